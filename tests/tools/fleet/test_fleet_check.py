"""The verdicts of a fleet's losses, from ends of streams that a test invents, and the view of a fleet."""

import asyncio
from collections import Counter
import io
import pathlib
import time
import types
from typing import Any

import pytest
from rich.console import Console

from tools.fleet.__main__ import main
from tools.fleet.checked_streams import StreamEnd, StreamLoad, Verdict
from tools.fleet.fleet_check import FleetCheck, _Loss, _LossEnd
from tools.fleet.fleet_members import FleetMember, LossKind, MemberState
from tools.fleet.fleet_view import FleetView, list_new_ends
from tools.server_process import RunningServer


class InventedLoad:
  """A load whose streams end as a test says, whenever somebody counts them."""

  find_faults, count_verdicts = StreamLoad.find_faults, StreamLoad.count_verdicts
  num_open = 3

  def __init__(self, *verdicts: Verdict, waited_s: float = 0.5, protocol: str = "grpc"):
    self.verdicts, self.waited_s, self.protocol, self._ends = verdicts, waited_s, protocol, []

  def set_requests(self, known) -> None:
    assert known

  @property
  def ends(self) -> list[StreamEnd]:
    for verdict in self.verdicts * 9:
      self._ends.append(StreamEnd(verdict, self.protocol, "the  reason\n", time.monotonic() + 60, self.waited_s, 7))
    return self._ends


FLEET: Any = types.SimpleNamespace(known=[None] * 100, router=types.SimpleNamespace(stood_still=(0.0, 0.0)))


def judge(load: Any, *, can_fail: bool, back_s: float = 1.0, still_s: float = 0.0) -> tuple[list[bool], list[str]]:
  now = time.monotonic()
  router = types.SimpleNamespace(stood_still=(now + 50, now + 50 + still_s))
  fleet: Any = types.SimpleNamespace(known=[None] * 100, router=router)
  check = FleetCheck(fleet, load, lambda line: None)
  loss = _Loss("it is killed", can_fail, lambda index: _LossEnd(time.monotonic(), back_s))
  asyncio.run(check._check_losses(loss, 2))
  return [row.passed for row in check.rows], [row.measured for row in check.rows]


def test_losses_keep_the_rules_only_with_exact_ends_in_time():
  passed, measured = judge(InventedLoad(Verdict.FINISHED, Verdict.ERROR, Verdict.CANCELLED), can_fail=True)
  assert passed == [True, True, True] and measured[1:] == ["in 0.5 s", "in 1.0 s"]
  for verdict in (Verdict.WRONG, Verdict.CUT_SHORT, Verdict.SILENT):
    passed, measured = judge(InventedLoad(Verdict.FINISHED, verdict), can_fail=True)
    assert passed == [False, True, True] and verdict.value in measured[0]
  assert judge(InventedLoad(Verdict.ERROR, waited_s=5.1), can_fail=True)[0] == [True, False, True]
  for protocol, still_s, in_time in (("http", 8.0, True), ("http", 7.0, False), ("grpc", 8.0, False)):
    late = InventedLoad(Verdict.ERROR, waited_s=12.5, protocol=protocol)  # the router stood still for a part of it
    assert judge(late, can_fail=True, still_s=still_s)[0] == [True, in_time, True]
  assert judge(InventedLoad(Verdict.ERROR), can_fail=False)[0] == [False, True]
  assert judge(InventedLoad(Verdict.FINISHED), can_fail=True, back_s=121.0)[0] == [True, True, False]


def test_what_happens_to_a_link_must_reach_it_and_leave_the_rotation_soon():
  """A round in which nothing passed is no success, and changed bits are in the table."""
  load: Any = InventedLoad(Verdict.FINISHED, Verdict.ERROR)
  for changed, back_s, passed in (
    (3, 1.0, [True, True, True]),
    (0, 1.0, [False, True, True]),
    (3, 6.0, [True, True, False]),
  ):
    check = FleetCheck(FLEET, load, lambda line: None)
    end = _LossEnd(time.monotonic(), back_s, changed=changed)
    loss = _Loss("bits change", True, {0: end, 1: end}.__getitem__, changed="bits changed")
    asyncio.run(check._check_losses(loss, 2))
    assert [row.passed for row in check.rows] == passed
    assert ("6 bits changed" if changed else "nothing passed") in check.rows[0].measured


