"""Certificates, keys and traces where several processes share a port: each of them asks, and each of them tells."""

import contextlib
import functools
import signal
import ssl

import grpc
import httpx
import psutil
import pytest

from server.proto import admin_pb2, admin_pb2_grpc
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tests.server.certificates import served_serial
from tests.server.harness import reason_of, token_ids_of
from tests.server.lifecycle.test_front_end_group import (
  IDS,
  LONG,
  NUM_CHANNELS,
  OWN_CONNECTION,
  Running,
  asked,
  expected,
  serving,
)
from tests.server.telemetry.test_tracing import PARENT, TRACE, TRACEPARENT, collecting
from tools.certificates import Authority, replace_file

KEY, OTHER_KEY, NEW_KEY = "a-key-of-team-a-that-is-long", "a-key-of-team-b-that-is-long", "a-key-that-comes-later"
ADMIN_KEY = "a-key-of-the-operator"
NOT_FOUND, ABORTED = pb.AbortResponse.OUTCOME_NOT_FOUND, pb.AbortResponse.OUTCOME_ABORTED
TOKENS = expected(max_tokens=40, ignore_eos=True)


def credentials_of(authority: Authority, client: str) -> grpc.ChannelCredentials:
  """`client` names a certificate; empty is none."""
  files = [authority.file.parent / f"{client}.{kind}" for kind in ("key", "pem")] if client else []
  return grpc.ssl_channel_credentials(authority.file.read_bytes(), *(file.read_bytes() for file in files))


def connect(server: Running, stack: contextlib.ExitStack, authority: Authority) -> list[pb_grpc.GenerationServiceStub]:
  """With the client's certificate, every process among them."""
  secure = functools.partial(grpc.secure_channel, credentials=credentials_of(authority, "client"))
  return [pb_grpc.GenerationServiceStub(channel) for channel in server.channels(stack, connect=secure)]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
  return (("authorization", f"Bearer {key}"),)


def code_of(call) -> grpc.StatusCode:
  with pytest.raises(grpc.RpcError) as caught:
    list(call)
  return caught.value.code()


