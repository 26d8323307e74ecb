"""The demo: its traffic, its screen at several sizes, and the whole of it for a few seconds without a terminal."""

from collections import Counter
import io
import itertools
import re
import time

import pytest
from rich.console import Console

from server.proto import sluice_pb2 as pb
from tests.tools.conftest import run_module
from tools.demo import chats
from tools.demo import load as demo_load
from tools.demo.chats import DemoTurn
from tools.demo.load import DemoLoad, DemoStream
from tools.demo.view import View, closing, plain_line
from tools.demo_model import skills


def test_chats_are_repeatable_mixed_shared_and_checkable():
  made = list(itertools.islice(chats.make_chats(seed=1), 300))
  assert made == list(itertools.islice(chats.make_chats(seed=1), 300))
  turns = [turn for chat in made for turn in chat.turns]
  assert {turn.kind for turn in turns} == chats.SHARED_TURNS.keys() | chats.OWN_TURNS.keys()
  for turn in turns:
    assert (turn.answer is not None) == (turn.kind in chats.CHECKED)
  stories = [turn.sampling for turn in turns if turn.kind == "story"]
  assert {bool(sampling.top_k) for sampling in stories} == {True, False}
  assert all(chat.turns[0].kind == "story" for chat in made[: chats.NUM_OPENING_CHATS])
  before = Counter(chat.before for chat in made if chat.before)
  assert sum(count > 1 for count in before.values()) == chats.NUM_SHARED_TEXTS
  for chat in made:
    for turn in chat.turns:
      if turn.kind == "recall" and turn.answer:
        name, word = turn.answer.removeprefix("I remember ").rstrip(".").split()
        assert f"{name} {word}" in " ".join(content for _, content in chat.before)


def test_clients_outnumber_the_slots():
  counts = [demo_load.wanted_clients(share / 100, 32) for share in range(100)]
  assert min(counts) > 32 and max(counts) > 48


def test_occupancy_weighs_steps_by_their_time():
  steps = [
    pb.StepLoad(time=at, num_running=running, num_waiting=waiting)
    for at, running, waiting in ((1.0, 4, 0), (2.0, 2, 3), (5.0, 4, 1))
  ]
  seen = demo_load.measure_occupancy(steps, 4)
  assert (seen.slots, seen.full_share, seen.queue, seen.longest_queue) == (2.5, 0.25, 2.25, 3)
  assert seen.queue_share == 0.75
  assert demo_load.measure_occupancy([], 4).slots == 0.0


def load_in_flight() -> DemoLoad:
  """A load in the middle of its run: 40 streams, every kind and every state, and two answers of GetLoad."""
  load = DemoLoad("127.0.0.1:1", 30.0)
  now = time.monotonic()
  load.started_s = now - 10
  turns = (turn for chat in chats.make_chats(seed=3) for turn in chat.turns)
  for index, turn in enumerate(itertools.islice(turns, 120, 160)):
    stream = DemoStream(index, turn, now - 5)
    if index % 3:
      stream.text = "Once upon a time, " * index
      stream.chunks = [(now - 4, 1), (now - 3.9, 2)]
    if index % 4 == 3:
      stream.text = turn.answer or stream.text
      stream.ended_s = now - 0.5
      stream.num_prompt_tokens, stream.num_cached_tokens = 100, 64
      load.ended.append(stream)
    else:
      load.live.append(stream)
  failed = DemoStream(99, load.live[0].turn, now - 1, ended_s=now, error="UNAVAILABLE: gone")
  load.ended.append(failed)
  rungs = [pb.RungLoad(tokens=tokens, rows=min(tokens, 32), steps_total=tokens) for tokens in (8, 32, 64, 256)]
  figures = {
    "max_num_seqs": 32,
    "running_requests": 30,
    "queued_requests": 12,
    "kv_blocks_total": 640,
    "kv_blocks_in_use": 500,
    "kv_blocks_cached": 90,
    "rungs": rungs,
  }
  load.samples.append((now - 1.5, pb.GetLoadResponse(**figures)))
  for rung in rungs:
    rung.steps_total *= 3
  load.samples.append(
    (
      now - 0.5,
      pb.GetLoadResponse(
        **figures,
        decode_tokens_total=1500,
        prefill_tokens_total=300,
        padding_tokens_total=200,
        skipped_tokens_total=2000,
        output_tokens_total=1400,
        steps_total=90,
      ),
    )
  )
  load._recent_ttft_s.extend([(now - 60, 9.0), (now, 0.05), (now, 0.15)])
  load._recent_gap_s.extend([(now, 0.01), (now, 0.02), (now, 0.03)])
  return load


def screen(view: View, width: int, height: int) -> list[str]:
  console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
  console.print(view, end="")
  return console.file.getvalue().rstrip("\n").split("\n")  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 45), (100, 30), (60, 12)])
