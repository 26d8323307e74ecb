"""Writes a Batch as bytes and reads it on a follower. May not change what a step computes.

What crosses hosts is the Batch, which each follower packs again, and not the packed array. A step of 64 decodes that
repeats the one before it is 20 bytes instead of 60 KB, so sending, checking and receiving cost microseconds. Leader and
followers then pack at the same time. Equal versions of Sluice pack equal arrays from equal batches in equal order, and
the handshake compares versions.
"""

from collections.abc import Sequence
import functools
import operator
import typing
from typing import Any

import msgspec

from engine.batch import Admission, Batch
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from extensions.multi_host.frame_channel import HostLost, Kind

_REMEMBERED_PARAMS = 1024  # sampling parameters of earlier requests that a follower keeps
_MAX_REHEARSED_BYTES = 1 << 14  # a larger step takes so long to read that cold caches do not count
_PARAM_TYPES = typing.get_type_hints(SamplingParams)  # by field, in the order of the constructor
_encode = msgspec.msgpack.encode
_list_params = operator.attrgetter(*_PARAM_TYPES)


class _Admitted(msgspec.Struct, array_like=True, gc=False):
  """An Admission without imported KV."""

  slot: int
  token_ids: tuple[int, ...]
  num_prompt_tokens: int
  block_ids: tuple[int, ...]
  params: bytes  # the values of SamplingParams; see _read_params
  seed: int
  constrained: bool
  adapter_slot: int


class _Step(msgspec.Struct, array_like=True, gc=False):
  """A Batch without request ids, which no device program reads."""

  step: int
  shape: tuple[int, int, int]
  slots: tuple[int, ...]
  starts: tuple[int, ...]
  counts: tuple[int, ...]
  num_logits: tuple[int, ...]
  samples: tuple[bool, ...]
  token_ids: tuple[tuple[int, ...], ...]
  admissions: tuple[_Admitted, ...]
  new_blocks: tuple[tuple[int, int, int], ...]
  masks: tuple[tuple[int, bytes], ...]
  padded_tokens: int
  num_drafts: tuple[int, ...]
  repeats: bool
  behind: tuple[int, ...]


_read_step = msgspec.msgpack.Decoder(_Step).decode
_read_values = msgspec.msgpack.Decoder(tuple.__class_getitem__(tuple(_PARAM_TYPES.values()))).decode
_read_repeat = msgspec.msgpack.Decoder(tuple[int, tuple[tuple[int, int, int], ...]]).decode


class StepEncoder:
  """Writes the steps of a leader, in order."""

  def __init__(self) -> None:
    self._latest: Batch | None = None

  def encode_step(self, batch: Batch) -> tuple[Kind, bytes]:
    """Returns the kind and the body of a step's frame."""
    assert not batch.num_proposals, "a draft model runs on one host"
    latest, self._latest = self._latest, batch
    if latest is not None and _is_repetition(latest, batch):
      return Kind.REPEAT, _encode((batch.step, batch.new_blocks))
    shape = batch.shape
    return Kind.STEP, _encode(
      (
        batch.step,
        (shape.tokens, shape.rows, shape.logits),
        batch.slots,
        batch.starts,
        batch.counts,
        batch.num_logits,
        batch.samples,
        batch.token_ids,
        tuple(map(_write_admission, batch.admissions)),
        batch.new_blocks,
        batch.masks,
        batch.padded_tokens,
        batch.num_drafts,
        batch.repeats,
        batch.behind,
      )
    )


