"""The benchmark of ways for KV pieces."""

import json

import pytest

from tests.commands import run_here, run_module


@pytest.mark.long
def test_every_way_brings_every_piece():
  done = run_module(
    "tools.bench.piece_transports", "--parts=rates", "--piece_mib=0.25", "--layers=2", "--pieces=2", "--rounds=1"
  )
  assert done.returncode == 0, done.stderr
  rates = json.loads(done.stdout)["rates"]
  assert rates["piece bytes"] == 1 << 18
  for way in ("shared memory", "gRPC", "jax.experimental.transfer"):
    assert rates[f"{way} GB/s"] > 0


def test_an_unknown_part():
  done = run_here("tools.bench.piece_transports", "--parts=rate")
  assert done.returncode == 2 and "rate is none of rates, faults" in done.stderr
