"""Resolves a model's name to its folder. Each kind of place has a module of its own.

Each kind's library is imported only for a name of that kind. A name of a folder needs none. Never imports JAX.
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
  """Returns the folder of a model, and downloads its missing files.

  The folder is complete by names and sizes. Downloaded files match the digests of their source.

  Args:
    name: a folder, ORG/NAME or hf://ORG/NAME on the Hugging Face hub (optionally with @REVISION), gs://BUCKET/PATH or
      s3://BUCKET/PATH.
    revision: the branch, tag or commit of a hub's repository.
    cache_dir: the folder for downloads; "": the hub's own cache, and ~/.cache/sluice/models (XDG_CACHE_HOME) for
      buckets.
    needs_weights: false: downloads only the configuration and the tokenizer.
    watch: receives the progress, and can stop the download; None: reports nothing.

  Raises:
    ConfigError: the name is wrong, or the network, the permissions or the disk failed; the message is one line.
    CheckpointError: the place holds no model that Sluice can load; the message is one line.
    DownloadStopped: `watch` stopped the download.
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
  except Exception as error:  # for example an unknown profile, or an invalid endpoint
    raise ConfigError(
      f"model={name.text!r} cannot be read: {' '.join(str(error).split()):.200}; correct the environment's settings of "
      f"{'Google Cloud' if name.kind == GCS else 'AWS'}"
    ) from error
