"""Runs the same weights and requests through Sluice and its peers on this CPU, in one run: tokens first, then speeds.

  python -m tools.peers [--shape=llama-125m] [--precision=int8] [--only=openvino,vllm] [--rounds=3] [--online]
                                                                                                       # make peers

Peers: transformers' continuous batching, llama.cpp's server, vLLM's CPU build, OpenVINO GenAI; each has its own
environment (tools/peers/setup.sh). The tool leaves out a peer without an environment, and the report says so. Weights
are random, sampling is greedy, and lengths are forced: by default log-normal, prompts of 64 tokens on average (8 to
512), and outputs of 64 (4 to 256).

In f32 all tokens must be the same, but for ties. Each engine rounds int8 and int4 in its own way. The report then has
the share of its tokens that transformers chooses in f32 after the same tokens, and how far the other tokens' logits
are from the largest. It also counts tokens that equal Sluice's, which matters where both read one file. With --unjudged
transformers does not run. Offline, all requests are there at the start. --online sends them with Poisson arrivals, at
--load of Sluice's offline rate from the same run. All engines are loaded, compiled and warmed up first. Rounds go
through all engines, each starting with another one, and the idle engines are stopped. Figures are medians over rounds.
"""

from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import signal
import sys
from typing import Any

from engine.errors import ConfigError, EngineError
from tools import workload
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import ROOT, commit, machine
from tools.peers import agreement, face, report
from tools.peers.process import PeerProcess
from tools.report.latency import Outcome, summary
from tools.workload import WorkRequest

MAX_LEN = 1024
ENVIRONMENTS = {
  "openvino": ".venv-peers-openvino",
  "vllm": ".venv-peers-vllm",
  "llama_cpp": ".venv-peers-llama_cpp",
  "transformers": ".venv-parity",
}
NUM_JUDGED = 16  # requests whose tokens the judge reads where precisions differ
WARM_UP_LEN = 4  # output tokens of each request before the first round; online, all of them
READY_S, SERVE_S = 600.0, 600.0


def python_of(name: str) -> pathlib.Path:
  """Returns the Python that runs an adapter. Raises ConfigError if its environment is missing."""
  if name == "sluice":
    return pathlib.Path(sys.executable)
  venv = ROOT / ENVIRONMENTS[name]
  if not (venv / ".ready").exists():
    raise ConfigError(f"{ENVIRONMENTS[name]} is not set up; run tools/peers/setup.sh {name}")
  return venv / "bin" / "python"


def start(name: str, folder: pathlib.Path, args: Any, flags: Sequence[str] = ()) -> PeerProcess:
  """Starts an adapter and waits until it is ready; prints why Sluice's attention or matmul is not its best."""
  print(f"{name}: getting ready ...", file=sys.stderr, flush=True)
  command = [
    *(str(python_of(name)), "-m", f"tools.peers.run_{name}"),
    *(f"--model={folder / 'model'}", f"--work={folder}", f"--threads={args.threads}", f"--max_len={MAX_LEN}"),
    *(f"--max_requests={args.max_requests}", f"--precision={args.precision}"),
    *(*(["--realtime"] if args.online else []), *flags),
    *(flag.removeprefix(f"{name}:") for flag in args.flag if flag.startswith(f"{name}:")),
  ]
  process = PeerProcess(name, command, folder / f"{name}.log", READY_S)
  for reason in process.about["settings"].get("fallbacks", ()):
    print(f"{name} is slower than it can be: {reason}", file=sys.stderr, flush=True)
  return process


def prepare(folder: pathlib.Path, shape: str) -> int:
  """Writes the model if it is missing; returns its vocabulary size. Raises ConfigError."""
  from tools.make_random_model import read_shape, write_model

  raw = read_shape(shape)
  if raw["model_type"] != "llama":
    raise ConfigError(f"shape={shape!r} is not a Llama, which the GGUF writer needs; use llama-125m or llama3.2-1b")
  raw["rope_scaling"] = None  # of no cost to any engine, and in GGUF a tensor of its own
  if not (folder / "model" / "config.json").exists():
    folder.mkdir(parents=True, exist_ok=True)
    print(f"writing random weights of {shape} ...", file=sys.stderr, flush=True)
    write_model(folder / "model", raw, seed=0)
  return raw["vocab_size"]


