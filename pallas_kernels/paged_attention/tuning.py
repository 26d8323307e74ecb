"""Tuned settings of the GPU kernels, by device, head size and block size. Kernels may hold no such constant.

The decode kernel's ring for heads of 128 was timed on an H100 (benchmarks/hopper). All other values follow from the
hardware's limits. A Hopper SM has 227 KiB of shared memory for its thread blocks and 65,536 registers. To saturate
memory, an SM needs 36 KB in flight (4.8 TB/s times 1 us over 132 SMs). A part of 256 tokens writes and reads back 6 %
of the bytes of its keys and values (8 KV heads of 128, groups of 4). On an H100, 8 rows of 1,024 took as long in parts
of 256 as in parts of 512.
"""

import dataclasses

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Tuning:
  """Settings that change speed but no result beyond rounding. Hashable.

  Attributes:
    split_tokens: least positions of the share of a pair of warpgroups, 64 or more: the plan cuts rows into shares.
    decode_stages: tiles of 64 keys and 64 values in the decode kernel's ring, 2 or more; 256 * head_dim bytes each.
    decode_ctas_per_sm: pairs of warpgroups of the decode kernel on an SM, 1 or 2; they share a thread block.
    prefill_stages: tiles of keys and of values in the prefill kernel's ring, 1 or more.
    prefill_tile_keys: keys a tile of the prefill kernel, 64 or 128.
    write_tokens: tokens of a thread block of the rotary and KV write kernel, a power of two from 4 to 64.
    lowering: how Pallas lowers the prefill kernel; pinned, because the default differs between versions.
  """

  split_tokens: int
  decode_stages: int
  decode_ctas_per_sm: int
  prefill_stages: int
  prefill_tile_keys: int
  write_tokens: int
  lowering: plgpu.LoweringSemantics = plgpu.LoweringSemantics.Warpgroup


# Streaming multiprocessors by device kind, for compilation without the device. The longest name that is a prefix of the
# kind applies; all others have the number of H100 SXM, H100 NVL, H200 and GH200.
_SMS = {"NVIDIA H100 PCIe": 114, "NVIDIA H800 PCIe": 114, "NVIDIA H20": 78, "NVIDIA H200": 132}
_MOST_COMMON_SMS = 132

# By JAX device kind, head size and block size; (None, head_dim, None) is the default of a head size.
_TABLE: dict[tuple[str | None, int, int | None], Tuning] = {
  (None, 64, None): Tuning(
    split_tokens=256,
    decode_stages=4,
    decode_ctas_per_sm=2,
    prefill_stages=4,
    prefill_tile_keys=128,
    write_tokens=8,
  ),
  (None, 128, None): Tuning(
    split_tokens=256,
    decode_stages=2,
    decode_ctas_per_sm=2,
    prefill_stages=2,
    prefill_tile_keys=128,
    write_tokens=8,
  ),
}


def count_sms(device_kind: str) -> int:
  """Returns the streaming multiprocessors of a GPU, from a device of this process if it has one, else from a table.

  Args:
    device_kind: JAX's name of the device kind.
  """
  for device in jax.devices():
    if device.device_kind == device_kind and getattr(device, "core_count", None):
      return device.core_count
  names = [name for name in _SMS if device_kind.startswith(name)]
  return _SMS[max(names, key=len)] if names else _MOST_COMMON_SMS


def list_tunings() -> list[tuple[int, int | None, Tuning]]:
  """Returns head size, block size (None: any) and settings of each entry of the table."""
  return [(head_dim, block_size, tuning) for (_, head_dim, block_size), tuning in _TABLE.items()]


def tuning_for(device_kind: str, head_dim: int, block_size: int) -> Tuning:
  """Returns the settings of a device, or the default of the head size for other devices.

  Raises:
    NotImplementedError: the table has no settings for the head size.
  """
  for key in ((device_kind, head_dim, block_size), (None, head_dim, None)):
    if key in _TABLE:
      return _TABLE[key]
  sizes = sorted({size for _, size, _ in _TABLE})
  raise NotImplementedError(f"paged attention on GPU: head_dim={head_dim} is not one of {', '.join(map(str, sizes))}")
