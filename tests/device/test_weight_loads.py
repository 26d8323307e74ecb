"""Parameters load on two threads: in order, no more at a time, and none after an error."""

import threading

import jax.numpy as jnp
import pytest

from engine.device.weight_shares import run_loads
from engine.errors import CheckpointError


def test_two_loads_run_at_a_time_and_come_in_order():
  both, running, most = threading.Barrier(2, timeout=30), [], []

  def load(number: int) -> dict:
    running.append(number)
    both.wait()  # passes only if another one runs
    most.append(len(running))
    both.wait()
    running.remove(number)
    return {f"{number}": jnp.ones(1)}

  found = run_loads([lambda number=number: load(number) for number in range(6)], 2)
  assert [name for values in found for name in values] == [f"{number}" for number in range(6)]
  assert set(most) == {2}


def test_an_error_ends_the_loads():
  started = []

  def load(number: int) -> dict:
    started.append(number)
    if number == 1:
      raise CheckpointError("tensor 1 is cut off")
    threading.Event().wait(0.02)
    return {}

  with pytest.raises(CheckpointError, match="tensor 1"):
    list(run_loads([lambda number=number: load(number) for number in range(100)], 1))
  assert len(started) < 50
