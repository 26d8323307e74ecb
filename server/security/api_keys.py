"""API keys: who may call, and as which tenant. Knows neither gRPC nor HTTP; never logs, keeps or compares a key itself.

The file has one key a line, optionally followed by the name of its tenant; # begins a comment:

    # name it --api_key_file, mode 0600 or 0640
    rW5vJ8Jk2nq4uYt1sXzB8mE0   team-a
    Qm3cT7uEw9pLz2aHk6dGf1Vx   team-a    # a second key while the first is being replaced
    hN4bV8yRs1oKj5xUi7tZe3Cq

Only SHA-256 digests stay in memory. A presented key is hashed and compared with all of them, without an early exit, so
that the time taken says nothing about how much of a key was right. The admin service has a file of its own, and knows
the one of users besides, to tell a user what is wrong.
"""

import hashlib
import hmac
import logging
import os
import pathlib
import re
import stat

from engine.errors import ConfigError
from server.errors import PermissionDenied, Unauthenticated

# Shorter keys can be guessed; more or longer ones are another file than this.
MIN_KEY_CHARS = 16
MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[!-\"$-~]+")  # what a header may carry, less "#" and blanks
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SCHEME = "bearer "

_log = logging.getLogger(__name__)


class ApiKeys:
  """The keys of one file, read again when it changes. Threads may share it.

  A changed file that is refused, or that has vanished, leaves the keys as they were and is logged once.
  """

  def __init__(self, path: str | pathlib.Path):
    """Reads the file.

    Raises:
      ConfigError: it cannot be read, others may read or write it, it has no key, or a line is not a key.
    """
    self._path = pathlib.Path(path)
    # Of the file as it was read: what tells whether it has changed since, and the tenant of each key's digest.
    self._signature, self._tenants = _read(self._path)
    self._refused: tuple[int, ...] | None = None

  def accepts(self, header_value: str | None) -> str | None:
    """The tenant of a key, or None for a key that is not in the file.

    Args:
      header_value: of `authorization` ("Bearer KEY") or of `x-api-key` ("KEY"); None where there was no such header.

    Returns:
      The tenant's name, never empty: the one beside the key in the file, else "key-" and a digest of the key.
    """
    if header_value is None:
      return None
    self._reload()
    if header_value[: len(_SCHEME)].lower() == _SCHEME:
      header_value = header_value[len(_SCHEME) :]
    presented = _digest(header_value.strip())
    found = None
    for digest, tenant in self._tenants.items():
      if hmac.compare_digest(digest, presented):
        found = tenant
    return found

  def check_credentials(self, authorization: str | None, api_key: str | None) -> str:
    """The tenant of a call with these two headers, either of which may be missing.

    Raises:
      Unauthenticated: neither holds a known key.
    """
    tenant = self.accepts(authorization) or self.accepts(api_key)
    if tenant is None:
      raise Unauthenticated(
        "the API key is missing; send it as `authorization: Bearer KEY` or as `x-api-key: KEY`"
        if authorization is None and api_key is None
        else "the API key is not known here; check the key, and that it is for this server"
      )
    return tenant

  def _reload(self) -> None:
    try:
      signature = _signature(os.stat(self._path))
    except OSError:
      signature = ()
    if signature in (self._signature, self._refused):
      return
    try:
      self._signature, self._tenants = _read(self._path)
    except ConfigError as error:
      self._refused = signature
      _log.error("API keys stay as they were: %s", error)
    else:
      self._refused = None
      _log.info("API keys were read again: %d", len(self._tenants))


class AdminKeys:
  """Who may call the admin service: a file of keys, and the one of users, none of whom may. Threads may share it."""

  def __init__(self, admins: ApiKeys, users: ApiKeys | None):
    """Args: users: None where users need no keys."""
    self._admins, self._users = admins, users

  def check_credentials(self, authorization: str | None, api_key: str | None) -> str:
    """As ApiKeys.check. All keys of both files are compared, whatever was presented.

    A key that is in both files is an admin's. That a key is a user's is told to whoever presents it, who could as well
    ask the users' port.

    Raises:
      PermissionDenied: a user's key.
      Unauthenticated: neither header holds a known key.
    """
    users = self._users
    is_user = users is not None and (users.accepts(authorization) or users.accepts(api_key)) is not None
    try:
      return self._admins.check_credentials(authorization, api_key)
    except Unauthenticated:
      if is_user:
        raise PermissionDenied(
          "this API key is for generating and may not administrate; send one of those of --admin_api_key_file"
        ) from None
      raise


def bind_tenant(asked: str, of_key: str | None) -> str:
  """Whose request it is: the key's tenant where keys are asked for, else what the request says.

  Args:
    asked: the request's own word; may be empty.
    of_key: from `ApiKeys`, or None where there are none.

  Raises:
    PermissionDenied: the request says it is somebody else's.
  """
  if of_key is None:
    return asked
  if asked not in ("", of_key):
    raise PermissionDenied(
      f"tenant={asked!r:.80} is not that of this API key; leave it empty, the key says whose it is"
    )
  return of_key


def _read(path: pathlib.Path) -> tuple[tuple[int, ...], dict[bytes, str]]:
  """Its signature, and the tenant of each key's digest; the descriptor that is checked is the one that is read."""
  try:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
      status = os.fstat(file.fileno())
      if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"api_key_file={path} is not a regular file")
      if status.st_mode & 0o007:
        raise ConfigError(
          f"api_key_file={path} has mode {stat.S_IMODE(status.st_mode):04o}, which opens it to every user of this "
          f"machine; chmod 600 {path}"
        )
      raw = file.read(MAX_FILE_BYTES + 1)
  except OSError as error:
    raise ConfigError(f"api_key_file={path} cannot be read: {error.strerror}") from None
  if len(raw) > MAX_FILE_BYTES:
    raise ConfigError(f"api_key_file={path} has more than {MAX_FILE_BYTES} bytes; is it a file of keys?")
  tenants: dict[bytes, str] = {}
  for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
    words = line.partition("#")[0].split()
    if not words:
      continue
    where = f"api_key_file={path} line {number}"  # and never the line itself
    if len(words) > 2 or not _KEY.fullmatch(words[0]) or not all(map(_TENANT.fullmatch, words[1:])):
      raise ConfigError(f"{where} is not `KEY` or `KEY TENANT` of printable ASCII, the tenant of A-Z a-z 0-9 . _ -")
    if len(words[0]) < MIN_KEY_CHARS:
      raise ConfigError(
        f"{where} has a key of {len(words[0])} characters, the least is {MIN_KEY_CHARS}; make one with: openssl rand "
        "-hex 24"
      )
    digest = _digest(words[0])
    if digest in tenants:
      raise ConfigError(f"{where} repeats an earlier key; leave one of the two out")
    tenants[digest] = words[1] if len(words) == 2 else f"key-{digest.hex()[:8]}"
  if not tenants:
    raise ConfigError(f"api_key_file={path} has no key, so nobody could call; write one key a line into it")
  return _signature(status), tenants


def _signature(status: os.stat_result) -> tuple[int, ...]:
  """Of the content, and of the mode: a file that is opened to others later is refused, too."""
  return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
