"""Sizes the KV pool and, with it, the default max_model_len. May not allocate or measure memory.

A length that the user sets is kept or rejected. The model's own length is only a default: the sizer lowers it to what
the pool holds, with a reason for the server's log.
"""

import dataclasses

from engine.errors import ConfigError

# The shortest default length; Sluice rejects a pool that cannot hold it.
_LEAST_LENGTH = 512
# On a CPU other programs share the memory, and the pool takes it as requests fill blocks. So the default is at most
# half of the free memory, and at most the largest of these bytes, one full sequence, and half of the weights.
CPU_KV_BYTES = 256 * 2**20
_SIGNIFICANT_BITS = 4  # of half of the free memory: a pool has at least 8/9 of it


@dataclasses.dataclass(frozen=True)
class PoolSize:
  """The size of a sufficient pool.

  Attributes:
    num_blocks: without the padding block.
    max_model_len: tokens.
    reason: why max_model_len is below the wanted length, or "".
  """

  num_blocks: int
  max_model_len: int
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class PoolSizer:
  """Everything that determines a pool except its memory.

  Attributes:
    block_bytes: bytes of one block (kv_cache.bytes_per_block).
    block_size: tokens a block.
    longest: the configured length in tokens, or the longest that model and kernels allow.
    is_chosen: the user set `longest`.
    max_num_seqs: sequences that run at once.
    shares_prefixes: the prefix cache can use blocks of finished requests.
  """

  block_bytes: int
  block_size: int
  longest: int
  is_chosen: bool
  max_num_seqs: int
  shares_prefixes: bool

  @property
  def least_length(self) -> int:
    """The shortest acceptable max_model_len, in tokens."""
    return self.longest if self.is_chosen else min(self.longest, _LEAST_LENGTH)

  def bytes_for(self, tokens: int) -> int:
    """Returns the bytes of the smallest pool for one sequence of `tokens`, including the padding block."""
    return (self._blocks_for(tokens) + 1) * self.block_bytes

  def cpu_bytes(self, left: int, weights: int) -> int:
    """Returns the default bytes for KV on a CPU, where host and device share memory.

    Where free memory limits them, they have few significant bits, so that most starts have a pool of the same size. The
    programs have that size in their shapes, and the compile cache finds only those of an equal one.

    Args:
      left: free bytes after weights and step.
      weights: bytes of the weights.
    """
    useful = max(CPU_KV_BYTES, self.bytes_for(self.longest), weights // 2)
    half = max(0, left // 2)
    rounding = max(0, half.bit_length() - _SIGNIFICANT_BITS)
    return max(min(useful, half >> rounding << rounding), self.bytes_for(self.least_length))

  def size_by_memory(self, available: int, source: str) -> PoolSize:
    """Returns a pool with as many blocks as fit the memory and are useful.

    Args:
      available: bytes for KV, on all devices together.
      source: their origin, for messages, such as a flag.

    Raises:
      ConfigError: the memory does not hold a sequence of `least_length`.
    """
    fits = available // self.block_bytes - 1
    needed = self._blocks_for(self.least_length)
    if fits < needed:
      raise ConfigError(
        f"{_mib(available)} ({source}) hold {max(fits, 0)} KV blocks, but one sequence of {self.least_length} tokens "
        f"needs {needed} ({_mib(self.bytes_for(self.least_length))}); raise --kv_cache_mb, or lower --max_model_len"
      )
    size = self.size_by_blocks(fits, f"{_mib(available)} ({source}) hold")
    # Twice the blocks that can run at once; the rest keeps prefixes of finished requests.
    most_useful = self.max_num_seqs * self._blocks_for(size.max_model_len) * (2 if self.shares_prefixes else 1)
    return dataclasses.replace(size, num_blocks=min(fits, most_useful))

  def size_by_blocks(self, num_blocks: int, source: str) -> PoolSize:
    """Returns a pool of `num_blocks`; source is the subject and verb of the reason, such as "--num_blocks gives".

    Raises:
      ConfigError: the blocks do not hold a sequence of the configured length.
    """
    needed = self._blocks_for(self.longest)
    if num_blocks >= needed:
      return PoolSize(num_blocks, self.longest)
    if self.is_chosen:
      raise ConfigError(
        f"max_model_len={self.longest} needs {needed} blocks of {self.block_size}, but {source} {num_blocks}; "
        f"lower --max_model_len to {num_blocks * self.block_size}, or raise --num_blocks"
      )
    return PoolSize(num_blocks, num_blocks * self.block_size, f"{source} {num_blocks} KV blocks of {self.block_size}")

  def _blocks_for(self, tokens: int) -> int:
    return -(-tokens // self.block_size)


def _mib(size: int) -> str:
  return f"{size / 2**20:.0f} MiB"
