"""Programs that copy KV blocks out of a pool and into one, in pieces. May not choose blocks, or keep copies.

Blocks move in pieces of PIECE_BLOCKS, so two compiled programs suffice. A reader fills up a piece with the padding
block, and a writer drops the padding. A piece has one array a layer, in the layout of the pool it is written to.

Digests of bytes are XXH3 of 64 bits (https://xxhash.com): they find accidents, not forgeries, at the speed of a copy.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from engine.batch import PIECE_BLOCKS
from engine.device import kv_cache
from engine.device.programs import Program, ProgramSpec, step_options

_CHUNK = 1 << 16  # bytes that stay in a core's cache between their copy and their digest

# One array a layer: [PIECE_BLOCKS, *shape of a block].
Piece = tuple[jax.Array, ...]


def piece_of(spec: ProgramSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns an abstract piece of the spec's pool, with the shardings of its buffers."""
  return tuple(
    jax.ShapeDtypeStruct((PIECE_BLOCKS, *buffer.shape[1:]), buffer.dtype, sharding=buffer.sharding)
    for buffer in spec.kv
  )


def piece_bytes(spec: ProgramSpec) -> int:
  """Returns the bytes of a piece over all layers and devices."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in piece_of(spec))


def _read_piece(kv: kv_cache.Buffers, block_ids: jax.Array) -> Piece:
  return tuple(buffer[block_ids] for buffer in kv)


def _write_piece(kv: kv_cache.Buffers, block_ids: jax.Array, piece: Piece) -> kv_cache.Buffers:
  return tuple(
    buffer.at[block_ids].set(blocks, mode="drop", unique_indices=True) for buffer, blocks in zip(kv, piece, strict=True)
  )


def read_program(spec: ProgramSpec) -> Program:
  """Returns the program that copies a piece out of the pool: (kv, int32[PIECE_BLOCKS]) -> piece."""
  ids = spec.whole((PIECE_BLOCKS,), jnp.int32)
  return Program("read-blocks", _read_piece, (spec.kv, ids), piece_of(spec), (), step_options(spec))


def write_program(spec: ProgramSpec) -> Program:
  """Returns the program that sets blocks of the pool (donated): (kv, int32[PIECE_BLOCKS], piece) -> kv.

  Ids past the pool are dropped. All ids must differ.
  """
  ids = spec.whole((PIECE_BLOCKS,), jnp.int32)
  return Program("write-blocks", _write_piece, (spec.kv, ids, piece_of(spec)), spec.kv, (0,), step_options(spec))


class BlockReader:
  """Copies blocks out of a pool."""

  def __init__(self, read: jax.stages.Compiled):
    """Args: read: the executable of read_program."""
    self._read = read

  def read_blocks(self, kv: kv_cache.Buffers, block_ids: Sequence[int]) -> Iterator[Piece]:
    """Yields copies of these blocks, a piece at a time, as launched steps leave them. Does not wait for the device."""
    for start in range(0, len(block_ids), PIECE_BLOCKS):
      ids = np.zeros(PIECE_BLOCKS, np.int32)
      part = block_ids[start : start + PIECE_BLOCKS]
      ids[: len(part)] = part
      yield self._read(kv, ids)


class BlockWriter:
  """Writes blocks into a pool."""

  def __init__(self, spec: ProgramSpec, write: jax.stages.Compiled):
    """Args: spec: of the pool. write: the executable of write_program."""
    self._write = write
    self._past_the_pool = spec.kv[0].shape[0]

  def write_piece(self, kv: kv_cache.Buffers, block_ids: Sequence[int], piece: Piece) -> kv_cache.Buffers:
    """Returns the pool (donated), with the piece's first blocks written to `block_ids`, at most PIECE_BLOCKS."""
    ids = self._past_the_pool + np.arange(PIECE_BLOCKS, dtype=np.int32)  # the ids must differ
    ids[: len(block_ids)] = block_ids
    return self._write(kv, ids, piece)


def copy_bytes(source: memoryview, target: memoryview, hasher: xxhash.xxh3_64) -> None:
  """Copies bytes between buffers of equal size and adds them to `hasher`."""
  for start in range(0, len(source), _CHUNK):
    part = target[start : start + _CHUNK]
    part[:] = source[start : start + _CHUNK]
    hasher.update(part)
