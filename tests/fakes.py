"""A device, a clock and an oracle for tests of the pure engine: wrong in every way the real device would be wrong.

The KV at a position is a digest of everything up to it, as in a transformer, and lives at a physical (block, offset):
a wrong block, a stale one or a lost recompute changes the tokens or trips an assertion. Values exist only at result():
the order of launches is the order of execution, and nothing runs before somebody asks for it.
"""

from collections.abc import Mapping
import hashlib
import itertools

from engine.batch import Batch, StepResult, TokenLogprobs
from engine.config import EngineConfig
from engine.constraint import ConstraintFailed
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams

ROOT = b"root"


def digest(before: bytes, token: int) -> bytes:
  """The KV of one position, given the KV of the position before."""
  return hashlib.blake2b(before + token.to_bytes(8, "little"), digest_size=16).digest()


def tokens_of(mask: bytes) -> list[int]:
  """The tokens that a mask allows."""
  bits = int.from_bytes(mask, "little")
  return [token for token in range(8 * len(mask)) if bits >> token & 1]


class FakeConstraint:
  """Allows about half of the tokens, which ones is a digest of all tokens before: one wrong or lost shows at once."""

  def __init__(self, vocab_size: int, length: int | None = None, fails_after: int | None = None):
    """Args: length: of a complete output; None: it never is. fails_after: so many tokens, with the text "enough"."""
    self._vocab_size, self._length, self._fails_after = vocab_size, length, fails_after
    self._state = ROOT
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
    self._state = digest(self._state, token)
    self.tokens.append(token)
    if len(self.tokens) == self._fails_after:
      raise ConstraintFailed("enough")


