"""Keys on every method: who may call, whose request it is, and files that change under a load."""

import threading

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
import pytest

from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.certificates import KEY, OTHER_KEY
from tests.server.harness import METHODS, REFLECTION, generate, reason_of, running
from tools.certificates import replace_file

IDS = pb.TokenIds(ids=[7, 8, 9])
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def locked(tokenizer, secrets):
  """A server that asks for keys."""
  with running(tokenizer, host=HostOptions(api_key_file=str(secrets / "keys"))) as served:
    yield served


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
  assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.SERVING
  watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
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
def test_reflection_may_be_left_open(tokenizer, secrets):
  with running(tokenizer, host=HostOptions(api_key_file=str(secrets / "keys"), open_reflection=True)) as served:
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    for method in REFLECTION:
      assert b"sluice.v1.ModelService" in next(served.channel.stream_stream(method)(iter([request]), timeout=60))
    with pytest.raises(grpc.RpcError, match="key is missing"):
      generate(served, token_ids=IDS)


def test_the_key_says_whose_request_it_is(locked, monkeypatch):
  tenants = []
  start = locked.generations.start_generation
  monkeypatch.setattr(
    locked.generations, "start_generation", lambda call, *rest: tenants.append(call.tenant) or start(call, *rest)
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


def test_keys_and_calls_at_once(tokenizer, tmp_path):
  """The file changes under a load of calls: those with a key that stays all succeed, and nothing else happens."""
  path = tmp_path / "keys"
  replace_file(path, f"{KEY}\n".encode())
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
      replace_file(path, f"{KEY}\na-key-that-comes-and-goes-{index}\n".encode())
    for thread in threads:
      thread.join(60)
    assert not failures
