"""Where the GPU kernels' values lie in shared memory: threads and TMA must agree, which no interpreter sees.

The kernels are lowered for a GPU, which takes none, and `tools.check_device.swizzles` looks at every transfer.
"""

import dataclasses
from pathlib import Path
import types

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import gpu_decode, gpu_prefill, gpu_write, plan
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.tuning import tuning_for
from tools.check_device import swizzles

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64)


def lower(program, *arguments: tuple[tuple[int, ...], str]) -> swizzles.SharedTransfers:
  """Lowers a program on arrays of such shapes and dtypes."""
  abstract = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in arguments]
  with swizzles.watch_shared_transfers() as found:
    jax.jit(program).trace(*abstract).lower(lowering_platforms=("cuda",))
  return found


def lower_write(head_dim: int, group: int, module=gpu_write, **tuned) -> swizzles.SharedTransfers:
  tuning = dataclasses.replace(tuning_for("", head_dim, 64), **tuned)
  return lower(
    lambda *args: module.rotate_and_write(*args, tuning=tuning),
    ((40, 2, group + 2, head_dim), "bfloat16"),
    ((40, head_dim // 2), "float32"),
    ((40, head_dim // 2), "float32"),
    ((9, 2, 2, 64, head_dim), "bfloat16"),
    ((40,), "int32"),
  )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", GROUPS)
def test_the_write_kernel_swizzles_nothing(head_dim: int, group: int) -> None:
  found = lower_write(head_dim, group)
  assert found.count and found.copies and not found.swizzled and not any(found.copies)


@pytest.mark.parametrize("tokens", [4, 16, 32, 64])
def test_the_write_kernel_swizzles_nothing_at_any_tile(tokens: int) -> None:
  found = lower_write(128, 4, write_tokens=tokens)
  assert found.count and not found.swizzled and not any(found.copies)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_warpgroup_lowering_of_the_write_kernel_is_noticed(group: int) -> None:
  """Heads of 128: it slices single rows out of swizzled tiles, and the keys and queries come out wrong."""
  source = Path(gpu_write.__file__).read_text()
  assert source.count("LoweringSemantics.Lane") == 1
  module = types.ModuleType("warpgroup_gpu_write")
  exec(source.replace("LoweringSemantics.Lane", "LoweringSemantics.Warpgroup"), module.__dict__)
  found = lower_write(128, group, module)
  assert found.misplaced and 128 in found.copies


@pytest.mark.parametrize("rows", range(1, 25))
def test_tiles_are_whole_where_any_slice_of_them_has_the_addresses_that_tma_gives(rows: int) -> None:
  """128-byte swizzle: chunk c of line l is at c ^ (l % 8), and a transfer counts lines from its slice's first tile."""
  line, chunk = np.arange(rows)[:, None], np.arange(8)
  agree = all(((chunk ^ ((tile * rows + line) % 8)) == (chunk ^ (line % 8))).all() for tile in range(8))
  assert swizzles.keeps_lines_whole((2, 2, rows, 64)) == agree


def attention(kernel: str, head_dim: int, group: int, block_size: int, **tuned) -> swizzles.SharedTransfers:
  """Lowers prefill or decode."""
  spec = ArgSpec(kernel, (), 48, 4, block_size, 1024 // block_size, group * 2, 2, head_dim, dtype="bfloat16")
  tuning = dataclasses.replace(tuning_for("", head_dim, block_size), **tuned)
  planned = plan.make_plan(spec.geometry, tuning.split_tokens, 132, tuning.decode_ctas_per_sm)
  assert planned.max_slots
  static = {"plan": planned, "scale": 0.1, "soft_cap": None, "tuning": tuning}

  def program(q, kv, tables, lens, starts, packed, *out):
    pieces = planned.split(packed)
    if kernel == "decode":
      return gpu_decode.decode(q, kv, tables, lens, starts, pieces, *out, **static)
    return gpu_prefill.prefill(q, kv, tables, lens, starts, pieces, **static, interpret=None)

  return lower(
    program,
    ((2, 48 * group, head_dim), "bfloat16"),
    ((9, 2, 2, block_size, head_dim), "bfloat16"),
    ((4, 1024 // block_size), "int32"),
    ((4,), "int32"),
    ((5,), "int32"),
    ((planned.size,), "int32"),
    *[((2, 48), "int32"), ((48, 2 * group, head_dim), "bfloat16")] * (kernel == "decode"),
  )


def check_attention(*args, **tuned) -> None:
  found = attention(*args, **tuned)
  assert found.swizzled and 128 in found.copies
  assert not found.misplaced


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 7, pytest.param(64, marks=pytest.mark.long)])
def test_attention_keeps_lines_whole(kernel: str, head_dim: int, group: int) -> None:
  check_attention(kernel, head_dim, group, 64)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [3, 8, 16])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_attention_keeps_lines_whole_at_any_size(kernel: str, head_dim: int, group: int, block_size: int) -> None:
  check_attention(kernel, head_dim, group, block_size)


def test_prefill_keeps_lines_whole_by_lane_lowering() -> None:
  """Which the sweep tries as well."""
  check_attention("prefill", 128, 4, 64, lowering=plgpu.LoweringSemantics.Lane)
