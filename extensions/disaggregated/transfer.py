"""Copies KV blocks from one runner's pool to another's, on other devices. The engine chooses the blocks.

A program of the source copies a piece of blocks out of its pool, JAX copies the piece from device to device, and a
program of the target writes it into its pool (engine.device.block_transfer).
"""

from collections.abc import Sequence
import dataclasses

import jax

from engine.device import kv_cache
from engine.device.block_transfer import (
  PIECE_BLOCKS,
  BlockReader,
  BlockWriter,
  Piece,
  read_program,
  write_program,
)
from engine.device.programs import ProgramSpec
from engine.device.runner import ModelRunner
from extensions.disaggregated.engine import ExportBlocks


@dataclasses.dataclass(frozen=True)
class Exported:
  """Blocks in transfer, on the target's devices. The last piece is padded."""

  num_blocks: int
  pieces: tuple[Piece, ...]


class BlockTransfer:
  """Copies blocks from the pool of `source` to that of `target`. Blocks must have one shape and layout."""

  def __init__(self, source: ProgramSpec, target: ProgramSpec):
    """Compiles both programs."""
    self._target = tuple(buffer.sharding for buffer in target.kv)
    self._reader = BlockReader(read_program(source).compile())
    self._writer = BlockWriter(target, write_program(target).compile())

  def read(self, kv: kv_cache.Buffers, block_ids: Sequence[int]) -> Exported:
    """Returns copies of these blocks of the source's pool, in transfer to the target's devices. Returns at once."""
    pieces = [jax.device_put(piece, self._target) for piece in self._reader.read_blocks(kv, block_ids)]
    return Exported(len(block_ids), tuple(pieces))

  def write(self, kv: kv_cache.Buffers, block_ids: Sequence[int], exported: Exported) -> kv_cache.Buffers:
    """Returns the target's pool (donated), with the exported blocks written to its blocks `block_ids`."""
    wanted = block_ids[: exported.num_blocks]
    for number, piece in enumerate(exported.pieces):
      kv = self._writer.write_piece(kv, wanted[number * PIECE_BLOCKS : (number + 1) * PIECE_BLOCKS], piece)
    return kv


def connect_runners(source: ModelRunner, target: ModelRunner) -> ExportBlocks:
  """Lets KV blocks move: `target` then admits requests with blocks that the returned function exports from `source`.

  Compiles the programs, so call it before seal().
  """
  transfer = BlockTransfer(source.spec, target.spec)

  def export_blocks(block_ids: Sequence[int]) -> Exported:
    return transfer.read(source.kv, block_ids)

  target.import_blocks = transfer.write
  # Copies once both ways, so that the first request does not pay for a first copy. No request uses block 0.
  target.kv = transfer.write(target.kv, (0,), export_blocks((0,)))
  return export_blocks
