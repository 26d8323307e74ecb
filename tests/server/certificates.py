"""Keys of tests, and what a test needs of a server's certificate."""

import pathlib
import socket
import ssl

from server.host_options import HostOptions
from tools.certificates import Authority

KEY, OTHER_KEY, ADMIN_KEY = "a-key-of-team-a-that-is-long", "a-key-without-a-tenant", "a-key-of-the-operator"


def tls_options(folder: pathlib.Path, **more) -> HostOptions:
  """With the certificate that an authority has issued for `server` there."""
  return HostOptions(tls_cert_file=str(folder / "server.pem"), tls_key_file=str(folder / "server.key"), **more)


def served_serial(address: str, authority: Authority) -> int:
  """Of the certificate that a new handshake shows."""
  context = ssl.create_default_context(cafile=str(authority.file))
  context.set_alpn_protocols(["h2"])
  host, port = address.rsplit(":", 1)
  with (
    socket.create_connection((host, int(port)), timeout=30) as raw,
    context.wrap_socket(raw, server_hostname=host) as wrapped,
  ):
    certificate = wrapped.getpeercert()
    assert certificate is not None
    return int(str(certificate["serialNumber"]), 16)
