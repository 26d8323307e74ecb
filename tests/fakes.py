"""Settings, a clock, a constraint and an oracle for the pure engine's tests, and a fake device that checks each Batch.

The device itself is extensions/fake_device/device.py: there a wrong page changes tokens; here it fails the test at
once.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
import hashlib
import itertools

from engine.batch import (
  IN_FLIGHT,
  MAX_DRAFT_MASKS,
  MAX_DRAFTS,
  PIECE_BLOCKS,
  Admission,
  Batch,
  BlockCopy,
  FinishedCopies,
  TokenLogprobs,
)
from engine.config import EngineConfig
from engine.constraint import ConstraintFailed
from engine.request import FinishReason, Request
from extensions.fake_device.device import NAN, ROOT, FakeDevice, FakeLaunched, Slot, follow_token, logprob, run_alone


def tokens_of(mask: bytes) -> list[int]:
  """The tokens that a mask allows."""
  bits = int.from_bytes(mask, "little")
  return [token for token in range(8 * len(mask)) if bits >> token & 1]


def small_config(**changes) -> EngineConfig:
  """Of a few rows and pages, with these changes: little work, and soon full."""
  fields = {"vocab_size": 50, "max_model_len": 64, "num_blocks": 40, "block_size": 4}
  return EngineConfig(**fields | {"token_budgets": (4, 8, 16), "max_num_seqs": 4, "prefill_chunk": 8} | changes)


class FakeConstraint:
  """Allows about half of the tokens, which ones is a digest of all tokens before: one wrong or lost shows at once."""

  def __init__(self, vocab_size: int, length: int | None = None, fails_after: int | None = None):
    """Args: length: of a complete output; None: it never is. fails_after: so many tokens, with the text "enough"."""
    self._vocab_size, self._length, self._fails_after = vocab_size, length, fails_after
    self._state = b"root"
    self.tokens: list[int] = []

  @property
  def is_done(self) -> bool:
    return len(self.tokens) == self._length

  def allowed(self) -> bytes:
    num_words = -(-self._vocab_size // 32)
    bits = hashlib.shake_128(self._state).digest(4 * num_words)
    mask = int.from_bytes(bits, "little") & ((1 << self._vocab_size) - 1) | 1 << self._state[0] % self._vocab_size
    return mask.to_bytes(4 * num_words, "little")

  def accept(self, token: int) -> None:
    assert not self.is_done and token in tokens_of(self.allowed()), f"{token} is not allowed after {self.tokens}"
    self._state = hashlib.blake2b(self._state + token.to_bytes(8, "little"), digest_size=16).digest()
    self.tokens.append(token)
    if len(self.tokens) == self._fails_after:
      raise ConstraintFailed("enough")


class FakeRunner(FakeDevice):
  """The fake device, which besides checks whatever a batch promises.

  Attributes:
    shapes: the shapes launched so far.
    num_steps: launches so far.
  """

  def __init__(self, config: EngineConfig, poison: int | None = None, poisoned: Mapping[str, int] | None = None):
    super().__init__(config)
    self.poison = poison
    if poisoned is not None:
      self.poisoned = poisoned
    self.shapes: set = set()
    self.num_steps = 0
    self._latest: Batch | None = None
    self._writers: dict[tuple[int, int], int] = {}  # of the step that runs: (block, offset) -> row
    self._planted: set[int] = set()  # pages of NaN whose owner has not read them yet
    self._nan_slots: set[Slot] = set()  # those owners
    self.host: dict[int, tuple[int | None, bytes]] = {}  # slot -> page and the key it was saved with
    self.broken: set[int] = set()  # slots whose contents are no longer what was saved
    self.copy_delay: Callable[[], int] = lambda: 0  # looks at the finished copies until one is finished
    self._copies: deque[list] = deque()  # looks left, and what is finished then

  def launch(self, batch: Batch) -> FakeLaunched:
    assert batch.step == self.num_steps, f"step {batch.step} launched after {self.num_steps - 1}"
    self.num_steps += 1
    self.shapes.add(batch.shape)
    assert batch.repeats == self._is_repetition(batch), "repeats the step before, or does not, and says otherwise"
    self._latest = batch
    return super().launch(batch)

  def _is_repetition(self, batch: Batch) -> bool:
    """Whether it is the latest batch a position on, and nothing but decodes."""
    latest = self._latest
    return (
      latest is not None
      and not (any(batch.token_ids) or any(latest.token_ids) or batch.admissions or batch.behind or latest.behind)
      and (batch.shape, batch.slots, batch.request_ids) == (latest.shape, latest.slots, latest.request_ids)
      and batch.starts == tuple(start + 1 for start in latest.starts)
    )

  def _admit(self, batch: Batch) -> None:
    config = self.config
    num_rows = len(batch.slots)
    for column in (
      batch.request_ids,
      batch.starts,
      batch.counts,
      batch.num_logits,
      batch.samples,
      batch.token_ids,
      batch.num_drafts or batch.slots,
      batch.behind or batch.slots,
    ):
      assert len(column) == num_rows, "columns differ in length"
    assert len(set(batch.slots)) == num_rows == len(set(batch.request_ids)), "a request has two rows"
    assert 1 <= sum(batch.counts) <= batch.shape.tokens, "more tokens than the rung holds"
    assert num_rows <= batch.shape.rows, "more rows than the rung holds"
    assert sum(batch.num_logits) <= batch.shape.logits, "more logit rows than the rung holds"
    admitted = {admission.slot for admission in batch.admissions}
    assert len(admitted) == len(batch.admissions) and admitted <= set(batch.slots), "admitted without a row"
    for admission in batch.admissions:
      assert 0 <= admission.slot < config.max_num_seqs and 0 <= admission.seed < 2**32
    lengths = {slot: len(known.table) for slot, known in self._slots.items()}
    lengths |= {admission.slot: len(admission.block_ids) for admission in batch.admissions}
    for slot, index, _ in batch.new_blocks:
      assert index == lengths[slot], "a block table has a gap"
      lengths[slot] += 1
    numbers = Counter(row for row, _ in batch.masks)
    assert [row for row, _ in batch.masks] == sorted(numbers.elements()), "masks are out of order"
    drafts = batch.num_drafts or (0,) * num_rows
    assert all(number == 1 + drafts[row] for row, number in numbers.items()), "not a mask for each logit row"
    assert numbers.total() - len(numbers) <= MAX_DRAFT_MASKS, "more masks after drafts than a step has"
    self._writers = {}
    super()._admit(batch)

  # engine.batch.BlockStore. A slot changes when its copy finishes, as late as that may be.

  def notify_copies(self, callback: Callable[[], None]) -> None:
    pass

  def save_blocks(self, copies: list[BlockCopy]) -> None:
    pages = self.export_blocks(tuple(copy.block for copy in copies))
    self._copies.append([self.copy_delay(), FinishedCopies(copies, True, len(copies), pages)])

  def fetch_blocks(self, copies: list[BlockCopy]) -> None:
    assert len(copies) <= PIECE_BLOCKS, "more than a piece"
    self._copies.append([self.copy_delay(), FinishedCopies(copies, False, 0)])

  def finished_copies(self) -> list[FinishedCopies]:
    found = []
    if self._copies:
      self._copies[0][0] -= 1
    while self._copies and self._copies[0][0] < 0:
      found.append(self._finish(self._copies.popleft()[1]))
    return found

  def _finish(self, copying: FinishedCopies) -> FinishedCopies:
    if copying.is_save:
      for (_, slot, key), page in zip(copying.copies, copying.piece, strict=True):
        self.host[slot] = page, key
        self.broken.discard(slot)
      return copying._replace(piece=None)
    num_good = 0
    for _, slot, key in copying.copies:
      if slot in self.broken or self.host[slot][1] != key:
        break
      num_good += 1
    pages = [12345 if slot in self.broken else self.host[slot][0] for _, slot, _ in copying.copies]
    return copying._replace(num_good=num_good, piece=pages)

  def write_blocks(self, fetched: FinishedCopies, blocks: Sequence[int]) -> None:
    if self._queue:
      self.run_until(self._queue[-1])
    for block, page in zip(blocks, fetched.piece, strict=False):
      self._pages[block] = page

  def poison_page(self, block: int) -> None:
    super().poison_page(block)
    self._planted.add(block)

  def _make_slot(self, admission: Admission) -> Slot:
    return _CheckedSlot(admission)

  def _run_row(
    self, batch: Batch, row: int, slot: Slot, masks: Mapping[int, Sequence[bytes]], bad_rows, logprobs
  ) -> list[int]:
    assert isinstance(slot, _CheckedSlot)
    block_size = self.config.block_size
    start, count = self._start_of(batch, row, slot), batch.counts[row]
    behind = batch.behind[row] if batch.behind else 0
    assert not behind or not slot.admission.constrained, "the next mask of a constrained row needs its tokens"
    assert not behind or slot.num_rejected <= behind, "more drafts were rejected than the row is behind"
    assert count >= 1, "a row without tokens"
    assert 0 <= batch.num_logits[row] <= count
    drafts = batch.num_drafts[row] if batch.num_drafts else 0
    known = start + count - drafts
    assert drafts <= MAX_DRAFTS, "more drafts than a row has"
    assert not drafts or batch.samples[row] and batch.num_logits[row] == count == 1 + drafts, (
      "drafts without logit rows"
    )
    is_forced = False
    if batch.token_ids[row]:
      inputs = list(batch.token_ids[row][: count - drafts])
      if inputs[0] == IN_FLIGHT:
        assert drafts and start >= slot.admission.num_prompt_tokens, "no token of this row is in flight"
        inputs = [slot.last_token]
      num_forced = known - len(slot.token_ids)
      if num_forced > 0 and slot.admission.constrained and not drafts:  # oracle() says whether they are right
        slot.token_ids += inputs[-num_forced:]
        is_forced = True
      assert inputs == slot.token_ids[start:known], "input tokens are not the request's"
    else:
      assert count == 1 and start == len(slot.token_ids) - 1, f"position {start} is not the last"
      assert start >= slot.admission.num_prompt_tokens, "last_tokens holds no prompt token"
    assert batch.samples[row] == (known == len(slot.token_ids)) or (is_forced and not batch.samples[row]), (
      "samples in the middle, or not at the end"
    )
    assert (start + count - 1) // block_size < len(slot.table), "the block table is too short"
    for position in range(start, start + count):
      block = slot.table[position // block_size]
      assert 1 <= block <= self.config.num_blocks, f"block {block} is not ours to write"
      place = block, position % block_size
      assert place not in self._writers, f"rows {self._writers.get(place)} and {row} write the same place"
      self._writers[place] = row
    wants_mask = slot.admission.constrained and batch.samples[row]
    assert (row in masks) == wants_mask, "a mask is missing, or nobody asked for it"
    self._check_pages(slot, start, self.poisoned.get(batch.request_ids[row], -1))
    tokens = super()._run_row(batch, row, slot, masks, bad_rows, logprobs)
    if batch.samples[row]:
      slot.token_ids += tokens
    return tokens

  def _check_pages(self, slot: "_CheckedSlot", start: int, bad_position: int) -> None:
    """Every position attends to all before it: each page must hold what the request's own tokens make of it."""
    for index in range(-(-start // self.config.block_size)):
      position = min(start, (index + 1) * self.config.block_size) - 1
      block = slot.table[index]
      value = self._pages[block]
      if value is NAN:
        if block in self._planted:
          self._planted.remove(block)
          self._nan_slots.add(slot)
        own = 0 <= bad_position <= position or self.poison in slot.token_ids[: position + 1]
        assert own or slot in self._nan_slots, f"NaN up to position {position} came from another request"
      else:
        assert value == slot.expected(position), f"block {block}, position {position}, holds another prefix"


class _CheckedSlot(Slot):
  """A slot that knows all of its request's tokens."""

  def __init__(self, admission: Admission):
    super().__init__(admission)
    self.token_ids = list(admission.token_ids)  # grows by what the device samples
    self._chain: list[int] = []

  def expected(self, position: int) -> int:
    """What `position` must hold; remembered, since the same positions are read at every step."""
    while len(self._chain) <= position:
      before = self._chain[-1] if self._chain else self.root
      self._chain.append(follow_token(before, self.token_ids[len(self._chain)]))
    return self._chain[position]


class VirtualClock:
  """Seconds that pass when told to."""

  def __init__(self, now: float = 0.0):
    self.now = now

  def __call__(self) -> float:
    return self.now

  def advance(self, seconds: float) -> None:
    self.now += seconds


def oracle(config: EngineConfig, request: Request) -> tuple[tuple[int, ...], FinishReason]:
  """What one request yields when it is served alone: its tokens, the one that ends it included, and its ending.

  A constraint is used up by it.
  """
  return run_alone(
    request.prompt_token_ids,
    request.params,
    request.seed,
    config.vocab_size,
    config.eos_token_ids,
    request.constraint,
  )


def oracle_prompt_logprobs(config: EngineConfig, request: Request) -> tuple[TokenLogprobs, ...]:
  """The log probabilities of prompt tokens from the second on."""
  state = ROOT
  entries = []
  for token, following in itertools.pairwise(request.prompt_token_ids):
    state = follow_token(state, token)
    entries.append(logprob(following, state, request.params.prompt_logprobs or 0, config.vocab_size))
  return tuple(entries)
