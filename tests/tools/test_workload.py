"""Request files: repeatable, of the promised distributions, refused with the line and field when broken."""

import io
import json
import math
import pathlib
import random
import statistics

import pytest

from engine.errors import ConfigError
from tools import workload
from tools.workload import WorkRequest

ROOT = pathlib.Path(__file__).resolve().parents[2]
AZURE = str(ROOT / "benchmarks" / "traces" / "azure_conv_500.csv")


def draws(spec: str, count: int = 20_000) -> list[int]:
  rng = random.Random(7)
  draw = workload.parse_lengths(spec)
  return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize(("mean", "low", "high"), [(64, 8, 512), (64, 4, 256), (20, 16, 4096)])
def test_lognormal_has_its_mean_after_clipping(mean, low, high):
  lengths = draws(f"lognormal:{mean}:{low}:{high}")
  assert min(lengths) == low
  assert max(lengths) <= high
  # Four standard errors of the mean of 20,000 draws, and half a token of rounding.
  assert abs(statistics.fmean(lengths) - mean) < 4 * statistics.stdev(lengths) / math.sqrt(len(lengths)) + 0.5


def test_loguniform_is_even_on_a_logarithmic_axis():
  lengths = draws("loguniform:20:2000")
  assert (min(lengths), max(lengths)) == (20, 2000)
  below = sum(length < 200 for length in lengths) / len(lengths)  # 200 is the middle of 20 and 2,000
  assert abs(below - 0.5) < 0.02


def test_fixed_and_uniform_lengths():
  assert set(draws("fixed:7", 50)) == {7}
  assert set(draws("uniform:2:4", 200)) == {2, 3, 4}


@pytest.mark.parametrize(
  "spec",
  [
    "",
    "fixed",
    "fixed:0",
    "fixed:1:2",
    "uniform:4:2",
    "lognormal:64:8",
    "loguniform:0:5",
    "lognormal:600:8:512",
    "gauss:3:4",
    "fixed:x",
  ],
)
def test_unknown_distributions_are_refused(spec):
  with pytest.raises(ConfigError):
    workload.parse_lengths(spec)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrival_gaps_have_the_rate_and_the_burstiness(burstiness):
  times = workload.arrivals(20_000, rate=5.0, burstiness=burstiness, seed=3)
  gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
  assert times[0] == 0.0
  assert min(gaps) >= 0.0
  mean = statistics.fmean(gaps)
  assert mean == pytest.approx(1 / 5, rel=0.06)
  assert statistics.stdev(gaps) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_an_infinite_rate_is_one_burst():
  assert workload.arrivals(5, math.inf, 1.0, 0) == [0.0] * 5


