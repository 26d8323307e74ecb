"""The GPU implementation as a whole, in Pallas' interpreter: the conformance suite, the fused layer, what is refused.

What the kernels do each, races, and bugs that their tests must notice are tested beside them (test_gpu_*.py); that they
compile for a GPU, without copies, is checked elsewhere, with the whole step.
"""

import dataclasses
import types

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, arg_specs, gpu, tuning
from pallas_kernels.paged_attention.api import PagedAttention
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.fp8_kv import BYTES, to_fp8
from pallas_kernels.paged_attention.gpu_decode import decode
from pallas_kernels.paged_attention.gpu_prefill import prefill
from pallas_kernels.paged_attention.reference import rotate
from pallas_kernels.paged_attention.tuning import Tuning, tuning_for
from tests.kernels import conformance

pytestmark = [
  pytest.mark.kernels,
  pytest.mark.usefixtures("gpu_interpreter"),
  pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),  # NaN, which is on purpose
]

# Weights are rounded to bf16 before they meet the values, as the tensor core wants them: relative errors of at most
# 2^-9 of either sign, in a sum whose weights add up to 1 and whose values are of order 1.
ATOL = 4e-3


def short_splits(device_kind: str, head_dim: int, block_size: int) -> Tuning:
  """Short splits."""
  return dataclasses.replace(tuning_for(device_kind, head_dim, block_size), split_tokens=64)


def one_sm(device_kind: str) -> int:
  """One thread block for all decode items, since the interpreter runs one after the other."""
  return 1


@pytest.fixture(scope="module", autouse=True)
def small_grids():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(gpu, "tuning_for", short_splits)
    patch.setattr(gpu, "count_sms", one_sm)
    yield


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
  """Stores keys and values by XLA's scatter, where the kernels look for them."""
  page = kv.shape[3]
  lines = jnp.stack([k, v], axis=2)
  return kv.at[slots // page, :, :, slots % page].set(to_fp8(lines) if kv.dtype == BYTES else lines.astype(kv.dtype))


def attention_alone(
  q, kv, block_tables, kv_lens, query_starts, *, scale, sliding_window, soft_cap, plan, work
) -> jax.Array:
  """The kernels that `attend` calls once keys and values are stored, on queries that are packed here."""
  geometry = plan.geometry
  assert sliding_window == geometry.sliding_window
  q = q.reshape(geometry.tokens, geometry.num_kv_heads, -1, geometry.head_dim).swapaxes(0, 1)
  rows = q.reshape(geometry.num_kv_heads, -1, geometry.head_dim), kv, block_tables, kv_lens, query_starts, work
  static = {
    "plan": plan,
    "scale": scale,
    "soft_cap": soft_cap,
    "tuning": short_splits("", geometry.head_dim, geometry.block_size),
    "interpret": plgpu.InterpretGPUParams(),
  }
  out = prefill(*rows, **static) if plan.has_prefill else None
  finished = jnp.zeros((geometry.num_kv_heads, geometry.tokens), jnp.int32)
  return decode(*rows, finished, out, **static) if plan.decode_queries else out


INTERPRETED = types.ModuleType("interpreted_gpu")
INTERPRETED.__dict__.update(
  kv_shape=gpu.kv_shape,
  make_plan=gpu.make_plan,
  write_kv=jax.jit(write_kv),
  ragged_paged_attention=jax.jit(attention_alone, static_argnames=("scale", "sliding_window", "soft_cap", "plan")),
)


# A run in the interpreter takes seconds. These are parts of `mixed`, of the last spec here, of the kernels' own tests.
LEFT_OUT = ("decode", "bfloat16", "mixed_window", "window_of_one", "soft_cap")
# Here both kernels and the plan between them must meet: `mixed` and `page_64` have every kind of row, `shared_prefix`
# rows that share pages. The lengths and page sizes of these are in the kernels' own tests; `make test-long` has them.
SELDOM = ("full_prefill_no_padding", "page_128_one_kv_head", "table_no_multiple_of_a_chunk", "long")
SPECS = (
  *(dataclasses.replace(spec, dtype="bfloat16") for spec in arg_specs.CONFORMANCE if spec.name not in LEFT_OUT),
  ArgSpec("page_64", ((1, 150), (0, 0), (20, 100), (4, 64)), 28, 5, 64, 3, 8, 1, 128, 70, 9.0, dtype="bfloat16"),
)
WITH_SPARE_BLOCKS = (*conformance.WITH_SPARE_BLOCKS, "one_row_of_one_token")  # may share an executable


class TestGpu(conformance.Conformance):
  implementation = INTERPRETED
  dtype = "bfloat16"
  atol = ATOL
  num_random = 2
  chunks = (64, 85, 1)
  test_write_keeps_the_rest_and_padding_touches_block_0_only = None  # test_gpu_write.py
  test_write_is_in_place_when_donated = None

  @pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, id=spec.name, marks=pytest.mark.long if spec.name in SELDOM else ()) for spec in SPECS],
  )
  def test_equals_dense_attention(self, spec: ArgSpec) -> None:
    if spec.block_size not in (16, 32, 64, 128):
      with pytest.raises(NotImplementedError, match="head_dim=18|block_size=8"):
        api.check_supported("gpu", spec.geometry, spec.dtype)
      return
    api.check_supported("gpu", spec.geometry, spec.dtype)
    spec = dataclasses.replace(spec, kv_dtype=self.kv_dtype)
    spec = conformance.with_spare_blocks(spec) if spec.name in WITH_SPARE_BLOCKS else spec
    arguments = arg_specs.make_arguments(spec)
    out = conformance.run(INTERPRETED, spec, *conformance.operands(INTERPRETED, spec, arguments))
    np.testing.assert_allclose(out, conformance.oracle(spec, arguments), rtol=2.0**-8, atol=ATOL)
    assert not out[arguments.query_starts[-1] :].any(), "padding tokens must give zeros"

  @pytest.mark.long  # each kernel's own test of this name stays in `make test`
  @pytest.mark.parametrize("queries", [1, 20], ids=["decode", "prefill"])
  def test_a_row_depends_neither_on_neighbors_nor_on_its_place(self, queries: int) -> None:
    super().test_a_row_depends_neither_on_neighbors_nor_on_its_place(queries)

  @pytest.mark.long  # the test of a query's bits in a chunk and alone stays
  def test_chunks_of_any_size_give_the_whole(self) -> None:
    super().test_chunks_of_any_size_give_the_whole()


