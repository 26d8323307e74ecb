"""The portable GPU kernels in Pallas' interpreter: the conformance suite, the fused layer, bugs that it must notice.

That they compile for each GPU, without copies, is checked elsewhere, with the whole step.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, arg_specs, portable
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8, to_fp8
from pallas_kernels.paged_attention.reference import rotate
from tests.kernels import conformance
from tests.kernels.seeded import seed_bug

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]

# Weights are rounded to the dtype of values before they meet: relative errors of at most 2^-9 of bf16 and 2^-12 of f16,
# of either sign, in a sum whose weights add up to 1 and whose values are of order 1.
ATOL = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
  """Stores keys and values by XLA's scatter, where the kernels look for them."""
  page, lines = kv.shape[3], jnp.stack([k, v], axis=2)
  return kv.at[slots // page, :, :, slots % page].set(to_fp8(lines) if kv.dtype == BYTES else lines.astype(kv.dtype))


def interpreted(module: types.ModuleType) -> types.ModuleType:
  """What the suite wants of an implementation."""
  made = types.ModuleType("interpreted_portable")
  made.__dict__.update(
    kv_shape=module.kv_shape,
    write_kv=jax.jit(write_kv),
    ragged_paged_attention=functools.partial(module.ragged_paged_attention, interpret=True),
  )
  return made


def check(spec: ArgSpec, module: types.ModuleType = portable) -> None:
  """Compares one call with the oracle."""
  implementation = interpreted(module)
  conformance.check(implementation, spec, conformance.program(implementation, spec), ATOL[spec.dtype])


class TestPortable(conformance.Conformance):
  implementation = interpreted(portable)
  num_random = 4
  test_write_keeps_the_rest_and_padding_touches_block_0_only = None  # test_a_layer_equals_the_reference
  test_write_is_in_place_when_donated = None  # tools.check_device

  # `mixed` has every kind of row, and the last spec of the seeded bugs a window, a cap and split rows.
  @pytest.mark.parametrize(
    "spec",
    [
      pytest.param(spec, id=spec.name, marks=() if spec.name == "mixed" else pytest.mark.long)
      for spec in arg_specs.CONFORMANCE
    ],
  )
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    if spec.head_dim % 8:
      with pytest.raises(NotImplementedError, match=f"head_dim={spec.head_dim} .* multiples of 8 from 16 to 256"):
        api.check_supported("portable", spec.geometry, spec.dtype)
      spec = dataclasses.replace(spec, head_dim=24)
    api.check_supported("portable", spec.geometry, spec.dtype)
    spec = conformance.with_spare_blocks(spec) if spec.name in conformance.WITH_SPARE_BLOCKS else spec
    check(spec)

  @pytest.mark.long
  def test_random_batches_in_one_executable(self) -> None:
    super().test_random_batches_in_one_executable()

  @pytest.mark.long
  def test_chunks_of_any_size_give_the_whole(self) -> None:
    super().test_chunks_of_any_size_give_the_whole()


_ROWS = ((1, 5), (1, 300), (7, 7), (0, 0), (20, 60), (2, 65), (1, 590))


def spec_of(dtype: str, head_dim: int, page: int, heads: tuple[int, int], **more) -> ArgSpec:
  """A batch with rows of every kind, of 600 positions at most, in which long rows are split."""
  name = f"{dtype}-{head_dim}-{page}" + "".join(f"-{value}" for value in more.values())
  return ArgSpec(name, _ROWS, 34, 8, page, -(-600 // page), *heads, head_dim, dtype=dtype, **more)


BUGS_IN = spec_of("float32", 16, 16, (6, 2), sliding_window=540, soft_cap=2.0)
QUICK = (spec_of("bfloat16", 80, 32, (3, 1), kv_dtype="uint8"),)
LONG = (
  BUGS_IN,
  spec_of("bfloat16", 64, 16, (4, 2)),
  spec_of("bfloat16", 96, 64, (2, 2), sliding_window=70),
  spec_of("float16", 128, 16, (5, 1), soft_cap=9.0),
  spec_of("float16", 256, 8, (2, 1), kv_dtype="uint8"),
  spec_of("bfloat16", 192, 128, (17, 1)),
  spec_of("float32", 112, 24, (2, 1)),
)


@pytest.mark.parametrize(
  "spec", [*(pytest.param(spec, id=str(spec), marks=pytest.mark.long) for spec in LONG), *QUICK], ids=str
)
def test_head_sizes_pages_and_dtypes(spec: ArgSpec) -> None:
  api.check_supported("portable", spec.geometry, spec.dtype, spec.stored_dtype)
  check(spec)


@pytest.mark.parametrize(
  ("dtype", "kv_dtype", "head_dim"),
  [
    ("bfloat16", "uint8", 80),
    pytest.param("bfloat16", "", 128, marks=pytest.mark.long),
    pytest.param("float32", "", 24, marks=pytest.mark.long),
  ],
)
def test_a_layer_equals_the_reference(dtype: str, kv_dtype: str, head_dim: int) -> None:
  """Queries, keys and values reach their places bit for bit; nothing else changes but block 0."""
  rng, tokens, used, heads, group, page = np.random.default_rng(3), 37, 33, 2, 3, 16
  qkv = rng.standard_normal((tokens, heads, group + 2, head_dim), np.float32) * 3
  qkv = conformance.put(qkv.astype(jnp.dtype(dtype)))
  angles = rng.uniform(0, 6, (tokens, head_dim // 2)).astype(np.float32)
  cos, sin = conformance.put(np.cos(angles)), conformance.put(np.sin(angles))
  stored = jnp.dtype(kv_dtype or dtype)
  kv = np.full(portable.kv_shape(9, page, heads, head_dim), 7, stored)
  slots = np.zeros(tokens, np.int32)
  slots[:used] = rng.permutation(np.arange(page, 9 * page))[:used]

  def expected(qkv, cos, sin, kv, slots):
    q, k, v = rotate(qkv, cos, sin)
    return q, write_kv(kv, k, v, slots)

  arguments = qkv, cos, sin, conformance.put(kv), conformance.put(slots)
  wanted = jax.jit(expected)(*arguments)
  found = jax.jit(functools.partial(portable.rotate_and_write, interpret=True))(*arguments)
  np.testing.assert_array_equal(conformance.f32(found[0]), conformance.f32(wanted[0]))
  np.testing.assert_array_equal(conformance.f32(found[1])[1:], conformance.f32(wanted[1])[1:])


def test_e4m3_without_instructions_for_it_is_that_of_xla() -> None:
  """All bytes; and all numbers of bf16 and f16, numbers halfway between two of e4m3, and their neighbors."""
  octets = np.arange(256, dtype=np.uint8)
  wide = np.asarray(from_fp8(octets))
  np.testing.assert_array_equal(jax.jit(portable._widen)(octets), wide)
  finite = np.sort(wide[np.isfinite(wide)]).astype(np.float64)
  halves = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
  bits = np.arange(1 << 16, dtype=np.uint16)
  numbers = [*(bits.view(dtype).astype(np.float32) for dtype in (jnp.bfloat16, np.float16)), halves]
  numbers += [np.nextafter(halves, np.float32(end)) for end in (-np.inf, np.inf)]
  x = np.concatenate(numbers)
  np.testing.assert_array_equal(from_fp8(jax.jit(portable._narrow)(x)), from_fp8(to_fp8(x)))


def test_8_bit_kv_that_pallas_cannot_address_is_refused() -> None:
  kv = jax.ShapeDtypeStruct((65536, 8, 2, 16, 129), jnp.uint8)
  rest = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8, 3, 128), (8, 64), (8, 64))]
  with pytest.raises(NotImplementedError, match=r"2164260864 bytes of 8-bit KV a layer .* --num_kv_blocks"):
    jax.eval_shape(portable.rotate_and_write, *rest, kv, jax.ShapeDtypeStruct((8,), jnp.int32))


@pytest.mark.compares_bits
@pytest.mark.long
def test_a_query_has_the_same_bits_in_a_chunk_and_alone() -> None:
  """Geometry.invariant: a prompt at once, in chunks and token by token."""
  spec = ArgSpec("invariant", ((90, 90),), 96, 3, table_width=8, dtype="bfloat16")
  arguments, implementation = arg_specs.make_arguments(spec), interpreted(portable)
  call = conformance.attend(implementation, spec, invariant=True)
  inputs = conformance.operands(implementation, spec, arguments)
  whole = conformance.f32(call(*inputs))[:90]
  for size in (1, 13, 64):
    for end in (size, 64, 90):
      q = np.full_like(arguments.q, np.nan)
      q[:size] = arguments.q[end - size : end]
      lens, starts = np.array([end, 0, 0], np.int32), np.array([0, size, size, size], np.int32)
      out = call(conformance.put(q.astype(jnp.bfloat16)), *inputs[1:3], conformance.put(lens), conformance.put(starts))
      np.testing.assert_array_equal(conformance.f32(out)[:size], whole[end - size : end])


@dataclasses.dataclass(frozen=True)
class Bug:
  """Text of portable.py and what it is replaced by; it must occur exactly once, so that the list cannot rot."""

  name: str
  old: str
  new: str


BUGS = (
  Bug("a query does not see itself", "seen = keyed[None, :] <= positions", "seen = keyed[None, :] < positions"),
  Bug("the window is one too wide", "keyed[None, :] > positions - window", "keyed[None, :] >= positions - window"),
  Bug("the tail is read", "(keyed >= low) & (keyed < high)", "keyed >= low"),
  Bug("sums do not decay", "return acc, new_peak, total * decay + weights", "return acc, new_peak, total + weights"),
  Bug("the pages are those of the next row", "jnp.broadcast_to(row, (count,))", "jnp.broadcast_to(row + 1, (count,))"),
  Bug("all tiles are the row's first", "begin = first + number * tile", "begin = first"),
  Bug("padding keeps what was there", "| (ids == num_rows), _cdiv", ", _cdiv"),
  Bug("a part begins where the row does", "    begin += part * chunks", "    begin += 0 * chunks"),
  Bug(
    "a part is left out", "fori_loop(0, _cdiv(end - begin, chunks), add", "fori_loop(1, _cdiv(end - begin, chunks), add"
  ),
  Bug("parts do not decay", "acc * decay[:, None] + values", "acc + values"),
  Bug("the cap is that of twice the score", "(2.0 / call.soft_cap)", "(4.0 / call.soft_cap)"),
  Bug("heads of a group are taken for one", "lax.rem(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), group)", "_i32(0)"),
)
QUICK_BUGS = ("the tail is read", "a part is left out")


@pytest.mark.parametrize(
  "bug",
  [
    pytest.param(bug, id=bug.name.replace(" ", "-"), marks=() if bug.name in QUICK_BUGS else pytest.mark.long)
    for bug in BUGS
  ],
)
def test_seeded_bug_is_caught(bug: Bug) -> None:
  with pytest.raises(AssertionError):
    check(BUGS_IN, seed_bug(portable, bug.old, bug.new))
