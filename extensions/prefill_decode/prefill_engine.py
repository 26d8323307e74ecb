"""The engine of a prefill server: it copies the blocks of chosen requests out of the pool when they finish."""

from collections.abc import Sequence
from concurrent.futures import Future
import dataclasses

from engine.batch import Runner
from engine.device.block_transfer import BlockReader, Piece, read_program
from engine.engine import Clock, Emit, Engine
from engine.request import FinishReason, Request, TokenEvent
from engine.scheduler import Scheduler
from extensions.prefill_decode.identity import describe_identity
from extensions.prefill_decode.pieces import PieceLayout
from extensions.prefill_decode.runner_check import check_runner

_COMPUTED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclasses.dataclass
class _Export:
  """Blocks to copy at the end of a request: [first, stop) of its table."""

  first: int
  stop: int
  future: Future[list[Piece]]
  request: Request | None = None


class PrefillEngine(Engine):
  """An Engine whose requests leave copies of their blocks.

  Attributes:
    identity: see `describe_identity`.
    layout: of a piece.
  """

  def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit):
    """Compiles the program that reads blocks, and runs it once. Raises ConfigError for a device without KV blocks."""
    super().__init__(scheduler, runner, clock, emit)
    self._model_runner = check_runner(runner)
    spec = self._model_runner.spec
    read = read_program(spec)
    self.identity, self.layout = describe_identity(self._model_runner), PieceLayout(read.results)
    self._reader = BlockReader(read.compile())
    for _ in self._reader.read_blocks(self._model_runner.kv, (0,)):
      pass
    self._exports: dict[str, _Export] = {}

  def expect_export(self, request_id: str, first: int, stop: int) -> Future[list[Piece]]:
    """Makes a request, submitted afterwards, leave blocks [first, stop) of its table in the returned future.

    Call `forget_export` when the request has ended, however that was.
    """
    future: Future[list[Piece]] = Future()
    self._exports[request_id] = _Export(first, stop, future)
    return future

  def forget_export(self, request_id: str) -> None:
    """Frees the entry of a request. The future stays as it is."""
    self._exports.pop(request_id, None)

  def is_export(self, request_id: str) -> bool:
    """Returns whether `expect_export` has named this request."""
    return request_id in self._exports

  def submit_all(self, requests: Sequence[Request]) -> None:
    for request in requests:
      if (export := self._exports.get(request.id)) is not None:
        export.request = request
    super().submit_all(requests)

  def _send(self, events: list[TokenEvent]) -> None:
    for event in events:
      if event.finish_reason in _COMPUTED and (export := self._exports.get(event.request_id)) is not None:
        assert export.request is not None, "a request ends after its submission"
        # Before a later step can write to these blocks: the reads come first in the device's order.
        blocks = export.request.final_blocks[export.first : export.stop]
        export.future.set_result(list(self._reader.read_blocks(self._model_runner.kv, blocks)))
    super()._send(events)
