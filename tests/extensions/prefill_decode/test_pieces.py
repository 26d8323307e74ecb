"""Pieces in shared memory: what is read is what was written, or an error."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.errors import Overloaded
from extensions.prefill_decode.pieces import CorruptPiece, PeerMemory, PieceLayout, PieceMemory

_SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _piece() -> tuple[jax.Array, ...]:
  """Two layers of different shape and type, 300 kB: more than a part of a copy."""
  values = np.random.default_rng(1).standard_normal(60_000).astype(np.float32)
  return (
    jax.device_put(values.reshape(16, 3750), _SHARDING),
    jax.device_put(values.reshape(16, 2, 1875).astype(jnp.bfloat16), _SHARDING),
  )


def _layout() -> PieceLayout:
  return PieceLayout([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_SHARDING) for leaf in _piece()])


def test_a_piece_survives_the_way():
  layout, piece = _layout(), _piece()
  assert layout.num_bytes == 60_000 * 6
  memory = PieceMemory(layout.num_bytes, 3 << 20)
  first, second = memory.take_slots(2)
  digest = layout.to_bytes(piece, memory.slot(second))
  peer = PeerMemory(os.getpid(), memory.fd, memory.nonce, memory.size)
  arrived = layout.from_bytes(peer.read_piece(memory.offset(second), digest, layout.num_bytes))
  for sent, found in zip(piece, arrived, strict=True):
    assert found.dtype == sent.dtype and np.array_equal(np.asarray(found), np.asarray(sent))
  for number in (0, 123_456, layout.num_bytes - 1):
    memory.slot(second)[number] ^= 4
    with pytest.raises(CorruptPiece, match="arrived with the digest"):
      peer.read_piece(memory.offset(second), digest, layout.num_bytes)
    memory.slot(second)[number] ^= 4
  with pytest.raises(CorruptPiece, match="outside the shared memory"):
    peer.read_piece(memory.size, digest, layout.num_bytes)
  with pytest.raises(CorruptPiece, match="arrived with the digest"):
    peer.read_piece(memory.offset(first), digest, layout.num_bytes)


def test_slots_are_limited():
  memory = PieceMemory(5000, 40_000)  # of two pages each
  assert memory.num_slots == 4
  slots = memory.take_slots(3)
  with pytest.raises(Overloaded, match="2 pieces of KV do not fit beside the leases of others, 1 of 4 are free; raise"):
    memory.take_slots(2)
  memory.give_back(slots)
  assert memory.num_free == 4 and len(set(memory.take_slots(4))) == 4


def test_memory_of_another_process_is_refused(tmp_path):
  memory = PieceMemory(5000, 40_000)
  with pytest.raises(CorruptPiece, match="belongs to another server"):
    PeerMemory(os.getpid(), memory.fd, b"x" * 32, memory.size)
  with pytest.raises(CorruptPiece, match="is not that of a prefill server"):
    PeerMemory(os.getpid(), memory.fd, memory.nonce, memory.size + 4096)
  with pytest.raises(CorruptPiece, match="cannot be opened: No such file"):
    PeerMemory(os.getpid(), 1 << 20, memory.nonce, memory.size)
  with open(tmp_path / "file", "wb+") as file:  # could shrink under its reader
    file.truncate(memory.size)
    with pytest.raises(CorruptPiece, match="is not that of a prefill server|cannot be read"):
      PeerMemory(os.getpid(), file.fileno(), memory.nonce, memory.size)
