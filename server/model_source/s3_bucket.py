"""Reads objects of an S3 bucket, or of an S3-compatible server, through boto3. Writes and decides nothing.

boto3 finds credentials, region and endpoint in its own sources: AWS_PROFILE, AWS_ENDPOINT_URL, the machine's role.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import pathlib
import re

import boto3
from botocore import UNSIGNED, exceptions
from botocore.config import Config

from server.model_source.bucket_copy import BucketObject

_PIECE = 1 << 20
_ETAG = re.compile(r"([0-9a-f]{32})(?:-([0-9]+))?")


class S3Bucket:
  """See ModelBucket."""

  interruptions = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)

  def __init__(self, bucket: str, path: str):
    session = boto3.Session()
    self._is_anonymous = session.get_credentials() is None
    config = Config(
      connect_timeout=5,
      read_timeout=30,
      retries={"mode": "standard", "total_max_attempts": 3},
      signature_version=UNSIGNED if self._is_anonymous else None,
    )
    self._client = session.client("s3", config=config)
    self._bucket, self._prefix = bucket, f"{path}/"

  def list_objects(self) -> list[BucketObject]:
    """See ModelBucket."""
    pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
    return [
      BucketObject(entry["Key"].removeprefix(self._prefix), entry["Size"], entry["ETag"])
      for page in pages
      for entry in page.get("Contents", ())
      if not entry["Key"].endswith("/")  # consoles make such a key for a folder
    ]

  def read_object(self, item: BucketObject, start: int) -> Iterator[bytes]:
    """See ModelBucket."""
    more = {"Range": f"bytes={start}-"} if start else {}
    answer = self._client.get_object(**self._key(item), IfMatch=item.version, **more)
    with contextlib.closing(answer["Body"]) as body:
      yield from body.iter_chunks(_PIECE)

  def has_digest_of(self, item: BucketObject, file: pathlib.Path) -> bool:
    """See ModelBucket. The ETag is the MD5, or the MD5 of the parts' MD5s, unless AWS KMS or a customer has the key."""
    etag = _ETAG.fullmatch(item.version.strip('"'))
    if etag is None:
      return True
    num_parts = int(etag[2] or 0)
    head = self._client.head_object(**self._key(item), PartNumber=1)
    if head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head:
      return True
    if not num_parts:
      return _md5_of_parts(file, [item.size])[0].hex() == etag[1]
    size = head["ContentLength"]
    sizes = [min(size, item.size - start) for start in range(0, item.size, size)]
    if len(sizes) == num_parts and _joined_md5(file, sizes) == etag[1]:
      return True
    # Only some uploads have parts of several sizes; each part takes one request.
    sizes = [
      self._client.head_object(**self._key(item), PartNumber=number)["ContentLength"]
      for number in range(1, num_parts + 1)
    ]
    return _joined_md5(file, sizes) == etag[1]

  def describe_error(self, error: Exception) -> str | None:
    """See ModelBucket."""
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
      return "AWS credentials are incomplete; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, exceptions.ClientError):
      code = error.response.get("Error", {}).get("Code", "")
      if code == "NoSuchBucket":
        return f"S3 knows no bucket {self._bucket!r}; check the name, and AWS_ENDPOINT_URL for a server other than AWS"
      if code in ("PreconditionFailed", "412", "NoSuchKey"):
        return "the bucket changed while it was copied; start again"
      if code in ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "401"):
        who = "without credentials" if self._is_anonymous else "with the credentials in use"
        return f"S3 refuses to read it {who} ({code}); set AWS_PROFILE or AWS_ACCESS_KEY_ID to one that may read it"
    if isinstance(error, (exceptions.ClientError, exceptions.BotoCoreError)):
      return f"S3 answered: {' '.join(str(error).split()):.200}; check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL"
    return None

  def _key(self, item: BucketObject) -> dict[str, str]:
    return {"Bucket": self._bucket, "Key": f"{self._prefix}{item.name}"}


def _joined_md5(file: pathlib.Path, sizes: list[int]) -> str:
  return hashlib.md5(b"".join(_md5_of_parts(file, sizes)), usedforsecurity=False).hexdigest()


def _md5_of_parts(file: pathlib.Path, sizes: list[int]) -> list[bytes]:
  """Returns the MD5 of each part of a file; the parts are adjacent and begin at its start."""
  digests = []
  with open(file, "rb") as stream:
    for size in sizes:
      digest, left = hashlib.md5(usedforsecurity=False), size
      while left and (piece := stream.read(min(left, _PIECE))):
        digest.update(piece)
        left -= len(piece)
      digests.append(digest.digest())
  return digests
