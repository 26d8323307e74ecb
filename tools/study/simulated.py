"""Answers the parts of `tools.study.claims` with the real Scheduler in virtual time. Measures nothing, loads no jax.

The arithmetic counts the batches that the Scheduler plans: static batching pays width * longest row in every step,
without the ladder's rounding. tools.simulate.events simulates, for the given cost table.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
import tempfile
from typing import Any, NamedTuple

from engine.config import EngineConfig
from engine.errors import ConfigError
from tools.report.latency import Objectives, Outcome
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import Arrival, made_up
from tools.simulate.step_costs import StepCosts
from tools.study import claims as claims
from tools.study.compare_batching import slot_bound

VOCAB_SIZE = 2**31 - 1  # the simulator ignores token ids
_ONE = Fleet()
_PAIR = Fleet(prefill_replicas=1, decode_replicas=1)
_LONG_PROMPTS, _TENANTS = claims.LongPrompts(), claims.Tenants()
# An H200-class device with an 8B model: about 100 GB of KV at 128 KiB a token.
LARGE = {
  "max_model_len": 16_384,
  "num_blocks": 50_000,
  "token_budgets": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
  "prefill_chunk": 512,
}


def large_config(**changes: Any) -> EngineConfig:
  """Returns the settings of the simulated device."""
  return EngineConfig(vocab_size=VOCAB_SIZE, **{**claims.UNBOUNDED, **LARGE, **changes})


# --- The Scheduler's own batches --------------------------------------------------------------------------------------


class Slots(NamedTuple):
  """Token slots of static batching: paid ones and useful ones."""

  paid: int
  useful: int


def static_slots(rows: claims.Rows, num_slots: int) -> tuple[Slots, list[tuple[int, tuple[str, ...]]]]:
  """Counts the slots of the Scheduler's static batches, before the ladder rounds up; also returns each (width, ids)."""
  longest = max(map(sum, rows))
  blocks = num_slots * (longest // 16 + 1)  # static batching reserves at most this many
  config = large_config(batching="static", max_num_seqs=num_slots, num_blocks=blocks, max_model_len=longest)
  simulation = Simulation(config, StepCosts(((8192, 1.0),)), _ONE, Collector(Objectives()))
  paid = useful = width = 0
  steps: list[tuple[int, tuple[str, ...]]] = []

  def watch(batch: Any, _: float) -> None:
    nonlocal paid, useful, width
    width = len(batch.admissions) or width
    paid += width * max(batch.counts)
    useful += sum(batch.counts)
    steps.append((width, batch.request_ids))

  simulation.replicas[0].runner.watch = watch
  simulation.run(at_once(rows))
  return Slots(paid, useful), steps


def idle_steps(short: int, long: int) -> int:
  """Returns the steps in which the slot of the shorter of two answers idles, in the Scheduler's static batches."""
  _, steps = static_slots([(16, short), (16, long)], 2)
  return sum("0" not in ids for _, ids in steps)


def allowed(rows: claims.Rows, num_slots: int) -> dict[str, Any]:
  """Returns the gain that the batching mode alone allows on these requests.

  Returns:
    idle_bound, idle_slot_share: from tools.study.compare_batching.slot_bound, by output lengths alone.
    static_slots, useful_slots, padding_share: token slots, prompts included.
    padding_bound: the ratio, if every token slot costs the same and continuous batching never pads.
  """
  bound = slot_bound([output for _, output in rows], num_slots)
  slots, _ = static_slots(rows, num_slots)
  return {
    "requests": len(rows),
    "slots": num_slots,
    "idle_bound": bound["bound"],
    "idle_slot_share": bound["idle_slot_share"],
    "static_slots": slots.paid,
    "useful_slots": slots.useful,
    "padding_share": round(1 - slots.useful / slots.paid, 4),
    "padding_bound": round(slots.paid / slots.useful, 3),
  }


# --- Simulated --------------------------------------------------------------------------------------------------------


def at_once(rows: claims.Rows) -> list[Arrival]:
  """Returns the rows with arrival at the start."""
  return made_up([(0.0, *row) for row in rows])


def simulated(
  config: EngineConfig,
  costs: StepCosts,
  arrivals: Sequence[Arrival],
  fleet: Fleet = _ONE,
  trace_file: str = "",
) -> tuple[dict[str, Any], list[Outcome]]:
  """Returns figures and outcomes of one run; a failed or preempted request is an error."""
  simulation = Simulation(config, costs, fleet, Collector(Objectives(), keep=True))
  if trace_file:
    simulation.replicas[0].engine.start_trace(trace_file)
  simulation.run(arrivals)
  for replica in simulation.replicas:
    replica.engine.recorder.stop_trace()
  figures = simulation.figures()
  if figures["failed"] or figures["preemptions"]:
    raise ConfigError(
      f"{config.batching}: {figures['failed']} requests failed and {figures['preemptions']} were preempted, so that "
      "modes are not comparable; the simulated pool is too small"
    )
  return figures, simulation.collector.outcomes


def simulate_case(rows: claims.Rows, num_slots: int, costs: StepCosts) -> dict[str, Any]:
  """Returns wall seconds of each mode on the simulated device, and the gain over static."""
  walls = {}
  for mode in claims.MODES:
    figures, _ = simulated(large_config(batching=mode, max_num_seqs=num_slots), costs, at_once(rows))
    walls[mode] = figures["wall_s"]
  return {
    "wall_s": walls,
    "chunked_over_static": round(walls["static"] / walls["chunked"], 3),
    "continuous_over_static": round(walls["static"] / walls["continuous"], 3),
  }


def simulate_formulas(rows: claims.Rows, num_slots: int, costs: StepCosts) -> dict[str, Any]:
  """Evaluates both formulas on simulated step traces."""
  found: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as folder:
    for mode in ("static", "chunked"):
      path = str(pathlib.Path(folder) / mode)
      simulated(large_config(batching=mode, max_num_seqs=num_slots), costs, at_once(rows), trace_file=path)
      found[mode] = claims.goodput_formulas(claims.traced_steps(path), waves=mode == "static")
  return claims.with_ratios(found)


def simulate_tail(rows: claims.Rows, costs: StepCosts, num_slots: int = 256) -> dict[str, Any]:
  """Simulates the tail at shares of the device's capacity."""
  config = large_config(max_num_seqs=num_slots)
  capacity = simulated(config, costs, at_once(rows))[0]["request_s"]
  found: dict[str, Any] = {"capacity_request_s": capacity}
  for load in claims.LOADS:
    _, outcomes = simulated(config, costs, made_up(claims.timed(rows, load * capacity)))
    found[f"load_{load:.0%}"] = claims.tail(outcomes)
  return found


def simulate_long_prompts(costs: StepCosts, load: claims.LongPrompts = _LONG_PROMPTS) -> dict[str, Any]:
  """Simulates gaps inline, chunked (an eighth, and a sixteenth), and disaggregated (two devices)."""
  found: dict[str, Any] = {"about": dataclasses.asdict(load)}
  slots = load.num_steady + load.num_long
  budgets = sorted({*LARGE["token_budgets"], load.num_steady + load.chunk, load.num_steady + load.chunk // 2})
  for name, mode, chunk, fleet in (
    ("inline", "continuous", load.chunk, _ONE),
    ("chunked", "chunked", load.chunk, _ONE),
    ("chunked_half", "chunked", load.chunk // 2, _ONE),
    ("disaggregated", "disaggregated", load.chunk, _PAIR),
  ):
    config = large_config(batching=mode, max_num_seqs=slots, prefill_chunk=chunk, token_budgets=tuple(budgets))
    found[name] = {}
    for state in ("quiet", "busy"):
      _, outcomes = simulated(config, costs, made_up(load.rows(state == "quiet")), fleet)
      found[name][state] = load.gaps(outcomes)
  return claims.against_quiet(found)


def simulate_batch_sizes(costs: StepCosts, context: int = 1000, tokens: int = 96) -> dict[str, Any]:
  """Returns decode tokens a second with 1 to 256 requests of one context."""
  rates = {}
  for size in claims.BATCH_SIZES:
    config = large_config(max_num_seqs=size, prefill_chunk=LARGE["token_budgets"][-1])
    _, outcomes = simulated(config, costs, at_once([(context, tokens)] * size))
    rates[size] = round(claims.decode_rate(outcomes), 1)
  return {
    "context": context,
    "decode_tok_s": rates,
    "knee": claims.knee(rates),
    "gain_at_64": round(rates[64] / rates[1], 2),
  }


def simulate_tenants(costs: StepCosts, load: claims.Tenants = _TENANTS) -> dict[str, Any]:
  """Simulates the small tenant alone, and under fcfs and fair."""
  budgets = tuple(sorted({*LARGE["token_budgets"], load.chunk + 64}))  # otherwise decodes push a chunk to the next rung
  config = large_config(max_num_seqs=load.slots, prefill_chunk=load.chunk, token_budgets=budgets)
  capacity = simulated(config, costs, at_once(load.rows()))[0]["request_s"]
  rows, small = load.arrivals(capacity)
  arrivals = [
    row._replace(tenant="small" if is_small else "large") for row, is_small in zip(made_up(rows), small, strict=True)
  ]
  alone = [arrival for arrival in arrivals if arrival.tenant == "small"]
  ways = {"alone": simulated(config, costs, alone)[1]}
  for policy in ("fcfs", "fair"):
    ways[policy] = simulated(dataclasses.replace(config, policy=policy), costs, arrivals)[1]
  about = dataclasses.asdict(load) | {"capacity_request_s": capacity}
  return claims.compare_tenants(ways, {arrival.id for arrival in alone}) | {"about": about}
