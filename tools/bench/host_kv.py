"""Measures what --host_kv_mb gives and costs; prints one JSON line.

  python -m tools.bench.host_kv [--shape=llama-125m] [--tokens=1500] [--rounds=7] [--host_kv_mb=1024]

Three engines of one model take turns: `off` without a host pool, `on` with one in memory, `file` with one in a file of
`--folder`. Their KV pool holds one conversation. In each round an engine computes the first turn of a new conversation,
then another conversation that evicts it, and then the second turn: the first turn, its answer, and `more` tokens. The
second turn's time to first token is compared, and its tokens must be equal. Before that turn, the system drops its copy
of the file in memory, so the blocks come from the disk. `evicting` compares the time of the conversation that evicts,
whose steps copy blocks out. `decode` compares steps of `rows` sequences that evict nothing, in `turns` further turns;
`least` is the fastest step of all. `cpu` figures are of the process's CPU time, which other programs disturb less.

Each ratio is the median over rounds of an engine's time to that of `off` in one round, and the reverse for the second
turn. So other programs on the machine disturb all alike.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import threading
import time

from engine.device.build import Built, build_engine
from engine.device.host_blocks import FileSlots
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.settings import UNBOUNDED_QUEUE
from tools.arguments import CommandParser, positive_int
from tools.make_random_model import read_shape
from tools.measure import commit, machine

_SHAPES = pathlib.Path(__file__).resolve().parents[2] / "models" / "shapes"
_BLOCK = 16
_ANSWER_TOKENS = 16
_WARM_STEPS = 4


@dataclasses.dataclass
class _Asked:
  """A request on its way: its tokens, and the time of each on time.perf_counter."""

  begin: float
  tokens: list[int] = dataclasses.field(default_factory=list)
  times: list[float] = dataclasses.field(default_factory=list)
  done: threading.Event = dataclasses.field(default_factory=threading.Event)

  @property
  def first_token_s(self) -> float:
    return self.times[0] - self.begin


class BenchedEngine:
  """An engine whose loop runs on a thread of its own, as in a server."""

  def __init__(self, options: BuildOptions):
    self._asked: dict[str, _Asked] = {}
    self._serial = itertools.count()
    self.built: Built = build_engine(options, lambda *_: None, self._take)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self.built.engine.run, args=(self._stop,), daemon=True)

  def start(self) -> None:
    """Starts the loop."""
    self._thread.start()

  def close(self) -> None:
    """Ends the loop."""
    self._stop.set()
    self.built.engine.wake()
    self._thread.join()

  def _take(self, events: list[TokenEvent]) -> None:
    now = time.perf_counter()
    for event in events:
      asked = self._asked[event.request_id]
      asked.tokens += event.token_ids
      asked.times += [now] * len(event.token_ids)
      if event.finish_reason is not None:
        asked.done.set()

  def drop_cached(self) -> None:
    """Makes the system forget what it has in memory of the file, if the host pool is one."""
    host = self.built.runner.host_blocks
    if host is not None and isinstance(host.slots, FileSlots):
      host.slots.drop_cached()

  def submit(self, prompt: list[int], max_tokens: int) -> _Asked:
    """Submits a greedy request of exactly `max_tokens`."""
    name = str(next(self._serial))
    asked = self._asked[name] = _Asked(time.perf_counter())
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    self.built.engine.submit(Request(name, prompt, params))
    return asked

  def ask(self, prompt: list[int], max_tokens: int) -> _Asked:
    """Submits a request and waits for its end."""
    asked = self.submit(prompt, max_tokens)
    asked.done.wait()
    return asked

  def decode_steps_s(self, rows: int, steps: int) -> list[float]:
    """Returns the seconds of each step in which `rows` sequences decode."""
    count = steps + rows + 2 * _WARM_STEPS
    asked = [self.submit(_prompt(row, _BLOCK), count) for row in range(rows)]
    for each in asked:
      each.done.wait()
    begin = max(each.times[0] for each in asked)
    end = min(each.times[-1] for each in asked)
    times = [moment for moment in asked[0].times if begin < moment < end][_WARM_STEPS:]
    return [after - before for before, after in itertools.pairwise(times)]


def _prompt(seed: int, length: int) -> list[int]:
  return [3 + (seed * 7919 + place * 31 + place // 7) % 997 for place in range(length)]


def measure(
  shape: str, tokens: int, more: int, rounds: int, host_kv_mb: int, rows: int, steps: int, turns: int, folder: str
) -> dict[str, object]:
  """Returns the figures of one model."""
  longest = -(-(tokens + _ANSWER_TOKENS + more + _ANSWER_TOKENS) // _BLOCK) * _BLOCK
  options = BuildOptions(
    str(_SHAPES / shape),
    random_weights=True,
    max_model_len=longest,
    num_blocks=longest // _BLOCK + 8,
    block_size=_BLOCK,
    speculation="none",
    **UNBOUNDED_QUEUE,
  )
  engines = {
    "off": BenchedEngine(options),
    "on": BenchedEngine(dataclasses.replace(options, host_kv_mb=host_kv_mb)),
    "file": BenchedEngine(dataclasses.replace(options, host_kv_mb=host_kv_mb, host_kv_dir=folder)),
  }
  for engine in engines.values():
    engine.built.runner.seal()  # the later engines compiled after the first one was ready
    engine.start()
  names = list(engines)
  found: dict[str, dict[str, list[float]]] = {
    what: {name: [] for name in names} for what in ("second_turn", "evicting", "evicting_cpu", "decode", "decode_cpu")
  }
  for number in range(rounds + 1):
    first, other = _prompt(2 * number, tokens), _prompt(2 * number + 1, tokens)
    answers = []
    for name in names if number % 2 else reversed(names):
      engine = engines[name]
      answer = engine.ask(first, _ANSWER_TOKENS)
      cpu = time.process_time()
      evicting = engine.ask(other, _ANSWER_TOKENS)
      cpu = time.process_time() - cpu
      engine.drop_cached()
      second = engine.ask([*first, *answer.tokens, *_prompt(number, more)], _ANSWER_TOKENS)
      answers.append((answer.tokens, evicting.tokens, second.tokens))
      if number:  # the first round warms up
        found["second_turn"][name].append(second.first_token_s)
        found["evicting"][name].append(evicting.first_token_s)
        found["evicting_cpu"][name].append(cpu)
    assert answers.count(answers[0]) == len(answers), f"round {number}: the tokens differ"
  least = dict.fromkeys(names, float("inf"))
  for turn in range(turns + 1):
    for name in names if turn % 2 else reversed(names):
      cpu = time.process_time()
      seconds = engines[name].decode_steps_s(rows, steps)
      cpu = time.process_time() - cpu
      if turn:
        found["decode_cpu"][name].append(cpu)
        found["decode"][name].append(statistics.median(seconds))
        least[name] = min(least[name], *seconds)
  result: dict[str, object] = {f"decode_{name}_least_ms": round(1e3 * least[name], 2) for name in names}
  for what, of_engines in found.items():
    for name in names:
      result[f"{what}_{name}_ms"] = round(1e3 * statistics.median(of_engines[name]), 2)
    for name in names[1:]:
      pairs = zip(of_engines[name], of_engines["off"], strict=True)
      ratios = sorted(off / mine if what == "second_turn" else mine / off for mine, off in pairs)
      result[f"{what}_{name}_ratio"] = round(statistics.median(ratios), 3)
      result[f"{what}_{name}_ratio_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
  for name in names[1:]:
    counts = engines[name].built.engine.stats().host_pool
    assert counts is not None
    result[name] = dataclasses.asdict(counts)
  result["block_mib"] = round(engines["on"].built.config.block_bytes / 2**20, 3)
  result["compiles_after_ready"] = sum(engine.built.runner.compiles_after_ready for engine in engines.values())
  for engine in engines.values():
    engine.close()
  return result


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("bench_host_kv", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="a folder of models/shapes, with random weights")
  parser.add_argument("--tokens", type=positive_int, default=1500, help="tokens of a first turn")
  parser.add_argument("--more", type=positive_int, default=32, help="new tokens of a second turn")
  parser.add_argument("--rounds", type=positive_int, default=7, help="rounds, after one to warm up")
  parser.add_argument("--host_kv_mb", type=positive_int, default=1024, help="memory of the host pool, in MiB")
  parser.add_argument("--rows", type=positive_int, default=8, help="sequences that decode")
  parser.add_argument("--steps", type=positive_int, default=20, help="steps that they decode together")
  parser.add_argument("--turns", type=positive_int, default=20, help="turns of each engine, after one to warm up")
  parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is, on the disk to measure")
  args = parser.parse_args(argv)
  try:
    read_shape(args.shape)
    found = measure(
      args.shape, args.tokens, args.more, args.rounds, args.host_kv_mb, args.rows, args.steps, args.turns, args.folder
    )
  except (EngineError, OSError) as error:
    return parser.failed(error)
  chosen = {"shape": args.shape, "tokens": args.tokens, "more": args.more, "rounds": args.rounds}
  print(json.dumps(chosen | found | {"machine": machine(), "commit": commit()}))
  return 0


if __name__ == "__main__":
  sys.exit(main())
