"""Reads objects of a Google Cloud Storage bucket through google-cloud-storage. Writes and decides nothing.

The library finds credentials and the endpoint in its own sources: GOOGLE_APPLICATION_CREDENTIALS, the machine's service
account, `gcloud auth application-default login`, STORAGE_EMULATOR_HOST.
"""

import base64
from collections.abc import Iterator
import hashlib
import pathlib

from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY
import google_crc32c
import requests

from server.model_source.bucket_copy import BucketObject

_PIECE, _RANGE = 1 << 20, 8 << 20  # bytes of one file read, and of one range request
_TIMEOUT_S = 10
_RETRY = DEFAULT_RETRY.with_timeout(5.0)


class GcsBucket:
  """See ModelBucket."""

  interruptions = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    exceptions.RetryError,
    exceptions.ServerError,
    auth_exceptions.TransportError,
  )

  def __init__(self, bucket: str, path: str):
    self._is_anonymous = False
    try:
      self._client = storage.Client()
    except auth_exceptions.DefaultCredentialsError:
      self._is_anonymous = True
      self._client = storage.Client.create_anonymous_client()
    self._bucket, self._prefix = bucket, f"{path}/"
    self._blobs: dict[str, storage.Blob] = {}

  def list_objects(self) -> list[BucketObject]:
    """See ModelBucket."""
    blobs = self._client.list_blobs(self._bucket, prefix=self._prefix, timeout=_TIMEOUT_S, retry=_RETRY)
    self._blobs = {blob.name.removeprefix(self._prefix): blob for blob in blobs if not blob.name.endswith("/")}
    return [BucketObject(name, blob.size or 0, str(blob.generation)) for name, blob in self._blobs.items()]

  def read_object(self, item: BucketObject, start: int) -> Iterator[bytes]:
    """See ModelBucket."""
    blob = self._blobs[item.name]
    for first in range(start, item.size, _RANGE):
      yield blob.download_as_bytes(
        start=first,
        end=min(first + _RANGE, item.size) - 1,  # inclusive
        checksum=None,  # pyright: ignore[reportArgumentType]  # of the whole alone: has_digest_of
        if_generation_match=blob.generation,
        timeout=_TIMEOUT_S,
        retry=_RETRY,
      )

  def has_digest_of(self, item: BucketObject, file: pathlib.Path) -> bool:
    """See ModelBucket. Every object has a CRC32C; objects that were not composed also have an MD5."""
    blob = self._blobs[item.name]
    if blob.crc32c:
      digest, wanted = google_crc32c.Checksum(), blob.crc32c
    elif blob.md5_hash:
      digest, wanted = hashlib.md5(usedforsecurity=False), blob.md5_hash
    else:
      return True
    with open(file, "rb") as stream:
      while piece := stream.read(_PIECE):
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode() == wanted

  def describe_error(self, error: Exception) -> str | None:
    """See ModelBucket."""
    if isinstance(error, exceptions.NotFound):
      return f"Google Cloud Storage knows no bucket {self._bucket!r}, or the object has gone; check the name"
    if isinstance(error, exceptions.PreconditionFailed):
      return "the bucket changed while it was copied; start again"
    if isinstance(error, (exceptions.Unauthorized, exceptions.Forbidden)):
      who = "without credentials" if self._is_anonymous else "with the credentials in use"
      return (
        f"Google Cloud Storage refuses to read it {who}; run gcloud auth application-default login, or set "
        "GOOGLE_APPLICATION_CREDENTIALS, for an account that may read it"
      )
    if isinstance(error, auth_exceptions.GoogleAuthError):
      return (
        f"Google credentials do not work ({' '.join(str(error).split()):.150}); run gcloud auth application-default "
        "login"
      )
    if isinstance(error, exceptions.GoogleAPIError):
      return f"Google Cloud Storage answered: {' '.join(str(error).split()):.200}"
    return None
