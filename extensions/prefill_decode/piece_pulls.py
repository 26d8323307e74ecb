"""A decode server's side of `--kv_transport=jax`: pulls pieces from one peer, and gives up those that do not end.

A pull ends by itself only if it works, or if its connection breaks. So each has a deadline here. A pull that misses it
is left behind: its connection is closed, and its memory may be held until the peer dies. Hence few pulls run at once,
and a peer with several such pulls is not used this way again.
"""

import asyncio
import concurrent.futures
import logging
import time
from typing import Any

from engine.batch import Runner
from engine.device.block_transfer import Piece, piece_of
from engine.engine import Clock, Emit
from engine.scheduler import Scheduler
from extensions.prefill_decode.decode_engine import DecodeEngine
from extensions.prefill_decode.jax_transport import SenderAddress, TransferEnd
from extensions.prefill_decode.pieces import check_digest
from extensions.prefill_decode.transfer_counts import TransferCounts

_log = logging.getLogger(__name__)
_LONGEST_PULL_S = 4.0
_LONGEST_CONNECT_S = 1.0
_MOST_PULLS = 2  # of a peer at once
_MOST_HUNG = 3
_POLL_S = (0.0005, 0.005)  # shortest and longest time between two looks at a pull, which are a tenth of its time


class PullingEngine(DecodeEngine):
  """A DecodeEngine with an end of JAX's transfers. Attributes: transfers: that end."""

  def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit):
    super().__init__(scheduler, runner, clock, emit)
    self.transfers = TransferEnd(piece_of(self._model_runner.spec))


class PullFailed(Exception):
  """A piece did not come. Attributes: is_late: by its deadline; otherwise the connection broke."""

  def __init__(self, text: str, is_late: bool):
    super().__init__(text)
    self.is_late = is_late


class PiecePuller:
  """Pulls pieces from one peer. Belongs to the event loop, and blocks nothing but `thread`.

  Attributes:
    is_given_up: whether too many pulls of this peer did not end.
  """

  def __init__(self, transfers: TransferEnd, name: str, thread: concurrent.futures.Executor, counts: TransferCounts):
    """Args:
    transfers: its server runs.
    name: of the peer, for the log.
    thread: checks digests.
    counts: counts pulls that do not end.
    """
    self._transfers, self._name, self._thread, self._counts = transfers, name, thread, counts
    self.is_given_up = False
    self._num_hung = 0
    self._turns = asyncio.Semaphore(_MOST_PULLS)
    self._pulls: set[asyncio.Task[Piece]] = set()
    self._sender: SenderAddress | None = None
    self._connection: Any = None

  async def pull_piece(self, sender: SenderAddress, uuid: int, digest: int) -> Piece:
    """Returns a piece on the device with the right digest.

    Args:
      sender: the peer's addresses.
      uuid: of the offer.
      digest: of the piece.

    Raises:
      PullFailed: it does not come.
      CorruptPiece: the digest differs.
    """
    await self._turns.acquire()
    # A pull cannot be cancelled, so it has a task that outlives its request.
    pull = asyncio.create_task(self._run_pull(sender, uuid, digest))
    self._pulls.add(pull)
    pull.add_done_callback(self._end_pull)
    return await asyncio.shield(pull)

  def _end_pull(self, pull: asyncio.Task[Piece]) -> None:
    self._turns.release()
    self._pulls.discard(pull)
    if not pull.cancelled():
      pull.exception()  # so that nobody reports it as never seen

  async def _run_pull(self, sender: SenderAddress, uuid: int, digest: int) -> Piece:
    if self.is_given_up:
      raise PullFailed("earlier pulls did not end", is_late=True)
    connection = await self._connect(sender)
    piece = tuple(connection.pull(uuid, list(self._transfers.leaves)))
    started = time.monotonic()
    while not all(leaf.is_ready() for leaf in piece):
      elapsed = time.monotonic() - started
      if elapsed > _LONGEST_PULL_S:
        self._leave_hung(connection)
        raise PullFailed(f"a pull did not end within {_LONGEST_PULL_S:g} s", is_late=True)
      await asyncio.sleep(min(max(elapsed / 10, _POLL_S[0]), _POLL_S[1]))
    try:
      found = await asyncio.get_running_loop().run_in_executor(self._thread, self._transfers.digest_piece, piece)
    except RuntimeError as error:  # of JAX; the arrays have the connection's failure
      self._drop(connection)
      raise PullFailed(" ".join(str(error).split()), is_late=False) from None
    check_digest(found, digest)
    return piece

  async def _connect(self, sender: SenderAddress) -> Any:
    """Returns the connection to a sender. Raises PullFailed if its data port cannot be reached.

    JAX aborts the process if it cannot connect to that port, so this connects first, in the same way.
    """
    if self._connection is None or self._sender != sender:
      host, _, port = sender.data.rpartition(":")
      try:
        async with asyncio.timeout(_LONGEST_CONNECT_S):
          _, writer = await asyncio.open_connection(host.strip("[]"), int(port), local_addr=(self._transfers.host, 0))
        writer.close()
      except OSError as error:  # TimeoutError, too
        reason = error.strerror or f"no answer within {_LONGEST_CONNECT_S:g} s"
        text = f"{sender.data} cannot be reached from {self._transfers.host}: {reason}"
        raise PullFailed(text, is_late=False) from None
      if self._connection is None or self._sender != sender:  # another pull may have been faster
        self._drop(self._connection)
        self._connection, self._sender = self._transfers.server.connect(sender.control), sender
    return self._connection

  def _leave_hung(self, connection: Any) -> None:
    self._drop(connection)
    self._counts.num_hung += 1
    self._num_hung += 1
    if self._num_hung == _MOST_HUNG:
      self.is_given_up = True
      _log.warning(
        "prefill server %s: %d pulls over JAX's transfer server did not end; until a restart its pieces come over gRPC "
        "or shared memory",
        self._name,
        _MOST_HUNG,
      )

  def _drop(self, connection: Any) -> None:
    """Closes a connection, which fails the pulls on it; the next one opens another."""
    if connection is not None:
      connection._poison_connection()  # nothing public closes it
    if connection is self._connection:
      self._connection = None