@pytest.mark.long  # each kernel has a case of fp8 in `make test`, and the engine another
class TestFp8KV(TestGpu):
  kv_dtype = "uint8"


def test_a_layer_rotates_writes_and_attends(capfd: pytest.CaptureFixture[str]) -> None:
  """`attend` on a buffer without this step's keys and values equals the parts; and no kernel races."""
  rows = ((1, 70), (2, 33), (0, 0), (20, 50), (1, 1), (5, 5))
  spec = ArgSpec("layer", rows, 32, 7, 16, 5, 6, 2, 64, dtype="bfloat16")
  arguments, rng = arg_specs.make_arguments(spec), np.random.default_rng(1)
  heads, used = spec.num_kv_heads, arguments.query_starts[-1]
  qkv = rng.standard_normal((spec.num_tokens, heads, spec.num_heads // heads + 2, spec.head_dim))
  angles = rng.uniform(0, 2 * np.pi, (spec.num_tokens, spec.head_dim // 2))
  qkv[used:] = np.nan
  qkv, cos, sin = jnp.asarray(qkv, jnp.bfloat16), *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))

  before = np.full(gpu.kv_shape(arguments.num_blocks, spec.block_size, heads, spec.head_dim), np.nan, np.float32)
  rotated = [conformance.f32(x) for x in rotate(qkv, cos, sin)]
  arguments.q[:] = rotated[0]
  slots = np.arange(spec.num_tokens, dtype=np.int32) % spec.block_size  # padding's
  for row, (queries, length) in enumerate(rows):
    tokens = slice(*arguments.query_starts[row : row + 2])
    places = arguments.slots(row, spec.block_size)
    slots[tokens] = places[length - queries :]
    block, offset = np.divmod(places[: length - queries], spec.block_size)
    for which, (all_of_row, new) in enumerate(((arguments.keys, rotated[1]), (arguments.values, rotated[2]))):
      before[block, :, which, offset] = all_of_row[row][: length - queries]
      all_of_row[row][length - queries :] = new[tokens]

  lens, starts, packed = conformance.rows_of(INTERPRETED, spec, arguments.kv_lens, arguments.query_starts)
  attention = PagedAttention("gpu", spec.geometry, spec.scale)
  out, kv = gpu.attend(
    attention,
    qkv,
    cos,
    sin,
    jnp.asarray(before).astype(jnp.bfloat16),
    attention.meta(jnp.asarray(arguments.block_tables), lens, starts, packed),
    jnp.asarray(slots),
    interpret=plgpu.InterpretGPUParams(detect_races=True),
  )
  assert "RACE" not in capfd.readouterr().out
  np.testing.assert_allclose(conformance.f32(out), conformance.oracle(spec, arguments), rtol=2.0**-8, atol=ATOL)
  assert not conformance.f32(out)[used:].any(), "padding tokens must give zeros"
  # Seldom a rotated value is rounded to the next number of bf16 (test_gpu_write.py).
  want = conformance.f32(conformance.filled(INTERPRETED, spec, arguments))
  np.testing.assert_allclose(conformance.f32(kv)[1:], want[1:], rtol=2.0**-7, atol=1e-6)


def test_kernels_are_lowered_once_a_program() -> None:
  """And not once a layer: compiling them takes seconds."""
  spec = ArgSpec("layers", (), 16, 8, 64, 4, 8, 2, 128)
  attention = PagedAttention("gpu", spec.geometry, spec.scale)
  plan = attention.plan
  assert plan is not None and plan.has_prefill

  def layers(qkv, angle, pools, tables, lens, starts, slots, packed):
    meta = attention.meta(tables, lens, starts, packed)
    for number, kv in enumerate(pools):
      out, pools[number] = attention.attend(qkv, angle, angle, kv, meta, slots)
      qkv = qkv + out.sum()
    return qkv, pools

  shaped = jax.ShapeDtypeStruct
  integers = [shaped(shape, jnp.int32) for shape in ((8, 4), (8,), (9,), (16,), (plan.size,))]
  pools = [shaped(gpu.kv_shape(9, 64, 2, 128), jnp.bfloat16)] * 3
  args = (shaped((16, 2, 6, 128), jnp.bfloat16), shaped((16, 64), jnp.float32), pools, *integers)
  text = jax.jit(layers).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("@mosaic_gpu_v2") == 3


@pytest.mark.parametrize(
  ("change", "dtype", "words"),
  [
    ({}, "float32", "dtype=float32.*bfloat16"),
    ({"head_dim": 80}, "bfloat16", "head_dim=80.*64, 128"),
    ({"block_size": 8}, "bfloat16", "block_size=8.*16, 32, 64, 128"),
    ({"num_heads": 130}, "bfloat16", "65 query heads"),
  ],
)
def test_what_is_not_supported_is_named(change: dict, dtype: str, words: str) -> None:
  spec = dataclasses.replace(ArgSpec("", (), 8, 8), **change)
  with pytest.raises(NotImplementedError, match=words):
    api.check_supported("gpu", spec.geometry, dtype)


@pytest.mark.parametrize(
  ("kind", "sms"),
  [
    ("NVIDIA H100 80GB HBM3", 132),
    ("NVIDIA H100 PCIe", 114),
    ("NVIDIA H100 NVL", 132),
    ("NVIDIA H200", 132),
    ("NVIDIA H200 NVL", 132),
    ("NVIDIA H20", 78),
    ("NVIDIA H20-3e", 78),
    ("NVIDIA GH200 480GB", 132),
    ("what is not known", 132),
  ],
)
def test_sms_of_a_device_that_is_not_here(kind: str, sms: int) -> None:
  assert tuning.count_sms(kind) == sms


def test_a_device_that_is_here_says_itself_how_many_sms_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
  here = types.SimpleNamespace(device_kind="NVIDIA H100 PCIe", core_count=60)
  monkeypatch.setattr(jax, "devices", lambda: [here])
  assert tuning.count_sms("NVIDIA H100 PCIe") == 60
  assert tuning.count_sms("NVIDIA H20") == 78
  monkeypatch.undo()
  monkeypatch.setattr(gpu, "count_sms", lambda kind: {"NVIDIA H20": 78}[kind])
  spec = ArgSpec("", (), 8, 8, 64, 4, 8, 2, 128)
  assert gpu.make_plan(spec.geometry, "NVIDIA H20").num_sms == 78


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "10.0", "12.0", "9.1", ""])
def test_a_gpu_that_is_not_hopper_is_refused(capability: str) -> None:
  with pytest.raises(NotImplementedError, match=r"needs compute capability 9\.0 .*, not .*set --attention=auto"):
    api.check_gpu_capability(capability)


