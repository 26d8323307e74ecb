"""The engine of a decode server: it takes prefix blocks that another server computed into its pool.

Blocks arrive in the prefix cache, so a request finds them like any cached prefix. The scheduler knows nothing of
transfers, and whatever does not arrive is computed. One piece is written between two steps, which bounds the delay of
running requests.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
import errno
import os

import jax
import numpy as np

from engine.batch import Runner
from engine.device.block_transfer import PIECE_BLOCKS, BlockWriter, Piece, write_program
from engine.engine import Clock, Emit, Engine, StepInFlight
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from extensions.prefill_decode.identity import describe_identity
from extensions.prefill_decode.pieces import PieceLayout
from extensions.prefill_decode.prefix_holds import PrefixHold, PrefixHolds
from extensions.prefill_decode.runner_check import check_runner


class DecodeEngine(Engine):
  """An Engine whose prefix cache other threads can fill.

  Attributes:
    identity: see `describe_identity`.
    layout: of a piece.
  """

  def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit):
    """Compiles the program that writes blocks, and runs it once. Raises ConfigError for a device without KV blocks."""
    super().__init__(scheduler, runner, clock, emit)
    self._model_runner = check_runner(runner)
    spec = self._model_runner.spec
    write = write_program(spec)
    piece = write.arguments[2]
    self.identity, self.layout = describe_identity(self._model_runner), PieceLayout(piece)
    self._writer = BlockWriter(spec, write.compile())
    empty = self.layout.from_bytes(np.zeros(self.layout.num_bytes, np.uint8))
    self._model_runner.kv = self._writer.write_piece(self._model_runner.kv, (), empty)
    jax.block_until_ready(self._model_runner.kv)
    self._holds = PrefixHolds(self.config, scheduler.pool)
    self._awaited: list[tuple[Request, PrefixHold, int]] = []  # see `release_hold`
    self._work: deque[Callable[[], None]] = deque()  # run between steps, one a turn

  # Any thread.

  def hold_prefix(self, request: Request, least_blocks: int) -> Future[PrefixHold | int]:
    """Reserves blocks for a prompt's prefix.

    Args:
      request: not yet submitted.
      least_blocks: hold nothing if fewer blocks are missing.

    Returns:
      The hold; or, without one, the number of blocks missing from the cache.
    """

    def hold() -> PrefixHold | int:
      missing = self._holds.count_missing(request)
      held = None
      if missing >= least_blocks:
        held = self._holds.hold_prefix(request, self._scheduler.num_running)
      return missing if held is None else held

    return self._between_steps(hold)

  def write_piece(self, hold: PrefixHold, number: int, piece: Piece) -> Future[bool]:
    """Writes a verified piece into a hold and publishes its blocks; False if the hold was given up.

    Args:
      hold: from `hold_prefix`.
      number: of the piece, among the blocks that were not cached. Pieces come in order.
      piece: from `PieceLayout.from_bytes`.
    """
    start = hold.num_cached + number * PIECE_BLOCKS
    stop = min(start + PIECE_BLOCKS, len(hold.blocks))

    def write() -> bool:
      if hold.is_released:
        return False
      runner = self._model_runner
      runner.kv = self._writer.write_piece(runner.kv, hold.blocks[start:stop], piece)
      self._holds.publish_blocks(hold, start, stop)
      return True

    return self._between_steps(write)

  def release_hold(self, hold: PrefixHold) -> None:
    """Releases a hold, of which nothing more will be written."""
    self._between_steps(lambda: self._holds.release_hold(hold))

  def release_with(self, request: Request, hold: PrefixHold, num_cached_tokens: int) -> None:
    """Releases a hold when a request has been admitted or has ended.

    Args:
      request: submitted after this call.
      hold: of its prefix.
      num_cached_tokens: tokens of its prompt that a prefix cache had; those that a transfer brought are not counted.
    """
    self._between_steps(lambda: self._awaited.append((request, hold, num_cached_tokens)))

  def start_trace(self, path: str) -> None:
    """Refuses: a replay would not have the blocks that arrive. Raises OSError."""
    reason = "a step trace lacks the blocks of other servers; serve without --role=decode"
    raise OSError(errno.EOPNOTSUPP, reason, os.fspath(path))

  def _between_steps[T](self, work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
      try:
        future.set_result(work())
      except Exception as error:
        future.set_exception(error)
        raise

    self._work.append(run)
    self.wake()
    return future

  # The engine thread.

  def step(self) -> bool:
    """See Engine.step; also does one piece of work of other threads."""
    if self.dead is not None:
      return False
    had_work = bool(self._work)
    try:
      if had_work:
        self._work.popleft()()
      if len(self._holds):
        self._give_up_holds()
    except Exception as error:
      self.fail(error)
      return True
    return super().step() or had_work

  def _launch(self, now: float) -> StepInFlight | None:
    launched = super()._launch(now)
    if self._awaited:
      self._settle_admitted()
    return launched

  def _settle_admitted(self) -> None:
    """Releases holds whose request was admitted or has ended."""
    waiting = []
    for request, hold, num_cached_tokens in self._awaited:
      if request.status is RequestStatus.WAITING:
        waiting.append((request, hold, num_cached_tokens))
        continue
      self._holds.release_hold(hold)
      request.num_prompt_cached_tokens = min(request.num_prompt_cached_tokens, num_cached_tokens)
    self._awaited = waiting

  def _give_up_holds(self) -> None:
    """Releases all holds if requests need their blocks."""
    scheduler = self._scheduler
    # A step takes at most one new block for each row that decodes. If nothing runs, the first in the queue must fit.
    is_stuck = not scheduler.num_running and scheduler.num_waiting > 0
    if scheduler.pool.num_free < scheduler.num_running or is_stuck:
      self._holds.release_all()
