"""Sluice against transformers' continuous batching on CPU, f32: one random model, the same requests, one run.

  python -m tools.compare_transformers [--peer_python=.venv-parity/bin/python]

The model has 125M parameters (Llama shape, 12 layers, width 768, random weights). 64 requests, all there at the start:
prompts log-normal (mean 64, 8 to 512), forced outputs log-normal (mean 64, 4 to 256), greedy. First the peer's best
setting is found, then both run alternately, each in a process of its own, and the figures are medians. Loading,
compiling and warming up are outside the timed part on both sides, and reported.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import sys
from typing import Any

from engine.errors import ConfigError, EngineError
from tools import workload
from tools.arguments import CommandParser, positive_int
from tools.measure import ROOT, machine, median_of, run_tool, write_result

PROMPT_LEN, OUTPUT_LEN = "lognormal:64:8:512", "lognormal:64:4:256"
VOCAB_SIZE = 32_000
MODEL = json.loads((ROOT / "models" / "shapes" / "llama-125m" / "config.json").read_text("utf-8"))


def agreement(ours: Mapping[int | str, Sequence[int]], theirs: Mapping[int | str, Sequence[int]]) -> dict[str, Any]:
  """How far two sets of greedy outputs agree.

  Returns:
    identical_requests: the share with every token equal.
    agreeing_prefix: the share of all tokens before each request's first difference. After one near tie decided
      differently two correct programs go different ways, so tokens after it say nothing.
  """
  prefixes = {}
  for identity, tokens in ours.items():
    other = theirs[identity]
    if len(tokens) != len(other):
      raise ConfigError(f"request {identity!r}: {len(tokens)} tokens against {len(other)}; both must be forced")
    prefixes[identity] = next((at for at, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))
  return {
    "identical_requests": round(sum(prefixes[key] == len(ours[key]) for key in ours) / len(ours), 4),
    "agreeing_prefix": round(sum(prefixes.values()) / sum(map(len, ours.values())), 4),
    "differing_requests": [key for key in ours if prefixes[key] < len(ours[key])],
  }


def prepare(folder: pathlib.Path, num_requests: int, seed: int) -> dict[str, Any]:
  """Writes model and requests, the model only where it is not there yet; returns the workload in words."""
  from tools.make_random_model import write_model

  folder.mkdir(parents=True, exist_ok=True)
  if not (folder / "model" / "config.json").exists():
    print("writing a random model of 125M parameters ...", file=sys.stderr, flush=True)
    write_model(folder / "model", dict(MODEL), seed=0)
  requests = workload.synthetic(num_requests, PROMPT_LEN, OUTPUT_LEN, VOCAB_SIZE, seed)
  description = {
    "num_requests": num_requests,
    "prompt_len": PROMPT_LEN,
    "output_len": OUTPUT_LEN,
    "seed": seed,
    "prompt_tokens": sum(len(request.prompt) for request in requests),
    "output_tokens": sum(request.output_len for request in requests),
  }
  with open(folder / "requests.jsonl", "w", encoding="utf-8") as file:
    workload.write_requests(file, requests, description)
  return description


def peer_flags(setting: str) -> list[str]:
  """Flags of transformers_peer.py from ATTENTION:MAX_REQUESTS:MAX_BATCH_TOKENS:COMPILE_LEVEL."""
  parts = setting.split(":")
  if len(parts) != 4 or parts[0] not in ("sdpa", "eager") or not all(part.isdecimal() for part in parts[1:]):
    raise ConfigError(
      f"peer_settings has {setting!r}; write ATTENTION:MAX_REQUESTS:MAX_BATCH_TOKENS:COMPILE_LEVEL, "
      "for example sdpa:32:0:0"
    )
  names = ("attention", "max_requests", "max_batch_tokens", "compile_level")
  return [f"--{name}={part}" for name, part in zip(names, parts, strict=True)]


def run_peer(args: Any, folder: pathlib.Path, setting: str) -> dict[str, Any]:
  """One run of transformers; for `setting` see peer_flags."""
  return run_tool(
    [
      args.peer_python,
      str(ROOT / "tools" / "transformers_peer.py"),
      f"--model={folder / 'model'}",
      f"--requests={folder / 'requests.jsonl'}",
      f"--output_tokens={folder / 'peer.jsonl'}",
      f"--threads={args.threads}",
      *peer_flags(setting),
    ],
    f"transformers, {setting}",
  )


def run_sluice(args: Any, folder: pathlib.Path) -> dict[str, Any]:
  """One run of tools.bench_offline."""
  return run_tool(
    [
      sys.executable,
      "-m",
      "tools.bench_offline",
      f"--model={folder / 'model'}",
      f"--requests={folder / 'requests.jsonl'}",
      f"--output_tokens={folder / 'sluice.jsonl'}",
      f"--max_num_seqs={args.max_num_seqs}",
      f"--token_budgets={args.token_budgets}",
      f"--prefill_chunk={args.prefill_chunk}",
      f"--compile_cache_dir={folder / 'programs'}",
    ],
    "sluice",
  )


def main(argv: Sequence[str] | None = None) -> int:
  """The command: progress and a table on standard error, one JSON line on standard output."""
  parser = CommandParser("tools.compare_transformers", __doc__)
  parser.add_argument(
    "--peer_python",
    default=str(ROOT / ".venv-parity" / "bin" / "python"),
    help="a Python with torch and transformers; make parity makes one",
  )
  parser.add_argument(
    "--peer_settings",
    default="sdpa:16:0:0,sdpa:32:0:0,sdpa:64:0:0,sdpa:32:256:0,eager:32:0:0",
    help="candidates ATTENTION:MAX_REQUESTS:MAX_BATCH_TOKENS:COMPILE_LEVEL (0: transformers' own "
    "choice, no torch.compile); the fastest is used",
  )
  parser.add_argument("--threads", type=positive_int, default=2, help="of torch; XLA takes every core it sees")
  parser.add_argument("--num_requests", type=positive_int, default=64)
  parser.add_argument("--max_num_seqs", type=positive_int, default=64, help="Sluice: sequences at once")
  parser.add_argument("--token_budgets", default="8,16,32,64,128,256,512", help="Sluice: the shape ladder")
  parser.add_argument("--prefill_chunk", type=positive_int, default=512, help="Sluice: prompt tokens a step")
  parser.add_argument("--rounds", type=positive_int, default=2, help="alternating runs after the search")
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--work", default=str(ROOT / ".cache" / "compare_transformers"), help="folder for the files")
  parser.add_argument("--output", default="", help="also write the result here")
  args = parser.parse_args(argv)
  folder = pathlib.Path(args.work)
  try:
    if not pathlib.Path(args.peer_python).exists():
      raise ConfigError(
        f"peer_python={args.peer_python} is not there; run make parity, or pass a Python that has "
        "torch and transformers"
      )
    settings = args.peer_settings.split(",")
    for setting in settings:
      peer_flags(setting)
    description = prepare(folder, args.num_requests, args.seed)
    search = {setting: _told(run_peer(args, folder, setting)) for setting in settings}
    best = max(search, key=lambda setting: search[setting]["output_tok_s"])
    ours, theirs = [], [search[best]]
    for number in range(args.rounds):
      ours.append(_told(run_sluice(args, folder)))
      if number + 1 < args.rounds:
        theirs.append(_told(run_peer(args, folder, best)))
    same = agreement(*(workload.read_tokens(str(folder / f"{name}.jsonl")) for name in ("sluice", "peer")))
  except (EngineError, OSError) as error:
    print(f"tools.compare_transformers: {' '.join(str(error).split())}", file=sys.stderr)
    return 1
  rates = {"sluice": median_of(ours, "output_tok_s"), "transformers": median_of(theirs, "output_tok_s")}
  result = {
    "ratio": round(rates["sluice"] / rates["transformers"], 3),
    "output_tok_s": rates,
    "agreement": same,
    "peer_setting": best,
    "peer_search": {setting: run["output_tok_s"] for setting, run in search.items()},
    "rounds": {
      name: [run["output_tok_s"] for run in runs] for name, runs in (("sluice", ours), ("transformers", theirs))
    },
    "sluice": ours[-1],
    "transformers": theirs[-1],
    "threads": args.threads,
    "workload": description,
    "machine": machine(),
  }
  print(
    f"\nsluice {rates['sluice']:.1f}, transformers {rates['transformers']:.1f} output tokens/s ({best}): ratio "
    f"{result['ratio']:.2f}; {same['identical_requests']:.1%} of requests identical, "
    f"{same['agreeing_prefix']:.1%} of tokens before a first difference",
    file=sys.stderr,
  )
  write_result(args.output, result)
  print(json.dumps(result))
  return 0


def _told(figures: dict[str, Any]) -> dict[str, Any]:
  print(f"  {figures['output_tok_s']:.1f} output tokens/s", file=sys.stderr, flush=True)
  return figures


if __name__ == "__main__":
  sys.exit(main())
