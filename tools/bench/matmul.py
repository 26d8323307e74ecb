"""Measures the matmuls of a step on a CPU with each kernel of the engine, beside ceilings of the run. Tunes nothing.

  python -m tools.bench.matmul [--shapes=llama-125m,llama-15m] [--rows=1,2,...,256] [--ways=packed,w8a8,...]
  [--output=FILE.json]

The program multiplies a step's matrices one after the other: those of every layer, each with its own weights as in a
model, and the head. Each matrix takes the previous one's output. There is no attention and no norm. The kernels are
XLA's dot and, if it is built, the packed kernel (pallas_kernels/packed_matmul): in f32, in f32 in the order that
--deterministic needs, with int8 weights (int8), with rows in 8 bits too (w8a8), and with those and weights of 4 bits in
groups of 32 (int4). The tool compares each figure with the ceilings just before and just after it
(tools/bench/ceilings.py). `of rate` is operations a second over a square matmul's in f32, and `of read` is bytes of
weights a second over the read bandwidth of all cores: the median product over the best read. `alike` is the median
product over the median read, which are disturbed alike.

Where the processor has AMX, `SLUICE_AMX=off` in the environment measures the packed kernel without tiles.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.device.host_memory import keep_freed
from engine.errors import ConfigError, EngineError
from models.config import ModelConfig
from models.grouped_weight import quantize_by_group
from models.quantize import quantize
from models.registry import config_from_hf
from pallas_kernels.packed_matmul import api
from tools.arguments import CommandParser, output_file, positive_float, positive_ints
from tools.bench.ceilings import Ceilings, CeilingWatch, in_words
from tools.bench.engine import model_folder
from tools.measure import best_and_median, commit, machine, show

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A weight [inputs, outputs] that every token of a step is multiplied by."""

  inputs: int
  outputs: int


def matrices(model: ModelConfig) -> list[Matrix]:
  """Returns a step's matrices in order; each has at least as many outputs as the next has inputs."""
  d, f, h = model.model_dim, model.hidden_dim, model.head_dim
  heads = model.num_heads * h
  layer = [Matrix(d, heads + 2 * model.num_kv_heads * h), Matrix(heads, d), Matrix(d, 2 * f), Matrix(f, d)]
  return layer * model.num_layers + [Matrix(d, model.vocab_size)]


def _packed(weight: np.ndarray) -> jax.Array:
  return jax.device_put(api.pack_weight(weight))


def _int8(weight: np.ndarray) -> tuple[jax.Array, jax.Array]:
  values, scales = quantize(jnp.asarray(weight), 1)
  return _packed(np.asarray(values)), scales


def _grouped(weight: np.ndarray, bits: int, group: int) -> jax.Array:
  made = quantize_by_group(weight, 1, bits, group)
  return jax.device_put(api.pack_groups(made.codes, made.scales, made.offsets, bits))


def _multiply_w8a8(x: jax.Array, packed: jax.Array, outputs: int) -> jax.Array:
  return api.grouped_matmul(x, packed, outputs, api.GroupLayout(x.shape[-1], 8))


