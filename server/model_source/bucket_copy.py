"""Copies a model from a bucket into Sluice's cache, complete and verified. Each protocol has a module of its own.

A copy has a temporary folder, which is renamed when all files are there and match their digests:

  gs--BUCKET--PATH--HASH/   one for each model
    LISTING.part/           the copy in progress: FILE.partial grows, FILE is complete and verified
    LISTING/NAME/           the complete copy; LISTING is a digest of the objects' names, sizes and versions
    LISTING/objects.json    the sizes and versions of its files
    current                 the last LISTING, for starts that cannot reach the bucket
"""

from collections.abc import Iterator, Mapping
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
from typing import Protocol

from engine.errors import CheckpointError, ConfigError, EngineError
from engine.model_folder import INDEX
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

_REMEDY = "--model_cache_dir"
_OBJECTS, _CURRENT = "objects.json", "current"
_NUM_STREAMS = 8
# The limit of successive attempts that receive no byte, and the first pause between two.
_MAX_FRUITLESS, _PAUSE_S = 5, 0.25


@dataclasses.dataclass(frozen=True)
class BucketObject:
  """One object of a bucket.

  Attributes:
    name: the path relative to the model's folder.
    size: the size in bytes.
    version: identifies the content: S3's ETag, or GCS's generation.
  """

  name: str
  size: int
  version: str


class ModelBucket(Protocol):
  """The objects below one path of a bucket. All methods may be called from any thread."""

  @property
  def interruptions(self) -> tuple[type[Exception], ...]:
    """The network errors after which a retry may succeed."""
    ...

  def list_objects(self) -> list[BucketObject]:
    """Returns all objects below the path."""
    ...

  def read_object(self, item: BucketObject, start: int) -> Iterator[bytes]:
    """Yields the object's bytes from `start`. Raises an error if the bucket no longer has this version."""
    ...

  def has_digest_of(self, item: BucketObject, file: pathlib.Path) -> bool:
    """Whether a file has the object's digest; true if the bucket has no digest of it."""
    ...

  def describe_error(self, error: Exception) -> str | None:
    """Returns what the bucket refused and what to do; None if the error is not the protocol's."""
    ...


def fetch_bucket_model(
  name: ModelName, bucket: ModelBucket, cache: pathlib.Path, *, needs_weights: bool, watch: DownloadWatch
) -> pathlib.Path:
  """Copies a model into the cache, unless the cache has the bucket's objects; returns its folder.

  Raises:
    ConfigError, CheckpointError: the copy failed; the message is one line with the remedy.
    DownloadStopped: `watch` stopped the copy.
  """
  home = cache / _folder_name(name)
  place = f"{name.kind}://{name.place}/{name.path}"
  try:
    try:
      listed = bucket.list_objects()
    except bucket.interruptions as error:
      current = _find_current(home, name)
      if current is None:
        raise
      watch.report_line(f"warning: {place} cannot be reached ({name_error(error)}); the copy in {current} serves")
      return current
    if not listed:
      raise CheckpointError(f"{place}: holds no objects; check the bucket and the path")
    make_cache_folder(home, _REMEDY)
    with _lock_folder(home, place, watch):
      return _copy_model(name, place, bucket, {item.name: item for item in listed}, home, needs_weights, watch)
  except (EngineError, DownloadStopped):
    raise
  except bucket.interruptions as error:
    raise ConfigError(
      f"{place} cannot be reached ({name_error(error)}); check the network and start again: what was copied is kept"
    ) from error
  except Exception as error:  # the libraries raise many types
    text = bucket.describe_error(error)
    if text is None and isinstance(error, OSError):
      text = describe_disk_error(error, home, _REMEDY)
    raise ConfigError(f"{place}: {text or f'was not copied ({name_error(error)}); start again'}") from error


def _copy_model(
  name: ModelName,
  place: str,
  bucket: ModelBucket,
  listed: Mapping[str, BucketObject],
  home: pathlib.Path,
  needs_weights: bool,
  watch: DownloadWatch,
) -> pathlib.Path:
  """Copies the model and returns its folder. The caller holds the lock of `home`."""
  content = sorted((item.name, item.size, item.version) for item in listed.values())
  listing = hashlib.sha256(json.dumps([needs_weights, content]).encode()).hexdigest()[:16]
  final, part = home / listing, home / f"{listing}.part"
  if not _is_complete(final, name):
    shutil.rmtree(final, ignore_errors=True)
    for stale in home.glob("*.part"):
      if stale != part:
        shutil.rmtree(stale, ignore_errors=True)
    folder = part / _model_folder_name(name)
    wanted = select_model_files(
      listed, lambda: b"".join(bucket.read_object(listed[INDEX], 0)), place, needs_weights=needs_weights
    )
    _take_unchanged([listed[file] for file in wanted], _find_current(home, name), folder)
    _copy_objects([listed[file] for file in wanted], place, bucket, folder, watch)
    record = {file: [listed[file].size, listed[file].version] for file in wanted}
    (part / _OBJECTS).write_text(json.dumps(record))
    part.rename(final)
  if needs_weights:
    current = home / f"{_CURRENT}.part"
    current.write_text(listing)
    current.replace(home / _CURRENT)
  return final / _model_folder_name(name)


