"""A small cost table, settings and traces for the fleet's planner."""

from array import array

from engine.config import EngineConfig
from tools import workload
from tools.plan_fleet.counted_fleet import CountedFleet, FleetPlan
from tools.plan_fleet.fleet_trace import FleetTrace
from tools.plan_fleet.make_sessions import make_sessions
from tools.simulate.step_costs import HostCosts, StepCosts

FAST = StepCosts(
  ((8, 1e-3), (128, 4e-3)),
  decode_row_s=1e-6,
  decode_key_s=1e-7,
  prefill_token_s=1e-6,
  prefill_pair_s=1e-8,
  host=HostCosts(launch_s=2e-4, launch_row_s=2e-6, commit_s=1e-5, commit_row_s=1e-6),
  kv_bytes_per_token=4096,
  about={"max_num_seqs": 16, "max_model_len": 2048, "num_blocks": 1024, "block_size": 16, "source": "made up"},
)


def config(**changes) -> EngineConfig:
  values = {
    "vocab_size": 2**31 - 1,
    "max_model_len": 2048,
    "num_blocks": 1024,
    "token_budgets": (8, 32, 128),
    "max_num_seqs": 16,
    "prefill_chunk": 128,
    "max_queued_requests": 10**9,
    "max_queued_tokens": 10**9,
    "queue_timeout_s": 0.0,
    "request_timeout_s": 0.0,
  }
  return EngineConfig(**values | changes)


def columns(rows) -> FleetTrace:
  """Requests of (arrival_s, prompt, output) rows, without keys."""
  return FleetTrace(
    array("d", (r[0] for r in rows)), array("q", (r[1] for r in rows)), array("q", (r[2] for r in rows))
  )


def load(count: int, rate: float, seed: int = 4) -> FleetTrace:
  requests = workload.synthetic(count, "lognormal:60:4:300", "lognormal:30:1:80", 10, seed=seed, rate=rate)
  return columns([(each.arrival_s, len(each.prompt), each.output_len) for each in requests])


def sessions(count: int, rate: float, max_len: int = 2000) -> FleetTrace:
  """Conversations whose keys cover a block of 16 tokens each."""
  lines = make_sessions(
    count,
    rate,
    num_systems=8,
    system_len="uniform:100:300",
    message_len="uniform:5:60",
    output_len="uniform:2:40",
    pause_s=3.0,
    max_len=max_len,
    key_tokens=16,
  )
  return FleetTrace(
    array("d", (line["timestamp"] / 1e3 for line in lines)),
    array("q", (line["input_length"] for line in lines)),
    array("q", (line["output_length"] for line in lines)),
    [tuple(line["hash_ids"][: line["input_length"] // 16]) for line in lines],
    16,
  )


def served(trace: FleetTrace, plan: FleetPlan, settings: EngineConfig | None = None, costs: StepCosts = FAST):
  """A fleet that has served the trace."""
  fleet = CountedFleet(settings or config(), costs, plan, trace)
  assert fleet.run()
  for replica in fleet.replicas:
    assert not replica.waiting and replica.load == 0
    assert replica.pool.free == replica.pool.num_blocks, "a block leaked"
  return fleet
