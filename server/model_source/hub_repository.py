"""Downloads a model from the Hugging Face hub into the hub's own cache, complete and verified.

huggingface_hub downloads, resumes, and follows HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. This module selects
the files, checks the free disk, compares each file with the digest on the hub, and adds a remedy to each error.
"""

from collections.abc import Sequence
import functools
import glob
import hashlib
import json
import os
import pathlib
import re
from typing import Any

from huggingface_hub import HfApi, constants, get_cached_repo_tree, get_token, snapshot_download
from huggingface_hub.errors import (
  CachedRepoTreeNotFoundError,
  GatedRepoError,
  HfHubHTTPError,
  LocalEntryNotFoundError,
  OfflineModeIsEnabled,
  RepositoryNotFoundError,
  RevisionNotFoundError,
  RevisionResolutionError,
)
from huggingface_hub.utils import tqdm

from engine.errors import CheckpointError, ConfigError, EngineError
from engine.model_folder import CONFIG, INDEX, SLUICE_MARKER
from server.model_source.download_watch import (
  ByteProgress,
  DownloadStopped,
  DownloadWatch,
  check_free_disk,
  describe_disk_error,
  make_cache_folder,
  name_error,
)
from server.model_source.file_selection import select_model_files
from server.model_source.model_name import ModelName
from server.version import server_version

_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
_PIECE = 1 << 20


class _CountingBar(tqdm):
  """Replaces the library's progress bar: shows nothing, and counts the bytes that reach the disk."""

  def __init__(self, progress: ByteProgress | None, **settings: Any):
    # The library has three bars. One counts files, and one counts bytes on the wire, which may be fewer.
    self._counts = settings.get("unit") == "B" and not str(settings.get("desc")).startswith("Downloading")
    self._progress = progress
    super().__init__(**settings | {"disable": True})

  def update(self, n: float | None = 1) -> None:
    """Counts the bytes that the library has written; the library calls it."""
    if self._counts and self._progress is not None:
      self._progress.add_bytes(int(n or 0))


def fetch_hub_model(
  name: ModelName, *, cache_dir: str, record_folder: pathlib.Path, needs_weights: bool, watch: DownloadWatch
) -> pathlib.Path:
  """Downloads a repository's missing files; returns the snapshot's folder.

  Args:
    name: a name of kind HUB.
    cache_dir: the folder of repositories; "": the hub's own cache (HF_HOME, HF_HUB_CACHE).
    record_folder: the folder for records of the verified files.
    needs_weights: false: only the configuration and the tokenizer.
    watch: receives the progress, and can stop the download.

  Raises:
    ConfigError, CheckpointError: the download failed; the message is one line with the remedy.
    DownloadStopped: `watch` stopped the download.
  """
  cache = pathlib.Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
  remedy = "--model_cache_dir" if cache_dir else "HF_HOME or --model_cache_dir"
  try:
    return _fetch_snapshot(name, cache, remedy, record_folder, needs_weights, watch)
  except (EngineError, DownloadStopped):
    raise
  except Exception as error:  # from the library or its HTTP library, which differs between versions
    raise ConfigError(_describe_error(error, name, cache, remedy)) from error


def _fetch_snapshot(
  name: ModelName,
  cache: pathlib.Path,
  remedy: str,
  record_folder: pathlib.Path,
  needs_weights: bool,
  watch: DownloadWatch,
) -> pathlib.Path:
  about: dict[str, Any] = {"library_name": "sluice", "library_version": server_version()}
  offline = constants.is_offline_mode()
  if not offline and not cache.is_dir():  # an existing cache may be read-only and complete
    make_cache_folder(cache, remedy)
  # If the hub cannot be reached, this is the cache's commit of the revision.
  commit = HfApi(**about).resolve_revision(
    name.place, revision=name.revision or None, cache_dir=cache, local_files_only=offline
  )
  download = functools.partial(
    snapshot_download, name.place, revision=commit, cache_dir=cache, local_files_only=offline, **about
  )
  # The first download also lists the repository, once for each commit, and stores the list in the cache.
  silent = functools.partial(_CountingBar, None)
  small = [CONFIG, INDEX, SLUICE_MARKER]
  folder = pathlib.Path(download(allow_patterns=small, tqdm_class=silent))  # pyright: ignore[reportArgumentType]
  try:
    sizes = {file.path: file.size for file in get_cached_repo_tree(name.place, revision=commit, cache_dir=cache)}
  except CachedRepoTreeNotFoundError:  # offline, with a cache from an older library
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
  wanted = select_model_files(
    sizes, (folder / INDEX).read_bytes, f"{name.place} of the Hugging Face hub", needs_weights=needs_weights
  )
  missing = [file for file in wanted if not (folder / file).exists()]
  if missing:
    total = sum(sizes[file] for file in missing)
    make_cache_folder(cache, remedy)
    check_free_disk(cache, total, name.place, remedy)
    progress = watch.begin_progress(f"downloading {name.place}", total)
    download(
      allow_patterns=[glob.escape(file) for file in wanted],
      tqdm_class=functools.partial(_CountingBar, progress),  # pyright: ignore[reportArgumentType]
    )
  _check_files(name.place, folder, wanted, sizes, record_folder, watch)
  return folder


