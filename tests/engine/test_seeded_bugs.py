"""A test of the tests: every bug of this list, put into the source, must be caught by the world's checks.

A bug is a (file, old text, new text); the old text must occur exactly once, so that the list cannot rot silently.
"""

from collections.abc import Callable
import dataclasses
from pathlib import Path
import types

import pytest

from engine.errors import EngineError
from tests.engine.world import run_world

ENGINE = Path(__file__).resolve().parents[2] / "engine"
WORLDS = 160  # most worlds that a bug may survive before it counts as missed


@dataclasses.dataclass(frozen=True)
class Bug:
  name: str
  file: str
  old: str
  new: str


BUGS = (
  Bug("the last token is served from the cache", "scheduler", "(known - 1) // block_size", "known // block_size"),
  Bug(
    "a block is published before it is full",
    "scheduler",
    "self._publish(request, end // block_size)",
    "self._publish(request, -(-end // block_size))",
  ),
  Bug(
    "a block is published when planned",
    "scheduler",
    "      request.num_computed_tokens = end\n",
    "      request.num_computed_tokens = end\n      self._publish(request, end // self.config.block_size)\n",
  ),
  Bug(
    "columns of other requests' decodes are kept",
    "steady_decode",
    "if decodes != self._columns.requests:",
    "if len(decodes) != len(self._columns.requests):",
  ),
  Bug("chunks grow where nothing is padded", "batching", "fills_padding=config.computes_padding", "fills_padding=True"),
  Bug("prompts beside decodes fill the largest rung", "batching", "chunk_limit if num_running else self.", ""),
  Bug(
    "the last piece of a prompt is a rest",
    "batching",
    "-(-wanted // num_steps), left",
    "wanted, self.chunk_limit, left",
  ),
  Bug("a key does not depend on what is before the block", "block_pool", "sha256(parent + array", "sha256(array"),
  Bug("a key does not depend on the salt", "block_pool", '\\0" + salt)', '\\0")'),
  Bug(
    "the row of a finished request is taken in",
    "scheduler",
    "if request.status is finished:\n        continue",
    "if False:\n        continue",
  ),
  Bug("a shared block stays in the free list", "block_pool", "        del self._free[block]\n", "        pass\n"),
  Bug("sharing does not count", "block_pool", "self._references[block] += 1", "self._references[block] = 1"),
  Bug("a reused block is still found by its old key", "block_pool", "    del self._by_key[key]\n", ""),
  Bug(
    "a block table grows one token late",
    "scheduler",
    "if position % block_size == 0 and not",
    "if position % block_size == 1 and not",
  ),
  Bug(
    "a step both preempts and admits",
    "scheduler",
    "may_admit = self.num_preemptions == num_preemptions",
    "may_admit = True",
  ),
  Bug("running prompts are not charged to the budget", "scheduler", "          plan.tokens_left -= count - 1\n", ""),
  Bug(
    "admitted prompts are not charged to the budget",
    "scheduler",
    "      taken += count\n      plan.tokens_left -= count\n",
    "      taken += count\n",
  ),
  Bug(
    "no token is set aside for decodes",
    "scheduler",
    "StepPlan(self.ladder.max_tokens - len(running),",
    "StepPlan(self.ladder.max_tokens,",
  ),
  Bug("the chunk is not limited", "scheduler", "          chunk_left -= count\n", ""),
  Bug("growth goes past the edge of the rung", "scheduler", "        left -= count - plan.counts[row]\n", ""),
  Bug("logit rows are not charged", "scheduler", "count = min(count, plan.logits_left + 1)", "pass"),
  Bug(
    "prompt log probabilities are read past the cache",
    "scheduler",
    "and not self._needs_every_position(request):\n      hits",
    "and True:\n      hits",
  ),
  Bug(
    "prompt log probabilities are reported twice",
    "row_values",
    "begin = max(request.num_prompt_logprobs, first)",
    "begin = first",
  ),
  Bug(
    "a request is not restarted when preempted",
    "scheduler",
    "request.num_computed_tokens = request.num_cached_tokens = request.num_sent_tokens = 0",
    "request.num_cached_tokens = request.num_sent_tokens = 0",
  ),
  Bug(
    "what is sent to the device is forgotten",
    "scheduler",
    "    request.num_sent_tokens = known\n",
    "    request.num_sent_tokens = request.num_prompt_tokens\n",
  ),
  Bug(
    "a preempted request goes to the end of the queue",
    "waiting_queue",
    "bisect.insort(self.requests, request, key=by_rank)",
    "self.requests.append(request)",
  ),
  Bug("the victim is the oldest", "scheduler", "victim = self._running.pop()", "victim = self._running.pop(0)"),
  Bug("a preempted request publishes blocks it has lost", "scheduler", " and request.status is running:", ":"),
  Bug("values on their way are not counted down", "scheduler", "      request.num_in_flight -= 1\n", ""),
  Bug(
    "NaN is published with a chunk",
    "scheduler",
    "return count if self._needs_every_position(request) else 1",
    "return count if self._needs_every_position(request) else int(request.num_computed_tokens + count == "
    "request.num_sent_tokens)",
  ),
  Bug("NaN does not end the request", "scheduler", "if bad_rows and row in bad_rows:", "if False:"),
  Bug(
    "a stop id is ignored",
    "scheduler",
    "if token in request.stop_ids:\n        events",
    "if token in self._eos:\n        events",
  ),
  Bug("ignore_eos is ignored", "scheduler", "frozenset() if params.ignore_eos else", "frozenset() if False else"),
  Bug(
    "max_tokens is one too many",
    "scheduler",
    "elif end >= request.max_computed_tokens:",
    "elif end > request.max_computed_tokens:",
  ),
  Bug(
    "one position too many is computed",
    "scheduler",
    "num_prompt_tokens + params.max_tokens - 1",
    "num_prompt_tokens + params.max_tokens",
  ),
  Bug("blocks of an ended request leak", "scheduler", "    self.pool.release_blocks(request.block_table)\n", ""),
  Bug("the slot of an ended request leaks", "scheduler", "    self._slots.append(request.slot)\n", ""),
  Bug(
    "an abort does not reach a waiting request",
    "scheduler",
    "return [] if request is None else",
    "return [] if request is None or request.status is RequestStatus.WAITING else",
  ),
  Bug(
    "the total deadline is ignored",
    "scheduler",
    "for each in (queue, request.deadline)",
    "for each in (queue,)",
  ),
  Bug("the queue deadline is ignored", "scheduler", "queue = request.queue_deadline if", "queue = None if"),
  Bug(
    "a deadline holds for a second only",
    "scheduler",
    "    self._next_deadline = min(map(",
    "    self._next_deadline = float('inf') or min(map(",
  ),
  Bug("a sibling starts before its leader is done", "scheduler", "if self._awaits_leader(request) or", "if"),
  Bug(
    "who does not fit is overtaken",
    "scheduler",
    "      if not count:\n        break\n      self._waiting.remove",
    "      if not count:\n        continue\n      self._waiting.remove",
  ),
  Bug("what can never fit is accepted", "validation", "if total > config.pool_tokens:", "if False:"),
  Bug("the queue is not bounded", "admission", "if num_requests >= max_requests:", "if False:"),
  Bug(
    "batch work takes all slots", "policy", "self._slots_left = self._batch_slots - num_batch", "self._slots_left = 99"
  ),
  Bug("long batch rows starve", "policy", "and self._step % _LONG_PERIOD != 0\n", ""),
  Bug("a wave stays open", "batching", "if num_running or (", "if ("),
  Bug("a wave does not reserve", "batching", "  reserves = True\n", "  reserves = False\n"),
  Bug(
    "a wave pays for its prompts alone",
    "batching",
    "self._width * longest_row",
    "self._width",
  ),
  Bug("a dynamic wave never starts", "batching", "now < oldest_arrival + self._window_s", "True"),
  Bug("several prompts are cut", "scheduler", "    if whole and count < known - cached:\n      return 0\n", ""),
  Bug(
    "a table is released twice",
    "block_pool",
    "left = self._references[block] - 1",
    "left = max(0, self._references[block] - 2)",
  ),
  Bug("tenants share blocks", "prefix_keys", "of_scope = request.tenant.encode()", 'of_scope = b""'),
  Bug(
    "a tenant's requests wait for ever", "waiting_queue", "if requests + change:", "if requests + change > 0 or True:"
  ),
  Bug(
    "a cached block is handed out as if it were free", "block_pool", "      if key is not None:\n", "      if False:\n"
  ),
  Bug("a repeated step outlives a request", "steady_decode", ".ends, starts)) - 1\n", ".ends, starts))\n"),
  Bug(
    "a repeated step has rows that have ended",
    "scheduler",
    "      self._steady.stop_run()\n      request.final",
    "      request.final",
  ),
  Bug(
    "a repeated step takes blocks that are not there", "steady_decode", "if len(growing) > pool.num_free:", "if False:"
  ),
  Bug("a block begins one token late", "steady_decode", "-(starts[0] + offset) %", "-(starts[0] + offset - 1) %"),
  Bug("a repeated step ends nobody", "steady_decode", " or not columns.stop_ids.isdisjoint(tokens)", ""),
  Bug("copies are trusted without a digest", "prefix_loads", "good = copies[:num_good]", "good = copies"),
  Bug(
    "a block is published before it has arrived",
    "prefix_loads",
    "    self._fetching.append((load, copies))\n",
    "    self._fetching.append((load, copies))\n    self._pool.publish_block(copies[0].block, keys[0])\n",
  ),
  Bug("blocks arrive for a load that is over", "prefix_loads", "    if load.is_over:\n      return []\n", ""),
  Bug(
    "a load begins at the wrong block",
    "prefix_loads",
    "PrefixLoad(request_id, keys, blocks, len(hits), len(hits))",
    "PrefixLoad(request_id, keys, blocks, len(hits), max(0, len(hits) - 1))",
  ),
  Bug("a load keeps its blocks", "prefix_loads", "    self._pool.release_blocks(load.blocks)\n", ""),
  Bug("a load lets go of its cached blocks while it runs", "prefix_loads", "    pool.share_blocks(hits)\n", ""),
  Bug(
    "the load of a request that ended goes on",
    "scheduler",
    "      self._waiting.remove(request)\n      if self.loads is not None:",
    "      self._waiting.remove(request)\n      if False:",
  ),
  Bug("a slot is reused while a load reads it", "host_pool", "if key not in self._readers:", "if True:"),
  Bug(
    "a slot is found before its copy is complete",
    "host_pool",
    "        self._saving[key] = slot\n",
    "        self._saving[key] = slot\n        self._kept[key] = slot\n",
  ),
  Bug("the slot of a broken copy leaks", "host_pool", "self._free.append(self._remove(bad))", "self._remove(bad)"),
  Bug(
    "a load takes blocks that requests need",
    "scheduler",
    "    if not self._fits(request, hits):\n      return False\n",
    "",
  ),
  Bug("all evicted blocks have one key", "block_pool", "self._evict(more, self._keys[more])", "self._evict(more, key)"),
  Bug("tokens of repeated steps are not counted", "steady_decode", "    self._uncounted_tokens += 1\n", ""),
)


