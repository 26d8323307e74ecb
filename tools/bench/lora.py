"""Measures what LoRA adapters cost a decode step; prints one JSON line.

  python -m tools.bench.lora [--shape=llama-125m] [--rows=64] [--adapters=8] [--rank=16] [--turns=20]

Two engines of one model take turns: one without --enable_lora, and one with every adapter loaded. A turn decodes `rows`
sequences for `steps` steps, without overlap, and takes the median time of a step. `idle` has the adapters loaded and no
row that uses one, `adapted` has rows of all adapters. Each ratio is the median over turns of a turn's time to that of
the engine without adapters in the same round. `least` figures are the fastest step of all turns, which other programs
on the machine delay least.
"""

from collections.abc import Sequence
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time

from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import UNBOUNDED_QUEUE
from models.registry import config_from_hf
from tools.arguments import CommandParser, positive_int
from tools.make_random_adapter import write_plain_adapter
from tools.make_random_model import find_bench_model

_PROMPT_TOKENS = 16
_WARM_STEPS = 4


def measure_step(built: Built, turn: str, rows: int, steps: int, names: Sequence[str]) -> list[float]:
  """Returns the seconds of each decode step of `rows` sequences, which use the adapters `names` in turn."""
  engine = built.engine
  for row in range(rows):
    prompt = [3 + (7 * row + place) % 200 for place in range(_PROMPT_TOKENS)]
    params = SamplingParams(max_tokens=steps + 2 * _WARM_STEPS + rows, temperature=0.0, ignore_eos=True)
    adapter = names[row % len(names)] if names else ""
    engine.submit(Request(f"{turn}-{row}", prompt, params, adapter=adapter))
  while engine.stats().num_waiting or engine.stats().num_live < rows:
    engine.step()
  for _ in range(_WARM_STEPS):
    engine.step()
  moments = [time.perf_counter()]
  for _ in range(steps):
    engine.step()
    moments.append(time.perf_counter())
  for row in range(rows):
    engine.abort(f"{turn}-{row}")
  while engine.num_live:
    engine.step()
  return [end - begin for begin, end in itertools.pairwise(moments)]


def build(model: pathlib.Path, rows: int, steps: int, max_loras: int, rank: int, is_random: bool) -> Built:
  """Builds an engine, with adapters if `max_loras` is above 0."""
  longest = _PROMPT_TOKENS + steps + 2 * _WARM_STEPS + rows + 16
  options = BuildOptions(
    str(model),
    random_weights=is_random,
    max_num_seqs=rows,
    token_budgets=(rows, 4 * rows),
    max_model_len=longest,
    num_blocks=rows * (longest // 16 + 1),
    block_size=16,
    overlap="false",
    enable_lora=max_loras > 0,
    max_loras=max(1, max_loras),
    max_lora_rank=rank,
    speculation="none",
    **UNBOUNDED_QUEUE,
  )
  return build_engine(options, lambda *_: None, lambda _: None)


def measure(model: pathlib.Path, rows: int, num_adapters: int, rank: int, steps: int, turns: int, is_random: bool):
  """Returns the figures of one model."""
  plain, adapted = (build(model, rows, steps, count, rank, is_random) for count in (0, num_adapters))
  names = [f"adapter-{number}" for number in range(num_adapters)]
  assert adapted.read_adapter is not None
  config = config_from_hf(json.loads((model / "config.json").read_text("utf-8")))
  load_seconds = []
  with tempfile.TemporaryDirectory() as folder:
    for number, name in enumerate(names):
      path = pathlib.Path(folder) / name
      write_plain_adapter(path, config, rank, number, strength=0.1)
      weights = adapted.read_adapter(str(path))
      begin = time.perf_counter()
      loaded = adapted.engine.load_adapter(name, weights)
      adapted.engine.step()
      loaded.result(timeout=0)
      load_seconds.append(time.perf_counter() - begin)
  plain.runner.seal()  # the second engine compiled after the first one was ready
  kinds = {"plain": (plain, []), "idle": (adapted, []), "adapted": (adapted, names)}
  seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
  least = dict.fromkeys(kinds, float("inf"))
  for turn in range(turns + 1):
    order = list(kinds) if turn % 2 else list(reversed(kinds))
    for kind in order:
      built, used = kinds[kind]
      found = measure_step(built, f"{kind}-{turn}", rows, steps, used)
      if turn:  # the first one warms up
        seconds[kind].append(statistics.median(found))
        least[kind] = min(least[kind], *found)
  result: dict[str, object] = {f"{kind}_ms": round(1e3 * statistics.median(of), 3) for kind, of in seconds.items()}
  result |= {f"{kind}_least_ms": round(1e3 * seconds, 3) for kind, seconds in least.items()}
  for kind in ("idle", "adapted"):
    result[f"{kind}_least_ratio"] = round(least[kind] / least["plain"], 4)
    ratios = sorted(mine / base for mine, base in zip(seconds[kind], seconds["plain"], strict=True))
    result[f"{kind}_ratio"] = round(statistics.median(ratios), 4)
    result[f"{kind}_ratio_quartiles"] = [round(ratios[len(ratios) * part // 4], 4) for part in (1, 3)]
  result["load_ms"] = round(1e3 * statistics.median(load_seconds), 2)
  result["compiles_after_ready"] = plain.runner.compiles_after_ready + adapted.runner.compiles_after_ready
  return result


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("bench_lora", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="a folder of models/shapes, with random weights, or demo")
  parser.add_argument("--rows", type=positive_int, default=64, help="sequences that decode")
  parser.add_argument("--adapters", type=positive_int, default=8, help="adapters that they use in turn")
  parser.add_argument("--rank", type=positive_int, default=16, help="rank of every matrix of an adapter")
  parser.add_argument("--steps", type=positive_int, default=20, help="steps of a turn")
  parser.add_argument("--turns", type=positive_int, default=20, help="turns of each kind, after one to warm up")
  args = parser.parse_args(argv)
  try:
    model, is_random = find_bench_model(args.shape)
    found = measure(model, args.rows, args.adapters, args.rank, args.steps, args.turns, is_random)
  except EngineError as error:
    return parser.failed(error)
  chosen = {"shape": args.shape, "rows": args.rows, "adapters": args.adapters, "rank": args.rank}
  print(json.dumps(chosen | found))
  return 0


if __name__ == "__main__":
  sys.exit(main())
