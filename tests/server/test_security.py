"""Who may call and who may listen: keys on every method, TLS and its rotation, the admin port, ids, and the logs."""

import json
import os
import pathlib
import socket
import ssl
import subprocess
import sys
import threading

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
import pytest

from engine.errors import ConfigError
from server.access_log import AccessLog
from server.admin import AdminActions
from server.client import Client, SluiceError
from server.errors import NotConfigured
from server.host import HostOptions
from server.proto import admin_pb2, admin_pb2_grpc
from server.proto import sluice_pb2 as pb
from tests.server.certificates import Authority, replace
from tests.server.harness import generate, reason_of, running

ROOT = pathlib.Path(__file__).resolve().parents[2]
IDS = pb.TokenIds(ids=[7, 8, 9])
FEW = pb.StopParams(max_tokens=3, ignore_eos=True)
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
KEY, OTHER_KEY, ADMIN_KEY = "a-key-of-team-a-that-is-long", "a-key-without-a-tenant", "a-key-of-the-operator"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
METHODS = [
  f"/{service.full_name}/{method.name}"
  for service in pb.DESCRIPTOR.services_by_name.values()
  for method in service.methods
]
REFLECTION = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("secrets")
  replace(folder / "keys", f"{KEY} team-a\n{OTHER_KEY}\n".encode())
  replace(folder / "admin_keys", f"{ADMIN_KEY}\n".encode())
  return folder


@pytest.fixture(scope="module")
def authority(folder) -> Authority:
  authority = Authority(folder)
  authority.issue("server")
  authority.issue("client")
  return authority


@pytest.fixture(scope="module")
def locked(tokenizer, folder):
  """A server that asks for keys."""
  with running(tokenizer, host=HostOptions(api_key_file=str(folder / "keys"))) as served:
    yield served


def tls(folder: pathlib.Path, **more) -> HostOptions:
  return HostOptions(tls_cert_file=str(folder / "server.pem"), tls_key_file=str(folder / "server.key"), **more)


# Keys.


@pytest.mark.catalogue("H5")
@pytest.mark.parametrize("method", [*METHODS, *REFLECTION, "/sluice.v1.GenerationService/Nonsense", "/nonsense"])
@pytest.mark.parametrize(
  "metadata, said",
  [
    ((), "the API key is missing; send it as"),
    ((("authorization", "Bearer wrong"),), "the API key is not known here"),
    ((("authorization", f"Bearer {KEY[:-1]}"),), "the API key is not known here"),
    ((("authorization", f"Basic {KEY}"),), "the API key is not known here"),
    ((("x-api-key", KEY + "x"),), "the API key is not known here"),
    ((("authorization-bin", KEY.encode()),), "the API key is missing"),
  ],
)
def test_without_a_key_no_method_answers(locked, method, metadata, said):
  call = locked.channel.stream_stream(method)
  with pytest.raises(grpc.RpcError, match=said) as caught:
    list(call(iter([b""]), metadata=metadata, timeout=30))
  assert caught.value.code() is UNAUTHENTICATED and reason_of(caught.value) == "UNAUTHENTICATED"
  assert KEY not in str(caught.value) and "wrong" not in caught.value.details()
  assert locked.engine.num_live == 0


@pytest.mark.catalogue("H5")
def test_health_needs_no_key(locked):
  stub = health_pb2_grpc.HealthStub(locked.channel)
  assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING
  watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
  assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
  watch.cancel()


@pytest.mark.parametrize("metadata", [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)])
def test_a_key_opens_every_method(locked, metadata):
  for method in (*METHODS, *REFLECTION):
    try:
      list(locked.channel.stream_stream(method)(iter([b""]), metadata=(metadata,), timeout=30))
    except grpc.RpcError as error:
      assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error  # the empty message
  with pytest.raises(grpc.RpcError, match="method='/nonsense' is not served here; reflection lists") as caught:
    locked.channel.unary_unary("/nonsense")(b"", metadata=(metadata,))
  assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and reason_of(caught.value) == "UNKNOWN_METHOD"


