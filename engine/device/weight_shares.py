"""Makes each device's share of a model's parameters from parts of the checkpoint. May not know files.

A `ReadPart` returns a part of a plain parameter, in host memory. Shares are read device by device, so a host reads what
its own devices hold.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import numpy as np

from models.linear import stored_name
from models.split import Box, ModelSplit

# (stored name, part of the parameter in the model) -> the part, contiguous or a view
ReadPart = Callable[[str, Box], np.ndarray]
# (stored name, value[, part of it]) -> parameters by stored name; see models.linear.arranger
Arrange = Callable[..., dict[str, Any]]


def parameter_axes(state: nnx.State) -> dict[str, tuple[str | None, ...]]:
  """Returns the logical names of each parameter's dimensions, by stored name."""
  variables, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
  return {
    stored_name(jax.tree_util.keystr(path, simple=True, separator=".")): variable.get_metadata()["axes"]
    for path, variable in variables
  }


@dataclasses.dataclass(frozen=True)
class ShareReader:
  """Reads parts of the shares of all devices together.

  Attributes:
    split: the model on its devices.
    plain: the parameters of the model in the plain form, abstract, by stored name.
    axes: logical names of their dimensions.
    read: reads a part of a parameter of the model.
  """

  split: ModelSplit
  plain: dict[str, jax.ShapeDtypeStruct]
  axes: dict[str, tuple[str | None, ...]]
  read: ReadPart

  def read_share(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None) -> np.ndarray:
    """Returns a part of a parameter of all shares together; zeros where it is padding.

    Args:
      name: stored name.
      shape: shape of all shares together.
      index: the part.
    """
    wanted = _bounded(index, shape)
    sizes = tuple(part.stop - part.start for part in wanted)
    leaf = self.plain[name]
    out = None
    for place, source in self.split.boxes(name, leaf.shape, self.axes[name]):
      both = [(max(box.start, part.start), min(box.stop, part.stop)) for box, part in zip(place, wanted, strict=True)]
      if any(start >= stop for start, stop in both):
        continue
      inner = tuple(
        slice(start - box.start + origin.start, stop - box.start + origin.start)
        for (start, stop), box, origin in zip(both, place, source, strict=True)
      )
      target = tuple(
        slice(start - part.start, stop - part.start) for (start, stop), part in zip(both, wanted, strict=True)
      )
      found = self.read(name, inner)
      if found.shape == sizes:
        return found  # nothing is padded or repeated
      out = np.zeros(sizes, leaf.dtype) if out is None else out
      out[target] = found
    return np.zeros(sizes, leaf.dtype) if out is None else out

  def read_whole(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter of all shares together, of `shape`."""
    return self.read_share(name, shape, tuple(slice(0, size) for size in shape))

  def load_plain(self, wanted: dict[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
    """Yields each parameter of `wanted`, in the plain form, on the devices."""
    for name, leaf in wanted.items():
      read = functools.partial(self.read_share, name, leaf.shape)
      # Waits, so that one tensor is in flight; a queue of transfers would hold the whole model in host memory.
      yield name, jax.make_array_from_callback(leaf.shape, leaf.sharding, read).block_until_ready()

  def load_arranged(
    self, wanted: dict[str, jax.ShapeDtypeStruct], kept: dict[str, jax.ShapeDtypeStruct], arrange: Arrange, whole: bool
  ) -> Iterator[dict[str, jax.Array]]:
    """Yields the parameters that `arrange` makes in host memory, device by device.

    Args:
      wanted: the parameters in the plain form, with shardings.
      kept: the parameters of all shares together, with shardings.
      arrange: makes one device's share.
      whole: `arrange` needs the whole plain parameter, whose numbers decide scales.
    """
    for name, leaf in wanted.items():
      if whole:
        yield from arrange_on_devices([(name, self.read_whole(name, leaf.shape))], wanted, kept, arrange)
      else:
        make = functools.partial(self._make_own, name, leaf.shape, arrange)
        yield _place_shares(leaf, kept, make)

  def _make_own(self, name: str, shape: tuple[int, ...], arrange: Arrange, part: Box) -> dict[str, Any]:
    return arrange(name, self.read_share(name, shape, part))


def arrange_on_devices(
  values: Iterable[tuple[str, Any]],
  wanted: dict[str, jax.ShapeDtypeStruct],
  kept: dict[str, jax.ShapeDtypeStruct],
  arrange: Arrange,
) -> Iterator[dict[str, jax.Array]]:
  """Yields the parameters that `arrange` makes of parts of whole values, device by device.

  Args:
    values: stored names and whole parameters.
    wanted, kept, arrange: as in ShareReader.load_arranged.
  """
  for name, value in values:
    yield _place_shares(wanted[name], kept, functools.partial(arrange, name, value))


def _place_shares(
  leaf: jax.ShapeDtypeStruct, kept: dict[str, jax.ShapeDtypeStruct], make: Callable[[Box], dict[str, Any]]
) -> dict[str, jax.Array]:
  """Returns parameters on the devices that have parts of `leaf`, each made once of its part."""
  shares: dict[tuple[tuple[int, int], ...], dict[str, Any]] = {}
  placed: dict[str, list[jax.Array]] = {}
  assert leaf.sharding is not None
  for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
    part = _bounded(index, leaf.shape)
    key = tuple((each.start, each.stop) for each in part)
    if key not in shares:
      shares[key] = make(part)
    for made, array in shares[key].items():
      placed.setdefault(made, []).append(jax.device_put(array, device))
  return {
    made: jax.make_array_from_single_device_arrays(kept[made].shape, kept[made].sharding, arrays)
    for made, arrays in placed.items()
  }


def _bounded(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
  """Returns `index` with numbers for every start and end."""
  assert index is not None  # JAX's type allows None
  return tuple(slice(*each.indices(size)[:2]) for each, size in zip(index, shape, strict=True))
