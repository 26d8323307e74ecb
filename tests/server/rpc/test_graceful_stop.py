"""The last moments of a server: whoever calls in them is told so, and nobody gets gRPC's CANCELLED."""

import asyncio
import collections
import signal

import grpc
from grpc._cython import cygrpc
import pytest

from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from server.rpc import call_interceptor
from tests.server.lifecycle.test_front_end_group import asked, expected, serving

TOKENS = 3
NUM_CALLERS = 48
NUM_CHANNELS = 4


async def crowd(port: int, process) -> collections.Counter:
  """Callers who never stop calling, until the server has ended; returns what came of their calls."""
  outcomes: collections.Counter = collections.Counter()
  request = asked(stopping=pb.StopParams(max_tokens=TOKENS, ignore_eos=True))
  wanted = expected(max_tokens=TOKENS, ignore_eos=True)

  async def call(stub) -> None:
    while process.poll() is None:
      tokens: list[int] = []
      try:
        async for message in stub.Generate(request, timeout=60):
          tokens += [token for delta in message.deltas for token in delta.token_ids]
        outcomes["OK" if tokens == wanted else f"OK with {tokens}"] += 1
      except grpc.aio.AioRpcError as error:
        outcomes[error.code().name + (" after tokens" if tokens else "")] += 1
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
          outcomes[error.details() or ""] += 1
        await asyncio.sleep(0.002)

  options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 100))
  channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(NUM_CHANNELS)]
  stubs = [pb_grpc.GenerationServiceStub(channel) for channel in channels]
  callers = [asyncio.create_task(call(stubs[number % NUM_CHANNELS])) for number in range(NUM_CALLERS)]
  while outcomes["OK"] < 2 * NUM_CALLERS:
    await asyncio.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  await asyncio.gather(*callers)
  for channel in channels:
    await channel.close()
  return outcomes


@pytest.mark.catalogue("A1")
@pytest.mark.parametrize("front_ends", [0, 2])
@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.long)])
def test_calls_that_meet_the_end_are_served_or_told(tmp_path, front_ends, count):
  for _ in range(count):
    for name in ("port", "http_port"):
      (tmp_path / name).unlink(missing_ok=True)
    with serving(tmp_path, front_ends, "--fake_step_ms=1", "--max_num_seqs=64", "--max_queued_requests=512") as server:
      outcomes = asyncio.run(crowd(server.port, server.process))
      code, said = server.end()
    assert set(outcomes) == {"OK", "UNAVAILABLE"}, outcomes
    assert code == 0 and "0 KV blocks in use" in said and "Traceback" not in said, said
    assert "accept" not in said, said


@pytest.mark.parametrize("error", [cygrpc._ServerStoppedError, asyncio.CancelledError])
def test_a_call_whose_message_is_read_when_the_loop_ends_is_no_error(error):
  class Context:
    async def read(self):
      try:
        await asyncio.Event().wait()
      except asyncio.CancelledError:
        raise error from None

  reported = []

  async def serve():
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    call = asyncio.ensure_future(call_interceptor._read(Context()))
    await asyncio.sleep(0.01)
    assert not call.done()

  asyncio.run(serve())
  assert reported == []