def _multiply_int4(x: jax.Array, packed: jax.Array, outputs: int) -> jax.Array:
  return api.grouped_matmul(x, packed, outputs, api.GroupLayout(x.shape[-1], 4, x.shape[-1] // 32, "float16"))


@dataclasses.dataclass(frozen=True)
class Way:
  """A way to store a weight [inputs, outputs], its bytes a value with scales of groups, and its product with x."""

  hold: Callable[[np.ndarray], Any]
  itemsize: float
  multiply: Callable[[jax.Array, Any, int], jax.Array]


WAYS = {
  "xla": Way(jnp.asarray, 4, lambda x, weight, outputs: x @ weight),
  "packed": Way(_packed, 4, api.matmul),
  "ordered": Way(_packed, 4, functools.partial(api.matmul, ordered=True)),
  "int8": Way(_int8, 1, lambda x, held, outputs: api.matmul(x, held[0], outputs, scales=held[1])),
  "w8a8": Way(lambda weight: _grouped(weight, 8, len(weight)), 1, _multiply_w8a8),
  "int4": Way(lambda weight: _grouped(weight, 4, 32), 0.5 + 2 / 32, _multiply_int4),
}


def choose_ways(wanted: str) -> tuple[str, ...]:
  """Returns the kernels of `wanted`, names with commas between; for "", all that this machine has.

  It prints the reason if it leaves some out.

  Raises:
    ConfigError: a name is unknown, or its kernel is not available here.
  """
  names = tuple(wanted.split(",")) if wanted else tuple(WAYS)
  if unknown := [name for name in names if name not in WAYS]:
    raise ConfigError(f"--ways: {unknown[0]!r} is not one of {', '.join(WAYS)}")
  try:
    api.check_supported(jnp.dtype("float32"))
  except NotImplementedError as error:
    if wanted and names != ("xla",):
      raise ConfigError(f"--ways={wanted}: {error}; --ways=xla needs none") from None
    print(error, file=sys.stderr)
    return ("xla",)
  return names


def tile_types() -> tuple[str, ...]:
  """Returns the types of the AMX tiles that the packed kernel uses in this run."""
  try:
    return api.find_tile_types()
  except NotImplementedError:
    return ()


def make_weights(held: Sequence[Matrix]) -> Iterator[np.ndarray]:
  """Makes random weights that keep the variance of their input, so that nothing overflows."""
  rng = np.random.default_rng(0)
  for m in held:
    yield rng.standard_normal((m.inputs, m.outputs), np.float32) * m.inputs**-0.5


def hold_weights(held: Sequence[Matrix], ways: Sequence[str]) -> dict[str, list[Any]]:
  """Returns the weights of each way. Ways of one layout share them, and only one plain weight exists at a time."""
  by_layout: dict[Callable, list[Any]] = {WAYS[way].hold: [] for way in ways}
  for weight in make_weights(held):
    for hold, weights in by_layout.items():
      weights.append(hold(weight))
  return {way: by_layout[WAYS[way].hold] for way in ways}


def step(way: str, held: Sequence[Matrix]) -> Callable[[jax.Array, list[Any]], jax.Array]:
  """Returns a program (x [rows, inputs of the first matrix], weights) -> output of the last matrix."""
  multiply = WAYS[way].multiply

  @jax.jit
  def program(x: jax.Array, weights: list[Any]) -> jax.Array:
    for matrix, weight in zip(held, weights, strict=True):
      x = multiply(x[:, : matrix.inputs], weight, matrix.outputs)
    return x

  return program


def times(
  shape: str, rows: Sequence[int], ways: Sequence[str], seconds: float, watch: CeilingWatch
) -> list[dict[str, Any]]:
  """Measures milliseconds of a step of a model's matrices, best and median, by rows and kernel, beside the ceilings.

  Raises:
    ConfigError: the shape is unknown.
  """
  folder = pathlib.Path(model_folder(shape))
  model = config_from_hf(json.loads((folder / "config.json").read_text("utf-8")))
  held, found = matrices(model), []
  laid_out = hold_weights(held, ways)
  programs = {way: step(way, held) for way in laid_out}
  watch.around()  # excludes the time since the previous figure
  for count in rows:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((count, held[0].inputs), np.float32))
    for way, weights in laid_out.items():
      program = programs[way]
      best, median = best_and_median(lambda p=program, w=weights, x=x: p(x, w).block_until_ready(), seconds)
      of_step = {"shape": shape, "rows": count, "way": way, "best_ms": best, "median_ms": median}
      found.append(of_step | beside_ceilings(of_step, held, watch.around()))
      print(f"{shape}, {count} rows, {way}: {best:.3f} ms", file=sys.stderr, flush=True)
  return found


def beside_ceilings(row: dict[str, Any], held: Sequence[Matrix], ceilings: Ceilings) -> dict[str, Any]:
  """Returns rates from the medians, and their shares of the ceilings."""
  weights = sum(matrix.inputs * matrix.outputs for matrix in held)
  seconds, flops, num_bytes = row["median_ms"] / 1e3, 2 * row["rows"] * weights, WAYS[row["way"]].itemsize * weights
  return {
    "ceilings": dataclasses.asdict(ceilings),
    "gflops": round(flops / seconds / 1e9, 2),
    "gb_s": round(num_bytes / seconds / 1e9, 2),
    "of_median_read": round(num_bytes / seconds / ceilings.median_bytes_s, 3) if ceilings.median_bytes_s else None,
    "best_of_read": round(num_bytes / row["best_ms"] * 1e3 / ceilings.bytes_s, 3),
  } | ceilings.shares(num_bytes, flops, seconds)


def measure(args: Any) -> dict[str, Any]:
  """Measures all shapes. Raises ConfigError."""
  if jax.default_backend() != "cpu":
    raise ConfigError(
      f"jax's platform is {jax.default_backend()}, this tool measures CPU kernels; set JAX_PLATFORMS=cpu"
    )
  ways = choose_ways(args.ways)
  keep_freed()  # as the engine does before it serves
  watch = CeilingWatch(jnp.float32, args.seconds)
  return {
    "steps": [row for shape in args.shapes for row in times(shape, args.rows, ways, args.seconds, watch)],
    "ceilings_seen": watch.range(),
    "tiles": tile_types(),
    "jax": jax.__version__,
    "machine": machine(),
    "commit": commit(),
  }


def table(result: dict[str, Any]) -> str:
  """Formats a table for each shape."""
  tiles = ", ".join(result["tiles"]) or "none"
  lines = [f"AMX tiles in use: {tiles}", in_words(result["ceilings_seen"])]
  names = list(dict.fromkeys(row["way"] for row in result["steps"]))
  for shape in dict.fromkeys(row["shape"] for row in result["steps"]):
    head = "".join(f"{f'{name} ms':>12}{'GFLOP/s':>9}{'of rate':>9}{'of read':>9}{'alike':>7}" for name in names)
    lines.append(f"\n{shape:>10}, rows{head}")
    of_shape = [row for row in result["steps"] if row["shape"] == shape]
    for count in dict.fromkeys(row["rows"] for row in of_shape):
      columns = "".join(
        f"{row['median_ms']:12.3f}{row['gflops']:9.1f}{row['of_rate']:9.2f}{row['of_read']:9.2f}"
        f"{row['of_median_read'] or 0:7.2f}"
        for row in of_shape
        if row["rows"] == count
      )
      lines.append(f"{count:16}{columns}")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line if something cannot be measured."""
  parser = CommandParser("tools.bench.matmul", __doc__)
  parser.add_argument("--shapes", default="llama-125m,llama-15m", help="folders of models/shapes, or demo")
  parser.add_argument("--rows", type=positive_ints, default=ROWS, help="tokens in a step")
  parser.add_argument("--ways", default="", help=f"kernels among {', '.join(WAYS)}; empty: all")
  parser.add_argument("--seconds", type=positive_float, default=1.0, help="seconds for each figure and each ceiling")
  parser.add_argument("--output", type=output_file, default="", help="JSON file to write")
  args = parser.parse_args(argv)
  args.shapes = args.shapes.split(",")
  try:
    result = measure(args)
  except EngineError as error:
    return parser.failed(error)
  show(result, table(result), args.output)
  return 0


if __name__ == "__main__":
  sys.exit(main())
