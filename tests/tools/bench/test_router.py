"""The bench of the router: its requests and its conversations, and once a whole small run."""

import asyncio
import json

import pytest

from tests.commands import run_module
from tests.server.router.replica_stub import running_stubs
from tools.bench.router import main, make_conversations, make_stream_bodies, send_all, send_request


def test_streams_are_read_whole():
  with running_stubs(1) as [stub]:
    stub.mode = "stream"
    answers = asyncio.run(send_all(stub.name, make_stream_bodies(5, 2, seed=1), at_once=2))
    assert [answer.num_events for answer in answers] == [2] * 5
    assert all(0 < answer.first_s <= answer.total_s for answer in answers)
    prompts = {seen[3] for seen in stub.seen}
    assert len(prompts) == 5  # nothing is cached


@pytest.mark.parametrize("mode", ["503", "break", "close"])
def test_a_failed_answer_ends_the_bench(mode):
  with running_stubs(1) as [stub]:
    stub.mode = mode
    with pytest.raises(ConnectionError):
      asyncio.run(send_request(stub.name, make_stream_bodies(1, 2, seed=1)[0]))


def test_conversations_share_beginnings():
  bodies = make_conversations(60, seed=1)
  assert bodies == make_conversations(60, seed=1)
  starts = [tuple(body["prompt"][:32]) for body in bodies]
  assert len(set(starts)) < len(starts) / 2


def test_an_unknown_part_is_refused(capsys):
  with pytest.raises(SystemExit) as stop:
    main(["--parts=speed"])
  assert stop.value.code == 2 and "speed is none of latency, affinity" in capsys.readouterr().err


@pytest.mark.long
def test_a_small_run():
  small = ("--rounds=1", "--requests_alone=3", "--stream_tokens=4", "--requests=40", "--step_ms=1", "--replicas=2")
  done = run_module("tools.bench.router", *small)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["latency"]["output tokens/s, 64 streams"]["router"] > 0
  assert 0 < found["affinity"]["round_robin"]["cached share"] <= found["affinity"]["one large cache"]["cached share"]
  assert sum(found["affinity"]["prefix_aware"]["requests"]) == 40
