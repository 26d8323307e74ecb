"""Measures what a second host costs a step: sending it, and how much later the follower begins; prints one JSON line.

  python -m tools.bench.hosts [--rows=64] [--steps=400] [--model=DIR] [--overlap=false]

Two processes of this machine, a CPU device each, decode `rows` sequences. Each has half of the cores for itself, as
hosts have. Both read one monotonic clock. `broadcast` is the leader's time to encode, authenticate and write a step.
`lag` is from the leader's call of the step's launch to the follower's; negative is earlier. With --overlap=true a step
is sent while the cores compute the one before it.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
from typing import Any

from engine.batch import Batch, Launched, Runner
from engine.device.options import BuildOptions
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import UNBOUNDED_QUEUE
from extensions.multi_host.build import build_follower, build_leader, join_devices
from extensions.multi_host.cluster_place import ClusterPlace, read_secret
from extensions.multi_host.follower import Follower, StartedStep, StepRunner
from extensions.multi_host.host_facts import collect_facts
from extensions.multi_host.leader import Leader, LeadingRunner
from server.host_options import ClusterSettings
from tools.arguments import CommandParser, positive_int
from tools.measure import ROOT, machine
from tools.server_process import find_free_port

_DEMO = ROOT / "models" / "demo"
_START_S = 300.0
_PROMPT_TOKENS = 16
_SWITCH_S = 0.0005  # as in the server


class TimedFollower:
  """A follower's runner that notes when each step begins."""

  def __init__(self, inner: StepRunner):
    self._inner = inner
    self.begun: list[float] = []  # time.monotonic

  @property
  def compiles_after_ready(self) -> int:
    """See ModelRunner."""
    return self._inner.compiles_after_ready

  def launch(self, batch: Batch) -> StartedStep:
    """Starts a step."""
    self.begun.append(time.monotonic())
    return self._inner.launch(batch)


class TimedEngine(Engine):
  """An engine whose runner notes when each step's broadcast begins and when it has ended."""

  def __init__(self, scheduler: Any, runner: Runner, clock: Any, emit: Any):
    assert isinstance(runner, LeadingRunner)
    self.moments: list[tuple[float, float, bool]] = []  # began, sent, repeats
    self._leading = runner
    super().__init__(scheduler, _NotingRunner(runner, self.moments), clock, emit)


class _NotingRunner:
  """A LeadingRunner with times."""

  def __init__(self, leading: LeadingRunner, moments: list[tuple[float, float, bool]]):
    self._leading, self._moments = leading, moments

  def launch(self, batch: Batch) -> Launched:
    """Starts a step."""
    began = time.monotonic()
    launched = self._leading.launch(batch)
    sent = self._leading.sent_at(self._leading.num_steps)
    assert sent is not None, "the latest step's time is known"
    self._moments.append((began, sent, batch.repeats))
    return launched


def take_half_of_cores(half: int) -> None:
  """Restricts this process to the first (0) or the second (1) half of its cores, if there are two."""
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) > 1:
    middle = len(cores) // 2
    os.sched_setaffinity(0, cores[middle:] if half else cores[:middle])


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
  """Returns p50, p90 and p99 in microseconds."""
  ordered = sorted(seconds)
  return {
    f"p{share}": round(1e6 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 1) for share in (50, 90, 99)
  }


def run_follower(place: ClusterPlace, cluster: ClusterSettings, secret: bytes, options: BuildOptions) -> None:
  """Follows until the leader has drained, and prints the times; ends the process."""

  def end(reason: str = "stopped") -> None:
    print(f"tools.bench.hosts: the leader is lost: {reason}", file=sys.stderr, flush=True)
    os._exit(1)

  follower = Follower(place, cluster, secret, end, end)
  follower.join_cluster(collect_facts(pathlib.Path(options.model_dir), place.num_hosts, {}))
  join_devices(place, _START_S)
  side = build_follower(options, follower, lambda *_: None)
  timed = TimedFollower(side.runner)
  follower.follow_leader(timed, side.scheduler.config.overlap)
  print(json.dumps(timed.begun), flush=True)
  os._exit(0)


