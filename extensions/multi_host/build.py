"""Builds an engine whose model lies on the devices of several hosts: the leader's engine, or a follower's runner.

Each host runs the same build in the same order: it reads its own devices' parts of the weights, compiles the same
programs and warms them up. The hosts agree on the number of KV blocks and compare what they have built.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import time
from typing import Protocol

import jax

from engine.build_facts import FactReporter, ignore_fact
from engine.config import EngineConfig
from engine.device.build import Built, EngineSide, begin_build, build_side, finish_build
from engine.device.options import BuildOptions
from engine.device.programs import ProgramSpec
from engine.device.runner import Progress
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from extensions.multi_host.cluster_place import ClusterPlace
from extensions.multi_host.host_facts import Facts
from extensions.multi_host.leader import Leader


class Agreement(Protocol):
  """What hosts agree on during a build; a Leader or a Follower."""

  def agree_on_blocks(self, num_blocks: int) -> int:
    """Returns the smallest number of KV blocks that any host's memory holds."""
    ...

  def agree_on_built(self, facts: Facts) -> None:
    """Raises ConfigError if the hosts have built different things."""
    ...


def join_devices(place: ClusterPlace, limit_s: float) -> None:
  """Connects JAX on all hosts, so that its devices are those of all of them. Call it before JAX finds devices.

  Raises:
    ConfigError: JAX cannot connect, or the hosts have different numbers of devices.
  """
  jax.config.update("jax_cpu_collectives_implementation", "gloo")  # on CPUs only
  jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the server
  local = place.host in ("127.0.0.1", "::1", "localhost")
  try:
    jax.distributed.initialize(
      f"{place.host}:{place.port}",
      place.num_hosts,
      place.host_id,
      cluster_detection_method=None if place.is_found else "deactivate",
      initialization_timeout=max(1, int(limit_s)),
      coordinator_bind_address=f"127.0.0.1:{place.port}" if local else None,
    )
    counts = dict.fromkeys(range(place.num_hosts), 0)
    for device in jax.devices():
      counts[device.process_index] += 1
  except (RuntimeError, ValueError) as error:
    raise ConfigError(
      f"JAX cannot connect {place.num_hosts} hosts at {place.host}:{place.port} ({' '.join(str(error).split()):.300}); "
      "open this port between them"
    ) from error
  if len(set(counts.values())) > 1:
    shown = ", ".join(f"host {host} has {count}" for host, count in counts.items())
    raise ConfigError(f"the hosts have different numbers of devices: {shown}; give each the same")


def build_leader(
  options: BuildOptions,
  leader: Leader,
  progress: Progress,
  emit: Emit,
  clock: Callable[[], float] = time.monotonic,
  engine_class: type[Engine] = Engine,
  report_fact: FactReporter = ignore_fact,
) -> Built:
  """Builds the engine of host 0, whose steps all hosts execute; see engine.device.build.build_engine."""
  side, cache_reason = _build_share(options, leader, progress, report_fact)
  engine = engine_class(side.scheduler, leader.lead(side.runner), clock, emit)
  return finish_build(options, cache_reason, engine, side)


def build_follower(
  options: BuildOptions, follower: Agreement, progress: Progress, report_fact: FactReporter = ignore_fact
) -> EngineSide:
  """Builds another host's part; its runner is sealed and ready for the leader's steps, its scheduler plans nothing."""
  side, _ = _build_share(options, follower, progress, report_fact)
  side.runner.seal()
  return side


def _build_share(
  options: BuildOptions, agreement: Agreement, progress: Progress, report_fact: FactReporter
) -> tuple[EngineSide, str]:
  devices, cache_reason = begin_build(dataclasses.replace(options, num_devices=0))
  side = build_side(
    options, devices, progress, None, report_fact=report_fact, agree_on_blocks=agreement.agree_on_blocks
  )
  agreement.agree_on_built(describe_built(side.scheduler.config, side.runner.spec))
  return side, cache_reason


def describe_built(config: EngineConfig, spec: ProgramSpec) -> Facts:
  """Returns what hosts compare after their builds: every resolved setting, and a digest of the programs' arguments."""
  facts = {f"--{field.name}": str(getattr(config, field.name)) for field in dataclasses.fields(config)}
  facts |= {"attention": spec.attention, "device": spec.device_kind}
  shapes = repr((spec.params, spec.kv, spec.slot_state, spec.table_width, spec.num_eos, spec.argmax, spec.sampling))
  return facts | {"programs": hashlib.sha256(shapes.encode()).hexdigest()[:16]}
