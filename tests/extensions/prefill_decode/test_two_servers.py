"""A prefill and a decode server as processes: the same tokens as one server, whatever happens to the prefill server."""

from concurrent.futures import ThreadPoolExecutor
import json
import random
import signal
import time
import urllib.request

import grpc
import pytest

from extensions.prefill_decode.proto import transfer_pb2, transfer_pb2_grpc
from server.client import Client, SluiceError, make_generate_request
from server.proto import sluice_pb2 as pb
from tests.extensions.prefill_decode.conftest import Server
from tests.server.router.router_harness import running_router, wait_until

_RANDOM = random.Random(7)
_SHARED = [_RANDOM.randrange(3, 400) for _ in range(150)]
# A prompt and its options each; three share a prefix, and the sixth is too short to move.
CASES = [
  (_SHARED, {"temperature": 0.0}),
  ([*_SHARED, 5, 6, 7], {"temperature": 0.9, "seed": 3, "logprobs": 3}),
  ([*_SHARED[:100], *range(3, 90)], {"temperature": 0.7, "seed": 4, "n": 3, "top_p": 0.9}),
  (list(range(10, 330)), {"temperature": 1.0, "seed": 5, "regex": "[a-z ]{12}"}),
  (list(range(20, 360)), {"temperature": 1.0, "seed": 6, "stop": ["a", "e"]}),
  (list(range(30, 50)), {"temperature": 1.0, "seed": 7}),
  (list(range(40, 200)), {"temperature": 1.0, "seed": 8, "prompt_logprobs": 1}),
  (list(range(50, 211)), {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.3, "max_tokens": 1}),
]


def answers(client: Client, salt: str) -> "Answers":
  """What the server answers to every case; the salt hides prefixes that earlier calls left."""

  def answer(case) -> pb.GenerateUnaryResponse:
    prompt, options = case
    request = make_generate_request(prompt, {"max_tokens": 16, "cache_salt": salt, "ignore_eos": True} | options)
    return client._generation.GenerateUnary(request, timeout=60)

  with ThreadPoolExecutor(4) as pool:
    return Answers(list(pool.map(answer, CASES)))


class Answers:
  """Answers to all cases, equal if their tokens and texts are, and their log probabilities nearly."""

  def __init__(self, responses: list[pb.GenerateUnaryResponse]):
    outputs = [output for response in responses for output in response.completions]
    self.outputs = [(list(each.token_ids), each.text, each.finished.reason) for each in outputs]
    entries = [entry for output in outputs for entry in output.logprobs]
    entries += [entry for response in responses for entry in response.prompt_logprobs]
    self.logprobs = [entry.logprob for entry in entries]
    assert len(self.logprobs) == 16 + 159

  def __eq__(self, other: object) -> bool:
    assert isinstance(other, Answers)
    return self.outputs == other.outputs and self.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def prefill_server(folder, port: int, **more) -> Server:
  return Server(folder, "prefill", "--role=prefill", *more.pop("flags", ()), port=port, **more)


