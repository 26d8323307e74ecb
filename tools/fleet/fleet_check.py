"""Loses processes of a fleet under load, and checks what the fleet promises. Starts and prints nothing itself."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import random
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ConfigError
from server.client import Client
from tools.chaos.report import Row, none_of
from tools.fleet.checked_streams import StreamEnd, StreamLoad, Verdict
from tools.fleet.fleet_members import BACK_WITHIN_S, LONG_AT_ONCE, NUM_LONG, FleetMember, LossKind, RunningFleet
from tools.fleet.idle_server import find_leaks

STREAMS = 16
_HEARD_WITHIN_S = 5.0
_ENDS_BETWEEN = 24  # streams that end before the next loss
_ENDS_WHOLE = 100  # streams that end while nothing is lost
_WAIT_S = 180.0
_TOGETHER_S = 3.0
_DEEDS = {LossKind.KILL: "is killed", LossKind.STOP: "is stopped"}


@dataclasses.dataclass
class _Losses:
  """What the losses of one kind have caused.

  Attributes:
    ended, errors: streams that ended, and those with an error.
    heard_s: the longest time until a client learned of a loss, without time in which the router itself stood still.
    back_s: the longest time until the process served again.
    faults: ends that break the rules.
  """

  ended: int = 0
  errors: int = 0
  heard_s: float = 0.0
  back_s: float = 0.0
  faults: list[str] = dataclasses.field(default_factory=list)


class FleetCheck:
  """Checks a fleet under a load. Belongs to one event loop.

  Attributes:
    rows: the results so far.
    doing: what it does now, for the view.
  """

  def __init__(
    self, fleet: RunningFleet, load: StreamLoad, report: Callable[[str], None], together_s: float = _TOGETHER_S
  ):
    """Args:
    fleet: entered already.
    load: without streams.
    report: called with a line for each event.
    together_s: seconds within which a round loses every process, with `together`.
    """
    self._fleet, self._load, self._report = fleet, load, report
    self.rows: list[Row] = []
    self.doing = "begins"
    self._num_chosen, self._together_s = 0, together_s
    self._rng = random.Random(0)

  async def check_all(self, faults: Sequence[LossKind], rounds: int, together: bool = False) -> None:
    """Checks the fleet whole, then each loss `rounds` times, then the fleet whole again.

    Args:
      faults: how processes are lost.
      rounds: times that each process is lost.
      together: a round loses every process, each at an instant of its own, instead of one process.

    Raises:
      ConfigError: a process did not come back, or no stream ends any more.
    """
    self._choose_requests()
    self._load.set_streams(STREAMS)
    await self._check_whole("before the losses")
    for fault in faults:
      if together:
        await self._check_losses(f"every process {_DEEDS[fault]}", True, rounds, self._lose_all(fault))
        continue
      for what, can_fail, lose in self._list_losses(fault):
        await self._check_losses(f"{what} {_DEEDS[fault]}", can_fail, rounds, lose)
    self._choose_requests()
    await self._check_whole("after the losses")
    began = time.monotonic()
    await self._load.stop()
    leaks = await asyncio.to_thread(self._list_leaks)
    row = none_of("no process holds anything", "no request, block, lease or compile", leaks, 4, asked=0)
    self._add_rows("idle", began, [row])

  def _choose_requests(self) -> None:
    """Sends long prompts that no replica knows yet, until all were sent; then they begin anew."""
    first = self._num_chosen * LONG_AT_ONCE % NUM_LONG
    self._load.set_requests([*self._fleet.known[first : first + LONG_AT_ONCE], *self._fleet.known[NUM_LONG:]])
    self._num_chosen += 1

  def _add_rows(self, scenario: str, began: float, rows: Sequence[Row]) -> None:
    seconds = time.monotonic() - began
    self.rows += [dataclasses.replace(row, scenario=scenario, seconds=seconds) for row in rows]

  async def _check_whole(self, when: str) -> None:
    self._begin(f"{_ENDS_WHOLE} streams {when}")
    fleet, since, began = self._fleet, len(self._load.ends), time.monotonic()
    moved = await asyncio.to_thread(_read_metric, fleet.decode.address, "sluice_transfer_prompts_total")
    hits = await asyncio.to_thread(_read_metric, fleet.router.address, "sluice_router_prefix_hits_total")
    await self._wait_for_ends(_ENDS_WHOLE)
    faults, ended = self._load.find_faults(since, allow_errors=False), len(self._load.ends) - since
    moved = await asyncio.to_thread(_read_metric, fleet.decode.address, "sluice_transfer_prompts_total") - moved
    hits = await asyncio.to_thread(_read_metric, fleet.router.address, "sluice_router_prefix_hits_total") - hits
    rows = [
      none_of("every stream has the tokens of one plain server", "0 others", faults, ended, asked=0),
      Row("the prefill server computes long prompts", "1 or more", f"{moved:g} prompts", moved > 0),
      Row("the router follows known prefixes", "1 or more", f"{hits:g} requests", hits > 0),
    ]
    self._add_rows(when, began, rows)

  def _list_losses(self, fault: LossKind) -> list[tuple[str, bool, Callable[[int], tuple[float, float]]]]:
    """Returns for each process: its name, whether streams may fail with it, and what loses it and waits for it."""
    fleet = self._fleet

    def lose_member(member: FleetMember) -> Callable[[int], tuple[float, float]]:
      def lose(index: int) -> tuple[float, float]:
        began = time.monotonic()
        member.lose(fault)
        return began, member.bring_back(fault)

      return lose

    def lose_replica(is_server: bool) -> Callable[[int], tuple[float, float]]:
      def lose(index: int) -> tuple[float, float]:
        began = time.monotonic()
        return began, fleet.await_replicas(fleet.lose_replica(fault, index, is_server))

      return lose

    losses = [("a replica's server", True, lose_replica(is_server=True))]
    if fault is LossKind.KILL:  # Ray gives a worker that stands still half a minute
      losses.insert(0, ("a replica's worker", True, lose_replica(is_server=False)))
    losses += [
      ("the prefill server", False, lose_member(fleet.prefill)),
      ("the decode server", True, lose_member(fleet.decode)),
      ("the router", fault is LossKind.KILL, lose_member(fleet.router)),
    ]
    return losses

  def _lose_all(self, fault: LossKind) -> Callable[[int], tuple[float, float]]:
    """Returns what loses every process, each at its own instant, and waits for all. Replicas lose worker or server."""

    def lose(index: int) -> tuple[float, float]:
      losses = [lose for _, _, lose in self._list_losses(fault)]
      num_of_replica = len(losses) - len(self._fleet.members)
      chosen = [losses[index % num_of_replica], *losses[num_of_replica:]]
      waits = [self._rng.uniform(0, self._together_s) for _ in chosen]

      def lose_later(lose: Callable[[int], tuple[float, float]], wait_s: float) -> float:
        time.sleep(wait_s)
        return lose(index // num_of_replica)[1]

      began = time.monotonic()
      with ThreadPoolExecutor(len(chosen)) as threads:
        return began, max(threads.map(lose_later, chosen, waits))

    return lose

  async def _check_losses(
    self, what: str, can_fail: bool, rounds: int, lose: Callable[[int], tuple[float, float]]
  ) -> None:
    found, started = _Losses(), time.monotonic()
    for index in range(rounds):
      self._choose_requests()
      await self._wait_for_ends(_ENDS_BETWEEN)
      self._begin(what if rounds == 1 else f"{what}, {index + 1} of {rounds}")
      since = len(self._load.ends)
      began, back_s = await asyncio.to_thread(lose, index)
      self._report(f"serves again after {back_s:.1f} s")
      await self._wait_for_ends(_ENDS_BETWEEN)
      ends = self._load.ends[since:]
      failed = [end for end in ends if end.verdict is Verdict.ERROR]
      found.ended, found.errors = found.ended + len(ends), found.errors + len(failed)
      found.heard_s = max([found.heard_s, *(self._measure_silence(end, began) for end in failed)])
      found.back_s = max(found.back_s, back_s)
      found.faults += self._load.find_faults(since, allow_errors=can_fail)
    target = "0 wrong, cut or silent" if can_fail else "0 errors"
    measured = f"{found.ended} ended, {found.errors} with an error"
    if found.faults:
      measured = f"{len(found.faults)} of {found.ended} ended otherwise: {found.faults[0]}"
    rows = [Row("every stream ends by the rules", target, measured, not found.faults, rounds, rounds)]
    if can_fail:
      in_time = found.heard_s <= _HEARD_WITHIN_S
      rows.append(Row("clients learn of it", f"in {_HEARD_WITHIN_S:g} s", f"in {found.heard_s:.1f} s", in_time))
    in_time = found.back_s <= BACK_WITHIN_S
    rows.append(Row("it serves again", f"in {BACK_WITHIN_S:g} s", f"in {found.back_s:.1f} s", in_time))
    self._add_rows(what, started, rows)

  def _measure_silence(self, end: StreamEnd, began: float) -> float:
    """Returns the seconds until a stream's error since its last message or the loss, while the router could send it."""
    since = max(began, end.ended - end.waited_s)
    stop, start = self._fleet.router.stood_still if end.protocol == "http" else (end.ended, end.ended)
    return end.ended - since - max(0.0, min(end.ended, start) - max(since, stop))

  def _begin(self, doing: str) -> None:
    self.doing = doing
    self._report(doing)

  async def _wait_for_ends(self, count: int) -> None:
    wanted, deadline = len(self._load.ends) + count, time.monotonic() + _WAIT_S
    while len(self._load.ends) < wanted:
      if time.monotonic() > deadline:
        raise ConfigError(f"{len(self._load.ends) - wanted + count} of {count} streams ended in {_WAIT_S:g} s")
      await asyncio.sleep(0.05)

  def _list_leaks(self) -> list[str]:
    """Returns a line for each process that, idle, still holds something, or has compiled after ready."""
    fleet, leaks = self._fleet, []
    for name, target, polls in (
      ("replicas", fleet.cluster.grpc_target, 24),  # Serve chooses who answers
      ("decode server", fleet.decode_target, 1),
      ("prefill server", fleet.prefill.address, 1),
    ):
      with Client(target) as client:
        for _ in range(polls):
          if held := find_leaks(client):
            leaks.append(f"{name}: {', '.join(held)}")
    for name, address, metric in (
      ("prefill server", fleet.prefill_metrics, "sluice_transfer_leased_pieces"),
      ("router", fleet.router.address, "sluice_router_replica_in_flight"),
    ):
      if held := _read_metric(address, metric):
        leaks.append(f"{name}: {metric} is {held:g}")
    return leaks


def _read_metric(address: str, name: str) -> float:
  """Returns the sum of a metric's series. Raises ConfigError if there is none."""
  text = httpx.get(f"http://{address}/metrics", timeout=30, trust_env=False).raise_for_status().text
  values = [
    sample.value for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
  ]
  if not values:
    raise ConfigError(f"{address} has no metric {name}")
  return sum(values)