def test_hopper_is_supported() -> None:
  api.check_gpu_capability("9.0")


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.long), 24])
def test_a_query_has_the_same_bits_in_a_chunk_and_alone(window: int | None) -> None:
  """With `Geometry.invariant`: five queries as one row, and each as a separate row."""
  spec = ArgSpec("chunk", ((5, 150),), 8, 5, 16, 10, 6, 2, 64, sliding_window=window, dtype="bfloat16")
  arguments = arg_specs.make_arguments(spec)
  kv = conformance.filled(INTERPRETED, spec, arguments)
  plan = gpu.make_plan(dataclasses.replace(spec.geometry, invariant=True), "")
  tables = jnp.asarray(np.broadcast_to(arguments.block_tables[0], arguments.block_tables.shape))

  def call(kv_lens: list[int], query_starts: list[int]) -> np.ndarray:
    lens, starts = np.array(kv_lens, np.int32), np.array(query_starts, np.int32)
    packed = plan.make_work(starts, lens)
    assert plan.split(packed)["worker_starts"][-1] == 0, "nothing for the decode kernel"
    out = INTERPRETED.ragged_paged_attention(
      conformance.put(arguments.q.astype(jnp.bfloat16)),
      kv,
      tables,
      conformance.put(lens),
      conformance.put(starts),
      work=jax.tree.map(conformance.put, plan.split(packed)),
      plan=plan,
      scale=spec.scale,
      sliding_window=window,
      soft_cap=None,
    )
    return conformance.f32(out)

  chunk = call([150, 0, 0, 0, 0], [0, 5, 5, 5, 5, 5])
  np.testing.assert_array_equal(chunk, call([146, 147, 148, 149, 150], [0, 1, 2, 3, 4, 5]))
  np.testing.assert_allclose(chunk, conformance.oracle(spec, arguments), rtol=2.0**-8, atol=ATOL)
