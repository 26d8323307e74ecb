"""Encodes events of the prefix cache as vLLM does: arrays in MessagePack, whose first item is the event's name."""

from collections.abc import Sequence

import msgspec

from engine.prefix_events import AllRemoved, PrefixEvent, RemovedBlock, StoredBlock

# vLLM's name of the device's own memory, whatever the device.
_MEDIUM = "GPU"


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
  """Blocks that follow one another; `token_ids` holds those of all."""

  block_hashes: list[int]
  parent_block_hash: int | None
  token_ids: list[int]
  block_size: int
  lora_id: int | None
  medium: str | None
  lora_name: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
  """Blocks that are gone."""

  block_hashes: list[int]
  medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
  """All blocks are gone."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
  """One message; `ts` is the time since the epoch in seconds."""

  ts: float
  events: list[BlockStored | BlockRemoved | AllBlocksCleared]
  data_parallel_rank: int | None = None


def hash_of_key(key: bytes) -> int:
  """Returns the 64 bits of a key by which events name its block."""
  return int.from_bytes(key[-8:], "big")


def encode_events(events: Sequence[PrefixEvent], block_size: int, time_s: float) -> bytes:
  """Returns one message; joins blocks that follow one another.

  Args:
    events: in their order.
    block_size: tokens of a block.
    time_s: the time since the epoch.
  """
  encoded: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
  before: PrefixEvent | None = None
  for event in events:
    last = encoded[-1] if encoded else None
    match event:
      case StoredBlock():
        follows = isinstance(before, StoredBlock) and (event.parent, event.adapter) == (before.key, before.adapter)
        if not (follows and isinstance(last, BlockStored)):
          parent = None if event.parent is None else hash_of_key(event.parent)
          last = BlockStored([], parent, [], block_size, None, _MEDIUM, event.adapter or None)
          encoded.append(last)
        last.block_hashes.append(hash_of_key(event.key))
        last.token_ids.extend(event.token_ids)
      case RemovedBlock():
        if not isinstance(last, BlockRemoved):
          last = BlockRemoved([], _MEDIUM)
          encoded.append(last)
        last.block_hashes.append(hash_of_key(event.key))
      case AllRemoved():
        encoded.append(AllBlocksCleared())
    before = event
  return msgspec.msgpack.encode(KVEventBatch(time_s, encoded))