def test_the_screen_fits_its_terminal(width, height):
  view = View(load_in_flight(), "a model with quite a long name · 127.0.0.1:12345 · ready after 12.3 s")
  for _ in range(2):
    lines = screen(view, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_the_screen_shows_what_happens():
  text = "\n".join(screen(View(load_in_flight(), "demo"), 80, 24))
  assert "1,400" in text  # output tokens a second: all within one second of the two answers
  assert "1,500 /s" in text
  assert re.search(r"padding\s+10% of computed", text)
  assert "30/32" in text
  assert "500/640" in text and re.search(r"cached\s+90, reclaimable", text)
  assert re.search(r"prefixes\s+64% of prompt tokens", text)
  assert re.search(r"queue\s+12", text)
  assert re.search(r"TTFT\s+p50 100 p99 149 ms", text)
  assert re.search(r"ITL\s+p50 20 p99 30 ms", text)


def test_an_answer_that_just_came_is_marked():
  load = load_in_flight()
  view = View(load, "demo")
  screen(view, 80, 24)
  stream = next(stream for stream in view._lines if stream and stream.turn.answer is not None)
  load.live.remove(stream)
  stream.ended_s = time.monotonic()
  for text, mark in ((stream.turn.answer or "", "✓"), ("something else", "✗")):
    stream.text = text
    assert any(mark in line for line in screen(view, 80, 24))


def test_a_stream_keeps_its_line_until_it_is_gone():
  load = load_in_flight()
  view = View(load, "demo")
  screen(view, 80, 24)
  before = list(view._lines)
  gone = next(stream for stream in before if stream in load.live)
  load.live.remove(gone)
  gone.ended_s = time.monotonic() - 60
  screen(view, 80, 24)
  for old, new in zip(before, view._lines, strict=True):
    assert (new is not old) == (old is gone)


def test_an_answer_is_right_only_when_it_is_the_expected_one():
  [instance] = skills.make_instances("reverse", 1, 0)
  ask = DemoTurn("reverse", "x", chats.GREEDY, 80, instance.answer)
  assert DemoStream(0, ask, 0.0, text=instance.answer).right is None
  assert DemoStream(0, ask, 0.0, text=f" {instance.answer}\n", ended_s=1.0).right is True
  assert DemoStream(0, ask, 0.0, text=instance.answer[:-1], ended_s=1.0).right is False
  assert DemoStream(0, ask, 0.0, text=instance.answer, ended_s=1.0, error="INTERNAL: x").right is False


def test_the_plain_line_and_the_summary_tell_the_same_story():
  load = load_in_flight()
  right, checked = (sum(column) for column in zip(*load.score().values(), strict=True))
  assert checked
  assert f"{right} of {checked} right" in plain_line(load)
  console = Console(file=io.StringIO(), width=100)
  console.print(closing(load, 4.25, 3.0, 100))
  text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
  assert f"{right} of {checked} right" in text
  assert f"{len(load.ended) - 1} answered, 1 failed" in text
  assert "4.2 s after the start" in text
  assert "10.0% of computed tokens; kernels skipped 50.0% of what rungs hold" in text


def test_the_demo_fills_slots_queues_preempts_and_shares(tmp_path, compile_cache):
  done = run_module(
    "tools.demo", "--requests=90", f"--compile_cache_dir={compile_cache}", f"--screenshot={tmp_path / 'view.svg'}"
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "\x1b" not in done.stdout
  assert re.search(r"\d of 32 slots, \d+ queued", done.stdout)
  assert re.search(r"first token +[\d.]+ s after the start", done.stdout)
  assert re.search(r"compiles +0 since ready", done.stdout)
  assert "-m server.main --port=50051" in done.stdout
  assert "tools.client --target=127.0.0.1:50051 --chat" in done.stdout
  assert "<svg" in (tmp_path / "view.svg").read_text("utf-8")

  def figure(pattern: str) -> float:
    found = re.search(pattern, done.stdout)
    assert found, done.stdout
    return float(found[1])

  assert figure(r"requests +(\d+) answered, 0 failed") >= 90
  assert figure(r"slots +([\d.]+) of 32 in use on average") > 24
  assert figure(r"queue +[\d.]+ requests on average, (\d+) at most") > 0
  assert figure(r"preemptions +(\d+),") > 0
  assert figure(r"prefixes +(\d+)% of") > 0
  right, checked = figure(r"skills +(\d+) of"), figure(r"skills +\d+ of (\d+) right")
  assert right >= 0.9 * checked > 0


def test_the_demo_of_a_missing_model_ends_with_the_servers_words():
  done = run_module("tools.demo", "--model=/nowhere/at/all")
  assert done.returncode == 1
  assert done.stderr.count("\n") == 1
  assert "/nowhere/at/all" in done.stderr