def _check_files(
  repository: str,
  folder: pathlib.Path,
  wanted: Sequence[str],
  sizes: dict[str, int],
  record_folder: pathlib.Path,
  watch: DownloadWatch,
) -> None:
  """Compares each file with its size, and with the digest that is its name in the cache, once for each content."""
  found = {file: (folder / file).stat() for file in wanted}
  for file, status in found.items():
    if status.st_size != sizes[file]:
      _remove_file(folder / file)
      raise CheckpointError(
        f"{folder / file}: has {status.st_size} bytes, and the hub lists {sizes[file]}; it is removed: start again to "
        "download it"
      )
  state = {file: [status.st_size, status.st_mtime_ns] for file, status in found.items()}
  record = record_folder / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]}.json"
  if _read_record(record) == state:
    return
  progress = watch.begin_progress(f"checking {repository}", sum(sizes[file] for file in wanted))
  for file in wanted:
    if not _has_its_digest(folder / file, found[file].st_size, progress):
      _remove_file(folder / file)
      raise CheckpointError(
        f"{folder / file}: does not have the digest that the hub lists; it is removed: start again to download it"
      )
  try:
    record.parent.mkdir(parents=True, exist_ok=True)
    part = record.with_name(f"{record.name}.{os.getpid()}")
    part.write_text(json.dumps(state))
    part.replace(record)
  except OSError:  # the next start verifies the files again
    pass


def _read_record(record: pathlib.Path) -> Any:
  try:
    return json.loads(record.read_text("utf-8"))
  except (OSError, ValueError):
    return None


def _has_its_digest(file: pathlib.Path, size: int, progress: ByteProgress) -> bool:
  """Whether a file's bytes match its blob's name: SHA-256 for large files, Git's SHA-1 for others.

  Also true if the file has no such name, as in a cache without links, or from a mirror with other names.
  """
  blob = os.path.basename(os.readlink(file)) if file.is_symlink() else ""
  if _SHA256.fullmatch(blob):
    digest = hashlib.sha256()
  elif _GIT_SHA1.fullmatch(blob):
    digest = hashlib.sha1(b"blob %d\0" % size)
  else:
    progress.add_bytes(size)
    return True
  with open(file, "rb") as stream:
    while piece := stream.read(_PIECE):
      digest.update(piece)
      progress.add_bytes(len(piece))
  return digest.hexdigest() == blob


def _remove_file(file: pathlib.Path) -> None:
  """Removes a snapshot's file and each link to its bytes, so that the next start downloads it again."""
  while file.is_symlink():
    target = file.parent / os.readlink(file)
    file.unlink(missing_ok=True)
    file = target
  file.unlink(missing_ok=True)


def _describe_error(error: Exception, name: ModelName, cache: pathlib.Path, remedy: str) -> str:
  """Returns one line with the error and its remedy."""
  repository, page = name.place, f"{constants.ENDPOINT}/{name.place}"
  hub = f"the Hugging Face hub ({constants.ENDPOINT})"
  token = "with the token in use" if get_token() else "without a token"
  if isinstance(error, GatedRepoError):
    return (
      f"{repository} is gated, and {hub} refuses it {token}; accept its terms at {page}, and set HF_TOKEN to that "
      "account's token"
    )
  if isinstance(error, RevisionNotFoundError):
    return f"{repository} has no revision {name.revision!r}; leave out --revision, or choose one of {page}/tree/main"
  status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
  if isinstance(error, RepositoryNotFoundError) or status == 401:
    return (
      f"model={name.text!r} is no folder here, and {hub} shows no such repository {token}; check the spelling, or set "
      "HF_TOKEN where it is private"
    )
  if status == 403:
    return f"{hub} forbids {repository} {token}; set HF_TOKEN to one that may read it ({page})"
  if status == 429:
    return f"{hub} limits the number of requests {token}; wait some minutes, or set HF_TOKEN"
  if status:
    return f"{hub} answered {status} to {repository}; try again later, or set HF_ENDPOINT to a mirror"
  if isinstance(error, (LocalEntryNotFoundError, RevisionResolutionError, OfflineModeIsEnabled)):
    cause = error.__cause__
    if constants.is_offline_mode():
      return (
        f"model={name.text!r} is no folder here, and {cache} holds no complete copy of such a repository; start once "
        "without HF_HUB_OFFLINE, or copy the model here and give its folder"
      )
    return (
      f"model={name.text!r} is no folder here, and {hub} cannot be reached ({name_error(cause or error)}); check the "
      "network, HTTPS_PROXY and HF_ENDPOINT, or copy the model here and give its folder"
    )
  if isinstance(error, OSError) and (text := describe_disk_error(error, cache, remedy)):
    return f"{repository}: {text}"
  return (
    f"{repository} was not downloaded from {hub} ({name_error(error)}); start again: files that are complete are kept"
  )
