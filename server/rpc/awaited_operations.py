"""Lets each grpc.aio operation finish before its task is cancelled, which prevents a leak. Knows no RPC.

grpc.aio frees an operation (a read, a write, a status) only if the task that awaits it continues. If the operation
fails, or the task is cancelled while it waits, grpcio 1.85 leaks 80 to 1,000 bytes, about 70 for each call that a
client cancels (https://github.com/grpc/grpc/issues/43360). Here the task continues when Core has finished the
operation, and receives the cancellation at its next await. Core finishes the operations of a call that has ended at
once. A read of a live call may never finish, so only a task of its own should wait for it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from grpc._cython import cygrpc

# For operations that Core does not finish: the call is live and the event loop ends, as after a crash.
_PATIENCE_S = 1.0
# Cancellations that a task may delay if it awaits nothing but operations; the next one cancels the operation too.
_PATIENCE = 16


def awaited_to_the_end[T](new_server: Callable[[], T]) -> T:
  """Returns the grpc.aio server that `new_server` makes on the running loop; other versions of grpcio may leak."""
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
  """Delegates to the real event loop, except for the futures of calls. The server's own futures are the loop's."""

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
  """A future that only gRPC's Core completes. The task that makes it awaits it."""

  __slots__ = ("_task",)

  def __init__(self, *, loop: asyncio.AbstractEventLoop):
    super().__init__(loop=loop)
    task = asyncio.current_task()
    assert task is not None, "an operation belongs to a call, and a call has a task"
    self._task = task

  def cancel(self, msg: Any = None) -> bool:
    """Cancels the task when this operation has finished, within a limit of time."""
    if self._task.cancelling() > _PATIENCE:
      return super().cancel(msg)
    self.add_done_callback(self._cancel_task)
    self.get_loop().call_later(_PATIENCE_S, super().cancel, msg)
    return True

  def set_exception(self, exception: type | BaseException, /) -> None:
    """Ends a failed operation: the call is over. The task continues, and is cancelled at its next await."""
    if isinstance(exception, cygrpc.ExecuteBatchError):
      self.add_done_callback(self._cancel_task)
      self.set_result(None)
    else:
      super().set_exception(exception)

  def _cancel_task(self, _: asyncio.Future[None]) -> None:
    """Runs after the task has continued, since the task's own callback was added first."""
    self._task.cancel()
