"""A compiled kernel and how it is launched, which a file can hold. Knows neither JAX nor MLIR."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import gzip
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.emulator import run_kernel
from tools.ptx_emulator.memory import AccessError, GlobalMemory
from tools.ptx_emulator.reader import Kernel, PtxError, read_kernels
from tools.ptx_emulator.tensor_map import TensorMap

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class MapSpec:
  """A tensor map before its array has an address; fields as of TensorMap, dimensions with the innermost last.

  Attributes:
    argument: number of the kernel's array.
    offset: elements from its start.
  """

  argument: int
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]
  box: tuple[int, ...]
  swizzle: int
  itemsize: int

  def place(self, address: int) -> TensorMap:
    """Returns the map of an array at an address."""
    size = self.itemsize
    return TensorMap(
      address + self.offset * size,
      size,
      self.shape[::-1],
      tuple(stride * size for stride in self.strides[::-1]),
      self.box[::-1],
      self.swizzle,
    )


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
  """A kernel and how it is launched.

  Attributes:
    text: its PTX.
    grid: blocks.
    shared_bytes: of dynamic shared memory.
    pointers: the arrays of the leading parameters.
    maps: of the last parameter; () if there is none.
    allows_equal_writes: see run_kernel.
  """

  text: str
  grid: tuple[int, int, int]
  shared_bytes: int
  pointers: tuple[int, ...]
  maps: tuple[MapSpec, ...]
  allows_equal_writes: bool = False

  @functools.cached_property
  def kernel(self) -> Kernel:
    """Raises PtxError for text that the reader does not know, or that has other parameters."""
    (kernel,) = read_kernels(self.text)
    num_pointers = len(kernel.parameters) - bool(self.maps)
    if num_pointers != len(self.pointers):
      raise PtxError(f"kernel {kernel.name} has {num_pointers} pointers; its module names {self.pointers}")
    return kernel

  def launch(self, memory: GlobalMemory, addresses: Sequence[int], seed: int) -> None:
    """Runs the kernel. Args: addresses: of all arrays. Raises KernelFault."""
    arguments: list[int | list[TensorMap]] = [addresses[number] for number in self.pointers]
    if self.maps:
      try:
        arguments.append([spec.place(addresses[spec.argument]) for spec in self.maps])
      except AccessError as error:
        raise KernelFault(f"kernel {self.kernel.name}: {error}") from error
    launch = self.kernel, memory, arguments, self.grid, self.shared_bytes
    run_kernel(*launch, seed, allows_equal_writes=self.allows_equal_writes)


@dataclasses.dataclass(frozen=True)
class ArrayCall:
  """A kernel on arrays: first the inputs, then the outputs.

  Attributes:
    kernel: what is launched.
    outputs: shape and name of the dtype of each.
    aliases: (input, output) that share memory.
  """

  kernel: CompiledKernel
  outputs: tuple[tuple[tuple[int, ...], str], ...]
  aliases: tuple[tuple[int, int], ...]

  def run(self, inputs: Sequence[Any], seed: int) -> list[np.ndarray]:
    """Returns the outputs of a launch; inputs do not change, and what the kernel does not write has all bits set.

    Args: seed: of the schedule.

    Raises:
      KernelFault, PtxError: see run_kernel.
    """
    given = [np.array(value, order="C") for value in inputs]
    made = [_unwritten(shape, dtype) for shape, dtype in self.outputs]
    for source, target in self.aliases:
      made[target] = given[source]
    memory, places, arrays = GlobalMemory(), {}, [*given, *made]
    for number, array in enumerate(arrays):
      if id(array) not in places:
        places[id(array)] = memory.add_buffer(f"argument {number}", array).address
    self.kernel.launch(memory, [places[id(array)] for array in arrays], seed)
    return made

  def save(self, path: pathlib.Path) -> None:
    """Writes it into a file of compressed JSON; its text names sources from the repository's root on."""
    text = json.dumps(dataclasses.asdict(self)).replace(f"{_ROOT}/", "")
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
      packed.write(text.encode())

  @classmethod
  def load(cls, path: pathlib.Path) -> ArrayCall:
    """Reads what `save` wrote."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    kernel = found["kernel"]
    maps = tuple(MapSpec(**{name: _frozen(value) for name, value in each.items()}) for each in kernel.pop("maps"))
    launched = CompiledKernel(**{name: _frozen(value) for name, value in kernel.items()}, maps=maps)
    return cls(launched, _frozen(found["outputs"]), _frozen(found["aliases"]))


def _frozen(value: Any) -> Any:
  return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def _unwritten(shape: tuple[int, ...], dtype: str) -> np.ndarray:
  """Returns an array whose bits are all 1: NaN in each float, also of 8 bits."""
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  return np.full((*shape, kind.itemsize), 0xFF, np.uint8).view(kind)[..., 0]
