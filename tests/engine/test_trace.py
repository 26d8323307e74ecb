"""The step trace: begun at any time, it replays to the same batches; a changed trace or scheduler is noticed."""

import json
from pathlib import Path

import pytest

from engine.batch import Batch
from engine.recorder import batch_line
from engine.scheduler import Scheduler
from engine.shapes import StepShape
from tests.engine.world import World
from tools import replay


def traced(path: Path, seed: int, before: int, overlap: bool = True) -> World:
  """A world whose trace begins after `before` operations."""
  world = World(seed, overlap=overlap, host_pool=False)
  for _ in range(before):
    world.random_op()
  world.engine.start_trace(str(path))
  for _ in range(120):
    world.random_op()
  world.drain()
  world.engine.stop_trace()
  world.step()
  assert not world.engine.recorder._trace
  return world


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("before", [0, 40, 41, 90])
def test_replays_from_any_moment(tmp_path: Path, before: int, overlap: bool, capsys: pytest.CaptureFixture) -> None:
  path = tmp_path / "trace.jsonl"
  num_preemptions = 0
  for seed in (0, 1, 2, 3, 14, 16):  # the last two preempt, whatever is sampled
    world = traced(path, seed, before, overlap)
    num_preemptions += world.scheduler.num_preemptions
    assert replay.main([str(path)]) == 0
    assert "batches are the same" in capsys.readouterr().out
  assert num_preemptions


def test_some_trace_begins_with_a_step_in_flight(tmp_path: Path) -> None:
  path = tmp_path / "trace.jsonl"
  begins = []
  for before in range(30, 40):
    traced(path, 1, before)
    begins.append(json.loads(path.read_text().splitlines()[0])["in_flight"] is not None)
  assert any(begins)


def lines_of_a_busy_world(tmp_path: Path) -> list[str]:
  path = tmp_path / "trace.jsonl"
  traced(path, 3, 20)
  return path.read_text().splitlines(keepends=True)


def test_a_trace_without_logit_rows_still_replays(tmp_path: Path) -> None:
  lines = []
  for line in lines_of_a_busy_world(tmp_path):
    entry = json.loads(line)
    for batch in (entry.get("batch"), entry.get("in_flight")):
      if batch:
        batch["shape"].pop()
    lines.append(json.dumps(entry))
  replayed = replay.replay(lines)
  assert replayed.difference is None and replayed.num_batches > 10


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)])
def test_a_step_in_flight_with_drafts_is_read_from_its_line(order: tuple[int, ...]) -> None:
  """A decode, a row with drafts, and two of a prompt, the last of one token."""
  counts, drafts, inputs = (1, 3, 2, 1), (0, 2, 0, 0), ((), (-1, 5, 6), (7, 8), (9,))
  ones = (1,) * 4

  def column(values: tuple) -> tuple:
    return tuple(values[row] for row in order)

  logits = column((1, 3, 1, 1))
  batch = Batch(
    4, StepShape(8, 8, 8), tuple("abcd"), (0, 1, 2, 3), ones, column(counts), logits, (True,) * 4, column(inputs),
    num_drafts=column(drafts),
  )  # fmt: skip
  found = replay._batch(batch_line(batch, False))
  assert (found.counts, found.num_drafts) == (batch.counts, batch.num_drafts)
  assert [len(ids) for ids in found.token_ids] == [len(ids) for ids in batch.token_ids]


def test_a_changed_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
  lines = lines_of_a_busy_world(tmp_path)
  at = next(index for index, line in enumerate(lines) if json.loads(line)["event"] == "schedule" and '"counts"' in line)
  entry = json.loads(lines[at])
  entry["batch"]["blocks"] = "0" * 64
  changed = tmp_path / "changed.jsonl"
  changed.write_text("".join([*lines[:at], json.dumps(entry) + "\n", *lines[at + 1 :]]))
  assert replay.main([str(changed)]) == 1
  out = capsys.readouterr().out
  assert f"line {at + 1}: step {entry['batch']['step']}: blocks was 0000" in out


def test_a_scheduler_that_decides_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  lines = lines_of_a_busy_world(tmp_path)
  admit = Scheduler._admit
  monkeypatch.setattr(Scheduler, "_admit", lambda self, plan, limit, now: admit(self, plan, min(limit, 2), now))
  replayed = replay.replay(lines)
  assert replayed.difference is not None
  assert " was " in replayed.difference and ", is now " in replayed.difference


@pytest.mark.parametrize(
  "text, complaint",
  [
    ("", "the file is empty"),
    ("{", "line 1"),
    ('{"event": "add"}\n', "begins with the scheduler's state"),
  ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture) -> None:
  path = tmp_path / "trace.jsonl"
  path.write_text(text)
  assert replay.main([str(path)]) == 2
  assert complaint in capsys.readouterr().err
  assert replay.main([str(tmp_path / "absent")]) == 2


def test_a_file_that_fails_ends_the_trace_not_the_engine(tmp_path: Path) -> None:
  world = World(5, overlap=True, host_pool=False)
  with pytest.raises(OSError):
    world.engine.start_trace(str(tmp_path / "no folder" / "trace"))
  world.engine.start_trace("/dev/full")
  for _ in range(400):
    world.random_op()
  world.drain()
  world.engine.stop_trace()
  world.step()
  assert world.engine.recorder.trace_error is not None
  assert world.num_ended > 10
