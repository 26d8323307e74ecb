"""Maps logical axes of arrays to the axes of a mesh. Decides placement only; may not allocate.

A single device is a mesh of one. A parameter names its dimensions (models/layers.py), and this module maps names to the
mesh. On several devices a step runs once on each, inside one shard_map, so XLA never decides where an array lies
(`on_each_device`). models/split.py says what a device's share of a model is.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from models.layers import SPLIT_AXES
from models.split import spread_shape

# The axis whose devices share each layer. Axes of batches and of experts would come before it, because neighbors have
# the fastest links.
AXIS = "model"
AXES = (AXIS,)

# Logical axis -> mesh axis (None: replicated).
RULES: dict[str, str | None] = {"embed": None, **dict.fromkeys(SPLIT_AXES, AXIS)}


def make_mesh(devices: Sequence[Any], sizes: Mapping[str, int] | None = None) -> Mesh:
  """Returns a mesh with the axes AXES over `devices` (jax.Device).

  Args: sizes: devices along each axis but the last, which has the others; None: 1.
  """
  extents = [(sizes or {}).get(axis, 1) for axis in AXES[:-1]]
  return Mesh(np.array(devices).reshape(*extents, len(devices) // math.prod(extents)), AXES)


def num_shares(mesh: Mesh) -> int:
  """Returns the number of devices that share each layer."""
  return mesh.shape[AXIS]


def on_each_device(mesh: Mesh, function: Callable[..., Any], arguments: Any, results: Any) -> Callable[..., Any]:
  """Returns a function of whole arrays that runs `function` once on each device, with that device's parts of them.

  Args:
    function: a pure function; where a mesh axis is not in the sharding of a result, it must return equal values.
    arguments: a tree of abstract arrays with shardings for each argument.
    results: the same of the result.
  """
  if mesh.size == 1:
    return function

  def specs(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)

  return jax.shard_map(function, mesh=mesh, in_specs=specs(tuple(arguments)), out_specs=specs(results), check_vma=False)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def rows_by_share(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array whose first dimension holds one device's rows after the other's."""
  return NamedSharding(mesh, PartitionSpec(AXIS))


def place_array(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns `value`, an array in host memory or on devices, with `sharding`.

  Each host copies only what its own devices hold. jax.device_put would compare the whole array between all hosts.
  """
  is_spread = isinstance(value, jax.Array) and not value.is_fully_addressable
  if is_spread or sharding.is_fully_addressable:
    return jax.device_put(value, sharding)
  held = np.asarray(value)
  return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def spread(mesh: Mesh, shape: Sequence[int], dtype: Any, axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
  """Returns the abstract array, with its sharding, that devices hold together.

  Args:
    mesh: the devices.
    shape: shape of one device's share.
    dtype: of the array.
    axes: logical name of each dimension; None: replicated.
  """
  sharding = NamedSharding(mesh, PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes)))
  return jax.ShapeDtypeStruct(spread_shape(shape, axes, num_shares(mesh)), dtype, sharding=sharding)


def spread_params(mesh: Mesh, state: nnx.State) -> Any:
  """Returns a tree like `state`, the parameters of one device's share, with the abstract arrays of all devices."""
  variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
  placed = []
  for variable in variables:
    value = variable.get_value()
    placed.append(spread(mesh, value.shape, value.dtype, variable.get_metadata()["axes"]))
  return jax.tree.unflatten(jax.tree.structure(state), placed)
