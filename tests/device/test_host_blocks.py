"""Evicted prefix blocks go to memory or a file of the host and come back: the same tokens, whatever happens there."""

from collections.abc import Iterator
import os
import pathlib
import subprocess
import sys
import time

import pytest

from engine.batch import BlockCopy, FinishedCopies, Runner
from engine.device.host_blocks import FileSlots, HostBlocks, MemorySlots
from engine.device.memory_check import size_host_pool
from engine.device.runner import ModelRunner
from engine.engine import Engine
from engine.errors import ConfigError
from engine.host_pool import HostPoolCounts
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from tests.device.serving import Served, make_engine
from tests.device.tiny_model import make_runner

NUM_BLOCKS, NUM_HOST_BLOCKS = 20, 64
PROMPTS = [[(7 * talk + 3 * place) % 90 + 2 for place in range(45)] for talk in range(4)]  # 12 blocks of 4 each


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
  runner = make_runner(num_blocks=NUM_BLOCKS, token_budgets=(32,), num_host_blocks=NUM_HOST_BLOCKS)
  runner.warm_up(lambda *_: None)
  runner.seal()
  return runner


def host_of(runner: Runner) -> HostBlocks:
  assert isinstance(runner, ModelRunner) and runner.host_blocks is not None
  return runner.host_blocks


def write_row(slots: MemorySlots | FileSlots, slot: int, row: bytes) -> None:
  """Overwrites a slot. No copy may be under way."""
  slots.open_slot(slot)[:] = row
  slots.write_slot(slot)


def flip_bit(slots: MemorySlots | FileSlots, slot: int, place: int) -> None:
  row = bytearray(slots.read_slot(slot))
  row[place] ^= 0x10
  write_row(slots, slot, row)


class Talks:
  """An engine, and all that its requests got."""

  def __init__(self, runner: ModelRunner, **changes):
    self.served: dict[str, Served] = {}
    settings = {"num_blocks": NUM_BLOCKS, "num_host_blocks": NUM_HOST_BLOCKS} | changes
    self.engine: Engine = make_engine(runner, self._take, **settings)

  def _take(self, events) -> None:
    for event in events:
      self.served[event.request_id].add(event)

  def start(self, prompt: list[int], max_tokens: int = 6, **fields) -> str:
    request_id = str(len(self.served))
    self.served[request_id] = Served()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    self.engine.submit(Request(request_id, prompt, params, **fields))
    return request_id

  def finish(self) -> None:
    """Steps until no request is live and no copy is under way."""
    loads = self.engine._scheduler.loads
    deadline = time.monotonic() + 60
    while self.engine.num_live or loads is not None and (loads.is_copying or loads.host._saving):
      self.engine.step()
      assert self.engine.dead is None, self.engine.dead
      assert time.monotonic() < deadline, "no end in sight"
    assert self.engine._scheduler.pool.num_used == 0

  def ask(self, prompt: list[int], max_tokens: int = 6, **fields) -> list[int]:
    """The tokens of a request alone."""
    request_id = self.start(prompt, max_tokens, **fields)
    self.finish()
    return self.served[request_id].tokens

  @property
  def counts(self) -> HostPoolCounts:
    found = self.engine.stats().host_pool
    assert found is not None
    return found


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[list[int]]:
  talks = Talks(runner, num_host_blocks=0, prefix_cache_scope="off")
  assert talks.engine.stats().host_pool is None
  return [talks.ask(prompt) for prompt in PROMPTS]


@pytest.fixture(params=["memory", "file"])
def talks(runner: ModelRunner, expected: list[list[int]], request, tmp_path, monkeypatch) -> Iterator[Talks]:
  """An engine whose first conversation is on the host alone."""
  host = host_of(runner)
  if request.param == "file":
    monkeypatch.setattr(host, "slots", FileSlots(NUM_HOST_BLOCKS, len(host.slots.read_slot(0)), str(tmp_path)))
  talks = Talks(runner)
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  assert talks.counts.num_kept == talks.counts.num_saved >= 12 and not talks.counts.num_loaded
  yield talks
  talks.finish()
  assert runner.compiles_after_ready == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_blocks_come_back(runner: ModelRunner, expected, overlap: bool) -> None:
  talks = Talks(runner, overlap=overlap)
  for _ in range(3):
    assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  counts = talks.counts
  assert counts.num_loaded >= 2 * 4 * 8 and counts.num_hits >= 8 and counts.num_failed == 0
  stats = talks.engine.stats()
  assert stats.num_cached_tokens >= 4 * counts.num_loaded, "a client sees them as cached tokens"
  assert runner.compiles_after_ready == 0


def test_requests_of_one_prefix_share_a_load(talks: Talks, expected) -> None:
  ids = [talks.start(PROMPTS[0]) for _ in range(3)]
  talks.finish()
  assert [talks.served[each].tokens for each in ids] == [expected[0]] * 3
  assert talks.counts.num_hits == 1 and talks.counts.num_loaded <= 11


