"""Measures what a step costs the host: planning, packing, dispatch, committing values; prints one JSON line.

  python -m tools.bench.host [--model=DIR] [--num_seqs=256] [--steps=300]

All sequences decode, so every step has `num_seqs` rows. Without a model the tool measures the scheduler alone. With
one, it launches each step on an idle device: dispatch is the call of the executable, not the wait for a busy device.
schedule_and_launch (schedule, pack and dispatch) lies between two steps of the device; read and commit run during the
next step. Reading the clock takes some 10 us right after a device step, so every other step is timed as a whole.
Each part has its time on the clock and in processor time of the scheduling thread. On a CPU the launched step competes
for the cores at once, and the clock includes the thread's wait for one.
"""

from collections.abc import Sequence
import gc
import json
import sys
import time

from engine.batch import StepResult
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tools.arguments import CommandParser, positive_int

_PROMPT_TOKENS = 32
_TOKEN = 7  # token id of every prompt and output


def fill(scheduler: Scheduler, num_seqs: int, max_tokens: int) -> None:
  """Queues the sequences; their prompts differ in length, so that they do not need new blocks in the same step."""
  for number in range(num_seqs):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    scheduler.add_request(Request(f"request-{number}", [_TOKEN] * (_PROMPT_TOKENS + number % 16), params))


Moment = tuple[float, float]  # the clock and the thread's processor time, seconds


def moment() -> Moment:
  """Returns the current moment."""
  return time.perf_counter(), time.thread_time()


class Parts:
  """Durations of the parts of steps, on the clock and in processor time."""

  def __init__(self):
    self._seconds: dict[str, list[tuple[float, float]]] = {}

  def add(self, part: str, begin: Moment, end: Moment) -> None:
    """Adds one duration of `part`."""
    self._seconds.setdefault(part, []).append((end[0] - begin[0], end[1] - begin[1]))

  def percentiles(self) -> dict[str, float]:
    """Returns median and 99th percentile of each part in microseconds."""
    measured = {}
    for part, seconds in self._seconds.items():
      for name, column in zip((part, f"{part}_processor"), zip(*seconds, strict=True), strict=True):
        ordered = sorted(column)
        measured[f"{name}_p50_us"] = round(1e6 * ordered[len(ordered) // 2], 1)
        measured[f"{name}_p99_us"] = round(1e6 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1)
    return measured


def measure(scheduler: Scheduler, runner, num_seqs: int, steps: int) -> dict[str, float]:
  """Runs until `steps` pure decode steps are timed; with a runner, every other one in its parts.

  Args:
    runner: an engine.device.runner.ModelRunner, or None for made-up values.
  """
  parts = Parts()
  dispatched: list[Moment] = []
  in_parts = True

  def timed(executable):
    def call(*arguments):
      if not in_parts:
        return executable(*arguments)
      dispatched.append(moment())
      results = executable(*arguments)
      dispatched.append(moment())
      return results

    return call

  if runner:
    for step in runner.calls.values():
      step.execute = timed(step.execute)
  fill(scheduler, num_seqs, steps + 64)
  num_timed = 0
  while num_timed < steps:
    dispatched.clear()
    in_parts = not runner or num_timed % 2 == 0
    began = moment()
    batch = scheduler.schedule(0.0)
    planned = moment() if in_parts else began
    assert batch is not None, "the sequences ended before the measurement did"
    launched = runner and runner.launch(batch)
    stopped = moment()
    if launched:
      launched.wait()
    arrived = moment()
    result = launched.result() if launched else StepResult((_TOKEN,) * len(batch.slots))
    read = moment()
    scheduler.commit(batch, result, 0.0)
    done = moment()
    if batch.counts != (1,) * num_seqs:
      continue
    num_timed += 1
    if in_parts:
      parts.add("schedule", began, planned)
    else:
      parts.add("schedule_and_launch", began, stopped)
    if dispatched:
      called, returned = dispatched
      parts.add("pack", planned, called)
      parts.add("dispatch", called, returned)
      parts.add("read", arrived, read)
    parts.add("commit", read, done)
  return parts.percentiles()


def config_for(num_seqs: int, steps: int, block_size: int) -> EngineConfig:
  """Returns settings under which all sequences run at once and are never preempted."""
  length = _PROMPT_TOKENS + 16 + steps + 64
  return EngineConfig(
    vocab_size=32_000,
    max_model_len=length,
    block_size=block_size,
    num_blocks=num_seqs * -(-length // block_size),
    token_budgets=(num_seqs, 2 * num_seqs),
    max_num_seqs=num_seqs,
    prefill_chunk=2 * num_seqs,
  )


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench.host", "Measure the host's share of a step of decodes.")
  parser.add_argument("--model", help="model folder; without it only the scheduler is measured")
  parser.add_argument("--num_seqs", type=positive_int, default=256, help="sequences that decode at once, at least 2")
  parser.add_argument("--steps", type=positive_int, default=300, help="steps to time")
  parser.add_argument("--block_size", type=positive_int, default=16, help="tokens a KV block")
  args = parser.parse_args(arguments)
  config = config_for(max(2, args.num_seqs), args.steps, args.block_size)
  runner = None
  if args.model:
    # Imported here, since the tool needs no jax without a model.
    from engine.device.build import build_engine
    from engine.device.options import BuildOptions

    options = BuildOptions(
      model_dir=args.model,
      num_blocks=config.num_blocks,
      block_size=config.block_size,
      token_budgets=config.token_budgets,
      max_num_seqs=config.max_num_seqs,
      max_model_len=config.max_model_len,
      prefill_chunk=config.prefill_chunk,
      speculation="none",
    )
    try:
      built = build_engine(options, lambda *_: None, lambda _: None)
    except EngineError as error:
      return parser.failed(error)
    config, runner = built.config, built.runner
    gc.collect()
    gc.freeze()  # as the server does: the collector need not scan the model's objects again
  measured = measure(Scheduler(config), runner, config.max_num_seqs, args.steps)
  print(json.dumps({"num_seqs": config.max_num_seqs, "steps": args.steps} | measured))
  return 0


if __name__ == "__main__":
  sys.exit(main())
