"""KV events of a real server, read by positions as vLLM documents them and as llm-d's indexer reads them.

A batch is [time, events, data parallel rank]. An event is [name, ...]: BlockStored has the hashes, the parent's hash,
the tokens of all blocks, the block size, a LoRA id, the medium and a LoRA name; BlockRemoved the hashes and the medium.
(vllm/distributed/kv_events.py with array_like=True; llm-d/llm-d-kv-cache, pkg/kvevents/engineadapter/vllm_adapter.go.)
"""

from collections.abc import Iterator
import json
import pathlib
import re
import signal
import socket
import time
import urllib.request

from absl.testing import flagsaver
import msgspec
import pytest
import zmq

from engine.errors import ConfigError
from engine.prefix_events import AllRemoved, PrefixEventLog, RemovedBlock, StoredBlock
from extensions.kv_events.event_encoding import encode_events, hash_of_key
from server import flags
from tests.server.conftest import no_test_hangs as no_test_hangs
from tests.server.test_main import start, wait_for_file

BLOCK = 16
TOPIC = b"kv@pod-1@demo"


class CacheIndex:
  """What a subscriber knows.

  Attributes:
    blocks: hash -> (parent's hash or None, tokens) of each block in the cache.
    numbers: of the batches, in order.
    num_removed, num_cleared: events of these kinds.
  """

  def __init__(self):
    self.blocks: dict[int, tuple[int | None, list[int]]] = {}
    self.numbers: list[int] = []
    self.num_removed = self.num_cleared = 0

  def take(self, number: bytes, payload: bytes) -> None:
    self.numbers.append(int.from_bytes(number, "big"))
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 600 and rank is None
    for name, *fields in events:
      if name == "BlockStored":
        hashes, parent, tokens, block_size, lora_id, medium, lora_name = fields
        assert (block_size, lora_id, medium, lora_name) == (BLOCK, None, "GPU", None)
        assert len(tokens) == BLOCK * len(hashes)
        for index, each in enumerate(hashes):
          self.blocks[each] = (parent, tokens[index * BLOCK : (index + 1) * BLOCK])
          parent = each
      elif name == "BlockRemoved":
        assert fields[1] == "GPU"
        for each in fields[0]:
          del self.blocks[each]  # it was there
          self.num_removed += 1
      else:
        assert name == "AllBlocksCleared" and not fields
        self.blocks.clear()
        self.num_cleared += 1

  def prefix_of(self, prompt: list[int]) -> int:
    """The tokens at a prompt's start that are cached, found by tokens alone."""
    known, parent = {value: key for key, (above, tokens) in self.blocks.items() for value in [(above, *tokens)]}, None
    for first in range(0, len(prompt), BLOCK):
      parent = known.get((parent, *prompt[first : first + BLOCK]))
      if parent is None:
        return first
    return len(prompt)


