"""Maps logical axes of arrays to one mesh axis. Decides placement only; may not allocate.

A single device is a mesh of one, so there is one code path. A parameter names its dimensions (models/layers.py), and
this module maps names to the mesh. A KV head stays with its query heads, and a slice of the hidden dimension stays with
the rows of the next matrix. So a layer needs two all-reduces and no other traffic (Megatron-LM, arXiv:1909.08053).
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from engine.errors import ConfigError
from models.linear import stored_name

AXIS = "model"

# Logical axis -> mesh axis (None: replicated).
RULES: dict[str, str | None] = {"vocab": AXIS, "embed": None, "mlp": AXIS, "kv_heads": AXIS}


def make_mesh(devices: Sequence[Any]) -> Mesh:
  """Returns a mesh with the single axis "model" over `devices` (jax.Device)."""
  return Mesh(np.array(devices), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def place_array(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns `value`, an array in host memory or on devices, with `sharding`.

  Each host copies only what its own devices hold. jax.device_put would compare the whole array between all hosts.
  """
  is_spread = isinstance(value, jax.Array) and not value.is_fully_addressable
  if is_spread or sharding.is_fully_addressable:
    return jax.device_put(value, sharding)
  held = np.asarray(value)
  return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def sharding_of(mesh: Mesh, name: str, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
  """Returns the sharding of an array.

  Args:
    mesh: the devices.
    name: name of the parameter, for the error.
    shape: shape of the whole array.
    axes: logical name of each dimension; None: replicated.

  Raises:
    ConfigError: a sharded dimension does not divide over the devices.
  """
  spec = [RULES[axis] if axis is not None else None for axis in axes]
  for size, axis, mesh_axis in zip(shape, axes, spec, strict=True):
    if mesh_axis is not None and size % mesh.shape[mesh_axis]:
      raise ConfigError(
        f"{name}: {axis}={size} does not divide over {mesh.shape[mesh_axis]} devices; set "
        f"--num_devices to a divisor of {size}"
      )
  return NamedSharding(mesh, PartitionSpec(*spec))


def shardings(mesh: Mesh, state: nnx.State) -> Any:
  """Returns a tree like `state` (arrays or ShapeDtypeStructs) with a NamedSharding for every parameter."""
  variables, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
  placed = [
    sharding_of(
      mesh,
      stored_name(jax.tree_util.keystr(path, simple=True, separator=".")),
      variable.get_value().shape,
      variable.get_metadata()["axes"],
    )
    for path, variable in variables
  ]
  return jax.tree.unflatten(jax.tree.structure(state), placed)
