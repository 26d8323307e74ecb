"""Checks for every lowered GPU kernel that threads and TMA agree on where values lie in shared memory.

TMA swizzles by the absolute address: in every 8 lines of `swizzle` bytes it XORs the number of a 16-byte chunk with the
number of its line. Mosaic GPU's loads and stores of registers XOR with the offset from the start of the given array.
Both agree if that array begins at a multiple of 8 lines, which its tiles do if their rows are a multiple of 8. A slice
of single rows of a swizzled array begins anywhere, and Mosaic GPU (jax 0.11.2) lowers it without an error.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import math
from typing import Any
from unittest import mock

_LINES = 8  # lines of `swizzle` bytes after which the pattern repeats


@dataclasses.dataclass
class SharedTransfers:
  """The transfers of lowered kernels.

  Attributes:
    count: transfers between registers and shared memory.
    swizzled: swizzled transfers.
    misplaced: a line for each swizzled one whose tiles are not whole groups of 8 lines.
    copies: swizzles of TMA's copies in bytes, in order; 0 for none.
  """

  count: int = 0
  swizzled: int = 0
  misplaced: list[str] = dataclasses.field(default_factory=list)
  copies: list[int] = dataclasses.field(default_factory=list)


def keeps_lines_whole(shape: tuple[int, ...]) -> bool:
  """Whether a swizzled array of tiles, [tiles..., tile...] of as many dimensions each, has 8 n rows a tile."""
  return math.prod(shape[len(shape) // 2 : -1]) % _LINES == 0


@contextlib.contextmanager
def watch_shared_transfers() -> Iterator[SharedTransfers]:
  """Notes what Mosaic GPU lowers while open, in any thread."""
  from jax.experimental.mosaic.gpu import fragmented_array, launch_context
  from jax.extend.mlir import ir

  found, arrays, context = SharedTransfers(), fragmented_array.FragmentedArray, launch_context.LaunchContext
  transfer, describe = arrays.transfer_tiled, context._get_tma_desc

  def watched_transfer(ref: Any, swizzle: int | None, *args: Any, **kwargs: Any) -> Any:
    # Layout inference uses such a reference to test whether a transfer could be lowered; it makes no code.
    if getattr(ref.owner, "name", "") != "builtin.unrealized_conversion_cast":
      found.count += 1
      if swizzle is not None and int(swizzle) > 16:
        found.swizzled += 1
        kind = ir.MemRefType(ref.type)
        if not keeps_lines_whole(tuple(kind.shape)):
          found.misplaced.append(
            f"{'x'.join(map(str, kind.shape))}x{kind.element_type} swizzled by {int(swizzle)} bytes"
          )
    return transfer(ref, swizzle, *args, **kwargs)

  def watched_copy(self: Any, ref: Any, transform: Any, peer: Any, shape: Any, swizzle: Any, *args: Any) -> Any:
    found.copies.append(int(swizzle) if swizzle is not None else 0)
    return describe(self, ref, transform, peer, shape, swizzle, *args)

  with (
    mock.patch.object(arrays, "transfer_tiled", staticmethod(watched_transfer)),
    mock.patch.object(context, "_get_tma_desc", watched_copy),
  ):
    yield found
