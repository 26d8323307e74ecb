"""tools.bench.deterministic: the promise is checked on the programs that are timed, and both sides do the same work."""

import json

import pytest

from tests.tools.conftest import ENGINE_FLAGS
from tools.bench import deterministic as bench_deterministic


@pytest.mark.long
def test_both_sides_on_a_tiny_model(tiny_model, compile_cache, tmp_path, capsys):
  output = tmp_path / "deterministic.json"
  code = bench_deterministic.main(
    [
      f"--model={tiny_model}",
      "--attention=reference",
      "--matmul=xla",
      "--batches=1,4",
      "--context=16",
      "--requests=5",
      "--prompts=4:20",
      "--outputs=2:6",
      "--rounds=1",
      "--seconds=0.01",
      f"--compile_cache_dir={compile_cache}",
      f"--output={output}",
      *ENGINE_FLAGS,
    ]
  )
  said = capsys.readouterr()
  assert code == 0, said.err
  result = json.loads(output.read_text("utf-8"))
  assert result == json.loads(said.out)
  assert result["token_budgets"] == [[8, 32], [8]]  # one size of step, the smallest that holds 8 sequences
  assert result["same_bits_in_ways"] > 10
  decodes = {row["work"]: row.get("padded_to") for row in result["work"]}
  assert decodes == {"decode of 1 at 16": [8, 8], "decode of 4 at 16": [8, 8], "offline": None}
  assert all(
    row["ratio"] == pytest.approx(row["deterministic_s"] / row["normal_s"], abs=1e-3) for row in result["work"]
  )


def test_what_cannot_be_measured_is_one_line(capsys):
  assert bench_deterministic.main(["--model=/nowhere"]) == 2
  assert "/nowhere: no such folder" in capsys.readouterr().err.strip().splitlines()[-1]