def test_tokens_are_those_of_one_server(folder, decode, free_port):
  """Without a prefill server, with one, and after its death; and nobody else may use the prefill server."""
  with Client(decode.address) as client:
    alone = answers(client, "alone")
    assert decode.counts().keys() == {"unreachable"}
    prefill = prefill_server(folder, free_port).wait_ready()
    time.sleep(1.1)  # the decode server lets an absent one rest for a second
    assert answers(client, "together") == alone
    # Six prompts of eight may move; two of them share blocks that the other has brought, or is bringing.
    counts = decode.counts()
    assert counts["prompts"] >= 4 and counts["shared_memory"] >= 4 and counts["bytes"] > 0
    answer = client.generate(_SHARED, max_tokens=2, cache_salt="cached")
    assert answer.ending.cached_tokens == 0  # moved, not cached
    assert client.generate(_SHARED, max_tokens=2, cache_salt="cached").ending.cached_tokens == 144
    with Client(prefill.address) as other:
      with pytest.raises(SluiceError, match="role=prefill: this server only computes prompts") as refused:
        other.generate(_SHARED)
      assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
      assert other.load().kv_blocks_in_use == 0 and other.load().compiles_after_ready == 0
    with grpc.insecure_channel(prefill.address) as channel:
      stub = transfer_pb2_grpc.TransferServiceStub(channel)
      for metadata in ((), (("x-sluice-transfer-secret", "a-guess-of-the-secret"),)):
        for method, message in (
          (stub.Prefill, transfer_pb2.PrefillRequest(token_ids=_SHARED)),
          (stub.Release, transfer_pb2.ReleaseRequest(lease_id="0")),
        ):
          with pytest.raises(grpc.RpcError) as error:
            method(message, metadata=metadata)
          assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    before = prefill.counts()
    assert before["leases"] == counts["prompts"] + 1 and not before.keys() & {"leased_pieces", "leases_expired"}
    prefill.kill()
    assert answers(client, "after") == alone
    assert client.load().kv_blocks_in_use == 0


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["int8", "auto"])
def test_int8_kv_moves_between_servers_of_int8_kv_alone(folder, free_port, kv_dtype):
  peer = f"--prefill_servers=127.0.0.1:{free_port}"
  decode = Server(folder, "decode-2", "--role=decode", "--kv_dtype=int8", peer, "--min_remote_prefill_tokens=32")
  decode.wait_ready()
  with Client(decode.address) as client:
    alone = answers(client, "alone")
    prefill = prefill_server(folder, free_port, flags=(f"--kv_dtype={kv_dtype}",)).wait_ready()
    time.sleep(1.1)
    assert answers(client, "together") == alone
    counts = decode.counts()
    if kv_dtype == "int8":
      assert counts["prompts"] >= 4 and "mismatch" not in counts
    else:
      assert counts["mismatch"] >= 1 and "prompts" not in counts
      assert "kv_dtype=int8 here kv_dtype=float32" in decode.log  # in the words of the prefill server
    prefill.kill()
  decode.stop()


@pytest.mark.long
@pytest.mark.parametrize(
  ("fault", "reason"),
  [
    ("corrupt", "corrupt"),
    ("remote", ""),
    ("remote-corrupt", "corrupt"),
    ("short", "corrupt"),
    ("expired", "corrupt"),
    ("slow", "late"),
    ("mismatch", "mismatch"),
    ("flipped", "corrupt"),
  ],
)
def test_faults_of_the_prefill_server_cost_time_alone(folder, free_port, fault, reason):
  transport = ("--kv_transport=jax",) if fault == "flipped" else ()
  peer = f"--prefill_servers=127.0.0.1:{free_port}"
  flags = ("--role=decode", peer, "--min_remote_prefill_tokens=32", "--remote_prefill_timeout_s=2", *transport)
  decode = Server(folder, "decode-2", *flags)
  prefill = prefill_server(folder, free_port, fault=fault, flags=transport)
  decode.wait_ready()
  prefill.wait_ready()
  with Client(decode.address) as client:
    for salt in ("a", "b"):
      first = answers(client, salt)
      assert first == answers(client, f"{salt}2")
    counts = decode.counts()
    if reason:
      assert counts[reason] >= 1 and "prompts" not in counts
    else:
      assert counts["prompts"] >= 4 and not counts.keys() & {"corrupt", "late", "error"}
    prefill.kill()
    time.sleep(1.1)
    assert answers(client, "c") == first
    assert client.load().kv_blocks_in_use == 0
  assert "0 KV blocks in use" in decode.stop()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["unsteady", "remote-unsteady", "jax-unsteady"])
def test_a_hundred_corrupt_and_late_transfers_change_no_answer(folder, free_port, fault):
  """Fifty late ones and fifty corrupt pieces each way, among good ones, over shared memory, gRPC and JAX."""
  transport = ("--kv_transport=jax",) if fault == "jax-unsteady" else ()
  flags = ("--min_remote_prefill_tokens=32", "--remote_prefill_timeout_s=0.25", *transport)
  decode = Server(folder, "decode-3", "--role=decode", f"--prefill_servers=127.0.0.1:{free_port}", *flags)
  prefill = prefill_server(folder, free_port, fault=fault, flags=transport)
  decode.wait_ready()
  prefill.wait_ready()
  with Client(decode.address) as client:
    first, number = answers(client, "first"), 0
    while min(decode.counts().get(reason, 0) for reason in ("late", "corrupt", "prompts")) < 50:
      number += 1
      assert number < 1000 and answers(client, f"again-{number}") == first
    assert "error" not in decode.counts()
    load = client.load()
    assert (load.kv_blocks_in_use, load.compiles_after_ready) == (0, 0)
  assert "0 KV blocks in use" in decode.stop()
  wait_until(lambda: "leased_pieces" not in prefill.counts())
  prefill.stop()


