"""What one step does and what came of it, in counts and ids: the two frozen values between Scheduler and Runner.

Pure Python: no array, no device. Columns rather than rows, so that a step of 256 sequences costs the host little.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any, Protocol

from engine.sampling_params import SamplingParams
from engine.shapes import StepShape


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
  """A request takes a slot: everything the device must know about it, sent once (again after a preemption).

  Attributes:
    slot: row of the device-resident per-request arrays, 0..max_num_seqs-1.
    token_ids: every token known now, prompt and outputs (all of them: a preempted request is re-admitted only when its
      last value has arrived).
    num_prompt_tokens: how many of `token_ids` are prompt.
    block_ids: the block table so far (later growth comes as Batch.new_blocks).
    params: the request's sampling parameters.
    seed: resolved seed (never None), 0..2**32-1.
    constrained: each of its sampling rows comes with a mask.
    imported: KV of the first blocks of `block_ids`, from another runner's export_blocks(); None where there is none.
  """

  slot: int
  token_ids: Sequence[int]
  num_prompt_tokens: int
  block_ids: tuple[int, ...]
  params: SamplingParams
  seed: int
  constrained: bool = False
  imported: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
  """One step. Row r covers positions [starts[r], starts[r] + counts[r]) of the request in slot slots[r].

  Attributes:
    step: serial number, from 0.
    shape: the rung; sum(counts) <= shape.tokens, len(slots) <= shape.rows, sum(num_logits) <= shape.logits.
    request_ids, slots, starts, counts: a column each, one entry a row.
    num_logits: logit rows of each row: 1, or counts[r] (every position, for prompt logprobs). A chunk that does not
      reach the end has one too, which shows whether its KV is sound; 0 is allowed, and then nothing is known of it.
      Logit rows belong to the row's LAST num_logits positions.
    samples: whether the row's last position yields a new token.
    token_ids: the row's input tokens, or () where the single input token is last_tokens[slot] on the device.
    admissions: slots to (re)initialise before the step runs.
    new_blocks: (slot, index in the table, block id) for tables that grew.
    masks: (row, allowed tokens as Constraint.allowed() has them), for each sampling row of a constrained request.
    num_drafts: how many of each row's last tokens are guesses, or () where none is. Such a row samples a token after
      its last known one and, as long as the guess there is that very token, another after the guess: up to
      1 + num_drafts[r] tokens in all. KV behind the last guess that came true is not looked at again. Until the step is
      committed, its request must have no other row.
    repeats: this step is the one before a position on: the same rows, rung and columns, no admissions, and each row is
      one token that the device knows.
    padded_tokens: what the way of batching pads the step to, before the ladder rounds it up: more than num_tokens only
      with static and dynamic batching. A device may leave out the padding of the ladder, but not this.
  """

  step: int
  shape: StepShape
  request_ids: tuple[str, ...]
  slots: tuple[int, ...]
  starts: tuple[int, ...]
  counts: tuple[int, ...]
  num_logits: tuple[int, ...]
  samples: tuple[bool, ...]
  token_ids: tuple[tuple[int, ...], ...]
  admissions: tuple[Admission, ...] = ()
  new_blocks: tuple[tuple[int, int, int], ...] = ()
  masks: tuple[tuple[int, bytes], ...] = ()
  padded_tokens: int = 0
  num_drafts: tuple[int, ...] = ()
  repeats: bool = False

  @property
  def num_tokens(self) -> int:
    """Useful tokens of the step."""
    return sum(self.counts)

  @property
  def computed_tokens(self) -> int:
    """Tokens that every device computes: the useful ones, and what the way of batching pads."""
    return max(self.num_tokens, self.padded_tokens)

  def device_tokens(self, computes_padding: bool) -> int:
    """Tokens that a device computes; what it skips is the rest of the shape.

    Args:
      computes_padding: as EngineConfig has it.
    """
    return self.shape.tokens if computes_padding else self.computed_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
  """Natural-log probabilities at one position: of the token there, and of the most likely ones.

  Attributes:
    token_id: the sampled token, or the prompt's own.
    logprob: its log probability under the model's unmodified distribution (before temperature, penalties and masks).
    top: (token id, log probability), most likely first, as many as were asked for, or the whole vocabulary if it has
      fewer.
  """

  token_id: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
  """Values of a step, by row of its Batch.

  Attributes:
    tokens: the sampled tokens, row after row, at least one each; meaningless where Batch.samples is false.
    bad_rows: rows whose logits held NaN or Inf; their tokens mean nothing.
    logprobs: row -> one entry for each of its logit rows, only where the request asked for logprobs. The last
      entries of a row that samples are those of its tokens; behind a guess that did not come true there is none.
    row_ends: of each row, the end of its tokens in `tokens`; () where every row has one.
  """

  tokens: Sequence[int]
  bad_rows: frozenset[int] = frozenset()
  logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = dataclasses.field(default_factory=dict)
  row_ends: Sequence[int] = ()

  def tokens_of(self, row: int) -> tuple[int, ...]:
    """The tokens of a row, in order."""
    if not self.row_ends:
      return (self.tokens[row],)
    return tuple(self.tokens[self.row_ends[row - 1] if row else 0 : self.row_ends[row]])

  def tokens_by_row(self) -> Iterator[tuple[int, ...]]:
    """The tokens of each row."""
    return map(self.tokens_of, range(len(self.row_ends))) if self.row_ends else zip(self.tokens)


class Launched(Protocol):
  """A step that the device is working on."""

  def result(self) -> StepResult:
    """Waits for the step and reads its values."""
    ...


class Runner(Protocol):
  """The device, as the engine sees it. Steps run in the order of launch."""

  def launch(self, batch: Batch) -> Launched:
    """Starts a step and returns at once; never compiles."""
    ...
