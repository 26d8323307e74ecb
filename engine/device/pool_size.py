"""How many blocks the KV pool has, and so the longest sequence where nobody chose one. Allocates and measures nothing.

A length that the user chose is kept or refused. The model's own length is only a wish: it is lowered to what the pool
holds, with a reason for whoever starts the server.
"""

import dataclasses

from engine.errors import ConfigError

# The shortest length that a model's own is lowered to; below it, Sluice refuses to start.
_LEAST_LENGTH = 512
# On a CPU every page of the pool is written at start, and other programs use the same memory: so the default takes at
# most half of what is free, and no more than the largest of these, one full sequence, and half of what weights take.
CPU_KV_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class PoolSize:
  """A pool that can serve.

  Attributes:
    num_blocks: without the padding block.
    max_model_len: tokens.
    reason: why max_model_len is below what was wished for; "" where it is not.
  """

  num_blocks: int
  max_model_len: int
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class PoolSizer:
  """All that decides on a pool but the memory for it.

  Attributes:
    block_bytes: of one block (kv_cache.bytes_per_block).
    block_size: tokens a block.
    longest: the chosen length in tokens, or the longest that model and kernels allow.
    is_chosen: the user chose `longest`.
    max_num_seqs: sequences running at once.
    shares_prefixes: blocks of ended requests are of use.
  """

  block_bytes: int
  block_size: int
  longest: int
  is_chosen: bool
  max_num_seqs: int
  shares_prefixes: bool

  @property
  def least_length(self) -> int:
    """The shortest max_model_len that will do, in tokens."""
    return self.longest if self.is_chosen else min(self.longest, _LEAST_LENGTH)

  def bytes_for(self, tokens: int) -> int:
    """Of the smallest pool that holds one sequence of so many tokens, the padding block included."""
    return (self._blocks_for(tokens) + 1) * self.block_bytes

  def cpu_bytes(self, left: int, weights: int) -> int:
    """Memory for KV where nobody chose it and host and device share theirs.

    Args:
      left: free bytes, after weights and step.
      weights: bytes.
    """
    useful = max(CPU_KV_BYTES, self.bytes_for(self.longest), weights // 2)
    return max(min(useful, left // 2), self.bytes_for(self.least_length))

  def size_by_memory(self, available: int, source: str) -> PoolSize:
    """As many blocks as the memory holds and can be of use.

    Args:
      available: bytes for KV, on all devices together.
      source: what they are, for messages: a flag, or what left them.

    Raises:
      ConfigError: it does not hold a sequence of `least_length`.
    """
    fits = available // self.block_bytes - 1
    needed = self._blocks_for(self.least_length)
    if fits < needed:
      raise ConfigError(
        f"{_mib(available)} ({source}) hold {max(fits, 0)} KV blocks, but one sequence of {self.least_length} tokens "
        f"needs {needed} ({_mib(self.bytes_for(self.least_length))}); raise --kv_cache_mb, or lower --max_model_len"
      )
    size = self.size_by_blocks(fits, f"{_mib(available)} ({source}) hold")
    # Twice what can run at once: the rest keeps prefixes of what ran before.
    most_useful = self.max_num_seqs * self._blocks_for(size.max_model_len) * (2 if self.shares_prefixes else 1)
    return dataclasses.replace(size, num_blocks=min(fits, most_useful))

  def size_by_blocks(self, num_blocks: int, source: str) -> PoolSize:
    """The pool of just so many blocks; source: who holds them, with the verb, for the reason.

    Raises:
      ConfigError: they do not hold a sequence of the chosen length.
    """
    needed = self._blocks_for(self.longest)
    if num_blocks >= needed:
      return PoolSize(num_blocks, self.longest)
    if self.is_chosen:
      raise ConfigError(
        f"max_model_len={self.longest} needs {needed} blocks of {self.block_size}, and {source} {num_blocks}: "
        f"lower --max_model_len to {num_blocks * self.block_size}, or raise --num_blocks"
      )
    return PoolSize(num_blocks, num_blocks * self.block_size, f"{source} {num_blocks} KV blocks of {self.block_size}")

  def _blocks_for(self, tokens: int) -> int:
    return -(-tokens // self.block_size)


def _mib(size: int) -> str:
  return f"{size / 2**20:.0f} MiB"
