"""How long a device waits for the host, on a runner whose steps end when the test says so, and a clock that it sets."""

import threading
from typing import Any

from engine.batch import Batch
from engine.shapes import StepShape
from tools.bench import device_idle
from tools.bench.device_idle import DeviceWatch, waited

_BATCH = Batch(0, StepShape(8, 8, 8), ("a",), (0,), (4,), (1,), (1,), (True,), ((),))


class _Step:
  def __init__(self):
    self.done = threading.Event()

  def wait(self) -> None:
    self.done.wait()


class _Runner:
  def __init__(self):
    self.steps: list[_Step] = []

  def launch(self, batch: Batch) -> _Step:
    del batch
    self.steps.append(_Step())
    return self.steps[-1]


def test_only_what_lies_between_a_step_and_a_later_launch_is_waiting() -> None:
  assert waited([0.0, 3.0, 5.0], [1.0, 2.0, 6.5]) == 1.0 + 0.0 + 1.5


def test_the_device_is_idle_from_a_steps_end_to_the_next_launch(monkeypatch) -> None:
  now, noted = [10.0], threading.Semaphore(0)

  def clock() -> float:
    if threading.current_thread() is not threading.main_thread():
      noted.release()
    return now[0]

  monkeypatch.setattr(device_idle.time, "monotonic", clock)
  runner: Any = _Runner()

  def end(step: int, at: float) -> None:
    now[0] = at
    runner.steps[step].done.set()
    assert noted.acquire(timeout=60)

  watch = DeviceWatch(runner)
  with watch.watching(runner):
    runner.launch(_BATCH)
    runner.launch(_BATCH)  # while the first runs
    end(0, at=12.0)
    end(1, at=15.0)
    now[0] = 18.0
    runner.launch(_BATCH)
    end(2, at=19.0)
  assert watch.held == [((4,), (1,))] * 3
  assert watch.idle_s(9.0) == 1.0 + 3.0, "before the first step, and between the second and the third"
  runner.launch(_BATCH)
  assert len(watch.held) == 3, "afterwards nothing goes through here"
