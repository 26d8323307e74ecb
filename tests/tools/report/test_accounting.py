"""The account of steps on two worked out by hand, its request shares, and what a run file gives back."""

import json

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.recorder import RequestRecord, StepRecord
from engine.scheduler import Scheduler
from tests.engine.test_engine import Front, make
from tests.fakes import FakeRunner, VirtualClock
from tools.report.accounting import (
  Flops,
  account,
  account_requests,
  padding_by_request,
  phases,
  request_table,
  table,
  whole_requests,
)
from tools.report.latency import Outcome
from tools.report.run_file import RecordedRun, read_run, steps_of_trace, write_run
from tools.report.shown_runs import padding_share

FLOPS = Flops(token=100.0, row=10.0, pair=1.0)


def step(number: int, time: float, **changed) -> StepRecord:
  """Of three decodes in a rung of 8 with 4 rows."""
  values = dict.fromkeys(StepRecord._fields, 0) | {
    "step": number,
    "side": "",
    "time": time,
    "shape_tokens": 8,
    "shape_rows": 4,
    "num_rows": 3,
    "decode_rows": 3,
    "decode_tokens": 3,
    "decode_keys": 30,
    "padding": 5,
    "idle_slots": 1,
    "blocks_used": 5,
    "kv_tokens": 30,
    "kv_slots": 40,
    "num_running": 3,
    "host_s": 0.1,
    "device_s": 0.5,
    "commit_s": 0.1,
  }
  return StepRecord(**values | changed)


def served(name: str, end: float, **changed) -> RequestRecord:
  """Of a request that waited one second, had its first token a second later, and ended two seconds after that."""
  values = dict.fromkeys(RequestRecord._fields, 0) | {
    "id": name,
    "side": "",
    "reason": "length",
    "arrival": end - 4.0,
    "first_scheduled": end - 3.0,
    "first_token": end - 2.0,
    "end": end,
    "prompt_tokens": 10,
    "output_tokens": 5,
  }
  return RequestRecord(**values | changed)


DECODES = step(0, 1.0)
PROMPT = {"num_rows": 1, "decode_rows": 0, "decode_tokens": 0, "decode_keys": 0, "prefill_tokens": 12}
PREFILL = step(1, 2.0, shape_tokens=16, prefill_pairs=78, padding=4, idle_slots=0, device_s=1.5, **PROMPT)


def test_tokens_and_time_by_rung_and_in_all():
  figures = account([DECODES, PREFILL], block_size=8, num_blocks=10)
  assert (figures["useful_tokens"], figures["padding_tokens"], figures["idle_slots"]) == (15, 9, 1)
  assert figures["padding_share"] == 9 / 24
  assert figures["by_rung"].keys() == {"8", "16"}
  assert (figures["by_rung"]["16"]["padding_tokens"], figures["by_rung"]["16"]["padding_share"]) == (4, 0.25)
  assert (figures["device_s"], figures["host_s"], figures["host_share"]) == (2.0, 0.4, pytest.approx(1 / 6, abs=1e-5))
  assert "useful_flops" not in figures


def test_padding_weighs_by_linear_layers_and_useful_work_by_attention_too():
  figures = account([DECODES, PREFILL], 8, 10, FLOPS)
  decodes, prefill = figures["by_rung"]["8"], figures["by_rung"]["16"]
  assert decodes["useful_flops"] == 3 * 100 + 3 * 10 + 30
  assert decodes["padding_flops"] == 5 * 100 + 1 * 10
  assert decodes["idle_flops"] == 100 + 10 + 10  # the mean context of the three rows
  assert prefill["useful_flops"] == 12 * 100 + 10 + 78
  assert prefill["padding_flops"] == 4 * 100 + 3 * 10
  assert figures["padding_flops_share"] == pytest.approx(940 / (360 + 1288 + 940), abs=1e-5)
  assert figures["useful_flop_s"] == 1648 / 2
  assert "padding of FLOPs" in table(figures) and "padding of FLOPs" not in table(account([DECODES], 8, 10))