@pytest.mark.long
def test_a_prefill_server_that_stops_dies_or_drains_ends_no_request(folder, decode, free_port):
  """SIGSTOP, SIGKILL and SIGTERM at random instants of running prompts, ten times each; every answer is the same."""
  chance = random.Random(11)
  with Client(decode.address) as client, ThreadPoolExecutor(1) as pool:
    alone = answers(client, "alone-2")
    for number in range(30):
      prefill = prefill_server(folder, free_port).wait_ready()
      time.sleep(1.1)
      running = pool.submit(answers, client, f"faults-{number}")
      time.sleep(chance.uniform(0.0, 0.1))
      prefill.process.send_signal((signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM)[number % 3])
      assert running.result(60) == alone
      prefill.kill()
      assert client.load().kv_blocks_in_use == 0
    counts = decode.counts()
    assert counts["prompts"] > 0 and counts.keys() & {"unreachable", "late", "refused"} and "error" not in counts


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "jax"])
def test_leases_that_nobody_releases_expire(folder, free_port, transport):
  """Their memory, which has a limit, comes back; prompts that find it full are computed by the decode server."""
  shared = ("--kv_transport", transport)
  prefill = prefill_server(folder, free_port, flags=("--lease_timeout_s=20", "--max_lease_mb=1", *shared))
  flags = ("--role=decode", f"--prefill_servers=127.0.0.1:{free_port}", "--min_remote_prefill_tokens=32", *shared)
  decode = Server(folder, "keeping", *flags, fault="keep")
  prefill.wait_ready()
  decode.wait_ready()
  with Client(decode.address) as client, ThreadPoolExecutor(4) as pool:
    first = client.generate(_SHARED, temperature=0.0, max_tokens=8)
    prompts = [[3 + number, *_SHARED] for number in range(60)]
    done = list(pool.map(lambda prompt: client.generate(prompt, max_tokens=2), prompts))
    assert len(done) == 60
    counts = prefill.counts()
    assert counts["leased_pieces"] > 20 and counts["leases_refused"] > 0 and decode.counts()["refused"] > 0
    prefill.wait_for("leases_expired", counts["leases"])
    assert "leased_pieces" not in prefill.counts()
    moved = decode.counts()["prompts"]
    assert client.generate(_SHARED, temperature=0.0, max_tokens=8, cache_salt="later").token_ids == first.token_ids
    assert decode.counts()["prompts"] == moved + 1
  decode.stop()
  prefill.stop()


@pytest.mark.long
def test_a_router_names_the_prefill_server(folder, free_port):
  """By llm-d's header over HTTP; a server that --prefill_servers lacks is used only with --trust_prefill_header."""
  prefill = prefill_server(folder, free_port)
  flags = ("--role=decode", "--min_remote_prefill_tokens=32")
  trusting = Server(folder, "trusting", *flags, "--trust_prefill_header")
  listing = Server(folder, "listing", *flags, "--prefill_servers=127.0.0.1:9")
  prefill.wait_ready()
  for server, name in ((trusting.wait_ready(), "prompts"), (listing.wait_ready(), "unreachable")):
    url = f"http://127.0.0.1:{server._http_file.read_text().strip()}/v1/completions"
    body = json.dumps({"prompt": _SHARED, "max_tokens": 4, "temperature": 0}).encode()
    headers = {"content-type": "application/json", "x-prefiller-host-port": prefill.address}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
      assert json.loads(response.read())["usage"]["completion_tokens"] == 4
    assert server.counts()[name] == 1
    if server is trusting:  # and so does Sluice's own
      replica = url.partition("//")[2].partition("/")[0]
      with running_router([replica], prefill_servers=(prefill.address,), min_prefill_bytes=100) as router:
        router.wait_ready(1)
        wait_until(lambda: router.value("sluice_router_prefill_ready") == 1)
        for prompt in (_SHARED, [7]):
          answer = router.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "cache_salt": "other"})
          assert answer.json()["usage"]["completion_tokens"] == 4
      assert server.counts()[name] == 2
    server.stop()
  assert prefill.counts()["leases"] == 2
  prefill.stop()
