"""Makes each device's share of a model's parameters from parts of the checkpoint. May not know files.

A `ReadPart` returns a part of a plain parameter, in host memory. Shares are read device by device, so a host reads what
its own devices hold.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
# Reads one parameter and places it; returns what `Arrange` made of it, by stored name.
Load = Callable[[], dict[str, jax.Array]]


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

  def list_loads(
    self, wanted: dict[str, jax.ShapeDtypeStruct], kept: dict[str, jax.ShapeDtypeStruct], arrange: Arrange, whole: bool
  ) -> Iterator[Load]:
    """Yields the work that makes each parameter of `wanted` in host memory, device by device.

    Args:
      wanted: the parameters in the plain form, with shardings.
      kept: the parameters of all shares together, with shardings.
      arrange: makes one device's share.
      whole: `arrange` needs the whole plain parameter, whose numbers decide scales.
    """
    for name, leaf in wanted.items():
      if whole:
        read = functools.partial(self.read_whole, name, leaf.shape)
        yield functools.partial(place_whole, name, read, leaf, kept, arrange)
      else:
        make = functools.partial(self._make_own, name, leaf.shape, arrange)
        yield functools.partial(_place_shares, leaf, kept, make)

  def _make_own(self, name: str, shape: tuple[int, ...], arrange: Arrange, part: Box) -> dict[str, Any]:
    return arrange(name, self.read_share(name, shape, part))


def place_whole(
  name: str,
  read: Callable[[], Any],
  leaf: jax.ShapeDtypeStruct,
  kept: dict[str, jax.ShapeDtypeStruct],
  arrange: Arrange,
) -> dict[str, jax.Array]:
  """Returns the parameters that `arrange` makes of parts of one whole value, device by device.

  Args:
    name: stored name of the value.
    read: returns it.
    leaf: the parameter in the plain form, with its sharding.
    kept, arrange: as in ShareReader.list_loads.
  """
  return _place_shares(leaf, kept, functools.partial(arrange, name, read()))


def run_loads(loads: Iterable[Load], num_threads: int) -> Iterator[dict[str, jax.Array]]:
  """Runs loads on threads and yields their parameters in order.

  Packing and checks leave the interpreter to other threads, so two of them load faster than one. Each holds the plain
  value of its own parameter alone. Results may wait for the caller, so this suits parameters that stay where they are.
  """
  with ThreadPoolExecutor(num_threads, "load") as threads:
    try:
      waiting = deque(threads.submit(load) for load in loads)
      while waiting:
        yield waiting.popleft().result()  # leaves the result to the caller alone
    finally:
      threads.shutdown(wait=False, cancel_futures=True)


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
