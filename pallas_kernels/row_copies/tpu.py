"""Row copies for TPUs; no TPU has run them. A buffer is [P, 8, W], so that each row is a run of whole hardware tiles.

The kernel starts the copies of all rows before it awaits the first. It names the buffer's memory space. Otherwise XLA
would copy the whole buffer to vector memory and back where it expects that to be faster.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

_LANES, _SUBLANES = 128, 8


def make_buffer_shape(num_rows: int, width: int) -> tuple[int, ...]:
  """See api.make_buffer_shape."""
  return num_rows, _SUBLANES, -(-width // (_SUBLANES * _LANES)) * _LANES


def _copy_kernel(sources, targets, source, _, target, done):
  """Copies row `sources[i]` of `source` to row `targets[i]` of `target`, for each i.

  Args:
    sources, targets: int32[N] in scalar memory; targets past the end are dropped.
    source, target: [rows, 8, W] in HBM.
    done: a semaphore of all copies.
  """

  def copy_each(act: Callable) -> None:
    def visit(i, carry):
      @pl.when(targets[i] < target.shape[0])
      def _():
        act(pltpu.make_async_copy(source.at[sources[i]], target.at[targets[i]], done))

      return carry

    lax.fori_loop(0, sources.shape[0], visit, 0)

  copy_each(lambda copy: copy.start())
  copy_each(lambda copy: copy.wait())


def _copy_rows(name: str, sources: jax.Array, targets: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
  return pl.pallas_call(
    _copy_kernel,
    out_shape=pltpu.HBM(target.shape, target.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
      out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
      scratch_shapes=[pltpu.SemaphoreType.DMA],
    ),
    input_output_aliases={3: 0},
    name=name,
  )(sources, targets, pltpu.with_memory_space_constraint(source, pltpu.HBM), target)


def _count(size: int) -> jax.Array:
  return jnp.arange(size, dtype=jnp.int32)


def read_rows(buffer: jax.Array, rows: jax.Array, width: int) -> jax.Array:
  """See api.read_rows."""
  size = rows.shape[0]
  rows = jnp.clip(rows, 0, buffer.shape[0] - 1)  # nothing else would stop a copy from other memory
  lines = jnp.zeros((size, *buffer.shape[1:]), buffer.dtype)
  return _copy_rows("read_rows", rows, _count(size), buffer, lines).reshape(size, -1)[:, :width]


def write_rows(buffer: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
  """See api.write_rows."""
  size, width = values.shape
  _, sublanes, lanes = buffer.shape
  lines = jnp.pad(values, ((0, 0), (0, sublanes * lanes - width))).reshape(size, sublanes, lanes)
  return _copy_rows("write_rows", _count(size), rows, lines, buffer)
