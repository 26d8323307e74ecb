"""The verdicts of host losses, from invented processes and streams, and bad flags. `make host-losses` has real ones."""

import asyncio
import signal
import subprocess
import time
from typing import Any

import pytest

from tools.fleet.checked_streams import StreamEnd, StreamLoad, Verdict
from tools.host_losses import loss_rounds
from tools.host_losses.__main__ import main
from tools.host_losses.loss_rounds import HostFault, LossRounds, _Rounds


class InventedHost:
  def __init__(self, code: int | None):
    self.code, self.signals = code, []

  def wait(self, timeout: float | None = None) -> int:
    if self.code is None:
      self.code = -signal.SIGKILL
      raise subprocess.TimeoutExpired("host", timeout or 0)
    return self.code

  def kill(self) -> None:
    pass


class InventedCluster:
  def __init__(self, codes: tuple[int | None, int | None]):
    self.hosts = dict(enumerate(map(InventedHost, codes)))

  def send_signal(self, host: int, number: signal.Signals) -> None:
    self.hosts[host].signals.append(number)


class InventedStreams:
  """Streams that end while the cluster starts again."""

  find_faults, count_verdicts = StreamLoad.find_faults, StreamLoad.count_verdicts

  def __init__(self, *verdicts: Verdict, after_s: float = 0.1):
    self.ends: list[StreamEnd] = []
    self._verdicts, self._after_s = verdicts, after_s

  def end_all(self) -> None:
    ended = time.monotonic() + self._after_s
    self.ends += [StreamEnd(each, "http", "why", ended, 0.1, 40) for each in self._verdicts]


def lose(
  codes: tuple[int | None, int | None], streams: InventedStreams, fault: HostFault, host: int, restart_s: float = 4.0
) -> _Rounds:
  cluster: Any = InventedCluster(codes)
  load: Any = streams
  proxy: Any = None
  check, found = LossRounds(cluster, proxy, load, "", (), 0), _Rounds()
  await_ends = check._await_ends

  def end_all(*arguments) -> tuple[list[str], float]:
    streams.end_all()
    return await_ends(*arguments)

  check._await_ends = end_all  # type: ignore[method-assign]
  check.start_hosts = lambda: restart_s  # type: ignore[method-assign]
  check._start_s = [4.4, 3.9, 3.8]
  asyncio.run(check._lose(fault, host, found))
  check.rows = check._judge(fault, 1, found)
  found.faults += [row.check for row in check.rows if not row.passed]
  if fault is HostFault.STOP:
    assert cluster.hosts[host].signals == [signal.SIGSTOP, signal.SIGCONT]
  return found


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(loss_rounds, "_CLOSED_S", 0.0)


@pytest.mark.parametrize(
  ("fault", "host", "codes"),
  [
    (HostFault.KILL, 1, (1, -signal.SIGKILL)),
    (HostFault.KILL, 0, (-signal.SIGKILL, -signal.SIGABRT)),
    (HostFault.STOP, 1, (1, 1)),
  ],
)
def test_losses_that_keep_the_rules_have_no_faults(fault: HostFault, host: int, codes: tuple[int, int]):
  found = lose(codes, InventedStreams(Verdict.ERROR, Verdict.CANCELLED), fault, host)
  assert not found.faults and (found.ended, found.errors, found.back_s) == (2, 1, [4.0])


@pytest.mark.parametrize(
  ("streams", "codes", "fault"),
  [
    (InventedStreams(Verdict.WRONG), (1, -signal.SIGKILL), "http wrong: why"),
    (InventedStreams(Verdict.CUT_SHORT), (1, -signal.SIGKILL), "http cut short: why"),
    (InventedStreams(Verdict.SILENT), (1, -signal.SIGKILL), "http silent: why"),
    (InventedStreams(Verdict.ERROR, after_s=5.1), (1, -signal.SIGKILL), "clients learn of it"),
    (InventedStreams(Verdict.ERROR), (0, -signal.SIGKILL), "host 0 ended with code 0"),
    (InventedStreams(Verdict.ERROR), (None, -signal.SIGKILL), "host 0 runs on"),
    (InventedStreams(Verdict.ERROR), (-signal.SIGKILL, -signal.SIGKILL), "host 0 ended with code -9"),
  ],
)
def test_each_breach_is_a_fault(streams: InventedStreams, codes: tuple[int | None, int], fault: str):
  faults = lose(codes, streams, HostFault.KILL, 1).faults
  assert any(each.startswith(fault) for each in faults), faults


def test_a_restart_that_takes_longer_than_a_start_is_a_fault():
  found = lose((1, -signal.SIGKILL), InventedStreams(Verdict.ERROR), HostFault.KILL, 1, restart_s=4.35)
  assert found.faults == ["a restart takes what a start takes"]


def test_bad_faults_are_refused(capsys):
  for faults in ("", "burn", "kill,burn"):
    with pytest.raises(SystemExit) as ended:
      main([f"--faults={faults}"])
    assert ended.value.code == 2 and "use some of kill,stop,corrupt,delay" in capsys.readouterr().err
