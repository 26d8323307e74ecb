"""The measure of the front end: every token it counts is the right one, and it says what it was told to measure."""

import json

import pytest

from tools.bench import frontend as bench_frontend


@pytest.mark.long
@pytest.mark.parametrize("processes", [0, 1])
def test_a_small_run(monkeypatch, capsys, processes):
  monkeypatch.setattr(bench_frontend, "_WARM_S", 0.3)
  arguments = ["--streams=8", "--step_ms=5", "--seconds=1", "--requests=20", "--client_processes=1"]
  assert bench_frontend.main([*arguments, f"--frontend_processes={processes}"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["streams"] == 8 and found["frontend_processes"] == processes
  assert found["streams_wrong"] == found["streams_failed"] == 0
  assert found["tokens_per_s"] > 0 and found["tokens_per_message"] >= 1
  assert found["step_ms_alone"] > 4 and found["step_ms_with_front_end"] > 4
  first = found["first_token_overhead"]
  assert first["requests"] == 20 and first["p50_ms"] > 0 and first["health_check_p50_ms"] > 0
  assert set(found["cores"]) == {"engine", "front_ends", "clients"}


def test_prompts_are_all_different():
  whole = bench_frontend.prompts(5000)
  assert len({tuple(prompt) for prompt in whole}) == 5000
  assert all(0 <= token < 2048 for prompt in whole for token in prompt)
