"""What grpc.aio awaits, awaited to its end: it frees nothing of an operation whose task did not go on after it."""

import asyncio
from collections.abc import Callable
import threading

import grpc
from grpc._cython import cygrpc
import pytest

from server.rpc import awaited_operations
from server.rpc.awaited_operations import Operation, awaited_to_the_end

_ENDINGS: dict[str, Callable[[Operation], None]] = {
  "done": lambda operation: operation.set_result(None),
  "failed": lambda operation: operation.set_exception(cygrpc.ExecuteBatchError("of Core")),
}


async def _settle() -> None:
  for _ in range(5):
    await asyncio.sleep(0)


@pytest.mark.parametrize("ending", _ENDINGS)
@pytest.mark.parametrize("when", ["never", "before", "at once", "after"])
def test_a_task_goes_on_after_an_operation_and_is_cancelled_then(ending, when):
  async def run() -> None:
    told: list[str] = []
    operations: list[Operation] = []

    async def call() -> None:
      operations.append(Operation(loop=asyncio.get_running_loop()))
      await operations[0]
      told.append("freed")
      try:
        await asyncio.sleep(60)
      except asyncio.CancelledError:
        told.append("cancelled")
        raise

    task = asyncio.ensure_future(call())
    await _settle()
    if when == "before":
      task.cancel()
      await _settle()
      assert told == [] and not task.done()
    if when == "at once":  # Core's word and the client's, read together: the task has not run in between
      _ENDINGS[ending](operations[0])
      task.cancel()
    else:
      _ENDINGS[ending](operations[0])
    await _settle()
    if when == "after":
      task.cancel()
      await _settle()
    if when == "never" and ending == "done":
      assert told == ["freed"] and not task.done()
      task.cancel()
      await _settle()
    assert told == ["freed", "cancelled"] and task.cancelled()

  asyncio.run(run())


def test_what_is_no_failure_of_an_operation_is_raised():
  async def run() -> None:
    operation = Operation(loop=asyncio.get_running_loop())
    operation.set_exception(RuntimeError("the server has stopped"))
    with pytest.raises(RuntimeError, match="has stopped"):
      await operation

  asyncio.run(run())


@pytest.mark.parametrize("pause", [True, False])
def test_a_handler_that_writes_for_ever_ends_with_its_call(pause, monkeypatch):
  """Also one that awaits nothing but operations, each of which fails."""
  ended = threading.Semaphore(0)
  made: list[Operation] = []

  class Counted(Operation):
    def __init__(self, *, loop: asyncio.AbstractEventLoop):
      super().__init__(loop=loop)
      made.append(self)

  monkeypatch.setattr(awaited_operations, "Operation", Counted)

  async def write(_: object, context: grpc.aio.ServicerContext) -> None:
    try:
      while True:
        await context.write(bytes(60_000))
        if pause:
          await asyncio.sleep(0)
    finally:
      ended.release()

  def cancel_many(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
      for _ in range(20):
        call = channel.stream_stream("/s.S/M")(iter([b""]))
        next(call)
        call.cancel()
        assert ended.acquire(timeout=20)

  async def run() -> None:
    server = awaited_to_the_end(lambda: grpc.aio.server())
    handler = grpc.stream_stream_rpc_method_handler(write)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s.S", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, cancel_many, f"127.0.0.1:{port}")
    await server.stop(None)

  asyncio.run(run())
  assert len(made) > 100 and all(operation.done() for operation in made)  # grpc.aio takes its futures from us