@pytest.mark.catalogue("H4")
@pytest.mark.catalogue("H5")
def test_every_process_asks_for_certificates_and_keys_and_takes_new_ones(tmp_path):
  authority = Authority(tmp_path)
  for name in ("server", "client"):
    authority.issue(name)
  keys = tmp_path / "keys"
  admin_keys = tmp_path / "admin_keys"
  replace_file(keys, f"{KEY} team-a\n{OTHER_KEY} team-b\n".encode())
  replace_file(admin_keys, f"{ADMIN_KEY}\n".encode())
  with (
    serving(
      *(tmp_path, 2, "--fake_step_ms=5", "--debug_invariants", f"--api_key_file={keys}"),
      *("--admin_port=0", f"--admin_api_key_file={admin_keys}"),
      *(f"--tls_cert_file={tmp_path / 'server.pem'}", f"--tls_key_file={tmp_path / 'server.key'}"),
      f"--tls_client_ca_file={authority.file}",
    ) as server,
    contextlib.ExitStack() as stack,
  ):
    stubs = connect(server, stack, authority)
    for stub in stubs:
      assert token_ids_of(list(stub.Generate(asked(), metadata=bearer(KEY), timeout=60))) == TOKENS
      for metadata in ((), bearer(NEW_KEY)):
        assert code_of(stub.Generate(asked(), metadata=metadata, timeout=60)) is grpc.StatusCode.UNAUTHENTICATED
    anonymous = functools.partial(grpc.secure_channel, credentials=credentials_of(authority, ""))
    for connected in [anonymous] * NUM_CHANNELS + [grpc.insecure_channel] * 4:
      with connected(f"127.0.0.1:{server.port}", options=OWN_CONNECTION) as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(asked(), metadata=bearer(KEY), timeout=60)
        assert code_of(call) is grpc.StatusCode.UNAVAILABLE

    # A name is its tenant's, wherever it is used.
    calls = {}
    for key, stub in ((KEY, stubs[0]), (OTHER_KEY, stubs[-1])):
      calls[key] = stub.Generate(asked(request_id="mine", stopping=LONG), metadata=bearer(key), timeout=60)
      next(calls[key])
    for stub in stubs:
      again = stub.Generate(asked(request_id="mine"), metadata=bearer(KEY), timeout=60)
      assert code_of(again) is grpc.StatusCode.ALREADY_EXISTS
    replace_file(keys, f"{KEY} team-a\n{OTHER_KEY} team-b\n{NEW_KEY} team-c\n".encode())
    wanted = pb.AbortRequest(request_ids=["mine"])
    for stub in stubs:
      assert list(stub.Abort(wanted, metadata=bearer(NEW_KEY), timeout=60).outcomes) == [NOT_FOUND]
    outcomes = [stub.Abort(wanted, metadata=bearer(KEY), timeout=60).outcomes[0] for stub in reversed(stubs)]
    assert outcomes == [ABORTED] + [NOT_FOUND] * (NUM_CHANNELS - 1)
    with pytest.raises(grpc.RpcError) as caught:
      list(calls[KEY])
    assert reason_of(caught.value) == "ABORTED_BY_REQUEST"
    assert next(calls[OTHER_KEY]).deltas, "team-b's goes on"
    calls[OTHER_KEY].cancel()

    # The process that has the admin service knows the users' keys, those of today, too.
    listening = [each for each in psutil.Process(server.process.pid).net_connections("tcp") if each.status == "LISTEN"]
    (admin_port,) = {each.laddr.port for each in listening} - {server.port, server.http_port}
    with grpc.insecure_channel(f"127.0.0.1:{admin_port}") as channel:
      ask = functools.partial(
        admin_pb2_grpc.AdminServiceStub(channel).GetConfig, admin_pb2.GetConfigRequest(), timeout=60
      )
      for key, code in (
        (KEY, grpc.StatusCode.PERMISSION_DENIED),
        (NEW_KEY, grpc.StatusCode.PERMISSION_DENIED),
        ("a-key-of-nobody-at-all", grpc.StatusCode.UNAUTHENTICATED),
      ):
        with pytest.raises(grpc.RpcError) as caught:
          ask(metadata=bearer(key))
        assert caught.value.code() is code
      assert ask(metadata=bearer(ADMIN_KEY)).flags

    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    body = {"prompt": list(IDS), "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    url = f"https://127.0.0.1:{server.http_port}/v1/completions"
    for _ in range(4):
      with httpx.Client(verify=context, timeout=60) as client:
        answer = client.post(url, json=body, headers=dict(bearer(KEY))).json()
        assert answer["choices"][0]["token_ids"] == TOKENS
        assert client.post(url, json=body).status_code == 401
    # New certificates: the very next handshakes have them, whichever process they meet; open connections go on.
    addresses = [f"127.0.0.1:{port}" for port in (server.port, server.http_port)]
    before = {served_serial(address, authority) for address in addresses for _ in range(NUM_CHANNELS)}
    assert len(before) == 1
    authority.issue("server")
    after = {served_serial(address, authority) for address in addresses for _ in range(NUM_CHANNELS)}
    assert len(after) == 1 and after != before
    for stub in (*stubs, *connect(server, stack, authority)):
      assert token_ids_of(list(stub.Generate(asked(), metadata=bearer(KEY), timeout=60))) == TOKENS
    server.process.send_signal(signal.SIGTERM)
    code, said = server.end()
    assert code == 0 and "0 KV blocks in use" in said and "Traceback" not in said, said


def test_every_process_sends_its_spans(tmp_path):
  """The drain does not lose the latest."""
  with collecting() as (collector, address):
    with serving(tmp_path, 2, f"--otlp_endpoint={address}") as server, contextlib.ExitStack() as stack:
      for serial, stub in enumerate(server.stubs(stack)):
        stub.GenerateUnary(asked(request_id=f"r-{serial}"), metadata=(("traceparent", TRACEPARENT),), timeout=60)
      server.process.send_signal(signal.SIGTERM)
      code, said = server.end()
      assert code == 0, said
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in collector.spans} == {(TRACE, PARENT)}
    ids = [pair.value.string_value for span in collector.spans for pair in span.attributes if pair.key.endswith(".id")]
    assert sorted(ids) == sorted(f"r-{serial}" for serial in range(NUM_CHANNELS))
    assert len(collector.requests) >= 2, "one from each process at least"