def test_what_kernels_skip_costs_nothing():
  skipping = [DECODES._replace(padding=0), PREFILL._replace(padding=0)]
  figures = account(skipping, 8, 10, FLOPS)
  assert (figures["useful_tokens"], figures["padding_tokens"], figures["skipped_tokens"]) == (15, 0, 9)
  assert figures["padding_share"] == figures["padding_flops"] == figures["padding_flops_share"] == 0
  assert figures["by_rung"]["16"]["skipped_tokens"] == 4
  # A step that fills its rung skips no token, but its device skips rows of logits all the same.
  full = PREFILL._replace(prefill_tokens=16, padding=0)
  assert account([*skipping, full], 8, 10, FLOPS)["padding_flops"] == 0
  assert account([DECODES, full], 8, 10, FLOPS)["padding_flops"] == 510 + 3 * 10
  # What a batching mode pads is computed: two of the five tokens beside three, and one more row of logits.
  waves = [DECODES._replace(padding=2), *skipping]
  assert account(waves, 8, 10, FLOPS)["padding_flops"] == 2 * 100 + 1 * 10
  assert padding_share(waves) == 2 / 20


def test_composition_and_kv():
  both = step(2, 3.0, decode_tokens=5, prefill_tokens=4, shape_tokens=16, padding=7, kv_tokens=40)
  figures = account([DECODES, PREFILL, both], 8, 10)
  # The last step has two tokens more than rows that decode: as many were speculated.
  assert figures["composition"] == {
    "decode_tokens": 0.25,
    "speculative_tokens": pytest.approx(2 / 24, abs=1e-5),
    "prefill_tokens": pytest.approx(16 / 24, abs=1e-5),
    "decode_steps": pytest.approx(1 / 3, abs=1e-5),
    "prefill_steps": pytest.approx(1 / 3, abs=1e-5),
    "mixed_steps": pytest.approx(1 / 3, abs=1e-5),
    "mean_rows": pytest.approx(7 / 3, abs=1e-3),
  }
  assert (figures["kv"]["occupancy_mean"], figures["kv"]["fragmentation_max"]) == (0.5, 0.25)
  assert figures["kv"]["fragmentation_mean"] == pytest.approx(0.5 / 3, abs=1e-5)
  assert set(json.loads(json.dumps(figures))) == set(figures)


def test_padding_is_shared_by_the_rows_of_a_step():
  steps = [step(1, 2.0, num_rows=5), step(0, 1.0)]  # 5 over 3 rows at 1 s, 5 over 5 at 2 s
  assert padding_by_request(steps, [(0.0, 3.0), (1.0, 2.0), (1.5, 9.0), (5.0, 6.0)]) == pytest.approx(
    [5 / 3 + 1, 5 / 3, 1, 0]
  )


