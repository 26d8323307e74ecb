"""A member of a fleet comes back on its port after a kill and a stop, with a real server."""

from server.client import Client
from tools.fleet import fleet_members
from tools.fleet.fleet_members import FleetMember, LossKind, MemberState
from tools.server_process import RunningServer, find_free_port


def test_a_member_comes_back_on_its_port(tmp_path, monkeypatch):
  monkeypatch.setattr(fleet_members, "_STOPPED_S", 0.1)
  port = find_free_port()
  flags = ("--fake_device", f"--port={port}")
  member = FleetMember("server", f"127.0.0.1:{port}", lambda: RunningServer(flags, tmp_path / "log"))
  assert member.state is MemberState.STARTING
  took = member.start()
  try:
    assert took == member.first_start_s > 0
    for fault, state in ((LossKind.KILL, MemberState.LOST), (LossKind.STOP, MemberState.STOPPED)):
      member.lose(fault)
      assert member.state is state
      assert member.bring_back(fault) > 0
      assert member.state is MemberState.SERVING and member.first_start_s == took
      with Client(member.address) as client:
        assert client.generate("Once", max_tokens=3, ignore_eos=True).token_ids
  finally:
    member.lose(LossKind.STOP)  # a stopped process ends, too
    member.end()
  member.end()