def seeded(bug: Bug) -> tuple[type, Callable]:
  """The Scheduler class and validate_request, one of them with the bug in it."""
  modules = {}
  for name in (
    "host_pool",
    "prefix_loads",
    "block_pool",
    "batching",
    "policy",
    "admission",
    "prefix_keys",
    "waiting_queue",
    "validation",
    "steady_decode",
    "step_plan",
    "draft_rows",
    "row_values",
    "scheduler",
  ):
    source = (ENGINE / f"{name}.py").read_text()
    if bug.file == name:
      assert source.count(bug.old) == 1, f"{bug.old!r} occurs {source.count(bug.old)} times in {name}.py"
      source = source.replace(bug.old, bug.new)
    module = modules[name] = types.ModuleType(f"seeded_{name}")
    exec(compile(source, f"seeded {name}.py", "exec"), module.__dict__)
  for user, module, name in (
    ("prefix_keys", "block_pool", "block_key"),
    ("prefix_keys", "block_pool", "root_key"),
    ("prefix_loads", "host_pool", "HostPool"),
    ("scheduler", "row_values", "cut_tokens_at_end"),
    ("scheduler", "row_values", "judge_rows"),
    ("scheduler", "row_values", "split_logprobs"),
    ("scheduler", "prefix_loads", "PrefixLoads"),
    ("scheduler", "block_pool", "BlockPool"),
    ("scheduler", "batching", "make_batching"),
    ("scheduler", "policy", "make_policy"),
    ("scheduler", "policy", "Policy"),
    ("scheduler", "steady_decode", "SteadyDecode"),
    ("scheduler", "step_plan", "StepPlan"),
    ("scheduler", "draft_rows", "DraftPlanner"),
    ("scheduler", "admission", "AdmissionControl"),
    ("scheduler", "prefix_keys", "PrefixKeys"),
    ("scheduler", "waiting_queue", "WaitingQueue"),
  ):
    setattr(modules[user], name, getattr(modules[module], name))
  return modules["scheduler"].Scheduler, modules["validation"].validate_request


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
  scheduler_class, validate_request = seeded(bug)
  monkeypatch.setattr("engine.engine.validate_request", validate_request)
  for seed in range(WORLDS):
    try:
      run_world(seed, scheduler_class=scheduler_class)
    except (AssertionError, EngineError, KeyError, IndexError, ValueError):
      return
  pytest.fail(f"{WORLDS} worlds did not notice: {bug.name}")


def test_no_bug_is_not_caught() -> None:
  """The machinery itself raises nothing: the unchanged source, loaded the same way, survives."""
  scheduler_class, _ = seeded(Bug("none", "", "", ""))
  for seed in range(5):
    run_world(seed, scheduler_class=scheduler_class)
