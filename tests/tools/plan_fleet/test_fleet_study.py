"""The study of fleets: what its rows say, the plot, and that the flags in its file are still flags."""

import json

import pytest

from tests.commands import ROOT
from tools.plan_fleet import fleet_study, plot_study
from tools.plan_fleet.__main__ import make_parser
from tools.plan_fleet.fleet_study import GAP_LIMITS_MS, FleetStudy, find_fewest

STUDY = ROOT / "benchmarks" / "fleet" / "study.json"


def row(kind: str, devices: int, ttft_ms: float, gap_ms: float, tpot_ms: float = 5.0) -> dict:
  figures = {"ttft_p99_ms": ttft_ms, "itl_p99_ms": gap_ms, "tpot_p50_ms": tpot_ms}
  return {"trace": "AZURE", "kind": kind, "devices": devices} | figures


ROWS = [
  row("together, chunk 512", 2, 9000.0, 30.0),  # too late
  row("together, chunk 512", 3, 900.0, 25.0),
  row("together, chunk 256", 5, 700.0, 15.0),
  row("apart, 1:1", 4, 800.0, 7.0),
  row("apart, 2:1", 3, 800.0, 7.0, 38.0),  # requests wait for a decode replica
]


def test_the_fewest_devices_meet_both_limits():
  found = {entry["gap_p99_ms"]: entry for entry in find_fewest(ROWS)}
  assert found.keys() == set(GAP_LIMITS_MS)
  assert (found[6]["together"], found[6]["apart"]) == (None, None)
  assert (found[8]["together"], found[8]["apart"]) == (None, 4)
  assert (found[16]["together"], found[16]["together_kind"]) == (5, "together, chunk 256")
  assert (found[30]["together"], found[30]["apart"]) == (3, 4)
  assert found[50]["apart"] == 3


def test_a_row_has_the_flags_that_make_it(tmp_path):
  study = FleetStudy(str(tmp_path / "none.jsonl"), "")
  assert study.has_trace("AZURE") and not study.has_trace("MOONCAKE")
  flags = ["--num_requests=20", "--replicas=2"]
  found = study.run_row(flags, what="two")
  assert found["flags"] == flags and found["what"] == "two" and found["completed"] == 20
  search = study.run_row(["--num_requests=20", "--find_cheapest", "--slo_ttft_p50_ms=10000"])
  assert search["fleet"] == "1"


def test_parts_are_kept_and_unknown_ones_refused(tmp_path, monkeypatch, capsys):
  path = tmp_path / "study.json"
  path.write_text('{"links": {"rows": []}}')
  monkeypatch.setitem(fleet_study.STUDIES, "disaggregation", lambda study: iter(ROWS))
  assert fleet_study.main(["--parts=disaggregation", f"--output={path}"]) == 0
  found = json.loads(path.read_text())
  assert found.keys() == {"links", "disaggregation"} and len(found["disaggregation"]["fewest"]) == len(GAP_LIMITS_MS)
  assert fleet_study.main(["--parts=weather", f"--output={path}"]) == 2
  assert "part 'weather' is none of affinity" in capsys.readouterr().err


def test_the_plot_is_the_same_each_time(tmp_path, capsys):
  study = tmp_path / "study.json"
  study.write_text(json.dumps({"disaggregation": {"fewest": find_fewest(ROWS)}}))
  texts = []
  for name in ("a.svg", "b.svg"):
    assert plot_study.main([f"--study={study}", f"--output={tmp_path / name}"]) == 0
    texts.append((tmp_path / name).read_text())
  assert texts[0] == texts[1] and "fewest devices" in texts[0]
  study.write_text("{}")
  assert plot_study.main([f"--study={study}", f"--output={tmp_path}/c.svg"]) == 2
  assert "has no part disaggregation" in capsys.readouterr().err


@pytest.mark.parametrize("part", fleet_study.PARTS)
def test_flags_of_the_published_study_are_flags(part: str):
  rows = json.loads(STUDY.read_text())[part]["rows"]
  assert rows
  for each in rows:
    make_parser().parse_args(each["flags"])
