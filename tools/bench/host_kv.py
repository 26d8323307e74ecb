"""Measures what --host_kv_mb gives and costs; prints one JSON line.

  python -m tools.bench.host_kv [--shape=llama-125m] [--tokens=1500] [--rounds=7] [--host_kv_mb=1024]

Two engines of one model take turns, `on` with a host pool and `off` without. Their KV pool holds one conversation. In
each round an engine computes the first turn of a new conversation, then another conversation that evicts it, and then
the second turn: the first turn, its answer, and `more` tokens. The second turn's time to first token is compared, and
its tokens must be equal. `evicting` compares the time of the conversation that evicts, whose steps copy blocks out.
`decode` compares steps of `rows` sequences that evict nothing, in `turns` further turns; `least` is the fastest step of
all. Each other ratio is the median over rounds of `on` to `off` (for the second turn `off` to `on`) in one round, so
other programs on the machine disturb both alike.

`file_cold` and `file_cached` are the time to read the blocks of one first turn from a file in `--folder` and to check
their digests: from the disk, after the system dropped its copy in memory, and from that copy.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

import xxhash

from engine.device.build import Built, build_engine
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


def read_file_s(folder: str, num_blocks: int, block_bytes: int, rounds: int) -> dict[str, list[float]]:
  """Returns the seconds to read and to verify blocks of a file, in each round: `file_cold` and `file_cached`.

  Raises:
    OSError: the folder takes no file of that size.
  """
  found: dict[str, list[float]] = {"file_cold": [], "file_cached": []}
  target = bytearray(block_bytes)
  with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
    digests = []
    for _ in range(num_blocks):
      content = os.urandom(block_bytes)
      digests.append(xxhash.xxh3_64_intdigest(content))
      file.write(content)
    os.fsync(file.fileno())
    for _ in range(rounds):
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
      for seconds in found.values():  # the second time it is in memory
        begin = time.perf_counter()
        file.seek(0)
        for digest in digests:
          file.readinto(target)
          assert xxhash.xxh3_64_intdigest(target) == digest
        seconds.append(time.perf_counter() - begin)
  return found


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
    **UNBOUNDED_QUEUE,
  )
  engines = {
    "off": BenchedEngine(options),
    "on": BenchedEngine(dataclasses.replace(options, host_kv_mb=host_kv_mb)),
  }
  engines["off"].built.runner.seal()  # the second engine compiled after the first one was ready
  for engine in engines.values():
    engine.start()
  names = list(engines)
  found: dict[str, dict[str, list[float]]] = {
    what: {name: [] for name in names} for what in ("second_turn", "evicting", "decode")
  }
  for number in range(rounds + 1):
    first, other = _prompt(2 * number, tokens), _prompt(2 * number + 1, tokens)
    answers = []
    for name in names if number % 2 else reversed(names):
      engine = engines[name]
      answer = engine.ask(first, _ANSWER_TOKENS)
      evicting = engine.ask(other, _ANSWER_TOKENS)
      second = engine.ask([*first, *answer.tokens, *_prompt(number, more)], _ANSWER_TOKENS)
      answers.append((answer.tokens, evicting.tokens, second.tokens))
      if number:  # the first round warms up
        found["second_turn"][name].append(second.first_token_s)
        found["evicting"][name].append(evicting.first_token_s)
    assert answers[0] == answers[1], f"round {number}: the tokens differ"
  least = dict.fromkeys(names, float("inf"))
  for turn in range(turns + 1):
    for name in names if turn % 2 else reversed(names):
      seconds = engines[name].decode_steps_s(rows, steps)
      if turn:
        found["decode"][name].append(statistics.median(seconds))
        least[name] = min(least[name], *seconds)
  counts = engines["on"].built.engine.stats().host_pool
  assert counts is not None
  result: dict[str, object] = {f"decode_{name}_least_ms": round(1e3 * least[name], 2) for name in names}
  for what, of_engines in found.items():
    for name in names:
      result[f"{what}_{name}_ms"] = round(1e3 * statistics.median(of_engines[name]), 2)
    pairs = zip(of_engines["on"], of_engines["off"], strict=True)
    ratios = sorted(off / on if what == "second_turn" else on / off for on, off in pairs)
    result[f"{what}_ratio"] = round(statistics.median(ratios), 3)
    result[f"{what}_ratio_least_and_most"] = [round(ratios[0], 3), round(ratios[-1], 3)]
  block_bytes = engines["on"].built.config.block_bytes
  for name, seconds in read_file_s(folder, tokens // _BLOCK, block_bytes, rounds).items():
    result[f"{name}_ms"] = round(1e3 * statistics.median(seconds), 2)
  result["block_mib"] = round(block_bytes / 2**20, 3)
  result |= dataclasses.asdict(counts)
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
