"""Parses a model's name into the kind of place and its parts. Checks whether a folder exists; uses no network."""

import dataclasses
import pathlib
import re

from engine.errors import ConfigError

# The kinds of places.
FOLDER, HUB, GCS, S3 = "folder", "hub", "gs", "s3"

_HUB_PAGE = re.compile(r"https://(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/([^?#]+?))?/?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+]*)://(.*)", re.DOTALL)
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})(?:@([^\s@]+))?", re.ASCII)
_BUCKET = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]+)/(\S+?)/*")
_ALLOWED = "--model takes a folder, ORG/NAME of the Hugging Face hub, gs://BUCKET/PATH or s3://BUCKET/PATH"


@dataclasses.dataclass(frozen=True)
class ModelName:
  """A parsed model name.

  Attributes:
    text: the name as the user wrote it.
    kind: one of FOLDER, HUB, GCS and S3.
    place: the folder, ORG/NAME, or the bucket.
    path: the path in the bucket, without a slash at either end; "" for other kinds.
    revision: the branch, tag or commit of a hub's repository; "" for its main branch and for other kinds.
  """

  text: str
  kind: str
  place: str
  path: str = ""
  revision: str = ""


def parse_model_name(text: str, revision: str = "") -> ModelName:
  """Parses a model's name. An existing folder takes precedence over a repository of the same name.

  Args:
    text: a path, ORG/NAME, ORG/NAME@REVISION, hf://ORG/NAME, the address of a repository's page, gs://BUCKET/PATH or
      s3://BUCKET/PATH.
    revision: the revision of a repository, if the text has none.

  Raises:
    ConfigError: the text is none of these, or the place has no revisions and one is given.
  """
  name = _parse_place(text, revision)
  if revision and name.kind != HUB:
    raise ConfigError(
      f"revision={revision!r} has no meaning for model={text!r}: only repositories of the Hugging Face hub have "
      "revisions; leave out --revision, or set --model=ORG/NAME"
    )
  if revision and name.revision != revision:
    raise ConfigError(f"model={text!r} and revision={revision!r} name two revisions; leave out --revision")
  return name


def _parse_place(text: str, revision: str) -> ModelName:
  if not text:
    raise ConfigError(f"model is empty; {_ALLOWED}")
  page = _HUB_PAGE.fullmatch(text)
  found = _SCHEME.fullmatch(text)
  if page is None and found is not None and found[1].lower() not in ("hf", "gs", "s3"):
    raise ConfigError(f"model={text!r} is at a {found[1]}:// address, which Sluice does not read; {_ALLOWED}")
  if found is not None and found[1].lower() in ("gs", "s3"):
    bucket = _BUCKET.fullmatch(found[2])
    if bucket is None or ".." in bucket[2].split("/"):
      raise ConfigError(f"model={text!r} must name a bucket and the model's folder in it; {_ALLOWED}")
    return ModelName(text, found[1].lower(), bucket[1], bucket[2])
  folder = pathlib.Path(text).expanduser()
  if found is None and folder.exists():
    return ModelName(text, FOLDER, str(folder))
  if page is not None:
    return ModelName(text, HUB, page[1], revision=page[2] or revision)
  repository = _REPOSITORY.fullmatch(found[2] if found is not None else text)
  if repository is not None:
    return ModelName(text, HUB, repository[1], revision=repository[2] or revision)
  if found is not None:
    raise ConfigError(f"model={text!r} must be hf://ORG/NAME or hf://ORG/NAME@REVISION; {_ALLOWED}")
  return ModelName(text, FOLDER, str(folder))
