"""Runs a request file through the engine in this process, at full speed; prints one JSON line. Uses no network.

  python -m tools.bench_offline --model=DIR --requests=FILE.jsonl --output_tokens=OUT.jsonl

Sampling is greedy, each request generates exactly output_len tokens, and end-of-sequence is ignored. The engine has all
requests at the start (with --realtime, at their arrival times). Standard output has the JSON line alone; all else goes
to standard error.
"""

import argparse
from collections.abc import Sequence
import contextlib
import dataclasses
import gc
import json
import pathlib
import resource
import sys
import time
from typing import Any

from engine.device.build import Built, ExecutableSource
from engine.device.options import BuildOptions
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.recorder import EngineStats
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.settings import UNBOUNDED_QUEUE
from engine.validation import validate_request
from extensions.disaggregated.build import build_any
from server.model_source.download_watch import DownloadWatch
from server.model_source.resolve_model import resolve_model_folder
from tools.arguments import CommandParser
from tools.measure import machine
from tools.report.accounting import Flops, account, account_requests, request_table, table, whole_requests
from tools.report.latency import Outcome, summary
from tools.report.run_file import RecordedRun, write_run
from tools.workload import WorkRequest, read_requests, write_tokens

_NO_FLAGS = {"model_dir", "all_rungs"} | UNBOUNDED_QUEUE.keys()  # fields of BuildOptions that the tool sets


def add_build_arguments(parser: CommandParser) -> None:
  """Adds a flag for each field of BuildOptions, except the model and those that tools set."""
  for field in dataclasses.fields(BuildOptions):
    if field.name in _NO_FLAGS:
      continue
    parse = {bool: _boolean, tuple: _budgets}.get(type(field.default), type(field.default))
    # Prompts are random tokens, after which models repeat themselves: drafts would gain what they do not gain on texts.
    default = "none" if field.name == "speculation" else field.default
    parser.add_argument(f"--{field.name}", type=parse, default=default, help="see the server's flag of this name")


def _boolean(text: str) -> bool:
  if text.lower() not in ("true", "false", "1", "0"):
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
  return text.lower() in ("true", "1")


def _budgets(text: str) -> tuple[int, ...]:
  try:
    return tuple(int(item) for item in text.split(","))
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers separated by commas") from None


def build_options(args: argparse.Namespace) -> BuildOptions:
  """Returns the options of add_build_arguments, without limits."""
  names = {field.name for field in dataclasses.fields(BuildOptions)} - _NO_FLAGS
  return BuildOptions(model_dir=args.model, **{name: getattr(args, name) for name in names}, **UNBOUNDED_QUEUE)


class EngineLoop:
  """The plain loop over `engine`, which its maker sets, and all that the engine emits, by request."""

  engine: Engine  # calls `take_events`

  def __init__(self) -> None:
    self._chunks: dict[str, list[tuple[float, int]]] = {}
    self._tokens: dict[str, list[int]] = {}
    self._endings: dict[str, TokenEvent] = {}

  def take_events(self, events: list[TokenEvent]) -> None:
    """Receives the engine's events."""
    now = time.monotonic()
    for event in events:
      if event.token_ids:
        self._chunks[event.request_id].append((now, len(event.token_ids)))
        self._tokens[event.request_id] += event.token_ids
      if event.finish_reason is not None:
        self._endings[event.request_id] = event

  def serve(self, requests: Sequence[WorkRequest], *, realtime: bool = False) -> list[Outcome]:
    """Runs all requests until they finish.

    Args:
      requests: requests with unique ids.
      realtime: submits each at its arrival_s; otherwise all at the start.

    Raises:
      EngineError: a request can never be served; raised before any request runs.
    """
    engine = self.engine
    prepared = [_engine_request(request) for request in requests]
    for work, request in zip(requests, prepared, strict=True):
      try:
        validate_request(engine.config, request)
      except EngineError as error:
        raise ConfigError(f"request id {work.id!r}: {error}") from error
    self._chunks = {request.id: [] for request in prepared}
    self._tokens = {request.id: [] for request in prepared}
    self._endings = {}
    waiting = sorted(zip(requests, prepared, strict=True), key=lambda pair: pair[0].arrival_s if realtime else 0.0)
    waiting.reverse()
    sent: dict[str, float] = {}
    gc.collect()
    gc.freeze()  # moves the model's objects out of the collector, so that no collection scans them during a run
    start = time.monotonic()
    while len(self._endings) < len(requests):
      while waiting and (not realtime or start + waiting[-1][0].arrival_s <= time.monotonic()):
        request = waiting.pop()[1]
        sent[request.id] = time.monotonic()
        engine.submit(request)
      if not engine.step() and waiting and not engine.num_live:
        time.sleep(max(0.0, start + waiting[-1][0].arrival_s - time.monotonic()))
      if engine.dead is not None:
        raise engine.dead
    return [
      self._outcome(work, request.id, start + work.arrival_s if realtime else start, sent[request.id])
      for work, request in zip(requests, prepared, strict=True)
    ]

  def _outcome(self, work: WorkRequest, name: str, intended_s: float, sent_s: float) -> Outcome:
    ending = self._endings[name]
    error = None if ending.finish_reason is FinishReason.LENGTH else f"{ending.finish_reason}: {ending.message}"
    came = tuple(self._chunks[name]), tuple(self._tokens[name])
    return Outcome(work.id, work.output_len, intended_s, sent_s, *came, error, work.tenant, work.priority)


class OfflineRun(EngineLoop):
  """The plain loop over an engine of its own.

  Attributes:
    built: the engine and its properties.
  """

  def __init__(
    self, options: BuildOptions, engine_class: type[Engine] = Engine, source: ExecutableSource | None = None
  ):
    """Builds the engine; writes progress to standard error. Raises EngineError."""
    super().__init__()
    self.built: Built = build_any(
      options, progress=_progress, emit=self.take_events, engine_class=engine_class, source=source
    )
    self.engine = self.built.engine


