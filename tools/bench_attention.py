"""Measures a layer's paged attention, and shows that its cost follows the batch: not the pool, not the block table.

  python -m tools.bench_attention [--seconds=0.5]

Prints milliseconds a layer (the best and the median of several calls of a program of four layers) for the batches of
pallas_kernels/paged_attention/arg_specs.py, beside two others: a naive version that gathers every row's whole block
table, where that fits in 2 GiB, and the floor, the batch's keys and values over the read bandwidth of one core measured
in the same run.
"""

from collections.abc import Callable, Sequence
import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import api, arg_specs
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from tools.arguments import CommandParser, positive_float, positive_int

_LAYERS = 4
_NAIVE_LIMIT = 2**31  # bytes of gathered keys and values
_POOL_BLOCKS = 4096


def best_and_median(call: Callable[[], object], seconds: float) -> tuple[float, float]:
  """Milliseconds of a call: repeated for `seconds`, and at least 5 times."""
  call()
  times, end = [], time.perf_counter() + seconds
  while len(times) < 5 or time.perf_counter() < end:
    start = time.perf_counter()
    call()
    times.append(1e3 * (time.perf_counter() - start))
  return min(times), sorted(times)[len(times) // 2]


def read_bandwidth(seconds: float) -> float:
  """Bytes a millisecond that one core reads from memory: the maximum of 256 MiB."""
  array = np.ones(2**26, np.float32)
  return array.nbytes / best_and_median(array.max, seconds)[0]


def naive(q, kv, meta: api.RaggedMeta, *, scale: float):
  """Paged attention by gathering all that the block tables could hold, for rows of one query in batch order.

  Args:
    kv: [P, page, 2, K, H].
  """
  rows = q.shape[0]
  num_kv_heads = kv.shape[3]
  both = kv[meta.block_tables].reshape(rows, -1, *kv.shape[2:])  # [S, B * page, 2, K, H]
  grouped = q.reshape(rows, num_kv_heads, -1, q.shape[-1])
  scores = jnp.einsum("skgh,slkh->skgl", grouped, both[:, :, 0]) * scale
  seen = jnp.arange(both.shape[1], dtype=jnp.int32)[None] < meta.kv_lens[:, None]
  scores = jnp.where(jnp.broadcast_to(seen[:, None, None], scores.shape), scores, -1e30)
  out = jnp.einsum("skgl,slkh->skgh", jax.nn.softmax(scores, axis=-1), both[:, :, 1])
  return out.reshape(q.shape)


def layers(attention: Callable) -> Callable:
  """A program of several layers: what a call costs without most of what a dispatch costs."""

  @jax.jit
  def program(q, kv, meta):
    for _ in range(_LAYERS):
      q = attention(q, kv, meta)
    return q

  return program


def operands(spec: ArgSpec, num_blocks: int) -> tuple[jax.Array, api.RaggedMeta]:
  """Queries and rows, the rows' blocks spread over a pool of at least `num_blocks`."""
  used = arg_specs.make(dataclasses.replace(spec, spare_blocks=1)).num_blocks
  arguments = arg_specs.make(dataclasses.replace(spec, spare_blocks=1 + max(0, num_blocks - used)))
  meta = api.RaggedMeta(*map(jnp.asarray, (arguments.block_tables, arguments.kv_lens, arguments.query_starts)))
  return jnp.asarray(np.nan_to_num(arguments.q)), meta


def measure(spec: ArgSpec, num_blocks: int, seconds: float) -> tuple[float, float, float | None]:
  """Milliseconds a layer: ours, best and median, and the naive version's best, or None where it is left out."""
  q, meta = operands(spec, num_blocks)
  num_blocks = max(num_blocks, int(meta.block_tables.max()) + 1)
  kv = jnp.ones(api.kv_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim))
  ours = layers(lambda q, kv, meta: api.ragged_paged_attention(q, kv, meta, scale=spec.scale))
  best, median = best_and_median(lambda: ours(q, kv, meta).block_until_ready(), seconds)
  gathered = kv.nbytes // num_blocks * spec.table_width * spec.num_rows
  if {queries for queries, _ in spec.rows} != {1} or len(spec.rows) != spec.num_tokens or gathered > _NAIVE_LIMIT:
    return best / _LAYERS, median / _LAYERS, None
  kv = kv.reshape(num_blocks, spec.block_size, 2, spec.num_kv_heads, spec.head_dim)
  other = layers(lambda q, kv, meta: naive(q, kv, meta, scale=spec.scale))
  return (
    best / _LAYERS,
    median / _LAYERS,
    best_and_median(lambda: other(q, kv, meta).block_until_ready(), seconds)[0] / _LAYERS,
  )


def line(name: str, spec: ArgSpec, num_blocks: int, seconds: float, bandwidth: float) -> str:
  """A line of a table."""
  best, median, other = measure(spec, num_blocks, seconds)
  held = sum(length for _, length in spec.rows) * 2 * spec.num_kv_heads * spec.head_dim * 4
  floor = held / bandwidth
  shown = "       -" if other is None else f"{other:8.2f}"
  return f"{name:34s} {best:8.3f} {median:8.3f} {shown} {held / 1e6:8.2f} {floor:8.3f} {best / floor:8.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench_attention", "Measure a layer's paged attention.")
  parser.add_argument("--seconds", type=positive_float, default=0.5, help="time for each number")
  parser.add_argument("--batches", type=positive_int, default=len(arg_specs.BENCHMARK), help="how many of the batches")
  args = parser.parse_args(arguments)
  bandwidth = read_bandwidth(args.seconds)
  print(f"12 query and 4 KV heads of 64, f32, blocks of 16; one core reads {bandwidth / 1e6:.1f} GB/s")
  head = f"{'best':>8s} {'median':>8s} {'naive':>8s} {'KV MB':>8s} {'floor':>8s} {'x floor':>8s}"
  print(f"\n{'batch (ms a layer)':34s} {head}")
  for spec in arg_specs.BENCHMARK[: args.batches]:
    print(line(spec.name, spec, _POOL_BLOCKS, args.seconds, bandwidth), flush=True)
  rows = dataclasses.replace(arg_specs.BENCHMARK[1], name="")
  print(f"\n{'8 rows, 128 long, by pool':34s} {head}")
  for num_blocks in (128, 1024, 8192):
    print(line(f"  {num_blocks} blocks", rows, num_blocks, args.seconds, bandwidth), flush=True)
  print(f"\n{'8 rows, 128 long, by table width':34s} {head}")
  for width in (8, 128, 1024):
    spec = dataclasses.replace(rows, table_width=width)
    print(line(f"  {width} blocks, {16 * width} tokens", spec, _POOL_BLOCKS, args.seconds, bandwidth), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
