"""Lays out pieces of KV blocks as bytes, in memory that two processes of one machine share. May not know requests.

A prefill server copies leased pieces into slots of one memfd. Its kernel object has no name and dies with its last
user, so a killed server leaves nothing behind. The file is sealed against shrinking, or a faulty writer could crash a
reader. A reader copies a piece out before it checks the digest, because the writer may use the slot again.
"""

from collections.abc import Sequence
import contextlib
import fcntl
import mmap
import os
import pathlib
import secrets

import jax
import numpy as np
import xxhash

from engine.device.block_transfer import Piece, copy_bytes
from engine.errors import Overloaded

_NONCE_BYTES = 32
_HEADER_BYTES = mmap.PAGESIZE
_RETRY_S = 1.0


class CorruptPiece(Exception):
  """A piece is not what its digest says, or its memory is gone."""


def machine_id() -> str:
  """Returns what two processes have in common that can open each other's files in /proc."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
  return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"


class PieceLayout:
  """Converts between a piece's arrays and its bytes: one layer after the other.

  Attributes:
    num_bytes: of a piece.
  """

  def __init__(self, piece: Sequence[jax.ShapeDtypeStruct]):
    """Args: piece: the abstract piece of `block_transfer.piece_of`."""
    self._leaves = tuple((leaf.shape, np.dtype(leaf.dtype), leaf.sharding) for leaf in piece)
    self._sizes = [leaf.size * np.dtype(leaf.dtype).itemsize for leaf in piece]
    self.num_bytes = sum(self._sizes)

  def to_bytes(self, piece: Piece, target: memoryview) -> int:
    """Writes a piece into `target` and returns the digest of its bytes. Waits for the device."""
    start, hasher = 0, xxhash.xxh3_64()
    for leaf, size in zip(piece, self._sizes, strict=True):
      source = memoryview(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)).cast("B")
      copy_bytes(source, target[start : start + size], hasher)
      start += size
    return hasher.intdigest()

  def from_bytes(self, data: np.ndarray) -> Piece:
    """Returns the arrays of a piece's bytes (uint8), on the device. Keeps `data`, which must not change any more."""
    arrays, start = [], 0
    for (shape, dtype, sharding), size in zip(self._leaves, self._sizes, strict=True):
      arrays.append(jax.device_put(data[start : start + size].view(dtype).reshape(shape), sharding))
      start += size
    return tuple(arrays)


class PieceMemory:
  """The shared memory of a prefill server, in slots of one piece. Belongs to one thread, but for `slot`.

  Attributes:
    nonce: its first bytes.
    num_slots, num_free: how many slots there are, and how many no lease holds.
    size: bytes of the file. The system gives memory to a slot at its first use.
  """

  def __init__(self, piece_bytes: int, max_bytes: int):
    """Args:
    piece_bytes: size of a slot.
    max_bytes: limit of all slots; at least one slot is made.
    """
    self._slot_bytes = -(-piece_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    self._piece_bytes = piece_bytes
    self.num_slots = max(1, max_bytes // self._slot_bytes)
    self.nonce = secrets.token_bytes(_NONCE_BYTES)
    self.size = _HEADER_BYTES + self.num_slots * self._slot_bytes
    self.fd = os.memfd_create("sluice-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(self.fd, self.size)
    fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    self._map = mmap.mmap(self.fd, self.size)
    self._map[:_NONCE_BYTES] = self.nonce
    self._free = list(range(self.num_slots - 1, -1, -1))  # the lowest is used first

  @property
  def num_free(self) -> int:
    return len(self._free)

  def take_slots(self, count: int) -> list[int]:
    """Takes slots. Raises Overloaded if too few are free."""
    if count > len(self._free):
      raise Overloaded(
        f"{count} pieces of KV do not fit beside the leases of others, {len(self._free)} of {self.num_slots} are free; "
        "raise --max_lease_mb of the prefill server",
        _RETRY_S,
      )
    return [self._free.pop() for _ in range(count)]

  def give_back(self, slots: Sequence[int]) -> None:
    """Frees slots."""
    self._free += reversed(slots)

  def offset(self, slot: int) -> int:
    """Returns where a slot begins in the file."""
    return _HEADER_BYTES + slot * self._slot_bytes

  def slot(self, slot: int) -> memoryview:
    """Returns the bytes of a slot's piece."""
    start = self.offset(slot)
    return memoryview(self._map)[start : start + self._piece_bytes]


class PeerMemory:
  """The shared memory of another process, opened for reading."""

  def __init__(self, pid: int, fd: int, nonce: bytes, size: int):
    """Raises CorruptPiece: that process has no such memory, or it could shrink."""
    self.nonce = nonce
    try:
      own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
      raise CorruptPiece(f"the shared memory of process {pid} cannot be opened: {error.strerror}") from None
    with contextlib.ExitStack() as stack:
      stack.callback(os.close, own)
      try:
        seals = fcntl.fcntl(own, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(own).st_size != size:
          raise CorruptPiece(f"the shared memory of process {pid} is not that of a prefill server")
        self._map = mmap.mmap(own, size, prot=mmap.PROT_READ)
      except (OSError, ValueError) as error:
        raise CorruptPiece(f"the shared memory of process {pid} cannot be read: {error}") from None
    if self._map[: len(nonce)] != nonce:
      raise CorruptPiece(f"the shared memory of process {pid} belongs to another server")

  def read_piece(self, offset: int, digest: int, num_bytes: int) -> np.ndarray:
    """Returns a copy of a piece's bytes. Raises CorruptPiece if the digest differs."""
    if not 0 <= offset <= len(self._map) - num_bytes:
      raise CorruptPiece(f"a piece at {offset} is outside the shared memory of {len(self._map)} bytes")
    data = np.empty(num_bytes, np.uint8)
    hasher = xxhash.xxh3_64()
    copy_bytes(memoryview(self._map)[offset : offset + num_bytes], memoryview(data), hasher)
    check_digest(hasher.intdigest(), digest)
    return data


def check_digest(found: int, wanted: int) -> None:
  """Raises CorruptPiece if the digests differ."""
  if found != wanted:
    raise CorruptPiece(f"a piece of KV arrived with the digest {found:016x} instead of {wanted:016x}")
