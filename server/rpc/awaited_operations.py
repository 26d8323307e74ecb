"""What grpc.aio awaits: each operation of a call is awaited to its end. Knows no method and no server of ours.

grpc.aio frees what it has allocated for an operation (a read, a write, a status) only where the task that awaits it
goes on after it. Of one that failed, or whose task was cancelled meanwhile, 80 to 1,000 bytes stay for good: some 70
for each call that a client cancels (https://github.com/grpc/grpc/issues/43360, grpcio 1.85). Here such a task goes on
first, once Core has ended the operation, and is cancelled then, at what it awaits next. Core ends at once what belongs
to a call that is over; a read of one that is not may never end, so that no task but its own should wait for it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from grpc._cython import cygrpc

# Where Core does not end one: the call goes on, and it is the event loop that ends, as after a crash.
_PATIENCE_S = 1.0
# Cancellations of a task that awaits one operation after the other, and nothing else, before one is cancelled with it.
_PATIENCE = 16


def awaited_to_the_end[T](new_server: Callable[[], T]) -> T:
  """A server of grpc.aio, as `new_server` makes it, on the running loop; of another grpcio perhaps with the leak."""
  core: Any = cygrpc  # the stubs lack what follows
  get_loop = getattr(core, "get_working_loop", None)
  if get_loop is None:
    return new_server()
  loop = _Loop(get_loop())
  core.get_working_loop = lambda: loop
  try:
    return new_server()
  finally:
    core.get_working_loop = get_loop
    loop.is_serving = True


class _Loop:
  """The loop it stands for, but for the futures that it makes for calls. Those of the server itself are the loop's."""

  def __init__(self, loop: asyncio.AbstractEventLoop):
    self._loop = loop
    self.is_serving = False

  def __getattr__(self, name: str) -> Any:
    return getattr(self._loop, name)

  def __eq__(self, other: object) -> bool:
    return self._loop == other

  def __hash__(self) -> int:
    return hash(self._loop)

  def create_future(self) -> asyncio.Future[None]:
    return Operation(loop=self._loop) if self.is_serving else self._loop.create_future()


class Operation(asyncio.Future[None]):
  """Of gRPC's Core, which alone ends it. The task that makes it awaits it."""

  __slots__ = ("_task",)

  def __init__(self, *, loop: asyncio.AbstractEventLoop):
    super().__init__(loop=loop)
    task = asyncio.current_task()
    assert task is not None, "an operation belongs to a call, and a call has a task"
    self._task = task

  def cancel(self, msg: Any = None) -> bool:
    """Cancels the task once this has ended, if that is soon."""
    if self._task.cancelling() > _PATIENCE:
      return super().cancel(msg)
    self.add_done_callback(self._cancel_task)
    self.get_loop().call_later(_PATIENCE_S, super().cancel, msg)
    return True

  def set_exception(self, exception: type | BaseException, /) -> None:
    """Of a failed operation: the call is over. The task goes on, and is cancelled."""
    if isinstance(exception, cygrpc.ExecuteBatchError):
      self.add_done_callback(self._cancel_task)
      self.set_result(None)
    else:
      super().set_exception(exception)

  def _cancel_task(self, _: asyncio.Future[None]) -> None:
    """Called after the task has gone on, for its own callback was there first."""
    self._task.cancel()
