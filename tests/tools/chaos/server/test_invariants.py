"""The server's books: read from outside, right while it serves, and deadly when they are not."""

import asyncio
import threading

import grpc
import pytest

from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.rpc.admin_service import AdminActions
from tests.server.harness import generate, running
from tools.chaos.proto import chaos_pb2, chaos_pb2_grpc
from tools.chaos.server import invariants

ADMIN = AdminActions(flags=lambda: (), set_trace=lambda on: "")
LONG = {"token_ids": pb.TokenIds(ids=[5, 6, 7]), "stopping": pb.StopParams(max_tokens=400, ignore_eos=True)}


def books_of(served) -> chaos_pb2.GetInvariantsResponse:
  with grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}") as channel:
    return chaos_pb2_grpc.ChaosServiceStub(channel).GetInvariants(chaos_pb2.GetInvariantsRequest(), timeout=30)


def test_what_was_accepted_is_somewhere(tokenizer):
  with running(tokenizer, host=HostOptions(admin_port=0), admin=ADMIN) as served:
    before = books_of(served)
    assert before.enabled and before.requests_accepted_total == before.generations_started_total == 0
    served.runner.poisoned = {"bad": 1}
    generate(served, text="the cat", sampling=pb.SamplingParams(n=3))
    with pytest.raises(grpc.RpcError):
      generate(served, request_id="bad", text="the")
    served.runner.go.clear()
    stream = served.generation.Generate(pb.GenerateRequest(**LONG))
    served.wait_until(lambda: served.engine.num_live == 1)
    during = books_of(served)
    assert (during.requests_live, during.generations_live) == (1, 1)
    stream.cancel()
    served.wait_until(lambda: len(served.generations) == 0)
    served.runner.go.set()
    served.wait_until(lambda: served.engine.num_live == 0)
    after = books_of(served)
    assert (after.requests_accepted_total, after.requests_live) == (5, 0)
    assert (after.requests_finished_total, after.requests_failed_total, after.requests_cancelled_total) == (3, 1, 1)
    assert (after.generations_started_total, after.generations_live) == (3, 0)
    assert after.generations_finished_total == after.generations_failed_total == after.generations_cancelled_total == 1
    assert (after.kv_blocks, after.kv_blocks_in_use, after.breaches_total, after.breach) == (256, 0, 0, "")
    assert after.checks_total > before.checks_total and min(after.threads, after.open_files, after.rss_bytes) > 0
    served.wait_until(lambda: books_of(served).asyncio_tasks <= before.asyncio_tasks)


def test_while_loading_there_are_none(tokenizer):
  with running(tokenizer, host=HostOptions(admin_port=0), admin=ADMIN, serve=False) as served:
    with pytest.raises(grpc.RpcError) as refused:
      books_of(served)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def lose_queued_tokens(served):
  served.engine._post(lambda: setattr(served.engine._scheduler._waiting, "num_tokens", 7) or [])


def leak_a_block(served):
  served.engine._post(lambda: served.engine._scheduler.pool.allocate_blocks(1) and [])


def lose_a_request(served):
  with served.engine._lock:
    served.engine._live.add("nobody")


def lose_a_generation(served):
  served.loop.call_soon_threadsafe(setattr, served.generations, "num_started", 9)


def leak_a_task(served):
  asyncio.run_coroutine_threadsafe(asyncio.sleep(60), served.loop)


def sample_outside_the_vocabulary(served):
  served.runner.config = served.engine.config.__class__(**vars(served.engine.config) | {"vocab_size": 10**6})


@pytest.mark.catalogue("D6")
@pytest.mark.parametrize(
  ("break_it", "said"),
  [
    (lose_queued_tokens, "queued tokens drifted"),
    (leak_a_block, "references, tables hold"),
    (lose_a_request, "a request was accepted and lost"),
    (lose_a_generation, "9 generations started"),
    (leak_a_task, "1 tasks more than at the start"),
    (sample_outside_the_vocabulary, "was sampled, the vocabulary has 400"),
  ],
)
def test_a_breach_ends_the_server(tokenizer, monkeypatch, caplog, break_it, said):
  monkeypatch.setattr(invariants, "_PATIENCE", 3)
  with running(tokenizer) as served:
    served.breaks = True
    served.runner.seconds = 0.02
    if break_it is leak_a_task:
      books = served.invariants
      assert books is not None
      served.wait_until(lambda: books.num_checks - served.engine.num_checks > 1)
      break_it(served)
    else:
      told = threading.Event()
      stream = served.generation.Generate(pb.GenerateRequest(**LONG))
      stream.add_callback(told.set)
      next(stream)
      break_it(served)
      with pytest.raises(grpc.RpcError):
        list(stream)
      assert told.wait(30)
    served.wait_until(lambda: bool(served.exit_code))
    assert served.exit_code == [1]
  lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("invariant broken: ")]
  assert len(lines) == 1 and said in lines[0], lines