def _engine_request(request: WorkRequest) -> Request:
  return Request(
    id=f"{type(request.id).__name__}-{request.id}",
    prompt_token_ids=request.prompt,
    params=SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True),
    tenant=request.tenant,
    priority=request.priority,
  )


def _progress(what: str, done: int, total: int) -> None:
  print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


def run(
  options: BuildOptions, requests: Sequence[WorkRequest], *, realtime: bool = False, trace_file: str = ""
) -> tuple[list[Outcome], dict[str, Any], EngineStats]:
  """Builds and runs once; returns each request's outcome, the figures of the JSON line, and all step records."""
  offline = OfflineRun(options)
  engine, config = offline.built.engine, offline.built.config
  engine.keep_all()
  if trace_file:
    engine.start_trace(trace_file)
  outcomes = offline.serve(requests, realtime=realtime)
  engine.stop_trace()
  engine.step()  # the stop request is an ordinary message
  stats = engine.stats(sys.maxsize)
  useful = stats.num_decode_tokens + stats.num_prefill_tokens
  prompt_tokens = sum(len(request.prompt) for request, outcome in zip(requests, outcomes, strict=True) if outcome.ok)
  figures = summary(outcomes, prompt_tokens) | {
    "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    "load_s": round(offline.built.load_s, 3),
    "warmup_s": round(offline.built.warmup_s, 3),
    "compiles_after_ready": offline.built.runner.compiles_after_ready,
    "padding_share": round(stats.num_padding_tokens / (stats.num_padding_tokens + useful), 5),
    "skipped_tokens": stats.num_skipped_tokens,
    "steps": stats.num_steps,
    "decode_tokens": stats.num_decode_tokens,
    "prefill_tokens": stats.num_prefill_tokens,
    "preemptions": stats.num_preemptions,
    "draft_tokens": stats.drafts.tokens,
    "accepted_draft_tokens": stats.drafts.accepted,
    "forced_tokens": stats.drafts.forced,
    "prefix_hit_tokens": stats.num_cached_tokens,
    "idle_slots": stats.num_idle_slots,
    "lost_tokens": stats.num_lost_tokens,
    "batching": options.batching,
    "token_budgets": list(config.token_budgets),
    "steps_by_rung": dict(sorted(stats.steps_by_rung.items())),
    "account": account(stats.steps, config.block_size, config.num_blocks, Flops.of_model(options.model_dir)),
    "account_requests": account_requests(whole_requests(stats.requests)),
  }
  return outcomes, figures, stats


def keep_run(
  path: str,
  args: argparse.Namespace,
  requests: Sequence[WorkRequest],
  outcomes: Sequence[Outcome],
  figures: dict[str, Any],
  stats: EngineStats,
) -> None:
  """Writes the run file."""
  kv = figures["account"]["kv"]
  about = {
    "tool": "tools.bench_offline",
    "label": args.label or args.batching,
    "batching": args.batching,
    "model": args.model,
    "workload": {"requests_file": args.requests, "num_requests": len(requests), "realtime": args.realtime},
    "slots": stats.max_num_seqs,
    "block_size": kv["block_size"],
    "num_blocks": kv["num_blocks"],
    "token_budgets": figures["token_budgets"],
    "slo": {},
    "machine": machine(),
  }
  start_s = min(outcome.intended_s for outcome in outcomes)
  prompt_lens = tuple(len(request.prompt) for request in requests)
  served = tuple(whole_requests(stats.requests))
  write_run(path, RecordedRun(about, figures, tuple(outcomes), prompt_lens, stats.steps, served), start_s)


def resolve_model(args: argparse.Namespace) -> pathlib.Path:
  """Returns the folder of args.model, downloading the model if needed. Raises ConfigError."""
  watch = DownloadWatch(lambda line: print(line, file=sys.stderr))
  return resolve_model_folder(args.model, needs_weights=not args.random_weights, watch=watch)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 after one line about a model or request that cannot be served."""
  parser = CommandParser("tools.bench_offline", __doc__)
  parser.add_argument("--model", required=True, help="model folder, ORG/NAME, gs://... or s3://...")
  parser.add_argument("--requests", required=True, help="request file (JSON lines)")
  parser.add_argument("--output_tokens", default="", help="file for the generated tokens")
  parser.add_argument("--realtime", action="store_true", help="submit each request at its arrival_s")
  parser.add_argument("--trace_file", default="", help="step trace (JSON lines) to write; slows the run")
  parser.add_argument("--run_file", default="", help="file for requests and steps, for tools.report")
  parser.add_argument("--label", default="", help="in --run_file: name of the run; empty: --batching")
  add_build_arguments(parser)
  args = parser.parse_args(argv)
  try:
    with contextlib.redirect_stdout(sys.stderr):  # keeps output of libraries apart from the JSON line
      requests = read_requests(args.requests)
      args.model = str(resolve_model(args))
      outcomes, figures, stats = run(build_options(args), requests, realtime=args.realtime, trace_file=args.trace_file)
      print(f"{table(figures['account'])}\n{request_table(figures['account_requests'])}")
      if args.run_file:
        keep_run(args.run_file, args, requests, outcomes, figures, stats)
      if args.output_tokens:
        write_tokens(args.output_tokens, {outcome.id: outcome.tokens for outcome in outcomes})
  except (EngineError, OSError) as error:
    return parser.failed(error, 1)
  print(json.dumps(figures), flush=True)
  return 0 if figures["failed"] == 0 else 1


if __name__ == "__main__":
  sys.exit(main())