def write(folder: pathlib.Path, name: str, requests: Sequence[WorkRequest]) -> pathlib.Path:
  """Writes a request file into the folder."""
  path = folder / f"{name}.jsonl"
  with open(path, "w", encoding="utf-8") as file:
    workload.write_requests(file, requests, {})
  return path


def judged(
  outcomes: dict[str, list[Outcome]], requests: Sequence[WorkRequest], folder: pathlib.Path, args: Any
) -> dict[str, dict[str, Any]]:
  """Compares every engine's tokens with transformers', or Sluice's without it; logits judge differences."""
  tokens = {name: {outcome.id: outcome.tokens for outcome in found} for name, found in outcomes.items()}
  reference = tokens.get("transformers", tokens["sluice"])
  found = {name: agreement.compare(reference, these) for name, these in tokens.items()}
  differing = sorted({identity for one in found.values() for identity in one.differing}, key=str)
  if args.precision != "f32":
    differing = [request.id for request in requests[:NUM_JUDGED]]
  margins: dict[str, dict[int | str, list[float]]] = {name: {} for name in tokens}
  judge = None
  if differing and not args.unjudged:
    try:
      judge = start("transformers", folder, args, ["--judge_only"])
    except ConfigError as error:
      print(f"tokens are not judged: {error}", file=sys.stderr)
  if judge is not None:
    try:
      prompts = {request.id: list(request.prompt) for request in requests}
      for name, these in tokens.items():
        rows = [{"id": key, "prompt": prompts[key], "tokens": list(these[key])} for key in differing]
        asked, answered = folder / "judge.jsonl", folder / "margins.jsonl"
        asked.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        judge.order({"judge": str(asked), "output": str(answered)}, SERVE_S)
        lines = map(json.loads, answered.read_text("utf-8").splitlines())
        margins[name] = {line["id"]: line["margins"] for line in lines}
    finally:
      judge.close()
  if args.precision != "f32":
    choices = {name: agreement.count_choices(these.values()) for name, these in margins.items()}
    beside = {name: {"beside_sluice": one.beside_sluice()} for name, one in found.items() if name != "sluice"}
    return {name: of | beside.get(name, {}) for name, of in choices.items()}
  return {name: one.judged(margins[name]) for name, one in found.items()}