class EventServer:
  """A server process with a fake device and 64 blocks."""

  def __init__(self, folder: pathlib.Path):
    self.endpoints = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
    self._http_file = folder / "http"
    arguments = ["--fake_device", "--port=0", "--http_port=0", f"--http_port_file={self._http_file}", "--num_blocks=64"]
    arguments += [f"--kv_events_endpoint={self.endpoints[0]}", f"--kv_events_replay_endpoint={self.endpoints[1]}"]
    self.process = start(
      *arguments, f"--port_file={folder}/port", f"--kv_events_topic={TOPIC.decode()}", "--max_model_len=512"
    )
    wait_for_file(folder / "port", self.process)
    self.url = f"http://127.0.0.1:{self._http_file.read_text().strip()}"

  def complete(self, prompt: list[int]) -> int:
    """Returns the cached tokens of a request."""
    body = json.dumps({"prompt": prompt, "max_tokens": 2, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
      return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

  def metric(self, name: str) -> float:
    with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
      return float(re.findall(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[EventServer]:
  server = EventServer(tmp_path_factory.mktemp("events"))
  yield server
  server.process.send_signal(signal.SIGTERM)
  _, said = server.process.communicate(timeout=60)
  assert server.process.returncode == 0 and "Traceback" not in said, said


def replay_batches(server: EventServer, first: int) -> list[tuple[bytes, bytes]]:
  """What the replay socket gives from a batch on: numbers and payloads."""
  found = []
  with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
    replay.setsockopt(zmq.RCVTIMEO, 30_000)
    replay.connect(server.endpoints[1])
    replay.send_multipart([b"", first.to_bytes(8, "big")])
    _, number, payload = replay.recv_multipart()
    while payload:
      found.append((number, payload))
      _, number, payload = replay.recv_multipart()
    assert int.from_bytes(number, "big", signed=True) == -1
  return found


def replayed(server: EventServer) -> CacheIndex:
  """What a subscriber knows that has read all batches."""
  index = CacheIndex()
  for number, payload in replay_batches(server, 0):
    index.take(number, payload)
  return index


def test_a_subscriber_knows_the_cache(server):
  prompts = [[3 + (number * 7 + index) % 900 for index in range(200)] for number in range(8)]
  index = CacheIndex()
  with zmq.Context() as context, context.socket(zmq.SUB) as events:
    events.setsockopt(zmq.SUBSCRIBE, b"kv@")
    events.setsockopt(zmq.RCVTIMEO, 30_000)
    events.connect(server.endpoints[0])
    time.sleep(0.5)  # a subscriber has no sign that it is known
    for prompt in [*prompts, *prompts[-2:], prompts[0]]:  # 12 blocks each: the pool holds 5 of them
      while events.poll(50):
        topic, number, payload = events.recv_multipart()
        assert topic == TOPIC
        index.take(number, payload)
      expected = min(index.prefix_of(prompt), len(prompt) - 1) // BLOCK * BLOCK
      assert server.complete(prompt) == expected
    while events.poll(200):
      index.take(*events.recv_multipart()[1:])
  assert index.num_removed > 0
  assert len(index.blocks) == server.metric("sluice_kv_blocks_cached")
  assert index.numbers == list(range(index.numbers[0], index.numbers[0] + len(index.numbers)))
  assert server.metric("sluice_kv_event_batches_total") == index.numbers[-1] + 1
  assert server.metric("sluice_kv_events_lost_total") == 0
  again = replayed(server)
  assert again.numbers[0] == 0 and again.num_cleared == 1  # an earlier server's blocks are void
  assert again.blocks == index.blocks
  assert replay_batches(server, again.numbers[-1]) == replay_batches(server, 0)[-1:]


def test_junk_at_the_replay_socket_changes_nothing(server):
  with zmq.Context() as context, context.socket(zmq.DEALER) as junk:
    junk.connect(server.endpoints[1])
    for parts in ([b""], [b"", b"123"], [b"", b"12345678", b"more"], [b"12345678"]):
      junk.send_multipart(parts)
    junk.setsockopt(zmq.LINGER, 1000)
  assert replayed(server).num_cleared == 1


def test_blocks_that_follow_one_another_are_one_event():
  keys = [bytes([number]) * 32 for number in range(5)]
  events = [
    AllRemoved(),
    StoredBlock(keys[0], None, (1, 2), ""),
    StoredBlock(keys[1], keys[0], (3, 4), ""),
    StoredBlock(keys[2], keys[1], (5, 6), "lora"),
    StoredBlock(keys[3], None, (7, 8), "lora"),
    RemovedBlock(keys[0]),
    RemovedBlock(keys[1]),
  ]
  ts, found, rank = msgspec.msgpack.decode(encode_events(events, 2, 5.0))
  first, second, third, fourth = map(hash_of_key, keys[:4])
  assert (ts, rank) == (5.0, None) and found == [
    ["AllBlocksCleared"],
    ["BlockStored", [first, second], None, [1, 2, 3, 4], 2, None, "GPU", None],
    ["BlockStored", [third], second, [5, 6], 2, None, "GPU", "lora"],
    ["BlockStored", [fourth], None, [7, 8], 2, None, "GPU", "lora"],
    ["BlockRemoved", [first, second], "GPU"],
  ]


def test_a_log_that_nobody_reads_is_bounded():
  log = PrefixEventLog(num_blocks=1, capacity=10)
  for number in range(25):
    log.note_key(bytes([number]), None, (number,), "")
    log.note_stored(bytes([number]))
  events = log.take_events(1000)
  assert len(events) <= 10 and events[0] == AllRemoved() and events[-1] == StoredBlock(bytes([24]), None, (24,), "")
  assert log.num_lost + len(events) >= 25
  log.note_stored(b"never noted")
  assert not log.take_events(1000) and log.num_lost > 0


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--kv_events_endpoint=5557"], r"must be tcp://HOST:PORT, tcp://\*:PORT or ipc://PATH"),
    (["--kv_events_endpoint=tcp://h:1", "--kv_events_replay_endpoint=udp://x"], "kv_events_replay_endpoint='udp://x'"),
    (["--kv_events_topic=t"], "kv_events_topic=t needs --kv_events_endpoint"),
    (["--kv_events_endpoint=tcp://h:1", "--prefix_cache_scope=off"], "does not go with --prefix_cache_scope=off"),
    (["--kv_events_endpoint=tcp://h:1", "--batching=disaggregated"], "does not go with --batching=disaggregated"),
  ],
)
def test_bad_flags_are_refused(arguments, said):
  with flagsaver.flagsaver(), pytest.raises(ConfigError, match=said):
    flags.parse_flags(["server", *arguments], "server.main")


def test_an_address_that_is_taken_ends_the_start_at_once():
  with socket.create_server(("0.0.0.0", 0)) as other:
    port = other.getsockname()[1]
    process = start("--port=0", "--http_port=0", f"--kv_events_endpoint=tcp://*:{port}")
    _, said = process.communicate(timeout=60)
  assert process.returncode == 1 and f"error: kv_events_endpoint=tcp://*:{port}: Address already in use" in said
  assert "importing JAX" not in said and "Traceback" not in said
