"""The parts of the load generator that need no server: the warm-up's cut, the collection of step records."""

import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from engine.errors import ConfigError
from engine.recorder import RequestRecord, StepRecord
from server.client import SluiceError
from server.proto import sluice_pb2 as pb
from tests.tools.report.test_accounting import served, step
from tools import bench_serving
from tools.bench_serving import StepCollector, missed_steps, server_figures, split_warmup
from tools.report.latency import Objectives, Outcome
from tools.workload import WorkRequest


def test_the_first_to_arrive_are_the_warm_up_and_the_rest_begins_anew():
  requests = [WorkRequest(name, arrival_s, (1,), 1) for name, arrival_s in (("c", 4.0), ("a", 0.5), ("b", 2.0))]
  first, rest = split_warmup(requests, 1)
  assert [(request.id, request.arrival_s) for request in first] == [("a", 0.5)]
  assert [(request.id, request.arrival_s) for request in rest] == [("b", 0.0), ("c", 2.0)]
  with pytest.raises(ConfigError, match="warmup_requests=3"):
    split_warmup(requests, 3)


class FakeServer:
  """Two engines in one process; keeps the latest `kept` records, and says what it is asked."""

  def __init__(self, kept: int):
    self.kept, self.now, self.asked = kept, 100.0, []
    self.records: list[StepRecord] = [step(number, 90.0 + number, side="decode") for number in range(5)]
    self.ended: list[RequestRecord] = [served("before", 90.0)]

  def load(self, steps_after_s: float | None = None) -> Any:
    if steps_after_s is None:
      return SimpleNamespace(now_s=self.now)
    self.asked.append(steps_after_s)
    found = [record for record in self.records if record.time > steps_after_s][-self.kept :]
    ended = [record for record in self.ended if record.end > steps_after_s]
    return SimpleNamespace(
      steps=[pb.StepLoad(**record._asdict()) for record in found],
      requests=[pb.RequestLoad(**record._asdict()) for record in ended],
    )


def test_every_step_of_the_block_is_collected_once_from_both_sides(monkeypatch):
  monkeypatch.setattr(bench_serving, "POLL_S", 0.001)
  server = FakeServer(kept=8)
  with StepCollector(server) as collector:  # type: ignore[arg-type]
    for number in range(20):
      polls = len(server.asked)
      if number < 2:  # then that side is idle, and what it did is offered again and again
        server.records.append(step(number, 100.5 + number, side="prefill"))
      server.records.append(step(5 + number, 101.0 + number, side="decode"))
      while len(server.asked) < polls + 2:
        time.sleep(0.001)
  steps = collector.records()
  assert [record.step for record in steps if record.side == "decode"] == list(range(5, 25))
  assert [record.step for record in steps if record.side == "prefill"] == [0, 1]
  assert missed_steps(steps) == 0 and missed_steps(steps[:6] + steps[8:]) == 2
  times = [record.time for record in steps]
  assert times == sorted(times)
  # On this process' clock: the server said 100 when the block began, which is now.
  assert abs(times[0] - 0.5 - time.monotonic()) < 60


def test_requests_that_ended_in_the_block_are_collected_once(monkeypatch):
  monkeypatch.setattr(bench_serving, "POLL_S", 0.001)
  server = FakeServer(kept=8)
  with StepCollector(server) as collector:  # type: ignore[arg-type]
    server.ended.append(served("a", 101.0, side="prefill", lost_tokens=2, num_preemptions=1))
    while len(server.asked) < 2:
      time.sleep(0.001)
    server.ended += [served("a", 104.0, side="decode", lost_tokens=3), served("b", 103.0, first_scheduled=None)]
  found = collector.served()
  assert [(record.id, record.side, record.lost_tokens, record.num_preemptions) for record in found] == [
    ("b", "", 0, 0),
    ("a", "decode", 5, 1),
  ]
  assert found[0].first_scheduled is None
  assert found[1].end - found[1].arrival == pytest.approx(4.0), "all times are on one clock"
  assert abs(found[1].end - 4.0 - time.monotonic()) < 60, "and it is this process' one"


def test_a_server_that_goes_away_is_told(monkeypatch):
  monkeypatch.setattr(bench_serving, "POLL_S", 0.001)
  server = FakeServer(kept=8)
  with StepCollector(server) as collector:  # type: ignore[arg-type]

    def fail(*_):
      raise SluiceError("gone", grpc.StatusCode.UNAVAILABLE)

    server.load = fail  # type: ignore[method-assign]
  with pytest.raises(SluiceError, match="gone"):
    collector.records()


def test_server_figures_are_differences():
  before = pb.GetLoadResponse(
    steps_total=5, decode_tokens_total=10, padding_tokens_total=1, rungs=[pb.RungLoad(tokens=8, steps_total=5)]
  )
  after = pb.GetLoadResponse(
    steps_total=9,
    decode_tokens_total=40,
    padding_tokens_total=11,
    idle_slots_total=3,
    skipped_tokens_total=7,
    rungs=[pb.RungLoad(tokens=8, steps_total=9, padding_tokens_total=10, device_s_total=0.5)],
  )
  figures = server_figures(before, after)
  assert (figures["steps"], figures["decode_tokens"], figures["idle_slots"]) == (4, 30, 3)
  assert (figures["padding_share"], figures["skipped_tokens"]) == (10 / 40, 7)
  assert figures["by_rung"]["8"]["steps"] == 4 and figures["by_rung"]["8"]["device_s"] == 0.5


def test_an_objective_for_the_whole_answer():
  outcome = Outcome(0, 2, 1.0, 1.0, ((1.5, 1), (3.0, 1)))
  assert Objectives(e2e_s=2.0).met(outcome) and not Objectives(e2e_s=1.9).met(outcome)


def test_a_bad_trace_is_told_before_a_server_is_waited_for(tmp_path, capsys):
  (tmp_path / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n30,-2\n", "utf-8")
  assert bench_serving.main(["--target=127.0.0.1:1", f"--trace={tmp_path}/trace.csv"]) == 1
  assert "a length of -2 tokens is below 0" in capsys.readouterr().err
