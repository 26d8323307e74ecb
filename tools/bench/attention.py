"""Measures a layer's paged attention, and shows that its cost depends on the batch, not on the pool or the block table.

  python -m tools.bench.attention [--seconds=0.5]
  python -m tools.bench.attention --share [--model=DIR] [--rows=32] [--context=256] [--kv_dtype=int8] [--dtype=bfloat16]
                                          [--seconds=60]

The first command prints milliseconds a layer (best and median of several calls of a program of four layers) for the
batches of pallas_kernels/paged_attention/arg_specs.py. It measures the C++ kernel with KV of float32 and of int8, in
turns, and XLA's loops, with rotary embedding and KV write as in a step. Beside them stand a naive version and a floor.
The naive version gathers every row's whole block table, if that fits in 2 GiB. The floor is the batch's keys and values
in float32 over the read bandwidth of all cores, measured in the same run.

The second command prints attention's share of a decode step, as a line of text and a line of JSON. It times the
engine's own step program, warm and through its runner, in three forms that alternate. The first form has `context`
positions a row. The second has one position a row, which leaves next to nothing to read. The third has no attention:
the heads' outputs are the queries, and the program writes no KV. With --kv_dtype=int8 a fourth form is the first with
int8 KV. --dtype is that of weights, activations and KV. Without --model, the command makes a random Llama of 125M
parameters.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from engine.batch import Admission, Batch
from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import ConfigError, EngineError
from engine.sampling_params import SamplingParams
from pallas_kernels.paged_attention import api, arg_specs
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from tools.arguments import CommandParser, positive_float, positive_int
from tools.bench.ceilings import read_bandwidth
from tools.make_random_model import read_shape, write_model
from tools.measure import best_and_median, machine

_LAYERS = 4
_NAIVE_LIMIT = 2**31  # limit for gathered keys and values, in bytes
_POOL_BLOCKS = 4096


def naive(q, kv, meta: api.RaggedMeta, *, scale: float):
  """Computes paged attention by gathering whole block tables, for rows of one query in batch order.

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
  """Returns a program of several layers, so that the dispatch hardly counts in the time of a layer."""

  @jax.jit
  def program(q, kv, meta):
    for _ in range(_LAYERS):
      q = attention(q, kv, meta)
    return q

  return program


def operands(spec: ArgSpec, num_blocks: int) -> tuple[jax.Array, api.RaggedMeta]:
  """Returns queries and rows; the rows' blocks are spread over a pool of at least `num_blocks`."""
  used = arg_specs.make_arguments(dataclasses.replace(spec, spare_blocks=1)).num_blocks
  arguments = arg_specs.make_arguments(dataclasses.replace(spec, spare_blocks=1 + max(0, num_blocks - used)))
  tables, lens, starts = map(jnp.asarray, (arguments.block_tables, arguments.kv_lens, arguments.query_starts))
  return jnp.asarray(np.nan_to_num(arguments.q)), api.RaggedMeta(tables, lens, starts)


