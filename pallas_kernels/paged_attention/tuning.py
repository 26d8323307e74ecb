"""Settings of the GPU kernels by device, head size and block size, so that kernels hold no constant to tune; data only.

Nothing here has been timed on a device yet: the values follow from what fits. A Hopper SM has 227 KiB of shared memory
for its thread blocks and 65,536 registers, and a kernel that reads memory wants 36 KB on their way per SM (4.8 TB/s
times 1 us over 132 SMs). A split of 512 tokens writes and reads back 3 % of what it reads of keys and values (8 KV
heads of 128, groups of 4), and one sequence of 16K tokens still is work for every SM.
"""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Tuning:
  """What may differ between devices without changing a result (beyond rounding). Hashable.

  Attributes:
    split_tokens: positions of a row that one decode item takes at least, 64 or more; see `plan.make_plan`.
    decode_stages: tiles of 64 keys and 64 values in the decode kernel's ring, 2 or more; 256 * head_dim bytes each.
    decode_ctas_per_sm: thread blocks of the decode kernel that an SM holds, 1 or 2.
    prefill_stages: tiles of keys and of values in the prefill kernel's ring, 1 or more.
    prefill_tile_keys: keys a tile of the prefill kernel, 64 or 128.
    write_tokens: tokens a thread block of the rotary and KV write kernel, a power of two from 4 to 64.
    lowering: how Pallas lowers the kernels; pinned since its default has changed between versions.
    num_sms: streaming multiprocessors, 1 or more: the grid of kernels whose blocks take several items.
  """

  split_tokens: int
  decode_stages: int
  decode_ctas_per_sm: int
  prefill_stages: int
  prefill_tile_keys: int
  write_tokens: int
  lowering: plgpu.LoweringSemantics = plgpu.LoweringSemantics.Warpgroup
  num_sms: int = 132  # of H100 SXM, H100 NVL, H200, GH200


# By device kind (as JAX calls it), head size and block size; a head size's default is under (None, head_dim, None).
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
    split_tokens=512,
    decode_stages=2,
    decode_ctas_per_sm=2,
    prefill_stages=2,
    prefill_tile_keys=128,
    write_tokens=8,
  ),
  (None, 256, None): Tuning(
    split_tokens=256,
    decode_stages=2,
    decode_ctas_per_sm=1,
    prefill_stages=1,
    prefill_tile_keys=64,
    write_tokens=8,
  ),
}


def tuning_for(device_kind: str, head_dim: int, block_size: int) -> Tuning:
  """The settings for a device, or the default of the head size where that device has none of its own.

  Raises:
    NotImplementedError: no settings for the head size.
  """
  for key in ((device_kind, head_dim, block_size), (None, head_dim, None)):
    if key in _TABLE:
      return _TABLE[key]
  sizes = sorted({size for _, size, _ in _TABLE})
  raise NotImplementedError(f"paged attention on GPU: head_dim={head_dim} is not one of {', '.join(map(str, sizes))}")
