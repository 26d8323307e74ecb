"""Matrices of 4, 6 or 8 bits with scales by group of inputs. May not know files, layers or layouts of kernels."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from models.families.tensor_map import Piece

BITS = (4, 6, 8)
WORD = 8  # codes of 4 bits in a uint32
SUPER = 256  # inputs of a superblock


@dataclasses.dataclass(frozen=True)
class GroupedWeight:
  """A weight of `num_inputs` input dimensions and then outputs; its inputs in row-major order make groups.

  The weight of input d (flat) and output n is `scales[g, n] * (codes[d, n] - zero) + offsets[g, n]`, g = d // group.
  One form holds all formats: one scale an output (a single group), symmetric groups, zero points (whose offset is scale
  * (zero - zero point)), and GGUF's scales with minima.

  Attributes:
    codes: uint8[*inputs, *outputs], each below 2**bits. Or, of 4 bits, words: uint32 with an eighth of the last input
      dimension, eight adjacent codes each, the first in the lowest bits. A format that has them so needs no other copy.
    scales: float16 or float32 [groups, *outputs], finite.
    bits: 4, 6 or 8.
    num_inputs: input dimensions of `codes`, at least 1.
    offsets: float16 or float32, like `scales`; None: 0.
    superblocks: void[inputs / 256, *outputs], GGUF's bytes of 256 inputs that `scales` and `offsets` are products of,
      for a product that reads these instead; None: there are none. Beside them, codes are bytes.
  """

  codes: np.ndarray
  scales: np.ndarray
  bits: int
  num_inputs: int = 1
  offsets: np.ndarray | None = None
  superblocks: np.ndarray | None = None

  def __post_init__(self):
    assert self.bits in BITS and (self.codes.dtype == np.uint8 or self.in_words and self.bits == 4), self.shapes
    assert self.scales.shape[1:] == self.outputs and self.inputs % self.scales.shape[0] == 0, self.shapes
    assert self.offsets is None or self.offsets.shape == self.scales.shape, self.shapes
    if self.superblocks is not None:
      assert self.superblocks.shape == (self.inputs // SUPER, *self.outputs) and not self.in_words, self.shapes

  @property
  def shapes(self) -> str:
    return (
      f"codes {self.codes.dtype}{self.codes.shape} of {self.bits} bits, scales {self.scales.shape}, {self.num_inputs} "
      "input dimensions"
    )

  @property
  def in_words(self) -> bool:
    """Whether the codes are words."""
    return self.codes.dtype == np.uint32

  @property
  def shape(self) -> tuple[int, ...]:
    """The dimensions of the weight, [*inputs, *outputs]."""
    last = self.num_inputs - 1
    size = self.codes.shape[last] * (WORD if self.in_words else 1)
    return (*self.codes.shape[:last], size, *self.codes.shape[last + 1 :])

  @property
  def inputs(self) -> int:
    """The number of inputs, flat."""
    return math.prod(self.shape[: self.num_inputs])

  @property
  def outputs(self) -> tuple[int, ...]:
    return self.codes.shape[self.num_inputs :]

  @property
  def group(self) -> int:
    """Adjacent inputs that share a scale."""
    return self.inputs // self.scales.shape[0]

  @property
  def zero(self) -> int:
    """The code of weight 0 where there is no offset: 8, 32 or 128."""
    return 1 << (self.bits - 1)

  def dequantize(self) -> np.ndarray:
    """Returns f32[*inputs, *outputs], the weight that all products with this one are compared with."""
    flat, codes = (self.scales.shape[0], self.group, *self.outputs), self.unpack().codes
    weight = (codes.reshape(flat).astype(np.float32) - self.zero) * self.scales[:, None].astype(np.float32)
    if self.offsets is not None:
      weight += self.offsets[:, None].astype(np.float32)
    return weight.reshape(codes.shape)

  def unpack(self) -> "GroupedWeight":
    """Returns the same weight with a byte for each code."""
    if not self.in_words:
      return self
    axis = self.num_inputs - 1
    words = np.ascontiguousarray(np.moveaxis(self.codes, axis, -1))  # no copy of those of most files
    codes = np.moveaxis(unpack_nibbles(words.view(np.uint8)), -1, axis)
    return dataclasses.replace(self, codes=codes)

  def pair_codes(self) -> np.ndarray:
    """Returns codes of 4 bits as uint8 with half of the last input dimension: two adjacent ones, the first low."""
    axis = self.num_inputs - 1
    lead, rest = self.codes.shape[:axis], self.codes.shape[axis + 1 :]
    if self.in_words:
      parts = self.codes.view([("bytes", np.uint8, 4)])["bytes"]  # [*inputs, *outputs, 4]
      return np.moveaxis(parts, -1, axis + 1).reshape(*lead, -1, *rest)
    split = self.codes.reshape(*lead, -1, 2, *rest)
    return split.take(0, axis + 1) | (split.take(1, axis + 1) << 4)

  def cut(self, part: tuple[slice, ...]) -> "GroupedWeight":
    """Returns a part of the weight, which has whole groups or, with one group, any inputs.

    Args: part: by dimension of the weight.
    """
    bounds = [each.indices(size) for each, size in zip(part, self.shape, strict=True)]
    if bounds == [(0, size, 1) for size in self.shape]:
      return self
    last, of_codes = self.num_inputs - 1, part
    if self.in_words:
      start, stop, _ = bounds[last]
      if start % WORD or stop % WORD:
        return self.unpack().cut(part)
      of_codes = (*part[:last], slice(start // WORD, stop // WORD), *part[last + 1 :])
    inputs, outputs = part[: self.num_inputs], part[self.num_inputs :]
    flat = np.arange(self.inputs).reshape(self.shape[: self.num_inputs])[inputs].reshape(-1)
    groups = np.zeros(1, int) if self.scales.shape[0] == 1 else flat[:: self.group] // self.group
    assert self.scales.shape[0] == 1 or np.array_equal(flat // self.group, np.repeat(groups, self.group)), part
    scales = self.scales[groups][(slice(None), *outputs)]
    offsets = None if self.offsets is None else self.offsets[groups][(slice(None), *outputs)]
    superblocks = self.superblocks
    if superblocks is not None:
      first = flat[::SUPER] // SUPER
      has_whole = np.array_equal(flat // SUPER, np.repeat(first, SUPER)[: flat.size]) and flat.size % SUPER == 0
      superblocks = superblocks[first][(slice(None), *outputs)] if has_whole else None
    return dataclasses.replace(
      self, codes=self.codes[of_codes], scales=scales, offsets=offsets, superblocks=superblocks
    )

  def regroup(self, group: int) -> "GroupedWeight":
    """Returns the same weight in smaller groups, which repeat scales. Args: group: a divisor of the present one."""
    assert self.group % group == 0, (self.group, group)
    times = self.group // group
    if times == 1:
      return self
    offsets = None if self.offsets is None else np.repeat(self.offsets, times, axis=0)
    scales = np.repeat(self.scales, times, axis=0)
    return dataclasses.replace(self, scales=scales, offsets=offsets, superblocks=None)

  def widen(self, bits: int) -> "GroupedWeight":
    """Returns the same weight as codes of so many bits, not fewer, with the same scales."""
    if bits == self.bits:
      return self
    moved = self.unpack().codes + np.uint8((1 << bits - 1) - self.zero)
    return dataclasses.replace(self, codes=moved, bits=bits, superblocks=None)


def quantize_by_group(weight: np.ndarray, num_inputs: int, bits: int, group: int) -> GroupedWeight:
  """Rounds a weight to the nearest codes, symmetrically, by group.

  The value of greatest magnitude in a group becomes -2**(bits - 1), the code with no counterpart, as in GGUF's Q4_0: a
  step is then 1/8 of it instead of 1/7. Codes that would pass 2**bits - 1 become that.

  Args:
    weight: finite, of a float dtype; its first `num_inputs` dimensions are inputs.
    group: inputs, flat, that share a scale; divides their number.
  """
  exact = np.asarray(weight, np.float32)
  outputs = exact.shape[num_inputs:]
  inputs = math.prod(exact.shape[:num_inputs])
  assert inputs % group == 0, (inputs, group)
  grouped = exact.reshape(inputs // group, group, *outputs)
  scales = choose_scales(grouped, bits).astype(np.float16 if bits == 4 else np.float32)
  return GroupedWeight(round_to_scales(grouped, scales, bits).reshape(exact.shape), scales, bits, num_inputs)


def choose_scales(grouped: np.ndarray, bits: int) -> np.ndarray:
  """Returns the scales of `quantize_by_group`, f32[G, *outputs], for weights f32[G, group, *outputs]; some negative."""
  low, high = grouped.min(axis=1), grouped.max(axis=1)
  return np.where(-low >= high, low, high) / np.float32(-(1 << (bits - 1)))


def round_to_scales(grouped: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
  """Returns the nearest codes uint8[G, group, *outputs] of weights f32, for scales [G, *outputs] of a float dtype."""
  zero, used = 1 << (bits - 1), scales.astype(np.float32)[:, None]
  steps = np.divide(grouped, used, out=np.zeros_like(grouped), where=used != 0)
  return np.clip(np.rint(steps) + zero, 0, 2 * zero - 1).astype(np.uint8)


def assemble_grouped(pieces: Sequence[tuple[Piece, GroupedWeight]], num_inputs: int) -> GroupedWeight:
  """Returns a parameter of the tensors of a checkpoint, each as [outputs, inputs] in `Piece.shape`.

  Pieces of other bits, groups or scale dtypes take the form that all have in common: the most bits, the smallest group,
  the widest dtype.

  Args:
    pieces: the pieces of one parameter and their weights with codes [inputs, outputs] (the transposed tensor).
    num_inputs: input dimensions of the parameter, which come first in it.
  """
  bits = max(weight.bits for _, weight in pieces)
  group = math.gcd(*(weight.group for _, weight in pieces))
  parts = [(piece, weight.widen(bits).regroup(group)) for piece, weight in pieces]
  has_offsets = any(weight.offsets is not None for _, weight in parts)
  inputs = num_inputs - 1, len(pieces[0][0].split) - 1  # the last dimension of inputs, in the parameter and in `split`
  keeps_words = all(
    weight.in_words and piece.order[inputs[0]] == inputs[1] and piece.split[-1] % WORD == 0 for piece, weight in parts
  )
  if not keeps_words or any(axis == inputs[0] for axis, _ in pieces[0][0].place):
    parts = [(piece, weight.unpack()) for piece, weight in parts]
  # In the tensors' order of memory, because a transposed copy of bytes takes ten times as long.
  stored = pieces[0][0].order if parts[0][1].codes.T.flags.c_contiguous else None
  codes = place_pieces(
    [(piece, weight.codes.T.reshape(*piece.split[:-1], -1).transpose(piece.order)) for piece, weight in parts],
    0,
    stored,
  )
  scales = place_scales([(piece, weight.scales) for piece, weight in parts], num_inputs)
  offsets = None
  if has_offsets:
    found = [
      (piece, np.zeros_like(weight.scales) if weight.offsets is None else weight.offsets) for piece, weight in parts
    ]
    offsets = place_scales(found, num_inputs)
  held = [(piece, weight.superblocks) for piece, weight in parts if weight.superblocks is not None]
  superblocks = place_scales(held, num_inputs) if len(held) == len(parts) else None
  return GroupedWeight(codes, scales, bits, num_inputs, offsets, superblocks)


def place_scales(parts: Sequence[tuple[Piece, np.ndarray]], num_inputs: int) -> np.ndarray:
  """Returns the scales [groups, *outputs] of a parameter, or its offsets.

  Args:
    parts: the pieces of the parameter and their scales [groups, outputs], as many groups each.
    num_inputs: input dimensions of the parameter, which come first in it.
  """
  moved = []
  for piece, value in parts:
    order = piece.order[num_inputs:]  # split's axes of the outputs, in the parameter's order
    split = [piece.split[axis] for axis in sorted(order)]
    ranks = [sorted(order).index(axis) for axis in order]
    moved.append((piece, np.moveaxis(value.T.reshape(*split, -1), -1, 0).transpose(0, *(1 + r for r in ranks))))
  return place_pieces(moved, num_inputs - 1)


def place_pieces(
  parts: list[tuple[Piece, np.ndarray]], fewer: int = 0, stored: tuple[int, ...] | None = None
) -> np.ndarray:
  """Returns a parameter with each value at its piece's place.

  Args:
    parts: the pieces and their values, in the parameter's axis order.
    fewer: leading axes of the parameter that the values lack.
    stored: the order of `Piece.split`'s axes in memory, for a transposed result; None: C order.
  """
  if not parts[0][0].place:
    ((_, value),) = parts
    return value
  places = [{axis - fewer: offset for axis, offset in piece.place} for piece, _ in parts]
  shape = list(parts[0][1].shape)
  for (_, value), place in zip(parts, places, strict=True):
    for axis, offset in place.items():
      shape[axis] = max(shape[axis], offset + value.shape[axis])
  order = stored or tuple(range(len(shape)))
  dtype = np.result_type(*(value.dtype for _, value in parts))
  out = np.empty([shape[order.index(axis)] for axis in range(len(shape))], dtype).transpose(order)
  for (_, value), place in zip(parts, places, strict=True):
    starts = [place.get(axis, 0) for axis in range(value.ndim)]
    out[tuple(slice(start, start + size) for start, size in zip(starts, value.shape, strict=True))] = value
  return out


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
  """uint8[..., K] -> uint8[..., 2K]; the low half of a byte comes first."""
  flat, chunk = packed.reshape(-1), 1 << 17
  pairs = np.empty(flat.size, "<u2")
  for start in range(0, flat.size, chunk):  # no temporary of the whole size, whose pages the system would clear
    part, to = flat[start : start + chunk], pairs[start : start + chunk]
    np.left_shift(part, 4, out=to, dtype=to.dtype)
    to |= part
    to &= 0x0F0F
  return pairs.view(np.uint8).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