def run_leader(
  place: ClusterPlace,
  cluster: ClusterSettings,
  secret: bytes,
  options: BuildOptions,
  follower: "subprocess.Popen[str]",
  rows: int,
  steps: int,
) -> dict[str, Any]:
  """Decodes with a follower and returns the figures of the repeated steps and of the others.

  Raises:
    ConfigError: the hosts cannot start.
  """

  def end(reason: object) -> None:
    print(f"tools.bench.hosts: the follower is lost: {reason}", file=sys.stderr, flush=True)
    os._exit(1)

  leader = Leader(place, cluster, secret, pathlib.Path(options.model_dir), lambda line: None, end, lambda: None)
  leader.gather_hosts({})
  join_devices(place, _START_S)
  built = build_leader(options, leader, lambda *_: None, lambda events: None, engine_class=TimedEngine)
  engine = built.engine
  assert isinstance(engine, TimedEngine)
  for row in range(rows):
    prompt = [3 + (7 * row + position) % 200 for position in range(_PROMPT_TOKENS)]
    engine.submit(Request(str(row), prompt, SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)))
  began = time.perf_counter()
  while engine.num_live:
    engine.step()
  elapsed = time.perf_counter() - began
  if engine.dead is not None:
    end(engine.dead)
  leader.dismiss_hosts()
  begun = json.loads(follower.communicate(timeout=60)[0].splitlines()[-1])
  moments = engine.moments
  found: dict[str, Any] = {"steps": len(moments), "step_ms": round(1e3 * elapsed / len(moments), 3)}
  for name, wanted in (("repeated", True), ("planned", False)):
    some = [
      (first, sent, start) for (first, sent, repeats), start in zip(moments, begun, strict=True) if repeats is wanted
    ]
    if some:
      found[name] = {
        "steps": len(some),
        "broadcast_us": percentiles_us([sent - first for first, sent, _ in some]),
        "lag_us": percentiles_us([start - sent for _, sent, start in some]),
      }
  return found


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("tools.bench.hosts", __doc__)
  parser.add_argument("--model", default=str(_DEMO), help="folder of the model")
  parser.add_argument("--rows", type=positive_int, default=64, help="sequences")
  parser.add_argument("--steps", type=positive_int, default=400, help="tokens of each sequence")
  parser.add_argument("--overlap", choices=("true", "false"), default="true", help="as the server's flag")
  parser.add_argument(
    "--follow", default="", help="PORT,SECRET_FILE of the leader; the tool starts its follower with it"
  )
  flags = parser.parse_args(argv)
  os.environ["JAX_PLATFORMS"] = "cpu"
  if flags.follow:
    take_half_of_cores(1)
  sys.setswitchinterval(_SWITCH_S)
  cluster = ClusterSettings(num_hosts=2, host_start_timeout_s=_START_S)
  options = BuildOptions(
    flags.model,
    token_budgets=(max(8, flags.rows), 2 * max(8, flags.rows)),
    max_num_seqs=flags.rows,
    max_model_len=flags.steps + _PROMPT_TOKENS,
    overlap=flags.overlap,
    speculation="none",
    **UNBOUNDED_QUEUE,
  )
  if flags.follow:
    port, _, file = flags.follow.partition(",")
    run_follower(ClusterPlace("127.0.0.1", int(port), 2, 1, False), cluster, read_secret(file), options)
  with tempfile.TemporaryDirectory(prefix="sluice-hosts-") as folder:
    file = pathlib.Path(folder) / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    place = ClusterPlace("127.0.0.1", find_free_port(), 2, 0, False)
    command = [sys.executable, "-m", "tools.bench.hosts", f"--follow={place.port},{file}", f"--overlap={flags.overlap}"]
    command += [f"--model={flags.model}", f"--rows={flags.rows}", f"--steps={flags.steps}"]
    follower = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    take_half_of_cores(0)
    try:
      found = run_leader(place, cluster, read_secret(str(file)), options, follower, flags.rows, flags.steps)
    except EngineError as error:
      return parser.failed(error, 1)
    finally:
      follower.kill()
      follower.wait()
  print(json.dumps({"rows": flags.rows, "overlap": flags.overlap, **found, "machine": machine()}), flush=True)
  os._exit(0)  # not finalized: JAX would wait for the follower


if __name__ == "__main__":
  sys.exit(main())