def test_others_do_not_wait_for_a_load(talks: Talks, expected) -> None:
  host = host_of(talks.engine._runner)
  started = host.finished_copies
  host.finished_copies = list  # the host is slow
  slow, quick = talks.start(PROMPTS[0]), talks.start([5, 6, 7, 8, 9, 10])
  for _ in range(20):
    talks.engine.step()
  assert talks.served[quick].finish_reason is FinishReason.LENGTH
  assert talks.served[slow].finish_reason is None and not talks.served[slow].tokens
  host.finished_copies = started
  talks.finish()
  assert talks.served[slow].tokens == expected[0]


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_that_ends_while_it_waits_leaves_nothing(talks: Talks, expected, how: str) -> None:
  engine = talks.engine
  waiting = talks.start(PROMPTS[0], deadline=engine.now() + 1e-5 if how == "deadline" else None)
  engine.step()
  assert engine._scheduler.num_waiting == 1 and engine._scheduler.pool.num_used > 0
  if how == "abort":
    engine.abort(waiting)
  for _ in range(20):
    engine.step()
    if not engine.num_live:
      break
  assert engine._scheduler.pool.num_used == 0, "the blocks of its load are still held"
  assert talks.served[waiting].finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT)
  talks.finish()
  assert talks.ask(PROMPTS[0]) == expected[0]


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_a_flipped_bit_is_found_and_computed_again(talks: Talks, expected, place: int) -> None:
  host = host_of(talks.engine._runner)
  first = next(iter(talks.engine._scheduler.loads.host._kept.values()))
  for slot in {first, 3, 4}:
    flip_bit(host.slots, slot, place)
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  assert talks.counts.num_failed >= 1
  failed = talks.counts.num_failed
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  assert talks.counts.num_failed <= failed + 1, "a broken copy is used again"


def test_contents_of_another_block_fail_the_digest(talks: Talks, expected) -> None:
  host = host_of(talks.engine._runner)
  rows = [bytes(host.slots.read_slot(slot)) for slot in range(NUM_HOST_BLOCKS)]
  for slot in range(NUM_HOST_BLOCKS):
    write_row(host.slots, slot, rows[slot - 1])
  host._digests = host._digests[-1:] + host._digests[:-1]  # each digest fits its contents, but not the key
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  assert talks.counts.num_failed >= 1


def test_a_copy_that_raises_costs_time_alone(talks: Talks, expected, monkeypatch, caplog) -> None:
  host = host_of(talks.engine._runner)

  def fail(copies: list[BlockCopy]) -> FinishedCopies:
    raise MemoryError("no memory")

  monkeypatch.setattr(host, "_fetch_piece", fail)
  monkeypatch.setattr(host, "_has_failed", False)
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  assert talks.counts.num_failed >= 1 and not talks.counts.num_loaded
  assert sum("copy of KV blocks" in record.message for record in caplog.records) == 1


def test_a_trace_is_refused(talks: Talks, tmp_path) -> None:
  with pytest.raises(OSError, match="serve without --host_kv_mb"):
    talks.engine.start_trace(str(tmp_path / "steps"))
  assert not (tmp_path / "steps").exists()


def test_sizes_are_checked_before_anything_is_allocated() -> None:
  assert size_host_pool(0, 5000, None, "") == 0
  assert size_host_pool(10, 2**20, 10 * 2**20, "") == 10
  with pytest.raises(ConfigError, match="host_kv_mb=1 holds no block of this model's KV, which has 3 MiB; raise"):
    size_host_pool(1, 3 * 2**20, None, "")
  with pytest.raises(ConfigError, match="host_kv_mb=11 needs 11 MiB of this machine's memory beside X, and 10 MiB are"):
    size_host_pool(11, 2**20, 10 * 2**20, " beside X")


def test_a_file_that_cannot_be_read_costs_time_alone(runner: ModelRunner, expected, tmp_path, monkeypatch) -> None:
  host = host_of(runner)
  slots = FileSlots(NUM_HOST_BLOCKS, len(host.slots.read_slot(0)), str(tmp_path))
  assert not list(tmp_path.iterdir()), "the file has a name"
  monkeypatch.setattr(host, "slots", slots)
  talks = Talks(runner)
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  os.ftruncate(slots._fd, 0)
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  failed = talks.counts.num_failed
  slots._close()
  assert [talks.ask(prompt) for prompt in PROMPTS] == expected
  assert talks.counts.num_failed > failed >= 1


def test_a_file_that_does_not_fit_is_refused(tmp_path) -> None:
  with pytest.raises(ConfigError, match=rf"host_kv_dir={tmp_path} takes no file of \d+ bytes: .*; lower --host_kv_mb"):
    FileSlots(2**40, 2**20, str(tmp_path))
  with pytest.raises(ConfigError, match="host_kv_dir=/nowhere takes no file of 8 bytes: No such file or directory"):
    FileSlots(1, 8, "/nowhere")


def test_a_slot_holds_a_block(runner: ModelRunner) -> None:
  block_bytes = sum(leaf.nbytes for leaf in runner.kv) // (NUM_BLOCKS + 1)
  assert len(host_of(runner).slots.read_slot(NUM_HOST_BLOCKS - 1)) == block_bytes


TWO_DEVICES = """
import jax
from tests.device import test_host_blocks as cases
from tests.device.tiny_model import make_runner

sizes = {"num_blocks": cases.NUM_BLOCKS, "num_host_blocks": cases.NUM_HOST_BLOCKS}
runner = make_runner(token_budgets=(32,), devices=jax.devices(), **sizes)
runner.warm_up(lambda *_: None)
runner.seal()
plain = cases.Talks(runner, num_host_blocks=0, prefix_cache_scope="off")
expected = [plain.ask(prompt) for prompt in cases.PROMPTS]
talks = cases.Talks(runner)
for _ in range(3):
  assert [talks.ask(prompt) for prompt in cases.PROMPTS] == expected
assert talks.counts.num_loaded > 50 and not talks.counts.num_failed and not runner.compiles_after_ready
print(len(jax.devices()), "devices")
"""


@pytest.mark.long
def test_blocks_of_two_devices_come_back() -> None:
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", TWO_DEVICES], cwd=root, env=environment, capture_output=True, text=True, check=False
  )
  assert done.stdout.strip() == "2 devices", done.stderr
