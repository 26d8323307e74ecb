"""The step and its result, in counts and ids: the frozen values between Scheduler and Runner. May not hold arrays.

Pure Python. Columns instead of rows, so that a step of 256 sequences costs the host little.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engine.sampling_params import SamplingParams
from engine.shapes import StepShape

PIECE_BLOCKS = 16  # KV blocks that a copy between a pool and other memory moves at most
MAX_DRAFTS = 7  # draft tokens of a row
IN_FLIGHT = -1  # input token that stands for last_tokens[slot] on the device, before drafts
MAX_DRAFT_MASKS = 64  # masks of a step, over all rows, for logit rows after the first of their row


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
  """All that the device needs about a request that takes a slot; sent once, and again after a preemption.

  Attributes:
    slot: row of the device-resident per-request arrays, 0..max_num_seqs-1.
    token_ids: all tokens of prompt and output. None is missing, because the scheduler re-admits a preempted request
      only after its last value arrived.
    num_prompt_tokens: number of prompt tokens in `token_ids`.
    block_ids: the block table so far (later growth comes as Batch.new_blocks).
    params: the request's sampling parameters.
    seed: resolved seed (never None), 0..2**32-1.
    constrained: each sampling row of the request has a mask.
    imported: KV of the first blocks of `block_ids`, from another runner's export_blocks(); None: no KV.
    adapter_slot: slot of the request's LoRA adapter; 0: none.
  """

  slot: int
  token_ids: Sequence[int]
  num_prompt_tokens: int
  block_ids: tuple[int, ...]
  params: SamplingParams
  seed: int
  constrained: bool = False
  imported: Any = None
  adapter_slot: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
  """One step. Row r covers positions [starts[r], starts[r] + counts[r]) of the request in slot slots[r].

  Attributes:
    step: serial number, from 0.
    shape: the rung; sum(counts) <= shape.tokens, len(slots) <= shape.rows, sum(num_logits) <= shape.logits.
    request_ids, slots, starts, counts: a column each, one entry a row.
    num_logits: logit rows of each row: 1, or counts[r] (every position, for prompt logprobs and means). A chunk before
      the end of a prompt has one too, which detects NaN in its KV; 0 is allowed, without that check. Logit rows belong
      to the row's LAST num_logits positions.
    samples: whether the row's last position yields a new token.
    token_ids: the row's input tokens, or () if the single input token is last_tokens[slot] on the device. The first
      token of a row with drafts may be IN_FLIGHT, which stands for that token too.
    admissions: slots to (re)initialize before the step runs.
    new_blocks: (slot, index in the table, block id) for tables that grew.
    masks: (row, result of Constraint.allowed()), for each sampling row of a constrained request. A row with drafts has
      1 + num_drafts[r] entries, one for each of its logit rows in order; entry j presumes that drafts 1..j are
      accepted. At most MAX_DRAFT_MASKS entries of a step follow the first one of their row.
    num_drafts: number of draft tokens at the end of each row, at most MAX_DRAFTS, or () without drafts. A row with
      drafts has counts[r] = num_logits[r] = 1 + num_drafts[r]. It samples a token after its last known token, and one
      more after each accepted draft: up to 1 + num_drafts[r] tokens. A draft is accepted if it equals the token sampled
      before it. KV after the last accepted draft is never read.
    behind: for each row, the drafts of its request in the step before, if that is not committed, or () without any.
      starts[r] counts them all as accepted; the device subtracts those that it rejected. Such a row samples, and its
      first token is the one on the device. A constrained row is behind none.
    repeats: this step repeats the previous one, a position later: the same rows, rung and columns, no admissions, and
      one token a row, which the device knows. It may differ in num_proposals and fills_draft.
    padded_tokens: tokens after the padding of the batching mode, before the ladder rounds up; above num_tokens only for
      static and dynamic batching. A device may skip the ladder's padding, but not this.
    num_proposals: tokens that a draft model on the device proposes after each sampling row; 0 or its own number.
    fills_draft: the draft model computes keys and values of the step's tokens though it proposes nothing. Without it
      and proposals it computes nothing, and its next step takes the tokens that only the device knows as 0.
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
  behind: tuple[int, ...] = ()
  num_proposals: int = 0
  fills_draft: bool = False

  @property
  def num_tokens(self) -> int:
    """Useful tokens of the step."""
    return sum(self.counts)

  @property
  def computed_tokens(self) -> int:
    """Tokens that every device computes: useful ones and the padding of the batching mode."""
    return max(self.num_tokens, self.padded_tokens)

  def device_tokens(self, computes_padding: bool) -> int:
    """Returns the tokens that a device computes; it skips the rest of the shape.

    Args:
      computes_padding: see EngineConfig.
    """
    return self.shape.tokens if computes_padding else self.computed_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
  """Natural-log probabilities at one position: of its token and of the most likely tokens.

  Attributes:
    token_id: the sampled token, or the prompt's token.
    logprob: log probability of the token under the model's unmodified distribution (before temperature, penalties and
      masks).
    top: (token id, log probability), most likely first, as many as requested, at most the vocabulary.
  """

  token_id: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
  """Values of a step, by row of its Batch.

  Attributes:
    tokens: the sampled tokens in row order, at least one a row; arbitrary if Batch.samples is false.
    bad_rows: rows whose logits held NaN or Inf; their tokens are arbitrary.
    logprobs: row -> one entry for each of its logit rows, for requests with logprobs. The last entries of a sampling
      row belong to its tokens; rejected drafts have no entry.
    row_ends: end of each row's tokens in `tokens`; () if every row has one token.
    embeddings: row -> little-endian float32 values of its embedding, for requests with `embed`.
    proposals: row -> tokens that a draft model proposes after the row's tokens, if the Batch wants proposals.
    fill_seconds: for which the host waited, after the step, for a draft model that proposes nothing.
  """

  tokens: Sequence[int]
  bad_rows: frozenset[int] = frozenset()
  logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = dataclasses.field(default_factory=dict)
  row_ends: Sequence[int] = ()
  embeddings: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
  proposals: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  fill_seconds: float = 0.0

  def tokens_of(self, row: int) -> tuple[int, ...]:
    """Returns the tokens of a row, in order."""
    if not self.row_ends:
      return (self.tokens[row],)
    return tuple(self.tokens[self.row_ends[row - 1] if row else 0 : self.row_ends[row]])

  def tokens_by_row(self) -> Iterator[tuple[int, ...]]:
    """The tokens of each row."""
    return map(self.tokens_of, range(len(self.row_ends))) if self.row_ends else zip(self.tokens)


