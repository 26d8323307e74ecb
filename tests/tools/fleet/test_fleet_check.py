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
from tools.fleet.fleet_check import FleetCheck
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


def judge(load: Any, *, can_fail: bool, back_s: float = 1.0, still_s: float = 0.0) -> tuple[list[bool], list[str]]:
  now = time.monotonic()
  router = types.SimpleNamespace(stood_still=(now + 50, now + 50 + still_s))
  fleet: Any = types.SimpleNamespace(known=[None] * 100, router=router)
  check = FleetCheck(fleet, load, lambda line: None)
  lose = lambda index: (time.monotonic(), back_s)  # noqa: E731
  asyncio.run(check._check_losses("it is killed", can_fail, 2, lose))
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
    assert ended.value.code == 2 and "use kill, stop, or kill,stop" in capsys.readouterr().err
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
    prefill=prefill, decode=decode, router=router, members=members, lose_replica=lose_replica, await_replicas=float
  )
  for fault, of_replica in ((LossKind.KILL, ["worker 0", "server 0", "worker 1"]), (LossKind.STOP, ["server 0"])):
    lose = FleetCheck(fleet, StreamLoad.__new__(StreamLoad), print, together_s=0.0)._lose_all(fault)
    for index, replica in enumerate(of_replica):
      lost.clear()
      assert lose(index)[1] == 7.0 and sorted(lost) == sorted([replica, "prefill", "decode", "router"])