def test_restarts_are_compared_with_starts_under_the_same_load():
  """A process starts as often as it is lost, in turns; a slower restart is a miss."""
  for restart_s, in_time in ((10.0, True), (11.5, False)):
    cluster = types.SimpleNamespace(measure_start=lambda: 20.0)
    members = [types.SimpleNamespace(name=name, start_anew=lambda: 10.0) for name in ("decode server", "router")]
    fleet: Any = types.SimpleNamespace(known=[None] * 100, cluster=cluster, members=members, router=FLEET.router)
    load: Any = InventedLoad(Verdict.FINISHED)
    check = FleetCheck(fleet, load, lambda line: None)
    asyncio.run(check._measure_start("replica"))
    end = _LossEnd(time.monotonic(), restart_s + 3.0, restart_s)
    loss = _Loss("it is killed", True, {0: end, 1: end, 2: end}.__getitem__, "decode server")
    asyncio.run(check._check_losses(loss, 3))
    assert check._starts == {"replica": [20.0], "decode server": [10.0] * 3}
    assert [row.passed for row in check.rows] == [True, True, True, in_time]
    assert check.rows[-1].check == "a restart takes what a start takes"


def test_the_view_shows_members_ends_and_events():
  member = FleetMember("decode server", "127.0.0.1:7", lambda: RunningServer((), pathlib.Path()))
  member.state = MemberState.STOPPED
  cluster = types.SimpleNamespace(grpc_target="127.0.0.1:5")
  fleet: Any = types.SimpleNamespace(cluster=cluster, ray_state=MemberState.LOST, members=(member,))
  load: Any = InventedLoad(Verdict.FINISHED, Verdict.ERROR)
  load._ends = load.ends * 4
  check = FleetCheck(fleet, load, lambda line: None)
  check.doing = "the decode server is stopped"
  view = FleetView(fleet, load, check)
  view.lines.append("serves again after 3.0 s")
  page = io.StringIO()
  Console(file=page, width=120, height=30).print(view)
  shown = page.getvalue()
  for text in (
    "127.0.0.1:7",
    "stopped",
    "lost",
    "the reason",
    "7 tokens",
    "serves again",
    check.doing,
    "3 streams open",
  ):
    assert text in shown
  assert len(shown.splitlines()) <= 30
  assert Counter(line.split()[1] for line in list_new_ends(load, 0)).keys() == {"error"}


def test_bad_flags_and_a_missing_ray_are_refused(capsys):
  for faults in ("", "burn", "kill,burn"):
    with pytest.raises(SystemExit) as ended:
      main([f"--faults={faults}"])
    assert ended.value.code == 2 and "use some of kill,stop,corrupt,delay" in capsys.readouterr().err
  with pytest.raises(SystemExit) as ended:
    main(["--faults=kill,delay", "--together"])
  assert ended.value.code == 2 and "leave out corrupt and delay" in capsys.readouterr().err
  assert main([]) == 2 and "make fleet" in capsys.readouterr().err


def test_a_round_can_lose_every_process():
  """Each round loses a replica's worker or its server, and every process beside Ray."""
  lost: list[str] = []

  class Member:
    def __init__(self, name: str):
      self.name = name

    def lose(self, fault: LossKind) -> None:
      lost.append(self.name)

    def bring_back(self, fault: LossKind) -> float:
      return 2.0

  def lose_replica(fault: LossKind, index: int, is_server: bool) -> int:
    lost.append(f"{'server' if is_server else 'worker'} {index}")
    return 7

  members = prefill, decode, router = Member("prefill"), Member("decode"), Member("router")
  fleet: Any = types.SimpleNamespace(
    prefill=prefill,
    decode=decode,
    router=router,
    members=members,
    lose_replica=lose_replica,
    await_replicas=lambda lost: (1.0, float(lost)),
  )
  for fault in LossKind:
    loss = FleetCheck(fleet, StreamLoad.__new__(StreamLoad), print, together_s=0.0)._lose_all(fault)
    for index, replica in enumerate(["worker 0", "server 0", "worker 1"]):
      lost.clear()
      assert loss.run(index).back_s == 8.0 and sorted(lost) == sorted([replica, "prefill", "decode", "router"])