def measure(
  engines: dict[str, PeerProcess], folder: pathlib.Path, vocab_size: int, args: Any
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
  """Runs warm-up and rounds; returns the workload, each engine's rounds, and its agreement."""

  def make_requests(rate: float) -> list[WorkRequest]:
    return workload.synthetic(args.num_requests, args.prompt_len, args.output_len, vocab_size, args.seed, rate)

  def serve(name: str, path: pathlib.Path, *, realtime: bool) -> list[Outcome]:
    return engines[name].serve(path, folder / f"{name}.jsonl", realtime=realtime, timeout_s=SERVE_S)

  requests = make_requests(math.inf)
  short = [dataclasses.replace(one, output_len=min(WARM_UP_LEN, one.output_len)) for one in requests]
  # The first full run is the slowest, so no rate uses it.
  warm_up = write(folder, "warm_up", requests if args.online else short)
  for name in engines:
    serve(name, warm_up, realtime=False)
  prompt_tokens = sum(len(request.prompt) for request in requests)
  about: dict[str, Any] = {
    "num_requests": args.num_requests,
    "max_requests": args.max_requests,
    "prompt_len": args.prompt_len,
    "output_len": args.output_len,
    "seed": args.seed,
    "prompt_tokens": prompt_tokens,
    "output_tokens": sum(request.output_len for request in requests),
  }
  if args.online:
    offline = summary(serve("sluice", warm_up, realtime=False), prompt_tokens)
    about |= {"offline_request_s": offline["request_s"], "rate": round(args.load * offline["request_s"], 4)}
    requests = make_requests(about["rate"])
  path = write(folder, "requests", requests)
  names = list(engines)
  rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
  last: dict[str, list[Outcome]] = {}
  for number in range(args.rounds):
    first = number % len(names)
    for name in names[first:] + names[:first]:
      last[name] = serve(name, path, realtime=args.online)
      rounds[name].append(summary(last[name], prompt_tokens))
      print(f"round {number + 1}, {name}: {rounds[name][-1]['output_tok_s']:.1f} tokens/s", file=sys.stderr, flush=True)
  for engine in engines.values():
    engine.close()
  return about, rounds, judged(last, requests, folder, args)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line: progress and a table on standard error, one JSON line on standard output."""
  parser = CommandParser("tools.peers", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="shape of models/shapes: a Llama, such as llama3.2-1b")
  parser.add_argument("--precision", choices=face.PRECISIONS, default="f32", help="of weights; KV follows the engine")
  parser.add_argument("--only", default=",".join(ENVIRONMENTS), help="peers, separated by commas")
  parser.add_argument("--rounds", type=positive_int, default=3)
  parser.add_argument(
    "--online", action="store_true", help="send requests at their arrival times, without transformers"
  )
  parser.add_argument("--unjudged", action="store_true", help="leave out transformers' judgment of tokens")
  parser.add_argument("--load", type=positive_float, default=0.6, help="with --online: share of Sluice's offline rate")
  parser.add_argument("--prompt_len", default=workload.PROMPT_LEN, help="distribution, such as uniform:500:900")
  parser.add_argument("--output_len", default=workload.OUTPUT_LEN, help="distribution")
  parser.add_argument("--num_requests", type=positive_int, default=64)
  parser.add_argument("--max_requests", type=positive_int, default=64, help="sequences at once")
  parser.add_argument("--threads", type=positive_int, default=2, help="threads of peers; XLA uses every visible core")
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--flag", action="append", default=[], help="PEER:--name=value, for one adapter; may be repeated")
  parser.add_argument("--work", default=str(ROOT / ".cache" / "peers"), help="folder for models and files")
  parser.add_argument("--output", default="", help="also write the result to this file")
  args = parser.parse_args(argv)
  folder = pathlib.Path(args.work).resolve() / args.shape
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the children on the way out
  left_out: dict[str, str] = {}
  engines: dict[str, PeerProcess] = {}
  try:
    chosen = [name for name in args.only.split(",") if name]
    for name in chosen:
      if name not in ENVIRONMENTS:
        raise ConfigError(f"only has {name!r}; peers are {', '.join(ENVIRONMENTS)}")
    vocab_size = prepare(folder, args.shape)
    engines["sluice"] = start("sluice", folder, args)
    for name in chosen:
      try:
        if args.online and name == "transformers":
          raise ConfigError("it is compared offline only")
        if args.precision != "f32" and name == "transformers":
          raise ConfigError("it is compared in f32 only")
        engines[name] = start(name, folder, args)
      except ConfigError as error:
        left_out[name] = " ".join(str(error).split())
        print(f"{name} is left out: {left_out[name]}", file=sys.stderr, flush=True)
    about, rounds, agreements = measure(engines, folder, vocab_size, args)
    result: dict[str, Any] = {
      "shape": args.shape,
      "precision": args.precision,
      "mode": "online" if args.online else "offline",
      "workload": about,
      "flags": args.flag,
      "engines": {
        name: {
          "figures": report.figures(rounds[name], online=args.online),
          "rounds": [report.figures([one], online=args.online) for one in rounds[name]],
          "agreement": agreements[name],
          "ready_s": engine.about["ready_s"],
          "settings": engine.about["settings"],
        }
        for name, engine in engines.items()
      },
      "left_out": left_out,
      "machine": machine(),
      "commit": commit(),
    }
    report.add_ratios(result["engines"], online=args.online)
  except (EngineError, OSError) as error:
    return parser.failed(error, 1)
  finally:
    for engine in engines.values():
      engine.close()
  print(f"\n{report.table(result)}", file=sys.stderr)
  report.keep(args.output, result)
  print(json.dumps(result))
  return 0


if __name__ == "__main__":
  sys.exit(main())
