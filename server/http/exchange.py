"""One request and its answer on the wire: a body with limits in, JSON or server-sent events out. Knows no endpoint."""

import asyncio
from collections.abc import Awaitable

from starlette.types import Receive


class ClientGone(Exception):
  """The client has closed its connection; there is nobody to answer."""


async def unless_gone[T](receive: Receive, work: Awaitable[T]) -> T:
  """Awaits `work`, which is cancelled when the client goes away. The request's body must have been read.

  Raises:
    ClientGone: it did.
  """
  working = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_wait_gone(receive))
  try:
    await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
      return working.result()
    raise ClientGone
  finally:
    for task in (working, gone):
      task.cancel()
    # Whatever `work` has to give back is given back before this returns.
    await asyncio.gather(working, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass
