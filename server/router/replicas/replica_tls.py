"""TLS from the router to its replicas: the context of the flags, one connection's bytes, and what an error means.

Opens no socket: the exchange sends and receives.
"""

import logging
import pathlib
import ssl

from engine.errors import ConfigError
from server.security.certificates import load_authorities, load_key_pair, stamp_files

_READ_BYTES = 64 << 10
# OpenSSL's X509_V_ERR_*.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
_NOT_TLS = {
  "WRONG_VERSION_NUMBER",
  "HTTP_REQUEST",
  "HTTPS_PROXY_REQUEST",
  "RECORD_LAYER_FAILURE",
  "PACKET_LENGTH_TOO_LONG",
}
_OLD_TLS = {"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE"}
_WANTS_CERTIFICATE = {"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"}
_REFUSES_CERTIFICATE = {
  "TLSV1_ALERT_UNKNOWN_CA",
  "SSLV3_ALERT_BAD_CERTIFICATE",
  "SSLV3_ALERT_CERTIFICATE_EXPIRED",
  "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
  "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
}

_log = logging.getLogger(__name__)


class ReplicaTls:
  """Verifies replicas' certificates and names, and holds the router's own certificate. Reads changed files again."""

  def __init__(self, ca_file: str, cert_file: str, key_file: str):
    """Args:
    ca_file: PEM of authorities; empty: those of the system.
    cert_file, key_file: PEM of the router's certificate, for replicas that require one; both or none.

    Raises:
      ConfigError: a file cannot be used.
    """
    self._ca_file, self._cert_file, self._key_file = (
      pathlib.Path(file) if file else None for file in (ca_file, cert_file, key_file)
    )
    self._seen = self._stamp()
    self._context = self._make_context()

  def open_session(self, host: str) -> "TlsSession":
    """Returns the session of a new connection to a replica whose certificate must be for `host`."""
    stamp = self._stamp()
    if stamp != self._seen:
      self._seen = stamp
      try:
        self._context = self._make_context()
      except ConfigError as error:
        _log.error("the files of TLS to replicas stay as they were: %s", error)
    return TlsSession(self._context, host, has_certificate=self._cert_file is not None)

  def _stamp(self) -> tuple[tuple[int, ...] | None, ...]:
    return stamp_files(self._ca_file, self._cert_file, self._key_file)

  def _make_context(self) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificate and name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    if self._ca_file is None:
      context.load_default_certs()
    else:
      load_authorities(context, "replica_ca_file", self._ca_file)
    if self._cert_file is not None and self._key_file is not None:
      load_key_pair(context, "client", self._cert_file, self._key_file)
    return context


class TlsSession:
  """TLS of one connection: plain bytes on one side, the socket's on the other.

  Attributes:
    has_ended: whether the peer has ended its side as TLS says. A connection that ends without that was cut.
  """

  def __init__(self, context: ssl.SSLContext, host: str, *, has_certificate: bool):
    """Args:
    context: of the client.
    host: the name or address that the peer's certificate must be for.
    has_certificate: whether the context has a certificate of its own.
    """
    self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
    self._host, self._has_certificate = host, has_certificate
    self._has_data = False
    self.has_ended = False

  def continue_handshake(self, received: bytes | None) -> tuple[bytes, bool]:
    """Returns the bytes to send, and whether the handshake is over.

    Args:
      received: what has come from the socket, b"" for its end; None: begin.

    Raises:
      ssl.SSLError: the handshake failed.
    """
    if received is not None:
      self._take_bytes(received)
    try:
      self._tls.do_handshake()
    except ssl.SSLWantReadError:
      return self._to_send.read(), False
    return self._to_send.read(), True

  def encrypt(self, data: bytes) -> bytes:
    """Returns the bytes to send for `data`. Raises ssl.SSLError."""
    self._tls.write(data)
    return self._to_send.read()

  def decrypt(self, received: bytes) -> bytes:
    """Returns the plain bytes of all whole records so far; b"" for none. Raises ssl.SSLError.

    Args:
      received: what has come from the socket; b"" for its end.
    """
    self._take_bytes(received)
    parts = []
    try:
      while data := self._tls.read(_READ_BYTES):
        self._has_data = True
        parts.append(data)
      self.has_ended = True
    except ssl.SSLWantReadError:
      pass
    return b"".join(parts)

  def explain_error(self, error: OSError) -> str:
    """Returns the reason why the connection failed, and what to do. Names no file, since clients see it."""
    if isinstance(error, ssl.SSLCertVerificationError):
      if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return f"its certificate {state}; renew the replica's --tls_cert_file, or set the clocks"
      if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return (
          f"its certificate is not for {self._host}; list the replica by a name of its certificate, or issue it one"
        )
      return f"its certificate is not trusted ({error.verify_message}); name its authority in --replica_ca_file"
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if reason in _NOT_TLS:
      return "it does not speak TLS; list it without https://, or start it with --tls_cert_file"
    if reason in _OLD_TLS:
      return "it has no TLS 1.2 or newer; update it"
    if reason in _WANTS_CERTIFICATE:
      return "it requires a certificate; set the router's --client_cert_file"
    if reason in _REFUSES_CERTIFICATE:
      return "it does not accept the router's certificate; name one of its --tls_client_ca_file in --client_cert_file"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
      return f"TLS failed: {reason or error}"
    if self._has_data:
      return "the connection ended within TLS"
    # Many servers, also Sluice, end the connection instead of saying what they dislike.
    if self._has_certificate:
      return "it ended the connection; if its --tls_client_ca_file lacks the authority of --client_cert_file, add it"
    return "it ended the connection; if it requires a certificate, set the router's --client_cert_file"

  def _take_bytes(self, received: bytes) -> None:
    if received:
      self._received.write(received)
    else:
      self._received.write_eof()
