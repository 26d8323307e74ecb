"""Loses processes of a fleet under load, breaks its connections, and checks what the fleet promises. Prints nothing."""

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
from tools.chaos.restart_times import LEAST_STARTS, judge_restarts
from tools.faulty_link import DELAY_S, HELD_S, LONGEST_BURST_S, FaultyLink
from tools.fleet.checked_streams import StreamEnd, StreamLoad, Verdict
from tools.fleet.fleet_members import (
  BACK_WITHIN_S,
  LONG_AT_ONCE,
  NUM_LONG,
  FleetMember,
  LinkFault,
  LossKind,
  RunningFleet,
)
from tools.fleet.idle_server import find_leaks

STREAMS = 16
_HEARD_WITHIN_S = 5.0
_ENDS_BETWEEN = 24  # streams that end before the next loss
_ENDS_WHOLE = 100  # streams that end while nothing is lost
_WAIT_S = 180.0
_TOGETHER_S = 3.0
_ENDS_AROUND_LINK = 4  # streams that end before and after what happens to a link
_ROTATION_WITHIN_S = 5.0
_PASSES_WITHIN_S = 30.0
_DEEDS = {LossKind.KILL: "is killed", LossKind.STOP: "is stopped"}
_LINK_DEEDS = {LinkFault.CORRUPT: "bits change", LinkFault.DELAY: "everything is late"}
_CHANGED = {LinkFault.CORRUPT: "bits changed", LinkFault.DELAY: "pieces held back"}


@dataclasses.dataclass(frozen=True)
class _LossEnd:
  """How one loss ended.

  Attributes:
    began: its instant on the machine's monotonic clock.
    back_s: seconds until the process served again, or all replicas were in the rotation.
    restart_s: seconds from the start of what replaced the process until it served; None: nothing replaced it.
    changed: changed bits, or late pieces, of what passed.
  """

  began: float
  back_s: float
  restart_s: float | None = None
  changed: int = 0


@dataclasses.dataclass(frozen=True)
class _Loss:
  """A way to lose a process, or to break a connection.

  Attributes:
    what: what happens, for people.
    can_fail: whether streams may fail.
    run: makes it happen the time that it is given, from 0, and waits until all serves again.
    place: what starts again, as `_list_places` names it; empty: nothing.
    changed: what is counted on a link, such as "bits changed"; empty: a process is lost.
  """

  what: str
  can_fail: bool
  run: Callable[[int], _LossEnd]
  place: str = ""
  changed: str = ""