def _copy_objects(
  items: list[BucketObject], place: str, bucket: ModelBucket, folder: pathlib.Path, watch: DownloadWatch
) -> None:
  """Copies the missing objects; skips complete ones, and continues partial ones."""
  left = [item for item in items if not (folder / item.name).exists()]
  begun = sum(_size_of(_partial_file(folder, item)) for item in left)
  total = sum(item.size for item in left) - begun
  check_free_disk(folder.parent.parent, total, place, _REMEDY)
  for item in left:
    (folder / item.name).parent.mkdir(parents=True, exist_ok=True)
  if not left:
    return
  progress = watch.begin_progress(f"downloading {place}", total)
  with concurrent.futures.ThreadPoolExecutor(_NUM_STREAMS) as pool:
    left.sort(key=lambda item: -item.size)
    copies = [pool.submit(_copy_object, item, place, bucket, folder, progress) for item in left]
    try:
      for copy in concurrent.futures.as_completed(copies):
        copy.result()
    except BaseException:
      for copy in copies:
        copy.cancel()
      raise


def _copy_object(
  item: BucketObject, place: str, bucket: ModelBucket, folder: pathlib.Path, progress: ByteProgress
) -> None:
  partial = _partial_file(folder, item)
  fruitless = 0
  while True:
    start = _size_of(partial)
    if start > item.size:
      partial.unlink()
      start = 0
    try:
      with open(partial, "ab") as out:
        for piece in bucket.read_object(item, start) if start < item.size else ():
          progress.add_bytes(len(piece))
          out.write(piece)
        out.flush()
        os.fsync(out.fileno())
      break
    except bucket.interruptions:
      fruitless = 0 if _size_of(partial) > start else fruitless + 1
      if fruitless == _MAX_FRUITLESS:
        raise
      time.sleep(_PAUSE_S * 2**fruitless)
  size = _size_of(partial)
  if size != item.size or not bucket.has_digest_of(item, partial):
    partial.unlink()
    raise CheckpointError(
      f"{place}/{item.name}: the copy has {size} of {item.size} bytes and another digest than the bucket's; it is "
      "removed: start again to download it"
    )
  partial.rename(folder / item.name)


def _take_unchanged(items: list[BucketObject], current: pathlib.Path | None, folder: pathlib.Path) -> None:
  """Links files of the previous copy whose objects have not changed."""
  if current is None:
    return
  record = json.loads((current.parent / _OBJECTS).read_text("utf-8"))
  for item in items:
    if record.get(item.name) == [item.size, item.version] and not (folder / item.name).exists():
      (folder / item.name).parent.mkdir(parents=True, exist_ok=True)
      with contextlib.suppress(OSError):  # the disk has no links; the object is copied instead
        os.link(current / item.name, folder / item.name)


def _find_current(home: pathlib.Path, name: ModelName) -> pathlib.Path | None:
  """Returns the model's folder in the last complete copy, or None."""
  try:
    final = home / (home / _CURRENT).read_text("ascii")
  except (OSError, ValueError):
    return None
  return final / _model_folder_name(name) if _is_complete(final, name) else None


def _is_complete(final: pathlib.Path, name: ModelName) -> bool:
  """Whether every file of a copy exists with its size. Later changes of a file's content are not detected."""
  try:
    record = json.loads((final / _OBJECTS).read_text("utf-8"))
    return all((final / _model_folder_name(name) / file).stat().st_size == size for file, (size, _) in record.items())
  except (OSError, ValueError):
    return False


@contextlib.contextmanager
def _lock_folder(home: pathlib.Path, place: str, watch: DownloadWatch) -> Iterator[None]:
  """Keeps other processes from copying the same model. The system releases the lock when the process ends."""
  with open(home / "lock", "w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      watch.report_line(f"waiting: another process downloads {place}")
      fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _partial_file(folder: pathlib.Path, item: BucketObject) -> pathlib.Path:
  return folder / f"{item.name}.partial"


def _size_of(file: pathlib.Path) -> int:
  """Returns a file's size in bytes; 0 if it does not exist."""
  return file.stat().st_size if file.exists() else 0


def _folder_name(name: ModelName) -> str:
  text = f"{name.kind}://{name.place}/{name.path}"
  readable = re.sub(r"[^A-Za-z0-9._-]+", "--", f"{name.kind}--{name.place}--{name.path}")[-120:]
  return f"{readable.lstrip('.')}--{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _model_folder_name(name: ModelName) -> str:
  return name.path.rsplit("/", 1)[-1]