@pytest.mark.catalogue("H8")
def test_reflection_may_be_left_open(tokenizer, folder):
  with running(tokenizer, host=HostOptions(api_key_file=str(folder / "keys"), open_reflection=True)) as served:
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    for method in REFLECTION:
      assert b"sluice.v1.ModelService" in next(served.channel.stream_stream(method)(iter([request]), timeout=10))
    with pytest.raises(grpc.RpcError, match="key is missing"):
      generate(served, token_ids=IDS)


def test_the_key_says_whose_request_it_is(locked, monkeypatch):
  tenants = []
  start = locked.generations.start
  monkeypatch.setattr(
    locked.generations, "start", lambda call, *rest: tenants.append(call.tenant) or start(call, *rest)
  )
  for key, tenant in ((KEY, ""), (KEY, "team-a"), (OTHER_KEY, "")):
    with Client(locked.address, api_key=key) as client:
      client.generate([7, 8], max_tokens=1, tenant=tenant)
  assert tenants[:2] == ["team-a"] * 2 and tenants[2].startswith("key-")
  with (
    Client(locked.address, api_key=KEY) as client,
    pytest.raises(SluiceError, match="tenant='team-b' is not that of this API key") as caught,
  ):
    client.generate([7, 8], tenant="team-b")
  assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
  assert len(tenants) == 3


def test_the_key_may_come_from_the_environment(locked, monkeypatch):
  monkeypatch.setenv("SLUICE_API_KEY", KEY)
  with Client(locked.address) as client:
    assert client.model_info().model == "tiny"
    assert client.load().max_num_seqs == 64
    assert client.tokenize("the") and client.detokenize([300]) and client.abort("nobody") == [False]


# TLS.


def secure(served, authority, client: str = "", **options) -> Client:
  if client:
    folder = authority.file.parent
    options |= {"tls_cert_file": str(folder / f"{client}.pem"), "tls_key_file": str(folder / f"{client}.key")}
  return Client(served.address, tls_ca_file=str(authority.file), **options)


def assert_unreachable(client: Client) -> None:
  with client, pytest.raises(SluiceError) as caught:
    client.model_info()
  assert caught.value.code is UNAVAILABLE
  assert "Traceback" not in str(caught.value)


def served_serial(address: str, authority) -> int:
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


@pytest.mark.catalogue("H4")
def test_tls(tokenizer, folder, authority):
  with running(tokenizer, host=tls(folder, api_key_file=str(folder / "keys"))) as served:
    with secure(served, authority, api_key=KEY) as client:
      assert len(client.generate([7, 8], max_tokens=3, ignore_eos=True).token_ids) == 3
      with client.stream([7, 8], max_tokens=3, ignore_eos=True) as stream:
        assert sum(len(piece.token_ids) for piece in stream) == 3
    with secure(served, authority, api_key="") as client, pytest.raises(SluiceError, match="key is missing"):
      client.model_info()
    assert_unreachable(Client(served.address, api_key=KEY))  # not encrypted
    assert_unreachable(Client(served.address, tls=True, api_key=KEY))  # an authority that nobody knows
    assert_unreachable(secure(served, Authority(folder, "stranger"), api_key=KEY))


@pytest.mark.catalogue("H4")
def test_an_old_protocol_is_refused(tokenizer, folder, authority):
  with running(tokenizer, host=tls(folder)) as served:
    context = ssl.create_default_context(cafile=str(authority.file))
    with pytest.warns(DeprecationWarning):
      context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = served.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as raw, pytest.raises((ssl.SSLError, OSError)):
      context.wrap_socket(raw, server_hostname=host)
    assert served_serial(served.address, authority)


@pytest.mark.catalogue("H4")
def test_mutual_tls(tokenizer, folder, authority):
  with running(tokenizer, host=tls(folder, tls_client_ca_file=str(authority.file))) as served:
    with secure(served, authority, "client") as client:
      assert client.model_info().model == "tiny"
    assert_unreachable(secure(served, authority))  # shows none
    (folder / "others").mkdir()
    stranger = Authority(folder / "others")
    cert_file, key_file = stranger.issue("client")
    files = {"tls_cert_file": str(cert_file), "tls_key_file": str(key_file)}
    assert_unreachable(Client(served.address, tls_ca_file=str(authority.file), **files))
    authority.issue("expired", days=(-10, -1))
    assert_unreachable(secure(served, authority, "expired"))