def make_layers(name: str, kv_dtype: str, spec: ArgSpec, num_blocks: int) -> Callable[[], None]:
  """Returns a function that runs rotary embedding, KV write and attention of several layers."""
  q, meta = operands(spec, num_blocks)
  num_blocks = max(num_blocks, int(meta.block_tables.max()) + 1)
  attention = api.PagedAttention(name, spec.geometry, spec.scale)
  q = q.reshape(spec.num_tokens, spec.num_kv_heads, -1, spec.head_dim)
  cos, sin = (jnp.full((spec.num_tokens, spec.head_dim // 2), x, jnp.float32) for x in (0.6, 0.8))
  slots = np.zeros(spec.num_tokens, np.int32)  # padding's block
  for row, (queries, length) in enumerate(spec.rows):
    position = np.arange(length - queries, length)
    blocks = np.asarray(meta.block_tables)[row, position // spec.block_size]
    first = int(meta.query_starts[row])
    slots[first : first + queries] = blocks * spec.block_size + position % spec.block_size

  @functools.partial(jax.jit, donate_argnums=0)
  def program(kv, q, cos, sin, meta, slots):
    for _ in range(_LAYERS):
      out, kv = attention.attend(jnp.concatenate([q, q[:, :, :2]], axis=2), cos, sin, kv, meta, slots)
      q = out.reshape(q.shape)
    return kv, q

  kv = jnp.ones(api.kv_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, name, kv_dtype), kv_dtype)

  def run() -> None:
    nonlocal kv
    kv, _ = jax.block_until_ready(program(kv, q, cos, sin, meta, slots))

  return run


def measure_in_turns(
  kinds: Sequence[tuple[str, str]], spec: ArgSpec, num_blocks: int, seconds: float
) -> list[tuple[float, float]]:
  """Returns milliseconds a layer, best and median, of each implementation and dtype of KV.

  Args:
    kinds: names of implementations, with the dtype of their KV.
    seconds: for each.
  """
  runs = [make_layers(name, kv_dtype, spec, num_blocks) for name, kv_dtype in kinds]
  times: list[list[float]] = [[] for _ in runs]
  for run in runs:
    run()
  end = time.perf_counter() + seconds * len(runs)
  while len(times[0]) < 3 or time.perf_counter() < end:
    for run, found in zip(runs, times, strict=True):
      start = time.perf_counter()
      run()
      found.append(1e3 * (time.perf_counter() - start) / _LAYERS)
  return [(min(found), statistics.median(found)) for found in times]


def naive_best(spec: ArgSpec, num_blocks: int, seconds: float) -> float | None:
  """Returns milliseconds a layer of the naive version, or None if it is left out."""
  q, meta = operands(spec, num_blocks)
  num_blocks = max(num_blocks, int(meta.block_tables.max()) + 1)
  page = 2 * spec.block_size * spec.num_kv_heads * spec.head_dim
  gathered = 4 * page * spec.table_width * spec.num_rows
  if {queries for queries, _ in spec.rows} != {1} or len(spec.rows) != spec.num_tokens or gathered > _NAIVE_LIMIT:
    return None
  kv = jnp.ones((num_blocks, spec.block_size, 2, spec.num_kv_heads, spec.head_dim))
  program = layers(lambda q, kv, meta: naive(q, kv, meta, scale=spec.scale))
  return best_and_median(lambda: program(q, kv, meta).block_until_ready(), seconds)[0] / _LAYERS


def implementations() -> tuple[tuple[str, str], ...]:
  """Returns what runs on a CPU, with the dtype of its KV: the C++ kernel, if it is built, and XLA's loops."""
  spec = arg_specs.BENCHMARK[0]
  try:
    api.check_supported("cpu", spec.geometry, spec.dtype)
  except NotImplementedError as error:
    print(error, file=sys.stderr)
    return (("reference", "float32"),)
  return ("cpu", "float32"), ("cpu", "int8"), ("reference", "float32")


def line(
  kinds: Sequence[tuple[str, str]], title: str, spec: ArgSpec, num_blocks: int, seconds: float, bandwidth: float
) -> str:
  """Returns a line of a table; KV bytes and the floor's factor are those of the first kind, with float32."""
  times = measure_in_turns(kinds, spec, num_blocks, seconds)
  other = naive_best(spec, num_blocks, seconds)
  held = sum(length for _, length in spec.rows) * 2 * spec.num_kv_heads * spec.head_dim * 4
  floor = 1e3 * held / bandwidth
  columns = "".join(f" {best:9.3f} {median:9.3f}" for best, median in times)
  shown = "       -" if other is None else f"{other:8.2f}"
  return f"{title:34s}{columns} {shown} {held / 1e6:8.2f} {floor:8.3f} {times[0][0] / floor:8.1f}"


@contextlib.contextmanager
def without_attention(name: str) -> Iterator[str]:
  """Registers an implementation with the buffers of `name` that does not rotate, store or attend; yields its name.

  Its own name keeps it apart from traces and executables of the other.
  """
  of = api.implementation(name)
  nothing = SimpleNamespace(
    kv_shape=of.kv_shape,
    attend=lambda attention, qkv, cos, sin, kv, *_: (qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[3]), kv),
  )
  with (
    mock.patch.dict(sys.modules, {f"{api.__package__}.nothing": nothing}),
    mock.patch.object(api, "IMPLEMENTATIONS", (*api.IMPLEMENTATIONS, "nothing")),
  ):
    yield "nothing"


def build_step(
  model_dir: str,
  rows: int,
  context: int,
  block_size: int,
  attention: str = "auto",
  kv_dtype: str = "auto",
  dtype: str = "auto",
) -> Built:
  """Returns an engine with one rung, of `rows` tokens and rows, and a pool that holds them."""
  options = BuildOptions(
    model_dir=model_dir,
    attention=attention,
    kv_dtype=kv_dtype,
    dtype=dtype,
    num_blocks=rows * -(-context // block_size),
    block_size=block_size,
    token_budgets=(rows,),
    max_num_seqs=rows,
    prefill_chunk=rows,
  )
  return build_engine(options, lambda *_: None, lambda _: None)


def decodes(built: Built, rows: int, length: int) -> Batch:
  """Returns a greedy step in which each of `rows` rows adds position `length - 1`; blocks lie anywhere in the pool."""
  blocks = np.random.default_rng(0).permutation(np.arange(1, built.config.num_blocks + 1)).tolist()
  each = built.config.num_blocks // rows
  params = SamplingParams(temperature=0.0, max_tokens=1)
  admissions = tuple(
    Admission(row, [7] * length, length, tuple(blocks[row * each : (row + 1) * each]), params, 0) for row in range(rows)
  )
  (shape,) = built.runner.steps
  return Batch(
    step=0,
    shape=shape,
    request_ids=tuple(map(str, range(rows))),
    slots=tuple(range(rows)),
    starts=(length - 1,) * rows,
    counts=(1,) * rows,
    num_logits=(1,) * rows,
    samples=(True,) * rows,
    token_ids=((7,),) * rows,
    admissions=admissions,
  )


def share(
  model_dir: str,
  rows: int,
  context: int,
  block_size: int,
  seconds: float,
  attention: str = "auto",
  kv_dtype: str = "auto",
  dtype: str = "auto",
) -> dict[str, Any]:
  """Measures attention's share of a step of `rows` decodes with `context` positions each.

  Returns:
    step_ms: the median step. attention_ms: its time over that of the step without attention. walk_ms: the part that
    grows with the context, over a step of one position a row; the rest is work lists, stores and loop starts.
    share: attention_ms / step_ms. share_of_best: the same of the shortest steps. share_of_processor: the same in
    processor time, which other work on the machine disturbs less, but which counts a phase on one core only once.
    steps: the number of steps of each form. With a kv_dtype also its step_ms, and speedup: the ratio of both steps.
  """
  block_size = block_size or api.preferred_block_size(api.candidates(attention, jax.default_backend())[0])
  real = build_step(model_dir, rows, context, block_size, attention, dtype=dtype)
  if context > real.config.max_model_len:
    raise ConfigError(f"context={context} exceeds the {real.config.max_model_len} positions of {real.model_name}")
  with without_attention(real.attention) as nothing:
    without = build_step(model_dir, rows, context, block_size, nothing, dtype=dtype)
  forms = {
    "step": (real, decodes(real, rows, context)),
    "short": (real, decodes(real, rows, 1)),
    "without": (without, decodes(without, rows, context)),
  }
  if kv_dtype != "auto":
    other = build_step(model_dir, rows, context, block_size, attention, kv_dtype, dtype)
    forms["other"] = other, decodes(other, rows, context)
  times: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
  for built, batch in forms.values():
    built.runner.launch(batch).result()
  end = time.perf_counter() + seconds
  while len(times["step"]) < 5 or time.perf_counter() < end:
    for form, (built, batch) in forms.items():
      batch = dataclasses.replace(batch, admissions=())
      start = time.perf_counter(), time.process_time()
      built.runner.launch(batch).result()
      times[form].append((time.perf_counter() - start[0], time.process_time() - start[1]))
  wall = {form: [1e3 * each for each, _ in values] for form, values in times.items()}
  median = {form: statistics.median(values) for form, values in wall.items()}
  processor = {form: statistics.median(each for _, each in values) for form, values in times.items()}
  taken = median["step"] - median["without"]
  about: dict[str, Any] = {}
  if kv_dtype != "auto":
    speedup = median["step"] / median["other"]
    about = {"kv_dtype": kv_dtype, "kv_dtype_step_ms": round(median["other"], 2), "speedup": round(speedup, 3)}
  return about | {
    "model": real.model_name,
    "attention": real.attention,
    "dtype": jnp.dtype(real.runner.spec.dtype).name,
    "rows": rows,
    "context": context,
    "block_size": block_size,
    "steps": len(times["step"]),
    "step_ms": round(median["step"], 2),
    "attention_ms": round(taken, 2),
    "walk_ms": round(median["step"] - median["short"], 2),
    "share": round(taken / median["step"], 4),
    "share_of_best": round(1 - min(wall["without"]) / min(wall["step"]), 4),
    "share_of_processor": round(1 - processor["without"] / processor["step"], 4),
    "machine": machine(),
  }


def print_share(args: Any) -> int:
  """Runs --share; returns the exit code."""
  with tempfile.TemporaryDirectory() as folder:
    model_dir = args.model
    if not model_dir:
      model_dir = str(pathlib.Path(folder) / "random-llama-125m")
      write_model(pathlib.Path(model_dir), read_shape("llama-125m"), seed=0)
    try:
      sizes = args.rows, args.context, args.block_size
      found = share(model_dir, *sizes, args.seconds, kv_dtype=args.kv_dtype, dtype=args.dtype)
    except EngineError as error:
      print(error, file=sys.stderr)
      return 2
  print(
    f"{found['model']}, {found['dtype']}, {found['rows']} rows of {found['context']} in blocks of "
    f"{found['block_size']}: a step takes {found['step_ms']} ms, attention {found['attention_ms']} of them, "
    f"{100 * found['share']:.1f} % ({100 * found['share_of_best']:.1f} % of the shortest, "
    f"{100 * found['share_of_processor']:.1f} % of processor time); walking over the keys alone {found['walk_ms']} ms"
  )
  if args.kv_dtype != "auto":
    print(
      f"with {args.kv_dtype} KV a step takes {found['kv_dtype_step_ms']} ms, {found['speedup']} times as many tokens/s"
    )
  print(json.dumps(found))
  return 0


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench.attention", "Measure a layer's paged attention.")
  parser.add_argument(
    "--seconds", type=positive_float, help="seconds for each number (default 0.5), or for all with --share (default 60)"
  )
  parser.add_argument(
    "--batches", type=positive_int, default=len(arg_specs.BENCHMARK), help="number of batches to measure"
  )
  parser.add_argument("--share", action="store_true", help="measure attention's share of a step instead")
  parser.add_argument("--model", help="for --share: a model folder; none: a random Llama of 125M parameters")
  parser.add_argument("--rows", type=positive_int, default=32, help="for --share: sequences that decode at once")
  parser.add_argument("--context", type=positive_int, default=256, help="for --share: positions of each sequence")
  parser.add_argument(
    "--block_size", type=positive_int, default=0, help="for --share: tokens a KV block; 0: as the engine"
  )
  parser.add_argument(
    "--kv_dtype", choices=("auto", "int8"), default="auto", help="for --share: also measure a step with this KV"
  )
  parser.add_argument(
    "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="for --share: see the server's flag"
  )
  args = parser.parse_args(arguments)
  args.seconds = args.seconds or (60.0 if args.share else 0.5)
  if args.share:
    return print_share(args)
  kinds, (bandwidth, _) = implementations(), read_bandwidth(args.seconds)
  print(f"12 query and 4 KV heads of 64, f32, blocks of 16; all cores read {bandwidth / 1e9:.1f} GB/s")
  head = "".join(f" {name if dtype == 'float32' else dtype:>9s} {'median':>9s}" for name, dtype in kinds)
  head += f" {'naive':>8s} {'KV MB':>8s} {'floor':>8s} {'x floor':>8s}"
  print(f"\n{'batch (ms a layer, best)':34s}{head}")
  for spec in arg_specs.BENCHMARK[: args.batches]:
    print(line(kinds, spec.name, spec, _POOL_BLOCKS, args.seconds, bandwidth), flush=True)
  rows = dataclasses.replace(arg_specs.BENCHMARK[1], name="")
  print(f"\n{'8 rows, 128 long, by pool':34s}{head}")
  for num_blocks in (128, 1024, 8192):
    print(line(kinds, f"  {num_blocks} blocks", rows, num_blocks, args.seconds, bandwidth), flush=True)
  print(f"\n{'8 rows, 128 long, by table width':34s}{head}")
  for width in (8, 128, 1024):
    spec = dataclasses.replace(rows, table_width=width)
    title = f"  {width} blocks, {16 * width} tokens"
    print(line(kinds, title, spec, _POOL_BLOCKS, args.seconds, bandwidth), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
