"""Matrices of e4m3 with a scale an output, as checkpoints hold them. May not know files, layers or kernels."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from models.families.tensor_map import Piece
from models.grouped_weight import place_pieces, place_scales
from models.quantize import E4M3


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
  """A weight of some input dimensions and then outputs. That of output n is `scales[n] * values[..., n]`.

  Attributes:
    values: float8_e4m3fn[*inputs, *outputs], finite; often a transposed view of a file.
    scales: f32[*outputs], finite.
  """

  values: np.ndarray
  scales: np.ndarray

  def __post_init__(self):
    assert self.values.dtype == E4M3 and self.scales.dtype == np.float32, (self.values.dtype, self.scales.dtype)
    assert self.num_inputs > 0 and self.values.shape[self.num_inputs :] == self.scales.shape, self.shapes

  @property
  def shapes(self) -> str:
    return f"values {self.values.shape}, scales {self.scales.shape}"

  @property
  def num_inputs(self) -> int:
    """The input dimensions of `values`."""
    return self.values.ndim - self.scales.ndim

  def dequantize(self) -> np.ndarray:
    """Returns f32[*inputs, *outputs], the weight that products with this one are compared with."""
    return self.values.astype(np.float32) * self.scales


def assemble_fp8(pieces: Sequence[tuple[Piece, Fp8Weight]], num_inputs: int) -> Fp8Weight:
  """Returns a parameter of the tensors of a checkpoint, each as [outputs, inputs] in `Piece.shape`, with their values.

  Args:
    pieces: the pieces of one parameter and their weights with values [inputs, outputs] (the transposed tensor).
    num_inputs: input dimensions of the parameter, which come first in it.
  """
  codes = place_pieces(
    [(piece, weight.values.view(np.uint8).T.reshape(piece.split).transpose(piece.order)) for piece, weight in pieces],
    stored=pieces[0][0].order,
  )
  scales = place_scales([(piece, weight.scales[None]) for piece, weight in pieces], num_inputs)
  return Fp8Weight(codes.view(E4M3), scales[0])