def sample(
  state: bytes,
  params: SamplingParams,
  seed: int,
  num_output_tokens: int,
  vocab_size: int,
  eos: tuple[int, ...],
  mask: bytes | None = None,
) -> int:
  """The token after a prefix: of its digest, and the seed where there is chance; 1 in 16 is end-of-sequence."""
  draw = state + seed.to_bytes(4, "little") if params.temperature > 0 else state
  value = int.from_bytes(hashlib.blake2b(draw, digest_size=8).digest(), "little")
  ends = set(params.stop_token_ids) | set(() if params.ignore_eos else eos)
  token = eos[value // 16 % len(eos)] if eos and value % 16 == 0 else value // 16 % vocab_size
  if mask is not None:
    choices = tokens_of(mask)
    if num_output_tokens < params.min_tokens:
      choices = [token for token in choices if token not in ends] or choices
    return token if token in choices else choices[value // 16 % len(choices)]
  while num_output_tokens < params.min_tokens and token in ends:
    token = (token + 1) % vocab_size
  return token


def logprob(token: int, state: bytes) -> TokenLogprobs:
  """A made-up log probability that tells positions apart."""
  return TokenLogprobs(token, -float(int.from_bytes(state[:4], "little")), ())


class _Slot:
  """The device-resident row of a request."""

  def __init__(self, admission):
    self.admission = admission
    self.table = list(admission.block_ids)
    self.token_ids = list(admission.token_ids)  # grows by what the device samples
    self._chain: list[bytes] = []

  def expected(self, position: int) -> bytes:
    """The digest that `position` must hold; remembered, since the same positions are read at every step."""
    while len(self._chain) <= position:
      before = self._chain[-1] if self._chain else ROOT
      self._chain.append(digest(before, self.token_ids[len(self._chain)]))
    return self._chain[position]


class FakeRunner:
  """Implements engine.batch.Runner, and checks whatever a batch promises.

  Attributes:
    shapes: the shapes launched so far.
    poison: a token id whose position comes out as NaN, and all that attend to it.
    poisoned: request id -> position that comes out as NaN when that request computes it, and all that attend to it.
  """

  def __init__(self, config: EngineConfig, poison: int | None = None, poisoned: Mapping[str, int] | None = None):
    self.config = config
    self.poison = poison
    self.poisoned = {} if poisoned is None else poisoned
    self.shapes: set = set()
    self.num_steps = 0
    self._slots: dict[int, _Slot] = {}
    self._kv: dict[tuple[int, int], bytes | None] = {}  # (block, offset) -> digest; None is NaN
    self._queue: list[_FakeLaunched] = []
    self._masks: dict[int, bytes] = {}  # of the step that runs

  def launch(self, batch: Batch) -> "_FakeLaunched":
    assert batch.step == self.num_steps, f"step {batch.step} launched after {self.num_steps - 1}"
    self.num_steps += 1
    self.shapes.add(batch.shape)
    launched = _FakeLaunched(self, batch)
    self._queue.append(launched)
    return launched

  def export(self, block_ids: tuple[int, ...]) -> tuple[list[bytes | None], ...]:
    """The digests of these blocks after all that was launched."""
    if self._queue:
      self.run_until(self._queue[-1])
    return tuple([self._kv.get((block, offset)) for offset in range(self.config.block_size)] for block in block_ids)

  def run_until(self, launched: "_FakeLaunched") -> None:
    """Executes queued steps in order of launch, up to and with `launched`."""
    while launched.values is None:
      step = self._queue.pop(0)
      step.values = self._execute(step.batch)

  def _execute(self, batch: Batch) -> StepResult:
    config = self.config
    num_rows = len(batch.slots)
    for column in (
      batch.request_ids,
      batch.starts,
      batch.counts,
      batch.num_logits,
      batch.samples,
      batch.token_ids,
      batch.num_output_tokens,
    ):
      assert len(column) == num_rows, "columns differ in length"
    assert len(set(batch.slots)) == num_rows == len(set(batch.request_ids)), "a request has two rows"
    assert 1 <= sum(batch.counts) <= batch.shape.tokens, "more tokens than the rung holds"
    assert num_rows <= batch.shape.rows and sum(batch.num_logits) <= batch.shape.rows, "more rows than the rung holds"
    admitted = {admission.slot for admission in batch.admissions}
    assert len(admitted) == len(batch.admissions) and admitted <= set(batch.slots), "admitted without a row"
    for admission in batch.admissions:
      assert 0 <= admission.slot < config.max_num_seqs and 0 <= admission.seed < 2**32
      self._slots[admission.slot] = _Slot(admission)
      for block, content in zip(admission.block_ids, admission.imported or (), strict=False):
        for offset in range(config.block_size):
          self._kv[block, offset] = content[offset]
    for slot, index, block in batch.new_blocks:
      assert index == len(self._slots[slot].table), "a block table has a gap"
      self._slots[slot].table.append(block)
    self._masks = dict(batch.masks)
    assert list(self._masks) == sorted(self._masks), "masks are out of order, or twice"
    writers = {}
    tokens, bad_rows, logprobs = [], set(), {}
    for row in range(num_rows):
      slot = self._slots[batch.slots[row]]
      tokens.append(self._run_row(batch, row, slot, writers, bad_rows, logprobs))
    return StepResult(tuple(tokens), frozenset(bad_rows), logprobs)

  def _run_row(self, batch: Batch, row: int, slot: _Slot, writers: dict, bad_rows: set, logprobs: dict) -> int:
    config, params = self.config, slot.admission.params
    start, count = batch.starts[row], batch.counts[row]
    assert count >= 1, "a row without tokens"
    assert 0 <= batch.num_logits[row] <= count
    if batch.token_ids[row]:
      assert list(batch.token_ids[row]) == slot.token_ids[start : start + count], "input tokens are not the request's"
    else:
      assert count == 1 and start == len(slot.token_ids) - 1, f"position {start} is not the last"
      assert start >= slot.admission.num_prompt_tokens, "last_tokens holds no prompt token"
    assert batch.samples[row] == (start + count == len(slot.token_ids)), "samples in the middle, or not at the end"
    assert batch.num_output_tokens[row] == len(slot.token_ids) - slot.admission.num_prompt_tokens
    assert (start + count - 1) // config.block_size < len(slot.table), "the block table is too short"
    mask = self._masks.get(row)
    wants_mask = slot.admission.constrained and batch.samples[row]
    assert (mask is not None) == wants_mask, "a mask is missing, or nobody asked for it"
    bad_position = self.poisoned.get(batch.request_ids[row], -1)
    for position in range(start):  # every position attends to all before it: all of them are read
      value = self._at(slot, position)
      if value is None:
        own = 0 <= bad_position <= position or self.poison in slot.token_ids[: position + 1]
        assert own, f"NaN at position {position} came from another request"
      else:
        assert value == slot.expected(position), f"position {position} holds another prefix"
    state: bytes | None = self._at(slot, start - 1) if start else ROOT
    entries = []
    for position in range(start, start + count):
      token = slot.token_ids[position]
      bad = state is None or position == bad_position or token == self.poison
      state = None if bad else digest(state or ROOT, token)
      place = self._place(slot, position)
      assert place not in writers, f"rows {writers.get(place)} and {row} write the same place"
      writers[place] = row
      self._kv[place] = state
      if position >= start + count - batch.num_logits[row]:
        if state is None:
          bad_rows.add(row)
        entries.append((position, state))
    token = 0
    if batch.samples[row]:
      if state is not None:
        token = sample(
          state,
          params,
          slot.admission.seed,
          batch.num_output_tokens[row],
          config.vocab_size,
          config.eos_token_ids,
          mask,
        )
      slot.token_ids.append(token)
    if params.logprobs is not None or params.prompt_logprobs is not None:
      known = slot.token_ids
      logprobs[row] = tuple(logprob(known[position + 1], state or ROOT) for position, state in entries)
    return token

  def _place(self, slot: _Slot, position: int) -> tuple[int, int]:
    block = slot.table[position // self.config.block_size]
    assert 1 <= block <= self.config.num_blocks, f"block {block} is not ours to write"
    return block, position % self.config.block_size

  def _at(self, slot: _Slot, position: int) -> bytes | None:
    place = self._place(slot, position)
    assert place in self._kv, f"position {position} reads {place}, never written"
    return self._kv[place]


class _FakeLaunched:
  """A step that runs when it is asked for."""

  def __init__(self, runner: FakeRunner, batch: Batch):
    self.runner = runner
    self.batch = batch
    self.values: StepResult | None = None

  def result(self) -> StepResult:
    self.runner.run_until(self)
    assert self.values is not None
    return self.values


class VirtualClock:
  """Seconds that pass when told to."""

  def __init__(self, now: float = 0.0):
    self.now = now

  def __call__(self) -> float:
    return self.now

  def advance(self, seconds: float) -> None:
    self.now += seconds


def oracle(config: EngineConfig, request: Request) -> tuple[tuple[int, ...], FinishReason]:
  """What one request yields when it is served alone, without blocks, batches or schedules: its tokens and ending.

  A constraint is used up by it.
  """
  state = ROOT
  for token in request.prompt_token_ids:
    state = digest(state, token)
  params = request.params
  outputs: list[int] = []
  ends = set(params.stop_token_ids) | set(() if params.ignore_eos else config.eos_token_ids)
  while True:
    constraint = request.constraint
    mask = None if constraint is None else constraint.allowed()
    token = sample(state, params, request.seed, len(outputs), config.vocab_size, config.eos_token_ids, mask)
    outputs.append(token)
    if constraint is not None:
      constraint.accept(token)
    if token in ends or (constraint is not None and constraint.is_done):
      return tuple(outputs), FinishReason.STOP
    if len(outputs) == params.max_tokens:
      return tuple(outputs), FinishReason.LENGTH
    state = digest(state, token)


def oracle_prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...]:
  """The log probabilities of prompt tokens from the second on."""
  state = ROOT
  entries = []
  for token, following in itertools.pairwise(request.prompt_token_ids):
    state = digest(state, token)
    entries.append(logprob(following, state))
  return tuple(entries)
