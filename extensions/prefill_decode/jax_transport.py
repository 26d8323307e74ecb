"""What both sides of `--kv_transport=jax` have: a transfer server of JAX, and digests of pieces on the device.

JAX's transfer server has no secret and no TLS, and a wrong frame aborts the process
(docs/decisions/host-and-overlap.md). So its port is for peers only. All arrays of a piece move under one random number.
"""

from collections.abc import Sequence
import math
import socket
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from engine.device.block_transfer import Piece
from engine.errors import ConfigError
from server.host_options import split_kv_address

_PARALLEL_COPIES = 8  # the most that the transfer server uses
_COPY_BYTES = (1 << 16, 1 << 24)  # least and most host memory of a copy
_ODD = 0x9E3779B97F4A7C15


def _mix(words: jax.Array) -> jax.Array:
  """Returns the finalizer of MurmurHash3 of each word: one-to-one, and every bit of the input reaches every other."""
  words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
  words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
  return words ^ (words >> 16)


def digest_leaf(leaf: jax.Array) -> jax.Array:
  """Returns the digest of one array of a piece, uint32[2]: two sums modulo 2**32 over its values' bits and places.

  A wrong value always changes both. Several wrong, moved or missing values go unnoticed once in 2**64 by chance. It is
  no protection from forgery, and NaNs and zeros compare by their bits.
  """
  bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
  place, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
  for axis in reversed(range(leaf.ndim)):
    place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride)
    stride *= leaf.shape[axis]
  first = _mix(bits ^ (place * np.uint32(0x9E3779B1)))
  second = first * np.uint32(0x2C1B3C6D)
  second ^= second >> 16
  return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


class SenderAddress(NamedTuple):
  """Where pieces can be pulled: IP:PORT of a transfer server, and of its connections for data."""

  control: str
  data: str


class TransferEnd:
  """This process's end of all transfers by JAX.

  Attributes:
    leaves: an abstract piece, with shardings.
    server: JAX's transfer server; None before `start_sender` or `start_receiver`.
    host: IP address from which a receiver pulls.
  """

  def __init__(self, leaves: Sequence[jax.ShapeDtypeStruct]):
    """Compiles the digests of the arrays, and runs them once. Args: leaves: of `block_transfer.piece_of`."""
    self.leaves = tuple(leaves)
    self.server: Any = None
    self.host = ""
    whole = NamedSharding(_sharding(self.leaves[0]).mesh, PartitionSpec())
    digest = jax.jit(digest_leaf, out_shardings=whole)
    programs = {leaf: digest.lower(leaf).compile() for leaf in dict.fromkeys(self.leaves)}  # most are alike
    self._digests = [programs[leaf] for leaf in self.leaves]
    self.digest_piece(tuple(jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding) for leaf in self.leaves))

  def start_sender(self, address: str) -> SenderAddress:
    """Starts a transfer server that peers may pull from. Raises ConfigError: the address cannot be used.

    Args:
      address: --kv_transport_address. Data moves through the next port, or through any for port 0.
    """
    host, port = split_kv_address(address)
    data = f"{host}:{port + 1 if port else _find_free_port(host)}"
    self._start_server(f"{host}:{port}", data)
    return SenderAddress(self.server.address(), data)

  def start_receiver(self, address: str) -> None:
    """Starts a transfer server that only pulls, from its own address. Raises ConfigError: that cannot be used.

    Args:
      address: --kv_transport_address. The port that a wrong frame could abort is open to this machine alone.
    """
    host, _ = split_kv_address(address)
    self.host = host.strip("[]")
    self._start_server("[::1]:0" if host.startswith("[") else "127.0.0.1:0", f"{host}:0")

  def _start_server(self, control: str, data: str) -> None:
    """Its host memory is eight copies of the largest array of a piece, at most 128 MiB."""
    from jax.experimental import transfer  # not a part of JAX that other servers depend on

    largest = max(math.prod(_sharding(leaf).shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in self.leaves)
    copy_bytes = min(max(_COPY_BYTES[0], -(-largest // 4096) * 4096), _COPY_BYTES[1])
    client = next(iter(_sharding(self.leaves[0]).device_set)).client
    try:  # one address for data on each server: a peer with more of them aborts this process
      self.server = transfer.start_transfer_server(client, control, [data], _PARALLEL_COPIES, copy_bytes)
    except (RuntimeError, ValueError) as error:
      raise ConfigError(
        f"kv_transport=jax: JAX's transfer server does not start at {control} and {data}: {error}; set another "
        "--kv_transport_address"
      ) from None

  def digest_piece(self, piece: Piece) -> int:
    """Returns the digest of a piece, 64 bits, which depends on the order of its arrays. Waits for the device."""
    total = 0
    for sums in [digest(leaf) for digest, leaf in zip(self._digests, piece, strict=True)]:
      first, second = np.asarray(sums).tolist()
      total = (total * _ODD + (first << 32 | second)) % (1 << 64)
    return total


def _sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
  assert isinstance(leaf.sharding, NamedSharding), "the spec's buffers are on a mesh"
  return leaf.sharding


def _find_free_port(host: str) -> int:
  with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as probe:
    probe.bind((host.strip("[]"), 0))
    return probe.getsockname()[1]
