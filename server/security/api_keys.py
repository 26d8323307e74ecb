"""Checks API keys and finds their tenants. Knows neither gRPC nor HTTP; never logs, stores or compares a plain key.

The file has one key a line, optionally followed by the name of its tenant; # begins a comment:

    # name it --api_key_file, mode 0600 or 0640
    rW5vJ8Jk2nq4uYt1sXzB8mE0   team-a
    Qm3cT7uEw9pLz2aHk6dGf1Vx   team-a    # a second key while the first is being replaced
    hN4bV8yRs1oKj5xUi7tZe3Cq

Only SHA-256 digests stay in memory. Sluice hashes a presented key and compares it with all of them, without an early
exit, so that the time taken reveals nothing about the keys. The admin service has its own file. It also knows the
users' file, so that the error for a user's key can name the mistake.
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

# Shorter keys can be guessed. A file with more or longer keys is probably not a key file.
MIN_KEY_CHARS = 16
MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[!-\"$-~]+")  # the characters of a header value without "#" and blanks
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SCHEME = "bearer "

_log = logging.getLogger(__name__)


class ApiKeys:
  """The keys of one file, which it reads again when the file changes. Threads may share it.

  If the changed file is invalid or missing, the old keys stay valid, and one log line says why.
  """

  def __init__(self, path: str | pathlib.Path):
    """Reads the file.

    Raises:
      ConfigError: the file cannot be read, others may read or write it, it has no key, or a line is not a key.
    """
    self._path = pathlib.Path(path)
    # The signature of the file that was read, and the tenant of each key's digest.
    self._signature, self._tenants = _read(self._path)
    self._refused: tuple[int, ...] | None = None

  def accepts(self, header_value: str | None) -> str | None:
    """Returns the tenant of a key, or None for a key that is not in the file.

    Args:
      header_value: value of `authorization` ("Bearer KEY") or `x-api-key` ("KEY"); None without such a header.

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
    """Returns the tenant of a call with these two headers, either of which may be missing.

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
  """The keys of the admin service, and those of users, whom it refuses. Threads may share it."""

  def __init__(self, admins: ApiKeys, users: ApiKeys | None):
    """Args: users: the users' keys; None where users need no keys."""
    self._admins, self._users = admins, users

  def check_credentials(self, authorization: str | None, api_key: str | None) -> str:
    """Returns the tenant, as ApiKeys.check_credentials does. Always compares with all keys of both files.

    A key that is in both files is an admin's. The error for a user's key says so, which its owner could as well learn
    from the users' port.

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


def bind_tenant(named: str, of_key: str | None) -> str:
  """Returns the request's tenant: the key's tenant where the server requires keys, else the one that it names.

  Args:
    named: the tenant that the request names; may be empty.
    of_key: the tenant from `ApiKeys`; None where the server requires no keys.

  Raises:
    PermissionDenied: the request names another tenant than the key's.
  """
  if of_key is None:
    return named
  if named not in ("", of_key):
    raise PermissionDenied(
      f"tenant={named!r:.80} is not that of this API key; leave it empty, the key says whose it is"
    )
  return of_key


def _read(path: pathlib.Path) -> tuple[tuple[int, ...], dict[bytes, str]]:
  """Returns the file's signature and the tenant of each key's digest. Checks and reads one and the same descriptor."""
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
    where = f"api_key_file={path} line {number}"  # never show the line itself
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
  """Returns the signature of content and mode, so that a later chmod that opens the file is noticed."""
  return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
