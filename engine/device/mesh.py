"""Where arrays live: one mesh axis, and the rules from logical axes to it. Decides placement only, allocates nothing.

One device is a mesh of one, so there is a single code path. A parameter names its dimensions (models/layers.py); this
file says which names are split. A split KV head takes its query heads along, and a split hidden dimension takes the
rows of the matrix behind it, so a layer needs two all-reduces and no other traffic (Megatron-LM, arXiv:1909.08053).
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
  """A mesh of the one axis "model" over `devices` (jax.Device)."""
  return Mesh(np.array(devices), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def sharding_of(mesh: Mesh, name: str, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
  """Where an array goes.

  Args:
    mesh: the devices.
    name: of the parameter, for the message.
    shape: of the whole array.
    axes: logical name of each dimension, or None for one that is never split.

  Raises:
    ConfigError: a split dimension does not divide over the devices.
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
  """A tree of the structure of `state` (arrays or ShapeDtypeStructs) with a NamedSharding at every parameter."""
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
