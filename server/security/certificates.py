"""Holds the server's certificate and reads it again when its files change. Shows nothing of a key but its path."""

import logging
import os
import pathlib
import ssl
import stat

import grpc

from engine.errors import ConfigError

_log = logging.getLogger(__name__)


class Certificates:
  """Certificate, key and, for mutual TLS, the authority that must have issued clients' certificates.

  gRPC calls at each handshake. Changed files are checked first. While they do not match, as when one of two is already
  replaced, the old ones stay in use, and one log line says why. Open connections keep their certificate;
  --max_connection_age_s ends them.

  Attributes:
    num_handshakes: handshakes begun so far.
  """

  def __init__(self, cert_file: str, key_file: str, client_ca_file: str = ""):
    """Reads the files.

    Args:
      cert_file: PEM, the server's certificate first, then intermediate ones.
      key_file: PEM, without a passphrase.
      client_ca_file: PEM of authorities. If it is set, clients must present a certificate that one of them issued.

    Raises:
      ConfigError: a file cannot be used; the text names the file and the reason.
    """
    self._cert_file = pathlib.Path(cert_file)
    self._key_file = pathlib.Path(key_file)
    self._client_ca_file = pathlib.Path(client_ca_file) if client_ca_file else None
    self.num_handshakes = 0
    self._load(_new_context())

  def credentials(self, *, counts: bool = False) -> grpc.ServerCredentials:
    """Returns credentials for one add_secure_port; each notices changes by itself.

    Args:
      counts: whether its handshakes count in `num_handshakes`.

    Raises:
      ConfigError: a file cannot be used.
    """
    seen = self._stamp()
    initial = self._load(_new_context())

    def renewed() -> grpc.ServerCertificateConfiguration | None:
      """Returns the new certificates, or None if they have not changed. Runs on gRPC's threads."""
      nonlocal seen
      self.num_handshakes += counts  # gRPC calls on one thread at a time
      signature = self._stamp()
      if signature == seen:
        return None
      seen = signature
      try:
        configuration = self._load(_new_context())
      except ConfigError as error:
        _log.error("the certificate stays as it was: %s", error)
        return None
      _log.info("the certificate was read again from %s", self._cert_file)
      return configuration

    return grpc.dynamic_ssl_server_credentials(
      initial,
      renewed,  # pyright: ignore[reportArgumentType]  (the stub forgot None)
      require_client_authentication=self._client_ca_file is not None,
    )

  def context(self) -> ssl.SSLContext:
    """Returns a context for asyncio; `renew` keeps it current."""
    self._context_seen = self._stamp()
    context = _new_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if self._client_ca_file is not None:
      context.verify_mode = ssl.CERT_REQUIRED
    self._load(context)
    return context

  def renew(self, context: ssl.SSLContext) -> None:
    """Loads changed files that match, before a handshake. Can only add authorities of clients."""
    signature = self._stamp()
    if signature == self._context_seen:
      return
    self._context_seen = signature
    try:
      self._load(_new_context())  # a context in use must never hold half of a pair
      self._load(context)
    except ConfigError as error:
      _log.error("the certificate of the HTTP side stays as it was: %s", error)

  def _stamp(self) -> tuple[tuple[int, ...] | None, ...]:
    return stamp_files(self._cert_file, self._key_file, self._client_ca_file)

  def _load(self, context: ssl.SSLContext) -> grpc.ServerCertificateConfiguration:
    """Reads and checks the files, since gRPC would accept any content and then fail each handshake."""
    certificate, key = load_key_pair(context, "tls", self._cert_file, self._key_file)
    authorities = None
    if self._client_ca_file is not None:
      authorities = load_authorities(context, "tls_client_ca_file", self._client_ca_file)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)


def make_certificates(cert_file: str, key_file: str, client_ca_file: str) -> Certificates | None:
  """Returns the certificates of three flags; None without TLS.

  Raises:
    ConfigError: a flag lacks its counterpart, or a file cannot be used.
  """
  if not (cert_file or key_file or client_ca_file):
    return None
  if not (cert_file and key_file):
    raise ConfigError(
      f"tls_cert_file={cert_file!r}, tls_key_file={key_file!r}, tls_client_ca_file={client_ca_file!r}: TLS needs "
      "--tls_cert_file and --tls_key_file together; --tls_client_ca_file adds to them"
    )
  return Certificates(cert_file, key_file, client_ca_file)


def load_key_pair(
  context: ssl.SSLContext, prefix: str, cert_file: pathlib.Path, key_file: pathlib.Path
) -> tuple[bytes, bytes]:
  """Loads a certificate and its key into a context; returns both.

  Args:
    context: of a server or a client.
    prefix: of the flags' names, for errors: `tls` of tls_cert_file and tls_key_file.
    cert_file, key_file: PEM.

  Raises:
    ConfigError: a file cannot be read, every user can read the key, or they are no pair.
  """
  certificate = _read_pem(f"{prefix}_cert_file", cert_file)
  key = _read_pem(f"{prefix}_key_file", key_file)
  mode = stat.S_IMODE(os.stat(key_file).st_mode)
  if mode & 0o007:
    raise ConfigError(
      f"{prefix}_key_file={key_file} has mode {mode:04o}, which opens it to every user of this machine; chmod 600 "
      f"{key_file}"
    )
  try:
    context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
  except (ssl.SSLError, OSError, ValueError) as error:
    raise ConfigError(
      f"{prefix}_cert_file={cert_file} and {prefix}_key_file={key_file} cannot be used together "
      f"({_reason(error)}); give a PEM certificate and its own PEM key, without a passphrase"
    ) from None
  return certificate, key


def load_authorities(context: ssl.SSLContext, flag: str, path: pathlib.Path) -> bytes:
  """Loads authorities that verify the peer's certificate into a context; returns them. Raises ConfigError."""
  authorities = _read_pem(flag, path)
  try:
    context.load_verify_locations(path)
  except (ssl.SSLError, OSError) as error:
    raise ConfigError(f"{flag}={path} cannot be used ({_reason(error)}); give PEM certificates") from None
  return authorities


def stamp_files(*paths: pathlib.Path | None) -> tuple[tuple[int, ...] | None, ...]:
  """Returns a value that changes when one of the files is written or replaced."""
  return tuple(_stamp_file(path) for path in paths if path)


def _read_pem(flag: str, path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise ConfigError(f"{flag}={path} cannot be read: {error.strerror}") from None


def _stamp_file(path: pathlib.Path) -> tuple[int, ...] | None:
  try:
    status = os.stat(path)
  except OSError:
    return None
  return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _new_context() -> ssl.SSLContext:
  return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _no_passphrase() -> str:
  """Refuses encrypted keys, for which OpenSSL would prompt at the terminal."""
  raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
  """Returns OpenSSL's reason, such as KEY_VALUES_MISMATCH; it holds no secrets."""
  return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