def test_flops_of_a_model_are_those_of_its_matrices(tmp_path):
  config = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 50,
  }
  (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
  query_and_output, key_and_value, mlp = 2 * 8 * 8, 2 * 8 * 4, 3 * 8 * 16
  flops = Flops.of_model(str(tmp_path))
  assert flops == Flops(token=2 * 3 * (query_and_output + key_and_value + mlp), row=2 * 8 * 50, pair=2 * 2 * 3 * 8)
  (tmp_path / "config.json").write_text("{}", "utf-8")
  with pytest.raises(ConfigError, match="hidden_size"):
    Flops.of_model(str(tmp_path))


# --- Files ------------------------------------------------------------------------------------------------------------

OUTCOMES = (
  Outcome(7, 3, 10.0, 10.25, ((11.0, 1), (12.5, 2)), (1, 2, 3)),
  Outcome("b", 4, 11.0, 11.0, (), (), "RESOURCE_EXHAUSTED: full"),
)


def test_a_run_comes_back_without_its_tokens(tmp_path):
  path = str(tmp_path / "run.jsonl")
  steps = (step(0, 10.5), step(1, 11.5, side="decode"))
  ended = (served("x", 14.5), served("y", 14.5, first_scheduled=None, first_token=None))
  write_run(path, RecordedRun({"label": "a"}, {"output_tok_s": 2.0}, OUTCOMES, (5, 6), steps, ended), start_s=10.0)
  run = read_run(path)
  assert (run.label, run.figures, run.prompt_lens) == ("a", {"output_tok_s": 2.0}, (5, 6))
  assert run.outcomes[0] == Outcome(7, 3, 0.0, 0.25, ((1.0, 1), (2.5, 2)))
  assert run.outcomes[0].ok and run.outcomes[0].tpot_s == OUTCOMES[0].tpot_s
  assert run.outcomes[1].error == "RESOURCE_EXHAUSTED: full"
  assert run.steps == (step(0, 0.5), step(1, 1.5, side="decode"))
  assert run.served == (served("x", 4.5), served("y", 4.5, first_scheduled=None, first_token=None))


def test_a_reader_goes_by_the_names_of_fields(tmp_path):
  path = tmp_path / "run.jsonl"
  write_run(str(path), RecordedRun({}, {}, OUTCOMES, (5, 6), (DECODES,)), start_s=0.0)
  head, *rows, last = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
  head["step_fields"] = ["new", *reversed(head["step_fields"])]
  last["s"] = [1, *reversed(last["s"])]
  path.write_text("\n".join(json.dumps(line) for line in (head, *rows, last)), "utf-8")
  assert read_run(str(path)).steps == (DECODES,)


@pytest.mark.parametrize(
  ("text", "complaint"),
  [
    ("", "line 1"),
    ('{"format": "other"}\n', "line 1.*other"),
    ('{"format": "sluice run 1", "request_fields": ["id"], "step_fields": []}\n{"r": [1, 2]}\n', "line 2"),
    ('{"format": "sluice run 1", "about": {}, "figures": {}}\nnonsense\n', "line 2"),
  ],
)
def test_what_is_no_run_file_is_refused_by_line(tmp_path, text, complaint):
  (tmp_path / "run.jsonl").write_text(text, "utf-8")
  with pytest.raises(ConfigError, match=complaint):
    read_run(str(tmp_path / "run.jsonl"))
  with pytest.raises(ConfigError, match="nowhere"):
    read_run(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("computes_padding", [True, False])
def test_a_step_trace_gives_the_records_it_can(tmp_path, computes_padding):
  config = EngineConfig(
    vocab_size=50,
    max_model_len=64,
    num_blocks=40,
    block_size=4,
    token_budgets=(4, 16),
    max_num_seqs=4,
    prefill_chunk=8,
    overlap=False,
    computes_padding=computes_padding,
  )
  clock = VirtualClock()
  engine = Engine(Scheduler(config), FakeRunner(config), clock, Front())
  engine.start_trace(str(tmp_path / "trace.jsonl"))
  for number in range(5):
    engine.submit(make(f"r{number}", num_prompt=10 + number, max_tokens=4))
  while engine.num_live:
    engine.step()
    clock.advance(0.5)
  engine.stop_trace()
  engine.step()
  records = engine.stats(100).steps
  known = ("step", "side", "time", "shape_tokens", "shape_rows", "num_rows", "decode_rows", "decode_tokens")
  known += ("prefill_tokens", "decode_keys", "prefill_pairs", "padding")
  read = steps_of_trace(str(tmp_path / "trace.jsonl"))
  assert len(read) == len(records) > 5
  for mine, kept in zip(read, records, strict=True):
    assert [getattr(mine, name) for name in known] == [getattr(kept, name) for name in known]
  assert any(step.padding for step in read) is computes_padding


def test_what_is_no_step_trace_is_refused(tmp_path):
  (tmp_path / "trace").write_text('{"event": "schedule", "batch": null}\n{"event": "commit"}\n', "utf-8")
  with pytest.raises(ConfigError, match="line 2"):
    steps_of_trace(str(tmp_path / "trace"))
  (tmp_path / "trace").write_text("", "utf-8")
  with pytest.raises(ConfigError, match="holds no step"):
    steps_of_trace(str(tmp_path / "trace"))


def test_where_requests_spent_their_time():
  records = [
    served("a", 10.0, cached_tokens=8),
    served("b", 20.0, arrival=13.0, num_preemptions=2, lost_tokens=7),
    served("late", 30.0, first_scheduled=None, first_token=None, reason="timeout", output_tokens=0),
  ]
  assert phases(records[1]) == (4.0, 1.0, 2.0) and phases(records[2]) == (None, None, None)
  figures = account_requests(records)
  assert (figures["requests"], figures["queue_p50_ms"], figures["prefill_p99_ms"]) == (3, 2500.0, 1000.0)
  assert (figures["cached_tokens"], figures["cached_share"]) == (8, round(8 / 30, 5))
  assert (figures["preempted_requests"], figures["preemptions"], figures["lost_tokens"]) == (1, 2, 7)
  assert figures["reasons"] == {"length": 2, "timeout": 1}
  assert "queue 2,500.0 and 3,970.0 ms" in request_table(figures) and "1 preempted" in request_table(figures)
  assert "queue -" in request_table(account_requests([]))


def test_a_request_of_two_sides_is_one():
  prefill = served("a", 8.0, side="prefill", output_tokens=1, num_preemptions=1, lost_tokens=3)
  decode = served("a", 10.0, side="decode", num_preemptions=1, lost_tokens=4)
  found = whole_requests([decode, served("b", 9.0), prefill])
  assert [record.id for record in found] == ["b", "a"]
  assert found[1] == decode._replace(num_preemptions=2, lost_tokens=7)
