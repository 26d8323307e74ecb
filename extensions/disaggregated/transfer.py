"""Copies KV blocks from one runner's pool to another's, on other devices. The engine chooses the blocks.

Blocks are copied in pieces of a fixed size, so two compiled programs suffice. The source fills up a piece with the
padding block, and the target drops the padding. Between the two programs, JAX copies from device to device.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from engine.device import kv_cache
from engine.device.mesh import replicated
from engine.device.programs import ProgramSpec
from engine.device.runner import ModelRunner
from extensions.disaggregated.engine import ExportBlocks

_PIECE = 16  # blocks


@dataclasses.dataclass(frozen=True)
class Exported:
  """Blocks in transfer: _PIECE blocks a piece, one array a layer, on the target's devices. The last piece is padded."""

  num_blocks: int
  pieces: tuple[tuple[jax.Array, ...], ...]


def _read(kv: kv_cache.Buffers, block_ids: jax.Array) -> tuple[jax.Array, ...]:
  return tuple(buffer[block_ids] for buffer in kv)


def _write(kv: kv_cache.Buffers, block_ids: jax.Array, piece: tuple[jax.Array, ...]) -> kv_cache.Buffers:
  return tuple(
    buffer.at[block_ids].set(blocks, mode="drop", unique_indices=True) for buffer, blocks in zip(kv, piece, strict=True)
  )


class BlockTransfer:
  """Copies blocks from the pool of `source` to that of `target`. Blocks must have one shape and layout."""

  def __init__(self, source: ProgramSpec, target: ProgramSpec):
    """Compiles both programs."""
    self._target = tuple(buffer.sharding for buffer in target.kv)
    self._past_the_pool = target.kv[0].shape[0]
    pieces = tuple(
      jax.ShapeDtypeStruct((_PIECE, *buffer.shape[1:]), buffer.dtype, sharding=buffer.sharding) for buffer in target.kv
    )
    ids = functools.partial(jax.ShapeDtypeStruct, (_PIECE,), jnp.int32)
    shardings = tuple(buffer.sharding for buffer in source.kv)
    self._read = (
      jax.jit(_read, out_shardings=shardings).lower(source.kv, ids(sharding=replicated(source.mesh))).compile()
    )
    self._write = (
      jax.jit(_write, donate_argnums=0, out_shardings=self._target)
      .lower(target.kv, ids(sharding=replicated(target.mesh)), pieces)
      .compile()
    )

  def read(self, kv: kv_cache.Buffers, block_ids: Sequence[int]) -> Exported:
    """Returns copies of these blocks of the source's pool, in transfer to the target's devices. Returns at once."""
    pieces = []
    for start in range(0, len(block_ids), _PIECE):
      ids = np.zeros(_PIECE, np.int32)
      part = block_ids[start : start + _PIECE]
      ids[: len(part)] = part
      pieces.append(jax.device_put(self._read(kv, ids), self._target))
    return Exported(len(block_ids), tuple(pieces))

  def write(self, kv: kv_cache.Buffers, block_ids: Sequence[int], exported: Exported) -> kv_cache.Buffers:
    """Returns the target's pool (donated), with the exported blocks written to its blocks `block_ids`."""
    wanted = block_ids[: exported.num_blocks]
    for number, piece in enumerate(exported.pieces):
      ids = self._past_the_pool + np.arange(_PIECE, dtype=np.int32)  # out-of-range ids are dropped; the ids are unique
      part = wanted[number * _PIECE : (number + 1) * _PIECE]
      ids[: len(part)] = part
      kv = self._write(kv, ids, piece)
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