class StepDecoder:
  """Reads the steps of a follower, in order."""

  def __init__(self) -> None:
    self._latest: Batch | None = None
    self._next_starts: tuple[int, ...] | None = None  # of the step that would repeat the latest
    self._rehearsed = b""  # the body of a step
    self._previous: Batch | None = None  # kept until there is time: to free it takes 20 us

  def decode_step(self, kind: Kind, body: bytes) -> Batch:
    """Returns a step with empty request ids. Raises HostLost if the frame holds none."""
    try:
      batch = self._repeat(body) if kind is Kind.REPEAT else _make_batch(_read_step(body))
    except msgspec.MsgspecError as error:
      raise HostLost(f"host 0, the leader, sent a frame that holds no step ({error})") from None
    self._previous, self._latest, self._next_starts = self._latest, batch, None
    if batch.admissions and len(body) <= _MAX_REHEARSED_BYTES:
      self._rehearsed = body
    return batch

  def prepare_repetition(self) -> None:
    """Makes the large part of the step that may come next. Call it while there is time; it changes no result."""
    self._previous = None
    if self._latest is not None:
      self._next_starts = _advance(self._latest.starts)

  def rehearse_step(self) -> None:
    """Reads the latest step with admissions again and drops it. Call it while there is time; it changes no result.

    A step evicts this code and its memory from a CPU's caches. To read the next step is then twice as slow.
    """
    if self._rehearsed:
      _make_batch(_read_step(self._rehearsed))

  def _repeat(self, body: bytes) -> Batch:
    latest = self._latest
    if latest is None:
      raise HostLost("host 0, the leader, repeats a step before it has sent one")
    step, new_blocks = _read_repeat(body)
    return Batch(  # dataclasses.replace takes several times as long
      step,
      latest.shape,
      latest.request_ids,
      latest.slots,
      self._next_starts or _advance(latest.starts),
      latest.counts,
      latest.num_logits,
      latest.samples,
      latest.token_ids,
      (),
      new_blocks,
      (),
      latest.padded_tokens,
      latest.num_drafts,
      repeats=True,
    )


def _advance(starts: tuple[int, ...]) -> tuple[int, ...]:
  return tuple([start + 1 for start in starts])


def _is_repetition(latest: Batch, batch: Batch) -> bool:
  """Returns whether `batch` follows from `latest`, its new blocks and its step."""
  return (
    batch.repeats
    and not batch.admissions
    and not batch.masks
    and batch.slots == latest.slots
    and batch.shape == latest.shape
    and batch.starts[0] == latest.starts[0] + 1
    and batch.counts == latest.counts
    and batch.num_logits == latest.num_logits
    and batch.samples == latest.samples
    and batch.token_ids == latest.token_ids
    and batch.padded_tokens == latest.padded_tokens
    and batch.num_drafts == latest.num_drafts
  )


def _write_admission(admission: Admission) -> tuple[Any, ...]:
  assert admission.imported is None, "KV of another runner cannot cross hosts"
  return (
    admission.slot,
    _as_tuple(admission.token_ids),
    admission.num_prompt_tokens,
    admission.block_ids,
    _encode(_list_params(admission.params)),
    admission.seed,
    admission.constrained,
    admission.adapter_slot,
  )


@functools.lru_cache(_REMEMBERED_PARAMS)
def _read_params(values: bytes) -> SamplingParams:
  """Returns the sampling parameters of these values in msgpack. Most requests have those of another one."""
  return SamplingParams(*_read_values(values))


def _as_tuple(values: Sequence[int]) -> tuple[int, ...]:
  return values if isinstance(values, tuple) else tuple(values)


def _make_batch(step: _Step) -> Batch:
  return Batch(
    step.step,
    StepShape(*step.shape),
    ("",) * len(step.slots),
    step.slots,
    step.starts,
    step.counts,
    step.num_logits,
    step.samples,
    step.token_ids,
    tuple(map(_make_admission, step.admissions)),
    step.new_blocks,
    step.masks,
    step.padded_tokens,
    step.num_drafts,
    step.repeats,
    step.behind,
  )


def _make_admission(each: _Admitted) -> Admission:
  return Admission(
    each.slot,
    each.token_ids,
    each.num_prompt_tokens,
    each.block_ids,
    _read_params(each.params),
    each.seed,
    each.constrained,
    None,
    each.adapter_slot,
  )
