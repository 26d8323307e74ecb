"""TLS: who is trusted, certificates that rotate under open connections, and files that are refused."""

import os
import socket
import ssl

import grpc
import pytest

from engine.errors import ConfigError
from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from tests.commands import run_module
from tests.server.certificates import KEY, served_serial, tls_options
from tests.server.harness import running
from tools.certificates import Authority, replace_file


def secure(served, authority, client: str = "", **options) -> Client:
  if client:
    folder = authority.file.parent
    options |= {"tls_cert_file": str(folder / f"{client}.pem"), "tls_key_file": str(folder / f"{client}.key")}
  return Client(served.address, tls_ca_file=str(authority.file), **options)


def assert_unreachable(client: Client) -> None:
  with client, pytest.raises(SluiceError) as caught:
    client.model_info()
  assert caught.value.code is grpc.StatusCode.UNAVAILABLE
  assert "Traceback" not in str(caught.value)


@pytest.mark.catalogue("H4")
def test_tls(tokenizer, secrets, authority):
  with running(tokenizer, host=tls_options(secrets, api_key_file=str(secrets / "keys"))) as served:
    with secure(served, authority, api_key=KEY) as client:
      assert len(client.generate([7, 8], max_tokens=3, ignore_eos=True).token_ids) == 3
      with client.stream([7, 8], max_tokens=3, ignore_eos=True) as stream:
        assert sum(len(piece.token_ids) for piece in stream) == 3
    with secure(served, authority, api_key="") as client, pytest.raises(SluiceError, match="key is missing"):
      client.model_info()
    assert_unreachable(Client(served.address, api_key=KEY))  # not encrypted
    assert_unreachable(Client(served.address, tls=True, api_key=KEY))  # an authority that nobody knows
    assert_unreachable(secure(served, Authority(secrets, "stranger"), api_key=KEY))


@pytest.mark.catalogue("H4")
def test_an_old_protocol_is_refused(tokenizer, secrets, authority):
  with running(tokenizer, host=tls_options(secrets)) as served:
    context = ssl.create_default_context(cafile=str(authority.file))
    with pytest.warns(DeprecationWarning):
      context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = served.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as raw, pytest.raises((ssl.SSLError, OSError)):
      context.wrap_socket(raw, server_hostname=host)
    assert served_serial(served.address, authority)


@pytest.mark.catalogue("H4")
def test_mutual_tls(tokenizer, secrets, authority):
  with running(tokenizer, host=tls_options(secrets, tls_client_ca_file=str(authority.file))) as served:
    with secure(served, authority, "client") as client:
      assert client.model_info().model == "tiny"
    assert_unreachable(secure(served, authority))  # shows none
    (secrets / "others").mkdir()
    stranger = Authority(secrets / "others")
    cert_file, key_file = stranger.issue("client")
    files = {"tls_cert_file": str(cert_file), "tls_key_file": str(key_file)}
    assert_unreachable(Client(served.address, tls_ca_file=str(authority.file), **files))
    authority.issue("expired", days=(-10, -1))
    assert_unreachable(secure(served, authority, "expired"))


def test_the_command_line_client(tokenizer, secrets, authority):
  options = tls_options(secrets, tls_client_ca_file=str(authority.file), api_key_file=str(secrets / "keys"))
  files = [
    f"--{name}={secrets / file}"
    for name, file in (("tls_ca_file", "ca.pem"), ("tls_cert_file", "client.pem"), ("tls_key_file", "client.key"))
  ]
  with running(tokenizer, host=options) as served:
    for arguments, key, code, said in (
      (files, KEY, 0, "tokens/s"),
      (files, "wrong", 1, "UNAUTHENTICATED UNAUTHENTICATED: the API key is not known here"),
      ([*files, f"--api_key={KEY}"], "wrong", 0, "tokens/s"),
      (files[:1], KEY, 1, "UNAVAILABLE: "),
      (["--tls_ca_file=/nowhere/ca"], KEY, 2, "error: /nowhere/ca: No such file or directory"),
    ):
      asked = (f"--target={served.address}", "--prompt=the", "--max_tokens=3")
      done = run_module("tools.client", *asked, *arguments, SLUICE_API_KEY=key)
      assert done.returncode == code and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
      assert KEY not in done.stderr


