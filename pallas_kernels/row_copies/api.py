"""Reads and writes single rows of a buffer that stays where it is. May not know what the rows mean.

Each implementation has its own layout of a buffer (`make_buffer_shape`). `reference` is plain jnp and runs anywhere;
its buffer is [P, D]. On a TPU, XLA may copy a whole buffer to vector memory for a scatter, and back; tpu.py copies
rows alone.
"""

import importlib
from types import ModuleType

import jax

IMPLEMENTATIONS = ("reference", "tpu")


def make_buffer_shape(num_rows: int, width: int, implementation: str = "reference") -> tuple[int, ...]:
  """Returns the shape of a buffer of `num_rows` rows of `width` numbers. Raises ValueError for the implementation."""
  return _find_module(implementation).make_buffer_shape(num_rows, width)


def read_rows(buffer: jax.Array, rows: jax.Array, width: int, implementation: str = "reference") -> jax.Array:
  """Returns rows of a buffer, [S, width].

  Args:
    buffer: of shape `make_buffer_shape`.
    rows: int32[S]; one outside of the buffer gives an arbitrary row.
    width: numbers of a row.
    implementation: a name of IMPLEMENTATIONS.
  """
  return _find_module(implementation).read_rows(buffer, rows, width)


def write_rows(buffer: jax.Array, rows: jax.Array, values: jax.Array, implementation: str = "reference") -> jax.Array:
  """Returns the buffer with new rows, updated in place if the caller's jit donates it.

  Args:
    buffer: of shape `make_buffer_shape`.
    rows: int32[T], not negative; those past the buffer's end are dropped. A row that occurs twice becomes arbitrary.
    values: [T, width].
    implementation: as in `read_rows`.
  """
  return _find_module(implementation).write_rows(buffer, rows, values)


def _find_module(implementation: str) -> ModuleType:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"row copies: implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
  return importlib.import_module(f"pallas_kernels.row_copies.{implementation}")
