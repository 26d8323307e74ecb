"""Which implementation of paged attention runs what, and where: one table, read before anything compiles.

It may import no implementation. What depends on more than the columns of the table, such as a missing library or the
scalar memory of a TPU, is the `check_supported` of an implementation (api.py).
"""

from collections.abc import Sequence
import math
import re
from typing import NamedTuple

from pallas_kernels.paged_attention.plan import Geometry


class Capability(NamedTuple):
  """What an implementation runs; () in a field of values is any.

  Attributes:
    platforms: as JAX names them.
    least, most: compute capabilities of GPUs.
    chips: the GPUs, for messages.
    dtypes: of queries, and of a buffer without a dtype of its own.
    eight_bit_kv: names of api.EIGHT_BIT_KV.
    head_dims, block_sizes: the sizes; a range is written as its ends.
    largest_group: query heads a KV head.
  """

  platforms: tuple[str, ...] = ()
  least: float = 0.0
  most: float = math.inf
  chips: str = ""
  dtypes: tuple[str, ...] = ()
  eight_bit_kv: tuple[str, ...] = ()
  head_dims: Sequence[int] = ()
  block_sizes: Sequence[int] = ()
  largest_group: float = math.inf


_GPU = ("gpu", "cuda")
# The best first: "auto" takes the first that the device, the model and the settings allow.
TABLE = {
  "cpu": Capability(
    platforms=("cpu",),
    dtypes=("float32", "bfloat16"),
    eight_bit_kv=("int8",),
    head_dims=range(1, 257),  # kMostHeadDim
    largest_group=48,  # kMostQueries
  ),
  "gpu": Capability(
    platforms=_GPU,
    least=9.0,  # older GPUs have no TMA and no wgmma
    most=9.0,  # newer ones have no wgmma
    chips="Hopper: H100, H200, H20, GH200",
    dtypes=("bfloat16",),
    eight_bit_kv=("fp8",),
    head_dims=(64, 128),
    block_sizes=(16, 32, 64, 128),
    largest_group=64,
  ),
  "portable": Capability(
    platforms=_GPU,
    least=8.0,  # older GPUs do not multiply bfloat16
    chips="Ampere, Ada, Hopper, Blackwell and later",
    dtypes=("bfloat16", "float16", "float32"),
    eight_bit_kv=("fp8",),
    head_dims=range(16, 257, 8),
    largest_group=64,
  ),
  "tpu": Capability(
    platforms=("tpu",),
    dtypes=("bfloat16", "float32"),
    eight_bit_kv=("int8", "fp8"),
    largest_group=256,
  ),
  "reference": Capability(eight_bit_kv=("int8", "fp8")),
}


def _list(values: Sequence[int] | Sequence[str]) -> str:
  if isinstance(values, range):
    step = "" if values.step == 1 else f"multiples of {values.step} from "
    return f"{step}{values[0]} to {values[-1]}"
  return ", ".join(map(str, values))


def find_device_refusal(name: str, platform: str, compute_capability: str) -> str:
  """Returns why an implementation cannot run on a device, or "".

  Args:
    name: of the implementation; one that is not in the table, as benchmarks register, runs anywhere.
    platform: as JAX names it.
    compute_capability: of a GPU, such as "9.0".
  """
  can = TABLE.get(name, Capability())
  if can.platforms and platform not in can.platforms:
    return f"{name} is for platform {' or '.join(can.platforms)}, not {platform}"
  if not can.least:
    return ""
  number = float(compute_capability) if re.fullmatch(r"\d+\.\d+", compute_capability) else 0.0
  if can.least <= number <= can.most:
    return ""
  needed = f"{can.least}" if can.least == can.most else f"{can.least} or newer"
  return f"{name} needs compute capability {needed} ({can.chips}), not {compute_capability or 'an unknown one'}"


def find_refusal(name: str, geometry: Geometry, dtype: str, kv_name: str) -> str:
  """Returns why an implementation has no kernel for a step, with the value and the supported ones, or "".

  Args:
    name: of the implementation.
    geometry: of the step.
    dtype: name of the dtype of q, k and v.
    kv_name: name of the buffer's, see api.name_kv_dtype.
  """
  can = TABLE.get(name, Capability())
  if kv_name in ("int8", "fp8") and kv_name not in can.eight_bit_kv:
    choices = " or ".join(("auto", *can.eight_bit_kv))
    return f"kv_dtype={kv_name}: paged attention ({name}) has no {kv_name} KV; set --kv_dtype to {choices}"
  for what, value, supported in (
    ("dtype", dtype, can.dtypes),
    ("head_dim", geometry.head_dim, can.head_dims),
    ("block_size", geometry.block_size, can.block_sizes),
  ):
    if supported and value not in supported:
      return f"paged attention ({name}): {what}={value} is not supported; supported are {_list(supported)}"
  if geometry.group > can.largest_group:
    return (
      f"paged attention ({name}): {geometry.group} query heads a KV head are not supported; supported are 1 to "
      f"{can.largest_group}"
    )
  return ""


def candidates(platform: str, compute_capability: str) -> tuple[str, ...]:
  """Returns the implementations that run on a device, the best first. The reference is always the last."""
  return tuple(name for name in TABLE if not find_device_refusal(name, platform, compute_capability))


def explain_reference(platform: str, compute_capability: str) -> str:
  """Returns why a device has no implementation but the reference, or "" if it has one."""
  if candidates(platform, compute_capability) != ("reference",):
    return ""
  names = [name for name, can in TABLE.items() if platform in can.platforms]
  refusals = [find_device_refusal(name, platform, compute_capability) for name in names]
  return " and ".join(refusals) or f"no kernels are for platform {platform}"
