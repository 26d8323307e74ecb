"""HTTPS with the certificates that gRPC uses: rotation, certificates of clients, and bytes that are no handshake."""

import contextlib
import socket
import ssl

import httpx
import pytest

from server.lifecycle.host import HostOptions
from tests.server.harness import running
from tools.certificates import Authority, replace_file


def options(certificate, key, **more) -> HostOptions:
  return HostOptions(http_port=0, tls_cert_file=str(certificate), tls_key_file=str(key), **more)


def serial_of(port: int, authority: Authority) -> int:
  """Of the certificate that a new connection is shown."""
  context = ssl.create_default_context(cafile=authority.file)
  with (
    socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
  ):
    return int(encrypted.getpeercert()["serialNumber"], 16)


@pytest.mark.catalogue("H4")
def test_https_and_a_new_certificate(tokenizer, tmp_path):
  authority = Authority(tmp_path)
  certificate, key = authority.issue("server")
  with running(tokenizer, host=options(certificate, key)) as server:
    port = server.host.http_port
    url = f"https://127.0.0.1:{port}"
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=authority.file), timeout=30) as client:
      assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
      asked = {"prompt": [7, 8], "max_tokens": 5, "stream": True, "ignore_eos": True}
      assert client.post("/v1/completions", json=asked).text.endswith("data: [DONE]\n\n")
    before = serial_of(port, authority)
    good = key.read_bytes()
    replace_file(key, b"no key at all")
    assert serial_of(port, authority) == before, "what does not fit together is not taken"
    replace_file(key, good)
    authority.issue("server")
    assert serial_of(port, authority) != before
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
      plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
      with contextlib.suppress(ConnectionResetError):
        assert b"200" not in plain.recv(1 << 16)


@pytest.mark.catalogue("H4")
def test_clients_without_a_certificate_are_not_heard(tokenizer, tmp_path):
  authority = Authority(tmp_path)
  certificate, key = authority.issue("server")
  with running(tokenizer, host=options(certificate, key, tls_client_ca_file=str(authority.file))) as server:
    url = f"https://127.0.0.1:{server.host.http_port}/v1/models"
    context = ssl.create_default_context(cafile=authority.file)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
      httpx.get(url, verify=context)
    context.load_cert_chain(*authority.issue("client"))
    assert httpx.get(url, verify=context).status_code == 200