@pytest.mark.catalogue("H4")
def test_an_expired_server_is_not_trusted(tokenizer, tmp_path):
  authority = Authority(tmp_path)
  authority.issue("server", days=(-10, -1))
  with running(tokenizer, host=tls_options(tmp_path)) as served:
    assert_unreachable(secure(served, authority))


@pytest.mark.catalogue("H4")
def test_certificates_rotate(tokenizer, tmp_path, caplog):
  authority = Authority(tmp_path)
  authority.issue("server")
  with running(tokenizer, host=tls_options(tmp_path)) as served, secure(served, authority) as old_client:
    served.runner.seconds = 0.002
    first = served_serial(served.address, authority)
    stream = old_client.stream([7, 8], max_tokens=400, ignore_eos=True)
    pieces = iter(stream)
    tokens = len(next(pieces).token_ids)
    authority.issue("server")
    second = served_serial(served.address, authority)
    assert second != first, "the very next handshake has the new one"
    tokens += sum(len(piece.token_ids) for piece in pieces)
    assert tokens == 400, "open connections go on"
    # Half of a pair, as between two renames; then what is no certificate; then no file.
    whole = (tmp_path / "server.pem").read_bytes(), (tmp_path / "server.key").read_bytes()
    (tmp_path / "new").mkdir()
    _, new_key = Authority(tmp_path / "new").issue("server")
    caplog.clear()
    replace_file(tmp_path / "server.key", new_key.read_bytes())
    assert [served_serial(served.address, authority) for _ in range(3)] == [second] * 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
      f"the certificate stays as it was: tls_cert_file={tmp_path}/server.pem and tls_key_file={tmp_path}/server.key "
      "cannot be used together (KEY_VALUES_MISMATCH); give a PEM certificate and its own PEM key, without a passphrase"
    ]
    replace_file(tmp_path / "server.pem", b"nonsense")
    assert served_serial(served.address, authority) == second
    (tmp_path / "server.pem").unlink()
    assert served_serial(served.address, authority) == second
    replace_file(tmp_path / "server.pem", whole[0])
    replace_file(tmp_path / "server.key", whole[1])
    authority.issue("server")
    assert served_serial(served.address, authority) not in (first, second)
    assert "PRIVATE KEY" not in caplog.text


@pytest.mark.catalogue("H4")
def test_bad_certificates_are_refused_at_the_start(tmp_path):
  authority = Authority(tmp_path)
  authority.issue("server")
  authority.issue("other")
  cert, key = str(tmp_path / "server.pem"), str(tmp_path / "server.key")
  replace_file(tmp_path / "junk", b"nonsense")
  replace_file(tmp_path / "open.key", (tmp_path / "server.key").read_bytes())
  os.chmod(tmp_path / "open.key", 0o644)
  replace_file(tmp_path / "locked.key", locked_key())
  for files, said in (
    ((cert, ""), "TLS needs --tls_cert_file and --tls_key_file together"),
    (("", key), "TLS needs --tls_cert_file and --tls_key_file together"),
    (("", "", str(authority.file)), "TLS needs --tls_cert_file and --tls_key_file together"),
    ((f"{tmp_path}/none", key), "tls_cert_file=.*/none cannot be read: No such file"),
    ((cert, f"{tmp_path}/none"), "tls_key_file=.*/none cannot be read: No such file"),
    ((cert, f"{tmp_path}/other.key"), r"cannot be used together \(KEY_VALUES_MISMATCH\)"),
    ((f"{tmp_path}/junk", key), "cannot be used together"),
    ((cert, f"{tmp_path}/junk"), "cannot be used together"),
    ((cert, f"{tmp_path}/locked.key"), r"cannot be used together \(.*\); give .* without a passphrase"),
    ((cert, f"{tmp_path}/open.key"), "tls_key_file=.*/open.key has mode 0644, .*; chmod 600"),
    ((cert, key, f"{tmp_path}/junk"), "tls_client_ca_file=.*/junk cannot be used"),
    ((cert, key, f"{tmp_path}/none"), "tls_client_ca_file=.*/none cannot be read"),
  ):
    names = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
    options = HostOptions(**dict(zip(names, files, strict=False)))
    with pytest.raises(ConfigError, match=said) as caught, running(None, host=options):
      pass
    assert len(str(caught.value).splitlines()) == 1


def locked_key() -> bytes:
  from cryptography.hazmat.primitives import serialization
  from cryptography.hazmat.primitives.asymmetric import ec

  return ec.generate_private_key(ec.SECP256R1()).private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b"passphrase"),
  )