@dataclasses.dataclass
class _Losses:
  """What the losses of one kind have caused.

  Attributes:
    ended, errors: streams that ended, and those with an error.
    silences: seconds until each client with an error learned of a loss, without those in which the router stood still.
    back_s: the longest time until the process served again.
    changed: changed bits, or late pieces, of what passed.
    restarts: seconds of each restart.
    faults: ends that break the rules.
  """

  ended: int = 0
  errors: int = 0
  back_s: float = 0.0
  changed: int = 0
  silences: list[float] = dataclasses.field(default_factory=list)
  restarts: list[float] = dataclasses.field(default_factory=list)
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
    self._starts: dict[str, list[float]] = {}

  async def check_all(self, faults: Sequence[LossKind | LinkFault], rounds: int, together: bool = False) -> None:
    """Checks the fleet whole, then each loss `rounds` times, then the fleet whole again.

    With LEAST_STARTS rounds or more, a process that is lost and replaced also starts as often, in turns.

    Args:
      faults: how processes are lost, and what happens to links, which the fleet then has.
      rounds: times that each process is lost.
      together: a round loses every process, each at an instant of its own, instead of one process.

    Raises:
      ConfigError: a process did not come back, or no stream ends any more.
    """
    self._choose_requests()
    self._load.set_streams(STREAMS)
    await self._check_whole("before the losses")
    for fault in faults:
      if isinstance(fault, LinkFault):
        losses = self._list_link_faults(fault)
      else:
        losses = [self._lose_all(fault)] if together else self._list_losses(fault)
      for loss in losses:
        await self._check_losses(loss, rounds)
    self._choose_requests(at_the_end=True)
    await self._check_whole("after the losses")
    began = time.monotonic()
    await self._load.stop()
    leaks = await asyncio.to_thread(self._list_leaks)
    row = none_of("no process holds anything", "no request, block, lease or compile", leaks, 4, asked=0)
    self._add_rows("idle", began, [row])

  def _choose_requests(self, at_the_end: bool = False) -> None:
    """Sends other long prompts from now on: those of the end, or the next ones, again from the first after the last.

    Long prompts that every replica knows would not reach the prefill server, so those of the end are sent only then.
    """
    first = self._num_chosen * LONG_AT_ONCE % (NUM_LONG - LONG_AT_ONCE)
    if at_the_end:
      first = NUM_LONG - LONG_AT_ONCE
    self._load.set_requests([*self._fleet.known[first : first + LONG_AT_ONCE], *self._fleet.known[NUM_LONG:]])
    self._num_chosen += 1

  def _add_rows(self, scenario: str, began: float, rows: Sequence[Row]) -> None:
    seconds = time.monotonic() - began
    self.rows += [dataclasses.replace(row, scenario=scenario, seconds=seconds) for row in rows]

  async def _check_whole(self, when: str) -> None:
    self._begin(f"{_ENDS_WHOLE} streams {when}")
    fleet, since, began = self._fleet, len(self._load.ends), time.monotonic()
    moved = await asyncio.to_thread(_read_metric, fleet, fleet.decode.address, "sluice_transfer_prompts_total")
    hits = await asyncio.to_thread(_read_metric, fleet, fleet.router.address, "sluice_router_prefix_hits_total")
    await self._wait_for_ends(_ENDS_WHOLE)
    faults, ended = self._load.find_faults(since, allow_errors=False), len(self._load.ends) - since
    moved = await asyncio.to_thread(_read_metric, fleet, fleet.decode.address, "sluice_transfer_prompts_total") - moved
    hits = await asyncio.to_thread(_read_metric, fleet, fleet.router.address, "sluice_router_prefix_hits_total") - hits
    rows = [
      none_of("every stream has the tokens of one plain server", "0 others", faults, ended, asked=0),
      Row("the prefill server computes long prompts", "1 or more", f"{moved:g} prompts", moved > 0),
      Row("the router follows known prefixes", "1 or more", f"{hits:g} requests", hits > 0),
    ]
    self._add_rows(when, began, rows)

  def _list_places(self) -> dict[str, Callable[[], float]]:
    """Returns for each kind of process what starts one and returns the seconds until it serves."""
    places: dict[str, Callable[[], float]] = {"replica": self._fleet.cluster.measure_start}
    return places | {member.name: member.start_anew for member in self._fleet.members}

  async def _measure_start(self, place: str) -> None:
    """Starts a process of this kind under the load, after an orderly end."""
    self._begin(f"a start of the {place}")
    took = await asyncio.to_thread(self._list_places()[place])
    self._starts.setdefault(place, []).append(took)
    self._report(f"serves after {took:.1f} s")
    await self._wait_for_ends(_ENDS_BETWEEN)

  def _list_losses(self, fault: LossKind) -> list[_Loss]:
    """Returns the loss of each process."""
    fleet, deed = self._fleet, _DEEDS[fault]

    def lose_member(member: FleetMember) -> Callable[[int], _LossEnd]:
      def lose(index: int) -> _LossEnd:
        began = time.monotonic()
        member.lose(fault)
        took = member.bring_back(fault)
        return _LossEnd(began, took, took if fault is LossKind.KILL else None)

      return lose

    def lose_replica(is_server: bool) -> Callable[[int], _LossEnd]:
      def lose(index: int) -> _LossEnd:
        began = time.monotonic()
        missed_s, took = fleet.await_replicas(fleet.lose_replica(fault, index, is_server))
        return _LossEnd(began, missed_s + took, took)

      return lose

    losses = [
      _Loss(f"a replica's worker {deed}", True, lose_replica(is_server=False), "replica"),
      _Loss(f"a replica's server {deed}", True, lose_replica(is_server=True), "replica"),
    ]
    for member, can_fail in ((fleet.prefill, False), (fleet.decode, True), (fleet.router, fault is LossKind.KILL)):
      place = member.name if fault is LossKind.KILL else ""  # one that was stopped goes on
      losses.append(_Loss(f"the {member.name} {deed}", can_fail, lose_member(member), place))
    return losses

  def _list_link_faults(self, fault: LinkFault) -> list[_Loss]:
    """Returns what happens to each link. A delay never fails a stream."""

    def break_link(link: FaultyLink) -> Callable[[int], _LossEnd]:
      def run(index: int) -> _LossEnd:
        began = time.monotonic()
        if fault is LinkFault.CORRUPT:
          burst_s = self._rng.uniform(0, LONGEST_BURST_S) if index % 2 else 0.0
          changed = link.corrupt(self._rng, burst_s, _PASSES_WITHIN_S)
        else:
          changed = link.delay(self._rng.uniform(*HELD_S), DELAY_S)
        return _LossEnd(began, self._await_rotation(), changed=changed)

      return run

    return [
      _Loss(
        f"{_LINK_DEEDS[fault]} between {between}",
        can_fail and fault is LinkFault.CORRUPT,
        break_link(link),
        changed=_CHANGED[fault],
      )
      for between, (can_fail, link) in self._fleet.links.items()
    ]

  def _await_rotation(self) -> float:
    """Returns the seconds until the router has all replicas in its rotation."""
    fleet, began = self._fleet, time.monotonic()
    url, verify = f"{fleet.scheme}://{fleet.router.address}/ready", fleet.tls.context if fleet.tls else False
    while time.monotonic() - began < _WAIT_S:
      if httpx.get(url, timeout=30, trust_env=False, verify=verify).json()["replicas_ready"] == len(fleet.replicas):
        break
      time.sleep(0.05)
    return time.monotonic() - began

  def _lose_all(self, fault: LossKind) -> _Loss:
    """Returns the loss of every process, each at its own instant. Replicas lose worker or server."""

    def lose(index: int) -> _LossEnd:
      losses = self._list_losses(fault)
      num_of_replica = len(losses) - len(self._fleet.members)
      chosen = [losses[index % num_of_replica], *losses[num_of_replica:]]
      waits = [self._rng.uniform(0, self._together_s) for _ in chosen]

      def lose_later(loss: _Loss, wait_s: float) -> float:
        time.sleep(wait_s)
        return loss.run(index // num_of_replica).back_s

      began = time.monotonic()
      with ThreadPoolExecutor(len(chosen)) as threads:
        return _LossEnd(began, max(threads.map(lose_later, chosen, waits)))

    return _Loss(f"every process {_DEEDS[fault]}", True, lose)

  async def _check_losses(self, loss: _Loss, rounds: int) -> None:
    found, started, since = _Losses(), time.monotonic(), len(self._load.ends)
    before = started
    ends_around = _ENDS_AROUND_LINK if loss.changed else _ENDS_BETWEEN
    for index in range(rounds):
      self._choose_requests()
      await self._wait_for_ends(ends_around)
      if loss.place and rounds >= LEAST_STARTS:
        await self._measure_start(loss.place)
      self._begin(loss.what if rounds == 1 else f"{loss.what}, {index + 1} of {rounds}")
      end = await asyncio.to_thread(loss.run, index)
      self._report(
        f"all in the rotation after {end.back_s:.1f} s" if loss.changed else f"serves after {end.back_s:.1f} s"
      )
      await self._wait_for_ends(ends_around)
      ends = self._load.ends[since:]
      failed = [each for each in ends if each.verdict is Verdict.ERROR]
      found.ended, found.errors = found.ended + len(ends), found.errors + len(failed)
      # A stream that ended before this loss learned of the one before.
      found.silences += [
        self._measure_silence(each, end.began if each.ended >= end.began else before) for each in failed
      ]
      before = end.began
      found.back_s, found.changed = max(found.back_s, end.back_s), found.changed + end.changed
      found.restarts += [] if end.restart_s is None else [end.restart_s]
      found.faults += self._load.find_faults(since, allow_errors=loss.can_fail)
      since += len(ends)
      if loss.changed and not end.changed:
        found.faults.append("nothing passed")
    self._add_rows(loss.what, started, self._judge(loss, rounds, found))

  def _judge(self, loss: _Loss, rounds: int, found: _Losses) -> list[Row]:
    target = "0 wrong, cut or silent" if loss.can_fail else "0 errors"
    measured = f"{found.ended} ended, {found.errors} with an error"
    if loss.changed:
      measured += f", {found.changed:,} {loss.changed}"
    if found.faults:
      measured = f"{len(found.faults)} of {found.ended} ended otherwise: {found.faults[0]}"
    rows = [Row("every stream ends by the rules", target, measured, not found.faults, rounds, rounds)]
    if loss.can_fail:
      late = sum(silence > _HEARD_WITHIN_S for silence in found.silences)
      measured = f"in {max(found.silences, default=0.0):.1f} s" + (f", {late} of {found.errors} later" if late else "")
      rows.append(Row("clients learn of it", f"in {_HEARD_WITHIN_S:g} s", measured, not late))
    what, limit_s = "it serves again", BACK_WITHIN_S
    if loss.changed:
      what, limit_s = "the router uses every replica again", _ROTATION_WITHIN_S
    rows.append(Row(what, f"in {limit_s:g} s", f"in {found.back_s:.1f} s", found.back_s <= limit_s))
    if found.restarts and (starts := self._starts.get(loss.place)):
      rows.append(judge_restarts(starts, found.restarts))
    return rows

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
    for name, target, polls, ca_file in (
      ("replicas", fleet.cluster.grpc_target, 24, ""),  # Serve chooses who answers
      ("decode server", fleet.decode_target, 1, fleet.ca_file),
      ("prefill server", fleet.prefill.address, 1, fleet.ca_file),
    ):
      with Client(target, tls_ca_file=ca_file) as client:
        for _ in range(polls):
          if held := find_leaks(client):
            leaks.append(f"{name}: {', '.join(held)}")
    for name, address, metric in (
      ("prefill server", fleet.prefill_metrics, "sluice_transfer_leased_pieces"),
      ("router", fleet.router.address, "sluice_router_replica_in_flight"),
    ):
      if held := _read_metric(fleet, address, metric):
        leaks.append(f"{name}: {metric} is {held:g}")
    return leaks


def _read_metric(fleet: RunningFleet, address: str, name: str) -> float:
  """Returns the sum of a metric's series. Raises ConfigError if there is none."""
  url, verify = f"{fleet.scheme}://{address}/metrics", fleet.tls.context if fleet.tls else False
  text = httpx.get(url, timeout=30, trust_env=False, verify=verify).raise_for_status().text
  values = [
    sample.value for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
  ]
  if not values:
    raise ConfigError(f"{address} has no metric {name}")
  return sum(values)
