"""Row copies in plain jnp; a buffer is [P, D]. Runs anywhere."""

import jax


def make_buffer_shape(num_rows: int, width: int) -> tuple[int, ...]:
  """See api.make_buffer_shape."""
  return num_rows, width


def read_rows(buffer: jax.Array, rows: jax.Array, width: int) -> jax.Array:
  """See api.read_rows."""
  del width
  return buffer[rows]


def write_rows(buffer: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
  """See api.write_rows."""
  return buffer.at[rows].set(values, mode="drop")
