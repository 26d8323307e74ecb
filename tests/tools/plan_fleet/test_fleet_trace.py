"""Traces in columns: the three forms, bad lines, repeats, days, and conversations from a seed."""

import json

import pytest

from engine.errors import ConfigError
from tests.commands import ROOT
from tests.tools.plan_fleet.conftest import columns, sessions
from tools.plan_fleet import make_sessions as sessions_command
from tools.plan_fleet.fleet_trace import describe_trace, read_fleet_trace, shape_trace
from tools.plan_fleet.make_sessions import make_sessions

AZURE = str(ROOT / "benchmarks" / "traces" / "azure_conv_500.csv")


def write(tmp_path, lines) -> str:
  path = tmp_path / "trace.jsonl"
  path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
  return str(path)


def mooncake(when: float, prompt: int, ids) -> dict:
  return {"timestamp": when, "input_length": prompt, "output_length": 4, "hash_ids": ids}


def test_azures_form():
  trace = read_fleet_trace(AZURE, 16)
  assert len(trace) == 500 and trace.key_tokens == 0 and trace.keys_of(3) == ()
  assert (trace.arrivals[0], trace.prompts[0], trace.outputs[0]) == (0.0, 374, 44)


def test_mooncakes_form_drops_the_piece_that_is_not_full(tmp_path):
  trace = read_fleet_trace(write(tmp_path, [mooncake(0, 1100, [0, 1, 2]), mooncake(1500, 512, [0])]), 16)
  assert list(trace.arrivals) == [0.0, 1.5] and trace.key_tokens == 512
  assert trace.keys_of(0) == (0, 1) and trace.keys_of(1) == (0,)


def test_request_files_share_keys_where_tokens_are_equal(tmp_path):
  prompts = ([1] * 40, [1] * 32 + [2] * 8, [2] * 40)
  lines = [{"id": n, "arrival_s": n, "prompt": prompt, "output_len": 2} for n, prompt in enumerate(prompts)]
  trace = read_fleet_trace(write(tmp_path, lines), 16)
  assert trace.key_tokens == 16
  assert trace.keys_of(0) == trace.keys_of(1) == (0, 1) and not set(trace.keys_of(2)) & {0, 1}


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"timestamp": 0, "input_length": 4, "hash_ids"\n', "line 1 cannot be read (JSONDecodeError"),
    ({"timestamp": 0, "input_length": 4, "hash_ids": [1]}, "line 1 cannot be read (KeyError: 'output_length')"),
    (mooncake(-1, 4, [1]), "timestamp=-1 must be milliseconds of 0 or more"),
    (mooncake(0, -4, [1]), "input_length=-4 must be a whole number of 0 or more"),
    (mooncake(0, 1100, [1]), "hash_ids has 1 entries; it must have a whole number of 0 or more for each 512"),
    (mooncake(0, 600, [-1, 2]), "hash_ids has 2 entries"),
  ],
)
def test_bad_lines_are_refused(tmp_path, line, message: str):
  with pytest.raises(ConfigError) as found:
    read_fleet_trace(write(tmp_path, [line]), 16)
  assert message in str(found.value)


def test_bad_files_are_refused(tmp_path):
  with pytest.raises(ConfigError, match="cannot be read"):
    read_fleet_trace(str(tmp_path / "none"), 16)
  with pytest.raises(ConfigError, match="line 2: it arrives 1.000 s before the line above it; sort by time"):
    read_fleet_trace(write(tmp_path, [mooncake(1000, 4, []), mooncake(0, 4, [])]), 16)


def test_a_repeated_trace_shares_nothing_between_passes():
  trace = sessions(50, 20.0)
  twice = shape_trace(trace, num_requests=100)
  first = {key for index in range(50) for key in twice.keys_of(index)}
  second = {key for index in range(50, 100) for key in twice.keys_of(index)}
  assert not first & second and len(first) == len(second)
  assert list(twice.arrivals) == sorted(twice.arrivals)
  assert list(twice.prompts[:50]) == list(twice.prompts[50:])


def test_a_day_swings_about_the_mean_rate():
  trace = shape_trace(columns([(number, 10, 2) for number in range(100)]), hours=10, swing=0.8)
  assert len(trace) == 36_000 and list(trace.arrivals) == sorted(trace.arrivals)
  hourly = [sum(3600 * hour <= time < 3600 * (hour + 1) for time in trace.arrivals) for hour in range(10)]
  assert hourly[0] < 0.3 * 3600 and 1.6 * 3600 < hourly[4] < 1.8 * 3600
  assert describe_trace(trace)["hours"] == pytest.approx(10, rel=0.01)


def test_lengths_and_rate_scale():
  trace = shape_trace(columns([(0.0, 100, 10), (4.0, 400, 30)]), length_scale=0.5, rate_scale=2.0, max_len=100)
  assert list(trace.arrivals) == [0.0, 2.0]
  assert list(trace.prompts) == [50, 85] and list(trace.outputs) == [5, 15]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"length_scale": 0.5}, "scale=0.5 would break the trace's shared prefixes"),
    ({"swing": 1.0, "hours": 1.0}, "swing=1 must be at least 0 and below 1"),
    ({"swing": 0.5}, "swing=0.5 needs the length of the day; set --hours"),
    ({"hours": 1.0, "num_requests": 5}, "both set the trace's length"),
  ],
)
def test_bad_shapes_are_refused(changes, message: str):
  with pytest.raises(ConfigError) as found:
    shape_trace(sessions(5, 5.0), **changes)
  assert message in str(found.value)


def test_a_trace_without_times_has_no_day():
  with pytest.raises(ConfigError, match="hours=2 needs a trace with times"):
    shape_trace(columns([(0.0, 10, 2)] * 3), hours=2)


def test_conversations_repeat_their_text(tmp_path):
  lines = make_sessions(400, 5.0, seed=3)
  assert lines == make_sessions(400, 5.0, seed=3) != make_sessions(400, 5.0, seed=4)
  seen: set[tuple[int, ...]] = set()
  again = 0
  for line in lines:
    full = tuple(line["hash_ids"][: line["input_length"] // 512])
    assert len(line["hash_ids"]) == -(-line["input_length"] // 512)
    again += any(full[:count] in seen for count in range(1, len(full) + 1))
    seen |= {full[:count] for count in range(1, len(full) + 1)}
  assert again > 350, "most prompts begin with a known text"
  rate = len(lines) / (lines[-1]["timestamp"] / 1e3)
  assert 2 < rate < 8


def test_the_command_writes_a_trace(tmp_path, capsys):
  path = str(tmp_path / "sessions.jsonl")
  assert sessions_command.main(["--num_requests=30", f"--output={path}"]) == 0
  assert len(read_fleet_trace(path, 16)) == 30
  assert sessions_command.main(["--mean_turns=0.5", f"--output={path}"]) == 2
  assert "mean_turns=0.5 must be at least 1" in capsys.readouterr().err
  assert sessions_command.main(["--max_len=100", f"--output={path}"]) == 2
  assert "below the shortest system prompt" in capsys.readouterr().err