@pytest.mark.parametrize(
  ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_impossible_rates_are_refused(rate, burstiness):
  with pytest.raises(ConfigError):
    workload.arrivals(3, rate, burstiness, 0)


def test_the_seed_decides_everything():
  first = workload.synthetic(30, "uniform:1:50", "uniform:1:50", 1000, seed=5, rate=2.0)
  assert first == workload.synthetic(30, "uniform:1:50", "uniform:1:50", 1000, seed=5, rate=2.0)
  assert first != workload.synthetic(30, "uniform:1:50", "uniform:1:50", 1000, seed=6, rate=2.0)
  # The values themselves, so that a change of the generator or of Python's shows: published figures name the seed.
  assert [(len(request.prompt), request.output_len) for request in first[:4]] == [(30, 6), (6, 9), (7, 29), (25, 2)]
  assert first[0].prompt[:3] == (154, 108, 524)


def test_one_stream_does_not_move_another():
  first = workload.synthetic(30, "uniform:1:50", "uniform:1:50", 1000, seed=5, rate=2.0)
  other = workload.synthetic(30, "uniform:1:50", "fixed:9", 1000, seed=5, rate=2.0)
  assert [request.prompt for request in first] == [request.prompt for request in other]
  assert [request.arrival_s for request in first] == [request.arrival_s for request in other]


def test_token_ids_stay_in_the_vocabulary():
  for request in workload.synthetic(50, "fixed:40", "fixed:1", 3):
    assert set(request.prompt) <= {0, 1, 2}


def test_the_shipped_trace_is_the_published_one():
  rows = workload.read_trace(AZURE)
  assert len(rows) == 500
  assert rows[0] == (0.0, 374, 44)
  assert rows[1][1:] == (396, 109)
  assert rows[1][0] == pytest.approx(4.314579, abs=1e-6)
  times = [row[0] for row in rows]
  assert times == sorted(times)
  assert "CC-BY-4.0" in pathlib.Path(AZURE).read_text("utf-8")


def test_a_trace_is_scaled_to_the_machine():
  rows = [(0.0, 1000, 100), (10.0, 7, 1), (20.0, 3000, 600)]
  scaled = workload.from_trace(rows, vocab_size=50, length_scale=0.1, rate_scale=0.5, max_len=120)
  # Ten percent of the lengths and at least 1, half as often, and together no more than 120: the prompt gives way.
  assert [(request.arrival_s, len(request.prompt), request.output_len) for request in scaled] == [
    (0.0, 100, 10),
    (20.0, 1, 1),
    (40.0, 60, 60),
  ]
  assert workload.from_trace(rows, 50, num_requests=2)[-1].output_len == 1


@pytest.mark.parametrize(
  "text",
  [
    "",
    "a,b\n1,2\n",
    "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,2\n",
  ],
)
def test_other_tables_are_not_traces(tmp_path, text):
  (tmp_path / "trace.csv").write_text(text, "utf-8")
  with pytest.raises(ConfigError, match="trace"):
    workload.read_trace(str(tmp_path / "trace.csv"))


@pytest.mark.parametrize(
  ("rows", "complaint"),
  [
    ("2023-11-16 18:15:46,5,2\n2023-11-16 18:15:47,-5,2\n", "row 2: a length of -5 tokens"),
    ("2023-11-16 18:15:46,5,2\n2023-11-16 18:15:45,5,2\n", "row 2: it arrives 1.000 s before the row above it; sort"),
    ("", "no rows"),
  ],
)
def test_a_trace_that_cannot_have_happened_is_refused(tmp_path, rows, complaint):
  (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows, "utf-8")
  with pytest.raises(ConfigError, match=complaint):
    workload.read_trace(str(tmp_path / "trace.csv"))


def test_a_file_of_lengths_alone_arrives_at_once(tmp_path):
  (tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n74,918,0.1\n", "utf-8")
  assert workload.read_trace(str(tmp_path / "lengths.csv")) == [(0.0, 74, 918)]


def test_request_files_come_back_as_written(tmp_path):
  requests = [WorkRequest(0, 0.0, (1, 2, 3), 4), WorkRequest("b", 1.25, (9,), 1)]
  file = io.StringIO()
  workload.write_requests(file, requests, {"seed": 1})
  assert json.loads(file.getvalue().splitlines()[0]) == {"trace": {"seed": 1}}
  path = tmp_path / "requests.jsonl"
  path.write_text(file.getvalue(), "utf-8")
  assert workload.read_requests(str(path)) == requests


def test_a_request_file_needs_no_description(tmp_path):
  path = tmp_path / "requests.jsonl"
  path.write_text('{"id": 0, "arrival_s": 0, "prompt": [5], "output_len": 40}\n\n', "utf-8")
  assert workload.read_requests(str(path)) == [WorkRequest(0, 0.0, (5,), 40)]


GOOD = {"id": 1, "arrival_s": 0.0, "prompt": [1, 2], "output_len": 3}


@pytest.mark.parametrize(
  ("change", "complaint"),
  [
    ({"id": None}, "id=None"),
    ({"id": True}, "id=True"),
    ({"arrival_s": -1}, "arrival_s=-1"),
    ({"arrival_s": math.nan}, "arrival_s=nan"),
    ({"arrival_s": "0"}, "arrival_s='0'"),
    ({"prompt": []}, "prompt="),
    ({"prompt": [1.5]}, "prompt="),
    ({"prompt": [-1]}, "prompt="),
    ({"prompt": "text"}, "prompt="),
    ({"output_len": 0}, "output_len=0"),
    ({"output_len": 2.0}, "output_len=2.0"),
    ({"id": 0}, "occurs twice"),
  ],
)
def test_a_broken_line_is_named(tmp_path, change, complaint):
  path = tmp_path / "requests.jsonl"
  path.write_text(json.dumps(GOOD | {"id": 0}) + "\n" + json.dumps(GOOD | change) + "\n", "utf-8")
  with pytest.raises(ConfigError) as caught:
    workload.read_requests(str(path))
  assert "line 2" in str(caught.value)
  assert complaint in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"id": 1}', "", '{"trace": {}}'])
def test_what_is_no_request_file_is_refused(tmp_path, text):
  path = tmp_path / "requests.jsonl"
  path.write_text(text, "utf-8")
  with pytest.raises(ConfigError, match="requests.jsonl"):
    workload.read_requests(str(path))


def test_a_missing_file_is_one_clear_error(tmp_path):
  with pytest.raises(ConfigError, match="cannot be read"):
    workload.read_requests(str(tmp_path / "none.jsonl"))


def test_the_command_writes_what_the_reader_reads(tmp_path, capsys):
  path = tmp_path / "requests.jsonl"
  assert (
    workload.main(
      ["--num_requests=5", "--vocab_size=10", "--prompt_len=fixed:3", "--output_len=fixed:2", f"--output={path}"]
    )
    == 0
  )
  assert workload.read_requests(str(path)) == workload.synthetic(5, "fixed:3", "fixed:2", 10)
  assert "5 requests" in capsys.readouterr().err


@pytest.mark.parametrize(
  "flags",
  [
    ["--vocab_size=10"],
    ["--vocab_size=0", "--output=-"],
    ["--nonsense"],
    ["--vocab_size=10", "--output=-", "--prompt_len=fixed:0"],
    ["--vocab_size=10", "--output=-", "--trace=/nowhere.csv"],
  ],
)
def test_bad_flags_are_one_line(capsys, flags):
  with pytest.raises(SystemExit) as caught:
    workload.main(flags)
  assert caught.value.code == 2
  assert capsys.readouterr().err.count("\n") == 1


def flags(*changed: str):
  parser = workload.CommandParser("test", None)
  workload.add_shape_arguments(parser)
  return parser.parse_args(changed)


def test_shared_prefixes_leave_lengths_and_times_alone():
  plain, _ = workload.from_arguments(flags("--num_requests=60", "--prompt_len=uniform:1:40", "--rate=5"), 1000)
  shared, about = workload.from_arguments(
    flags("--num_requests=60", "--prompt_len=uniform:1:40", "--rate=5", "--num_prefixes=3", "--prefix_len=16"), 1000
  )
  assert (about["num_prefixes"], about["prefix_len"]) == (3, 16)
  for before, after in zip(plain, shared, strict=True):
    assert (after.arrival_s, len(after.prompt), after.output_len) == (
      before.arrival_s,
      len(before.prompt),
      before.output_len,
    )
    assert after.prompt[16:] == before.prompt[16:] and after.prompt[-1] == before.prompt[-1]
  beginnings = {request.prompt[:16] for request in shared if len(request.prompt) > 16}
  assert len(beginnings) == 3
  short = [request.prompt[:-1] for request in shared if 1 < len(request.prompt) < 17]
  assert short and all(any(prefix[: len(start)] == start for prefix in beginnings) for start in short)


def test_a_rate_gives_a_trace_new_times_and_keeps_its_lengths():
  own, _ = workload.from_arguments(flags(f"--trace={AZURE}", "--scale=0.1", "--num_requests=50"), 100)
  drawn, about = workload.from_arguments(
    flags(f"--trace={AZURE}", "--scale=0.1", "--num_requests=50", "--rate=20", "--burstiness=0.5"), 100
  )
  assert [(len(r.prompt), r.output_len) for r in drawn] == [(len(r.prompt), r.output_len) for r in own]
  assert [r.arrival_s for r in drawn] == workload.arrivals(50, 20.0, 0.5, 0)
  assert (about["rate"], about["burstiness"], about["rate_scale"]) == (20.0, 0.5, None)


def test_tenants_have_unequal_shares_and_priorities_the_share_asked_for():
  senders = workload.make_senders(20_000, 4, 0.25, seed=1)
  assert senders == workload.make_senders(20_000, 4, 0.25, seed=1) != workload.make_senders(20_000, 4, 0.25, seed=2)
  shares = [sum(tenant == f"tenant{number}" for tenant, _ in senders) / 20_000 for number in range(4)]
  assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.01)
  assert sum(priority for _, priority in senders) / 20_000 == pytest.approx(0.25, abs=0.01)
  assert {tenant for tenant, _ in workload.make_senders(50, 1, 0.0, seed=1)} == {""}
  tenants_alone = [tenant for tenant, _ in workload.make_senders(20_000, 4, 0.9, seed=1)]
  assert tenants_alone == [tenant for tenant, _ in senders], "priorities have a stream of their own"
  with pytest.raises(ConfigError, match="batch_share=1.5 must be at least 0 and at most 1"):
    workload.make_senders(1, 1, 1.5, seed=0)


def test_a_request_file_holds_tenants_and_priorities_where_there_are_any(tmp_path):
  path = tmp_path / "requests.jsonl"
  assert (
    workload.main(["--num_requests=20", "--vocab_size=9", "--num_tenants=3", "--batch_share=0.5", f"--output={path}"])
    == 0
  )
  lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
  assert lines[0]["trace"]["num_tenants"] == 3
  requests = workload.read_requests(str(path))
  assert [(line.get("tenant", ""), line.get("priority", 0)) for line in lines[1:]] == [
    (request.tenant, request.priority) for request in requests
  ]
  assert {request.tenant for request in requests} == {"tenant0", "tenant1", "tenant2"}
  assert {request.priority for request in requests} == {0, 1}
  for bad in ('"tenant": 3', '"priority": "high"', '"priority": true'):
    path.write_text('{"id": 0, "arrival_s": 0, "prompt": [1], "output_len": 2, ' + bad + "}\n", "utf-8")
    with pytest.raises(ConfigError, match="line 1: (tenant|priority)=.* must be a"):
      workload.read_requests(str(path))
