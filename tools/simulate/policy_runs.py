"""Runs policies side by side over the same arrivals, and makes their table, run files and page. Knows no flag."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import math
import pathlib
import sys
import time
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.policy import find_policy_class
from tools import workload
from tools.report.accounting import account, account_requests, whole_requests
from tools.report.latency import Objectives
from tools.report.run_file import RecordedRun, write_run
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import Arrival
from tools.simulate.step_costs import StepCosts

# Title, figure and format of each column; the table omits a column without figures.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
  ("output tok/s", "output_tok_s", "{:,.0f}"),
  ("TTFT p50 ms", "ttft_p50_ms", "{:,.0f}"),
  ("p99", "ttft_p99_ms", "{:,.0f}"),
  ("TPOT p50 ms", "tpot_p50_ms", "{:,.1f}"),
  ("p99", "tpot_p99_ms", "{:,.1f}"),
  ("ITL p99 ms", "itl_p99_ms", "{:,.1f}"),
  ("goodput req/s", "goodput_request_s", "{:,.2f}"),
  ("met SLO", "slo_attainment", "{:.0%}"),
  ("fairness", "fairness", "{:.2f}"),
  ("preemptions", "preemptions", "{:,}"),
)


@dataclasses.dataclass(frozen=True)
class PolicyRun:
  """One policy's run.

  Attributes:
    policy: the policy's name.
    figures: the simulation's figures as plain JSON values.
    simulation: the simulation at its end.
  """

  policy: str
  figures: dict[str, Any]
  simulation: Simulation


def check_policies(names: Sequence[str]) -> None:
  """Raises ConfigError for the first unknown or repeated name."""
  for name in names:
    find_policy_class(name)
    if names.count(name) > 1:
      raise ConfigError(f"policies={','.join(names)} names {name} twice; set --policies to each name once")


def run_policies(
  policies: Sequence[str],
  config: EngineConfig,
  costs: StepCosts,
  fleet: Fleet,
  objectives: Objectives,
  arrivals: Sequence[Arrival],
  keep: bool,
) -> list[PolicyRun]:
  """Serves the same arrivals under each policy. Raises EngineError.

  Args:
    keep: whether to keep the input of write_report(): every request's token times and every step's record.
  """
  runs = []
  for policy in policies:
    simulation = Simulation(dataclasses.replace(config, policy=policy), costs, fleet, Collector(objectives, keep))
    if keep:
      for replica in simulation.replicas:
        replica.engine.keep_all()
    started = time.process_time()
    simulation.run(arrivals)
    # Processor time, since other work on the machine affects it less.
    took = time.process_time() - started
    figures: dict[str, Any] = simulation.figures() | {"policy": policy}
    figures["simulator"] = {"processor_s": round(took, 3), "steps_per_minute": round(figures["steps"] / took * 60)}
    runs.append(PolicyRun(policy, figures, simulation))
  return runs


# --- A load that separates policies -----------------------------------------------------------------------------------


def measure_capacity(config: EngineConfig, costs: StepCosts, fleet: Fleet, arrivals: Sequence[Arrival]) -> float:
  """Returns the fleet's requests a second for a burst under policy fcfs.

  Raises:
    ConfigError: the fleet serves none of them.
  """
  simulation = Simulation(dataclasses.replace(config, policy="fcfs"), costs, fleet, Collector(Objectives()))
  simulation.run([arrival._replace(arrival_s=0.0) for arrival in arrivals])
  figures = simulation.figures()
  if not figures["request_s"]:
    raise ConfigError(
      f"none of {len(arrivals)} requests is served ({figures['errors']}), so there is no capacity to load; "
      "set --max_len or --num_blocks"
    )
  return figures["request_s"]


def paced(arrivals: Sequence[Arrival], rate: float, burstiness: float, seed: int) -> list[Arrival]:
  """Returns the same requests at `rate` a second, as tools.workload.arrivals makes them."""
  times = workload.arrivals(len(arrivals), rate, burstiness, seed)
  return [arrival._replace(arrival_s=time) for arrival, time in zip(arrivals, times, strict=True)]


# --- Output -----------------------------------------------------------------------------------------------------------


def policy_table(figures: Sequence[Mapping[str, Any]]) -> str:
  """Formats the figures of the runs as lines for a terminal."""
  columns = [column for column in _COLUMNS if any(each.get(column[1]) is not None for each in figures)]
  rows = [["policy", *(title for title, _, _ in columns)]]
  for each in figures:
    cells = ["-" if each.get(name) is None else form.format(each[name]) for _, name, form in columns]
    rows.append([each["policy"], *cells])
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
    for row in rows
  )


def write_report(
  runs: Sequence[PolicyRun], workload_about: Mapping[str, Any], costs: StepCosts, costs_file: str, folder: str
) -> str:
  """Writes a run file for each policy, a page and plots (tools.report) into `folder`; returns the page's path.

  Only a fleet of one engine keeps steps; the page of a larger fleet shows requests alone.

  Raises:
    ConfigError: matplotlib is missing.
    OSError: a file cannot be written.
  """
  try:
    from tools.report.__main__ import main as report  # needs matplotlib; a simulation does not
  except ImportError as error:
    raise ConfigError(
      f"report={folder} needs matplotlib ({error}); install the extra dev, or leave --report out"
    ) from error
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  classes = [run.policy.rpartition(":")[2] for run in runs]
  files = []
  for run in runs:
    short = run.policy.rpartition(":")[2]
    label = short if classes.count(short) == 1 else run.policy
    simulation, config = run.simulation, run.simulation.config
    objectives = simulation.collector.objectives
    about = {
      "tool": "tools.simulate",
      "label": label,
      "policy": run.policy,
      "batching": config.batching,
      "model": costs.about.get("model"),
      "workload": dict(workload_about),
      "slots": config.max_num_seqs,
      "block_size": config.block_size,
      "num_blocks": config.num_blocks,
      "token_budgets": list(config.token_budgets),
      "slo": {name: limit for name, limit in dataclasses.asdict(objectives).items() if limit < math.inf},
      "machine": costs.about.get("machine") or {},
      "costs": {"file": costs_file, "source": costs.about.get("source")},
    }
    collector = simulation.collector
    alone = len(simulation.replicas) == 1
    stats = [replica.engine.stats(sys.maxsize) for replica in simulation.replicas if alone]
    steps = tuple(step for each in stats for step in each.steps)
    served = tuple(whole_requests([record for each in stats for record in each.requests]))
    figures = run.figures
    if steps:
      accounts = account(steps, config.block_size, config.num_blocks), account_requests(served)
      figures = figures | dict(zip(("account", "account_requests"), accounts, strict=True))
    outcomes, prompt_lens = tuple(collector.outcomes), tuple(collector.prompt_lens)
    recorded = RecordedRun(about, figures, outcomes, prompt_lens, steps, served)
    files.append(str(path / f"{label.replace(':', '.')}.jsonl"))
    write_run(files[-1], recorded, collector.first_arrival)
  with contextlib.redirect_stdout(sys.stderr):
    code = report([*files, f"--output={folder}", "--title=Sluice: policies side by side, simulated"])
  if code:
    raise ConfigError(f"tools.report made no page of {', '.join(files)}; see the line above")
  return str(path / "report.html")
