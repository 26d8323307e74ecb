"""Writes a Batch as bytes and reads it on a follower. May not change what a step computes.

What crosses hosts is the Batch, which each follower packs again, and not the packed array. A step of 64 decodes that
repeats the one before it is 20 bytes instead of 60 KB, so sending, checking and receiving cost microseconds. Leader and
followers then pack at the same time. Equal versions of Sluice pack equal arrays from equal batches in equal order, and
the handshake compares versions.
"""

from collections.abc import Sequence

import msgspec

from engine.batch import Admission, Batch
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from extensions.multi_host.frame_channel import HostLost, Kind

_encode = msgspec.msgpack.encode


class _Admitted(msgspec.Struct, array_like=True, frozen=True):
  """An Admission without imported KV."""

  slot: int
  token_ids: tuple[int, ...]
  num_prompt_tokens: int
  block_ids: tuple[int, ...]
  params: SamplingParams
  seed: int
  constrained: bool
  adapter_slot: int


class _Step(msgspec.Struct, array_like=True, frozen=True):
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
      _Step(
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
    self._previous: Batch | None = None  # kept until there is time: to free it takes 20 us

  def decode_step(self, kind: Kind, body: bytes) -> Batch:
    """Returns a step with empty request ids. Raises HostLost if the frame holds none."""
    try:
      batch = self._repeat(body) if kind is Kind.REPEAT else _make_batch(_read_step(body))
    except msgspec.MsgspecError as error:
      raise HostLost(f"host 0, the leader, sent a frame that holds no step ({error})") from None
    self._previous, self._latest, self._next_starts = self._latest, batch, None
    return batch

  def prepare_repetition(self) -> None:
    """Makes the large part of the step that may come next. Call it while there is time; it changes no result."""
    self._previous = None
    if self._latest is not None:
      self._next_starts = _advance(self._latest.starts)

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


def _write_admission(admission: Admission) -> _Admitted:
  assert admission.imported is None, "KV of another runner cannot cross hosts"
  return _Admitted(
    admission.slot,
    _as_tuple(admission.token_ids),
    admission.num_prompt_tokens,
    admission.block_ids,
    admission.params,
    admission.seed,
    admission.constrained,
    admission.adapter_slot,
  )


def _as_tuple(values: Sequence[int]) -> tuple[int, ...]:
  return values if isinstance(values, tuple) else tuple(values)


def _make_batch(step: _Step) -> Batch:
  return Batch(
    step=step.step,
    shape=StepShape(*step.shape),
    request_ids=("",) * len(step.slots),
    slots=step.slots,
    starts=step.starts,
    counts=step.counts,
    num_logits=step.num_logits,
    samples=step.samples,
    token_ids=step.token_ids,
    admissions=tuple(
      Admission(
        slot=each.slot,
        token_ids=each.token_ids,
        num_prompt_tokens=each.num_prompt_tokens,
        block_ids=each.block_ids,
        params=each.params,
        seed=each.seed,
        constrained=each.constrained,
        adapter_slot=each.adapter_slot,
      )
      for each in step.admissions
    ),
    new_blocks=step.new_blocks,
    masks=step.masks,
    padded_tokens=step.padded_tokens,
    num_drafts=step.num_drafts,
    repeats=step.repeats,
    behind=step.behind,
  )
