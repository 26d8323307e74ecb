"""Decodes GGUF's blocks to codes, scales and offsets. May not know files or names.

The layouts are those of ggml-quants.c. Blocks lie along a row, so a row of bytes becomes a row of codes. Types of 5 and
6 bits, and MXFP4, take codes of 6, whose zero lies in the middle of their range.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from engine.device.formats.compressed_tensors import decode_e2m1, halved_powers

_PART_BYTES = 200_000
Decoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes [B, block], scales and offsets [B, block / group]


@dataclasses.dataclass(frozen=True)
class BlockType:
  """How one type decodes.

  Attributes:
    bits, group, has_offsets: of the GroupedWeight.
    decode_some: uint8[B, bytes] -> codes, scales and offsets, exactly.
    scale_dtype: in which scales are kept; those of K types are products, rounded to float16.
    super_bytes: the bytes of a block that a K type's scales and offsets are products of; None: another type.
  """

  bits: int
  group: int
  has_offsets: bool
  decode_some: Callable[[np.ndarray], Decoded]
  scale_dtype: str = "float16"
  super_bytes: slice | None = None

  def decode(self, blocks: np.ndarray) -> Decoded:
    """Like `decode_some`, a part at a time: the processor's cache holds what all its passes touch."""
    step = max(1, _PART_BYTES // blocks.shape[1])
    whole: list[np.ndarray | None] = [None, None, None]
    for start in range(0, len(blocks), step):
      for place, part in enumerate(self.decode_some(blocks[start : start + step])):
        if part is not None:
          if (out := whole[place]) is None:
            out = whole[place] = np.empty((len(blocks), part.shape[1]), part.dtype)
          out[start : start + step] = part
    codes, scales, offsets = whole
    assert codes is not None and scales is not None
    return codes, scales, offsets

  def superblocks(self, blocks: np.ndarray) -> np.ndarray | None:
    """uint8[B, bytes] -> void[B], the superblocks of a GroupedWeight; None if the type has none."""
    if self.super_bytes is None:
      return None
    part = np.ascontiguousarray(blocks[:, self.super_bytes])
    return part.view(np.dtype((np.void, part.shape[1])))[:, 0]


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
  """Returns the float16 at byte `start` of each block, [B, 1]."""
  return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _words(packed: np.ndarray) -> np.ndarray:
  """uint8[B, S] -> uint64[B, S / 8]. Loops over words of all blocks take eight bytes at once, and are long."""
  return np.ascontiguousarray(packed).view(np.uint64)


def _each(byte: int) -> np.uint64:
  """Returns a word whose bytes are all `byte`."""
  return np.uint64(byte * 0x0101_0101_0101_0101)


def _bits(words: np.ndarray, shift: int, mask: int) -> np.ndarray:
  """Returns `byte >> shift & mask` of every byte; the mask has no bits that come from the next byte."""
  return (words >> np.uint64(shift)) & _each(mask)


def _halves(packed: np.ndarray) -> np.ndarray:
  """uint8[B, S] -> uint8[B, 2S], all low halves of bytes before all high ones."""
  words = _words(packed)
  halves = np.empty((words.shape[0], 2, words.shape[1]), np.uint64)
  for place in range(words.shape[1]):
    halves[:, 0, place] = _bits(words[:, place], 0, 15)
    halves[:, 1, place] = _bits(words[:, place], 4, 15)
  return halves.view(np.uint8).reshape(packed.shape[0], -1)


def _decode_q4_0(blocks: np.ndarray) -> Decoded:
  return _halves(blocks[:, 2:]), _half(blocks, 0), None


def _decode_q4_1(blocks: np.ndarray) -> Decoded:
  scale, least = _half(blocks, 0), _half(blocks, 2).astype(np.float32)
  return _halves(blocks[:, 4:]), scale, least + 8 * scale.astype(np.float32)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
  """uint8[B, 4] -> uint8[B, 32], 16 where the bit is set."""
  return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _decode_q5_0(blocks: np.ndarray) -> Decoded:
  codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
  return codes + np.uint8(16), _half(blocks, 0), None


def _decode_q5_1(blocks: np.ndarray) -> Decoded:
  codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
  scale, least = _half(blocks, 0), _half(blocks, 2).astype(np.float32)
  return codes + np.uint8(16), scale, least + 16 * scale.astype(np.float32)


def _decode_q8_0(blocks: np.ndarray) -> Decoded:
  return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None


def _k_scales(blocks: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the f32 scales and offsets [B, 8] of Q4_K and Q5_K, for codes whose zero is `zero`."""
  low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
  factors = np.concatenate([low & 63, mixed & 15 | low >> 2 & 48], axis=1)
  minima = np.concatenate([high & 63, mixed >> 4 | high >> 2 & 48], axis=1)
  scales = _half(blocks, 0).astype(np.float32) * factors.astype(np.float32)
  offsets = zero * scales - _half(blocks, 2).astype(np.float32) * minima.astype(np.float32)
  return scales, offsets


def _decode_q4_k(blocks: np.ndarray) -> Decoded:
  codes = _halves(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256)
  return codes, *_k_scales(blocks, 8)


def _decode_q5_k(blocks: np.ndarray) -> Decoded:
  low, fifth = _words(blocks[:, 48:]), _words(blocks[:, 16:48])
  codes = np.empty((blocks.shape[0], 8, 4), np.uint64)
  for group in range(8):  # of 32 codes, in four words; two groups share their bytes
    for word in range(4):
      code = _bits(low[:, group // 2 * 4 + word], group % 2 * 4, 15)
      code |= _bits(fifth[:, word], group, 1) << np.uint64(4)
      np.add(code, _each(16), out=codes[:, group, word])
  return codes.view(np.uint8).reshape(-1, 256), *_k_scales(blocks, 16)


def _decode_q6_k(blocks: np.ndarray) -> Decoded:
  low, high = _words(blocks[:, :128]), _words(blocks[:, 128:192])
  codes = np.empty((blocks.shape[0], 8, 4), np.uint64)
  for group in range(8):  # of 32 codes, in four words; groups 0 and 2 share their low bytes, 0 to 3 their high bytes
    half, quarter = divmod(group, 4)
    for word in range(4):
      code = _bits(low[:, half * 8 + quarter % 2 * 4 + word], quarter // 2 * 4, 15)
      code |= _bits(high[:, half * 4 + word], quarter * 2, 3) << np.uint64(4)
      codes[:, group, word] = code
  factors = blocks[:, 192:208].view(np.int8).astype(np.float32)
  return codes.view(np.uint8).reshape(-1, 256), _half(blocks, 208).astype(np.float32) * factors, None


def _decode_mxfp4(blocks: np.ndarray) -> Decoded:
  codes = decode_e2m1(blocks[:, 1:])  # low and high halves alternate; GGUF's lie apart
  return np.concatenate([codes[:, ::2], codes[:, 1::2]], axis=1), halved_powers(blocks[:, :1]), None


BLOCK_TYPES: dict[str, BlockType] = {
  "Q4_0": BlockType(4, 32, False, _decode_q4_0),
  "Q4_1": BlockType(4, 32, True, _decode_q4_1),
  "Q5_0": BlockType(6, 32, False, _decode_q5_0),
  "Q5_1": BlockType(6, 32, True, _decode_q5_1),
  "Q8_0": BlockType(8, 32, False, _decode_q8_0),
  "Q4_K": BlockType(4, 32, True, _decode_q4_k, super_bytes=slice(0, 16)),
  "Q5_K": BlockType(6, 32, True, _decode_q5_k, super_bytes=slice(0, 16)),
  "Q6_K": BlockType(6, 16, False, _decode_q6_k, super_bytes=slice(192, 210)),
  "MXFP4": BlockType(6, 32, False, _decode_mxfp4, "float32"),
}