class Launched(Protocol):
  """A step that the device is running."""

  def result(self) -> StepResult:
    """Waits for the step and reads its values."""
    ...


class Runner(Protocol):
  """The device, as the engine sees it. Steps run in the order of launch."""

  def launch(self, batch: Batch) -> Launched:
    """Starts a step and returns at once; never compiles."""
    ...


@runtime_checkable
class AdapterWriter(Protocol):
  """A Runner with slots for LoRA adapters."""

  def write_adapter(self, slot: int, weights: Any) -> None:
    """Writes an adapter's weights into a slot before the next step; steps already launched keep the former ones.

    Raises:
      ValueError: the weights are not those of this model; nothing changes.
    """
    ...


class BlockCopy(NamedTuple):
  """A copy of a prefix block between the device and the host.

  Attributes:
    block: id in the device's pool.
    slot: of the host's memory.
    key: the block's prefix key, on which the digest depends.
  """

  block: int
  slot: int
  key: bytes


class FinishedCopies(NamedTuple):
  """Copies that are complete.

  Attributes:
    copies: as given to `save_blocks` or `fetch_blocks`.
    is_save: from the device to the host.
    num_good: leading copies that succeeded, with the digests of their contents.
    piece: the contents, for `write_blocks`; None after a save.
  """

  copies: list[BlockCopy]
  is_save: bool
  num_good: int
  piece: Any = None


@runtime_checkable
class BlockStore(Protocol):
  """A Runner that keeps copies of KV blocks in memory of the host. Copies finish in the order in which they begin."""

  def notify_copies(self, callback: Callable[[], None]) -> None:
    """Sets what is called, on any thread, when copies finish."""
    ...

  def save_blocks(self, copies: list[BlockCopy]) -> None:
    """Starts to copy blocks to the host as launched steps leave them. Returns at once."""
    ...

  def fetch_blocks(self, copies: list[BlockCopy]) -> None:
    """Starts to verify at most PIECE_BLOCKS saved blocks and to bring them to the device. Returns at once."""
    ...

  def finished_copies(self) -> list[FinishedCopies]:
    """Returns the copies finished since the last call, in order. Never waits."""
    ...

  def write_blocks(self, fetched: FinishedCopies, blocks: Sequence[int]) -> None:
    """Writes the first fetched blocks into `blocks` of the pool, after launched steps and before the next one."""
    ...
