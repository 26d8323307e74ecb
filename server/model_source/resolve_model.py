"""The one way from a model's name to its folder; each kind of place is read by a module of its own.

A library is imported where a name asks for it: a server of a folder needs none of them, and JAX is not touched.
"""

import os
import pathlib

from engine.errors import ConfigError
from engine.model_folder import check_model_folder
from server.model_source.bucket_copy import ModelBucket, fetch_bucket_model
from server.model_source.download_watch import DownloadWatch
from server.model_source.model_name import FOLDER, GCS, HUB, ModelName, parse_model_name


def resolve_model_folder(
  name: str,
  *,
  revision: str = "",
  cache_dir: str = "",
  needs_weights: bool = True,
  watch: DownloadWatch | None = None,
) -> pathlib.Path:
  """Finds a model by its name, downloads what is missing of it, and looks whether it is one that can be loaded.

  What it returns is complete, as far as names and sizes tell, and a download has the digests of its source.

  Args:
    name: a folder, ORG/NAME or hf://ORG/NAME of the Hugging Face hub (with @REVISION, if need be), gs://BUCKET/PATH or
      s3://BUCKET/PATH.
    revision: branch, tag or commit of a hub's repository.
    cache_dir: where downloads are kept; "": the hub's own cache, and ~/.cache/sluice/models (XDG_CACHE_HOME) for
      buckets.
    needs_weights: false: configuration and tokenizer are enough, and nothing else is downloaded.
    watch: is told of progress, and can stop it; None: nobody is told.

  Raises:
    ConfigError: the name, the network, the permission or the disk, in one line.
    CheckpointError: there is something, and it is no model that can be loaded, in one line.
    DownloadStopped: see DownloadWatch.
  """
  watch = watch or DownloadWatch()
  parsed = parse_model_name(name, revision)
  if parsed.kind == FOLDER:
    check_model_folder(pathlib.Path(parsed.place), needs_weights=needs_weights)
    return pathlib.Path(parsed.place)
  cache = pathlib.Path(cache_dir).expanduser() if cache_dir else _default_cache()
  if parsed.kind == HUB:
    from server.model_source.hub_repository import fetch_hub_model

    folder = fetch_hub_model(
      parsed, cache_dir=cache_dir, record_folder=cache / "checked", needs_weights=needs_weights, watch=watch
    )
  else:
    folder = fetch_bucket_model(parsed, _open_bucket(parsed), cache, needs_weights=needs_weights, watch=watch)
  check_model_folder(folder, needs_weights=needs_weights)
  return folder


def _default_cache() -> pathlib.Path:
  return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sluice" / "models"


def _open_bucket(name: ModelName) -> ModelBucket:
  try:
    if name.kind == GCS:
      from server.model_source.gcs_bucket import GcsBucket

      return GcsBucket(name.place, name.path)
    from server.model_source.s3_bucket import S3Bucket

    return S3Bucket(name.place, name.path)
  except ImportError as error:
    extra = "gcs" if name.kind == GCS else "s3"
    raise ConfigError(
      f"model={name.text!r} needs a library that is not installed ({error.name}); install the extra {extra}: "
      f"pip install 'sluice-serve[{extra}]'"
    ) from error
  except Exception as error:  # a profile that does not exist, an endpoint that is no address, and the like
    raise ConfigError(
      f"model={name.text!r} cannot be read: {' '.join(str(error).split()):.200}; correct the environment's settings of "
      f"{'Google Cloud' if name.kind == GCS else 'AWS'}"
    ) from error