def test_the_command_line_client(tokenizer, folder, authority):
  options = tls(folder, tls_client_ca_file=str(authority.file), api_key_file=str(folder / "keys"))
  files = [
    f"--{name}={folder / file}"
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
      done = subprocess.run(
        [
          sys.executable,
          "-m",
          "tools.client",
          f"--target={served.address}",
          "--prompt=the",
          "--max_tokens=3",
          *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"SLUICE_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
      )
      assert done.returncode == code and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
      assert KEY not in done.stderr


@pytest.mark.catalogue("H4")
def test_an_expired_server_is_not_trusted(tokenizer, tmp_path):
  authority = Authority(tmp_path)
  authority.issue("server", days=(-10, -1))
  with running(tokenizer, host=tls(tmp_path)) as served:
    assert_unreachable(secure(served, authority))


@pytest.mark.catalogue("H4")
def test_certificates_rotate(tokenizer, tmp_path, caplog):
  authority = Authority(tmp_path)
  authority.issue("server")
  with running(tokenizer, host=tls(tmp_path)) as served, secure(served, authority) as old_client:
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
    replace(tmp_path / "server.key", new_key.read_bytes())
    assert [served_serial(served.address, authority) for _ in range(3)] == [second] * 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
      f"the certificate stays as it was: tls_cert_file={tmp_path}/server.pem and tls_key_file={tmp_path}/server.key "
      "cannot be used together (KEY_VALUES_MISMATCH); give a PEM certificate and its own PEM key, without a passphrase"
    ]
    replace(tmp_path / "server.pem", b"nonsense")
    assert served_serial(served.address, authority) == second
    (tmp_path / "server.pem").unlink()
    assert served_serial(served.address, authority) == second
    replace(tmp_path / "server.pem", whole[0])
    replace(tmp_path / "server.key", whole[1])
    authority.issue("server")
    assert served_serial(served.address, authority) not in (first, second)
    assert "PRIVATE KEY" not in caplog.text


@pytest.mark.catalogue("H4")
def test_bad_certificates_are_refused_at_the_start(tmp_path):
  authority = Authority(tmp_path)
  authority.issue("server")
  authority.issue("other")
  cert, key = str(tmp_path / "server.pem"), str(tmp_path / "server.key")
  replace(tmp_path / "junk", b"nonsense")
  replace(tmp_path / "open.key", (tmp_path / "server.key").read_bytes())
  os.chmod(tmp_path / "open.key", 0o644)
  replace(tmp_path / "locked.key", locked_key())
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


# Ids and logs.


@pytest.mark.catalogue("I6")
def test_request_ids_are_echoed_or_made(served):
  stub = served.generation
  request = pb.GenerateRequest(token_ids=IDS, stopping=FEW)
  for sent in ("abc-1.2_3", "a" * 128):
    call = stub.Generate(request, metadata=(("x-request-id", sent),))
    list(call)
    assert dict(call.trailing_metadata())["x-request-id"] == sent
    _, unary = stub.GenerateUnary.with_call(request, metadata=(("x-request-id", sent),))
    assert dict(unary.trailing_metadata())["x-request-id"] == sent
    with pytest.raises(grpc.RpcError) as caught:
      stub.GenerateUnary(pb.GenerateRequest(), metadata=(("x-request-id", sent),))
    assert dict(caught.value.trailing_metadata())["x-request-id"] == sent
    assert not caught.value.initial_metadata(), "a refusal sends no header"
  made = set()
  for metadata in ((), (("x-request-id", ""),), (("x-request-id", "a b"),), (("x-request-id", "a" * 129),)):
    _, call = stub.GenerateUnary.with_call(request, metadata=metadata)
    made.add(dict(call.trailing_metadata())["x-request-id"])
  assert len(made) == 4 and all(len(each) == 32 and set(each) <= set("0123456789abcdef") for each in made)
  with Client(served.address) as client, pytest.raises(SluiceError) as failed:
    client.generate([])
  assert len(failed.value.request_id) == 32


@pytest.mark.catalogue("H6")
def test_the_access_log_has_a_line_a_call_and_no_text(tokenizer, folder, tmp_path):
  log = tmp_path / "access.jsonl"
  options = HostOptions(access_log=str(log), api_key_file=str(folder / "keys"))
  with running(tokenizer, host=options) as served:
    with Client(served.address, api_key=KEY) as client:
      answer = client.generate("the secret word", max_tokens=5, ignore_eos=True, request_id="mine")
      with client.stream("the secret word", max_tokens=5, ignore_eos=True, n=2) as stream:
        list(stream)
      with pytest.raises(SluiceError):
        client.generate("the secret word", top_p=7.0)
      served.runner.seconds = 0.005
      with client.stream("the", max_tokens=400, ignore_eos=True) as stream:
        next(iter(stream))
      served.wait_until(lambda: served.engine.num_live == 0)
      with pytest.raises(SluiceError):
        client.generate("the", max_tokens=400, ignore_eos=True, timeout_s=0.1)
      served.wait_until(lambda: served.engine.num_live == 0)
    stub = health_pb2_grpc.HealthStub(served.channel)
    stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    for metadata in ((), (("x-api-key", KEY),)):
      with pytest.raises(grpc.RpcError):
        served.channel.unary_unary('/forged","code":"OK')(b"", metadata=metadata)
  text = log.read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  codes = [line["code"] for line in lines]
  # A client whose deadline has passed also cancels, and that may come first.
  assert codes.pop(4) in ("DEADLINE_EXCEEDED", "CANCELLED")
  assert codes == ["OK", "OK", "INVALID_ARGUMENT", "CANCELLED", "UNAUTHENTICATED", "UNIMPLEMENTED"]
  first = lines[0]
  assert first["method"] == "/sluice.v1.GenerationService/GenerateUnary" and first["generation_id"] == "mine"
  assert (first["prompt_tokens"], first["output_tokens"], first["tenant"]) == (answer.ending.prompt_tokens, 5, "team-a")
  assert lines[1]["output_tokens"] == 10
  assert (lines[2]["reason"], lines[5]["reason"]) == ("INVALID_REQUEST", "UNAUTHENTICATED")
  assert "tenant" not in lines[5] and "output_tokens" not in lines[3]
  assert all(line["time"].endswith("+00:00") and line["duration_s"] >= 0 and line["peer"] for line in lines)
  assert len({line["request_id"] for line in lines}) == len(lines)
  assert not any(word in text for word in ("secret", KEY, answer.text))


@pytest.mark.catalogue("H7")
def test_the_access_log_cannot_be_forged_and_survives_its_file(tmp_path, capfd):
  path = tmp_path / "log"
  log = AccessLog(str(path))
  log.write(method="/a\n{}\r\x1b[31m\u2028", reason=None, peer="x" * 10_000, count=3)
  path.rename(tmp_path / "rotated")
  log.write(method="/b")
  (line,) = (tmp_path / "rotated").read_text().splitlines()
  assert line.isascii() and line.isprintable()
  assert json.loads(line) | {"time": ""} == {
    "time": "",
    "method": "/a\n{}\r\x1b[31m\u2028",
    "peer": "x" * 256,
    "count": 3,
  }
  assert json.loads(path.read_text())["method"] == "/b"
  log.close()
  full = AccessLog("/dev/full")
  full.write(method="/c")
  full.close()
  assert capfd.readouterr().err == ""
  errors = AccessLog("-")
  errors.write(method="/d")
  assert json.loads(capfd.readouterr().err)["method"] == "/d"
  with pytest.raises(ConfigError, match="access_log=/nowhere/log cannot be opened: No such file"):
    AccessLog("/nowhere/log")


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", *REFLECTION])
def test_malformed_messages_of_standard_services_are_told_alike(served, method):
  with pytest.raises(grpc.RpcError, match="the 3 bytes are no grpc.*Request; generate the client from") as caught:
    list(served.channel.stream_stream(method)(iter([b"\xff\xff\xff"]), timeout=10))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason_of(caught.value) == "MALFORMED_REQUEST"


@pytest.mark.catalogue("H6")
def test_an_incident_has_one_number_in_status_and_log(served, monkeypatch, caplog):
  def broken(*_, **__):
    raise ValueError("secret of ours")

  monkeypatch.setattr(served.engine, "stats", broken)
  with pytest.raises(grpc.RpcError) as caught:
    served.model.GetLoad(pb.GetLoadRequest())
  monkeypatch.undo()
  number = caught.value.details().split("incident ")[1].split()[0]
  assert caught.value.code() is grpc.StatusCode.INTERNAL and f"incident {number}:" in caplog.text
  assert not any("secret" in str(value) for _, value in caught.value.trailing_metadata())


# The admin port.


class Actions:
  """Stands for the composition root."""

  def __init__(self):
    self.traced: list[bool] = []
    self.actions = AdminActions(flags=lambda: ["--model=tiny", "--api_key_file=/etc/keys"], set_trace=self._set_trace)

  def _set_trace(self, on: bool) -> str:
    if self.traced == [True, False]:
      raise NotConfigured("no step trace without --trace_file")
    self.traced.append(on)
    return "/tmp/trace"


def admin_of(served, **options):
  return admin_pb2_grpc.AdminServiceStub(grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}", **options))


def test_the_admin_service(tokenizer):
  actions = Actions()
  options = HostOptions(admin_port=0, drain_timeout_s=60)
  with running(tokenizer, host=options, admin=actions.actions) as served:
    admin = admin_of(served)
    config = admin.GetConfig(admin_pb2.GetConfigRequest())
    assert list(config.flags) == ["--model=tiny", "--api_key_file=/etc/keys"] and config.server_version
    assert admin.SetTrace(admin_pb2.SetTraceRequest(on=True)).path == "/tmp/trace"
    admin.SetTrace(admin_pb2.SetTraceRequest(on=False))
    assert actions.traced == [True, False]
    with pytest.raises(grpc.RpcError, match="no step trace without --trace_file") as caught:
      admin.SetTrace(admin_pb2.SetTraceRequest(on=True))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION and reason_of(caught.value) == "NOT_CONFIGURED"
    with pytest.raises(grpc.RpcError, match="are no sluice.admin.v1.SetTraceRequest"):
      grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}").unary_unary(
        "/sluice.admin.v1.AdminService/SetTrace"
      )(b"\xff")
    # Neither is on the other's port.
    for channel, method in (
      (served.channel, "/sluice.admin.v1.AdminService/Drain"),
      (served.channel, "/grpc.channelz.v1.Channelz/GetServers"),
      (grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"), METHODS[0]),
      (grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"), "/grpc.channelz.v1.Channelz/GetServers"),
    ):
      with pytest.raises(grpc.RpcError, match="is not served here") as caught:
        channel.unary_unary(method)(b"")
      assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    served.runner.seconds = 0.002
    call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    messages = [next(call)]
    assert [admin.Drain(admin_pb2.DrainRequest()).live_requests for _ in range(3)] == [1, 1, 1]
    messages += list(call)
    assert sum(len(delta.token_ids) for message in messages for delta in message.deltas) == 400
    served.thread.join(30)
    assert served.exit_code == [0]


def test_the_admin_command(tokenizer, folder):
  options = HostOptions(admin_port=0, admin_api_key_file=str(folder / "admin_keys"))
  with running(tokenizer, host=options, admin=Actions().actions) as served:
    for command, key, code, said in (
      ("config", ADMIN_KEY, 0, "--model=tiny\n--api_key_file=/etc/keys\n"),
      ("trace_on", ADMIN_KEY, 0, "step trace: recording to /tmp/trace\n"),
      ("nonsense", ADMIN_KEY, 2, "error: give one of config, trace_on, trace_off, drain\n"),
      (
        "drain",
        KEY,
        1,
        "UNAUTHENTICATED: the API key is not known here; check the key, and that it is for this server\n",
      ),
      ("drain", ADMIN_KEY, 0, "draining, 0 live requests\n"),
    ):
      done = subprocess.run(
        [sys.executable, "-m", "tools.admin", f"--target=127.0.0.1:{served.host.admin_port}", command],
        cwd=ROOT,
        env=os.environ | {"SLUICE_ADMIN_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
      )
      assert (done.returncode, done.stdout + done.stderr) == (code, said)
    served.thread.join(30)
    assert served.exit_code == [0]


@pytest.mark.catalogue("H8")
def test_channelz_is_on_the_admin_port_where_wanted(tokenizer):
  with (
    running(tokenizer, host=HostOptions(admin_port=0, enable_channelz=True), admin=Actions().actions) as served,
    grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}") as channel,
  ):
    generate(served, token_ids=IDS, stopping=FEW)
    servers = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest()).server
    assert any(server.data.calls_succeeded >= 1 for server in servers)


@pytest.mark.catalogue("H5")
def test_keys_of_users_are_not_good_for_the_admin_service(tokenizer, folder):
  options = HostOptions(admin_port=0, api_key_file=str(folder / "keys"), admin_api_key_file=str(folder / "admin_keys"))
  with running(tokenizer, host=options, admin=Actions().actions) as served:
    for key in (KEY, OTHER_KEY, ""):
      with pytest.raises(grpc.RpcError) as caught:
        admin_of(served).Drain(admin_pb2.DrainRequest(), metadata=(("x-api-key", key),))
      assert caught.value.code() is UNAUTHENTICATED
    assert admin_of(served).GetConfig(admin_pb2.GetConfigRequest(), metadata=(("x-api-key", ADMIN_KEY),)).flags
    with pytest.raises(grpc.RpcError, match="not known here"):
      served.model.GetModelInfo(pb.GetModelInfoRequest(), metadata=(("x-api-key", ADMIN_KEY),))
    assert not served.host.stopping


@pytest.mark.catalogue("H8")
def test_an_admin_service_for_others_needs_tls_and_keys(folder, authority):
  keys = {"admin_api_key_file": str(folder / "admin_keys")}
  for options in (HostOptions(), tls(folder), HostOptions(**keys)):
    fields = {name: getattr(options, name) for name in ("tls_cert_file", "tls_key_file", "admin_api_key_file")}
    with (
      pytest.raises(ConfigError, match="admin_host=0.0.0.0 can be reached by others, who could stop the server"),
      running(None, host=HostOptions(admin_port=0, admin_host="0.0.0.0", **fields), admin=Actions().actions),
    ):
      pass
  options = tls(folder, admin_port=0, admin_host="0.0.0.0", **keys)
  with running(None, host=options, admin=Actions().actions) as served:
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{served.host.admin_port}", credentials) as channel:
      stub = admin_pb2_grpc.AdminServiceStub(channel)
      assert stub.GetConfig(admin_pb2.GetConfigRequest(), metadata=(("x-api-key", ADMIN_KEY),)).flags
    # One certificate for two ports, and both see the new one.
    authority.issue("server")
    admin_address = f"127.0.0.1:{served.host.admin_port}"
    serials = [served_serial(address, authority) for address in (served.address, admin_address)]
    authority.issue("server")
    newer = [served_serial(address, authority) for address in (served.address, admin_address)]
    assert serials[0] == serials[1] != newer[0] == newer[1]


def test_keys_and_calls_at_once(tokenizer, folder, tmp_path):
  """The file changes under a load of calls: those with a key that stays all succeed, and nothing else happens."""
  path = tmp_path / "keys"
  replace(path, f"{KEY}\n".encode())
  with running(tokenizer, host=HostOptions(api_key_file=str(path))) as served:
    failures = []

    def work():
      with Client(served.address, api_key=KEY) as client:
        for _ in range(50):
          try:
            client.generate([7, 8], max_tokens=2)
          except SluiceError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for index in range(50):
      replace(path, f"{KEY}\na-key-that-comes-and-goes-{index}\n".encode())
    for thread in threads:
      thread.join(60)
    assert not failures
