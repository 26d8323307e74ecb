"""A device without a model: tokens are a pure function of the contents of KV pages, so that any page error shows.

For load tests, chaos tests and tests of all code around the device. Uses the standard library alone, so that a client
can import it and compute every expected token (`expected_tokens`). May not know the scheduler.

The KV at a position is a hash of everything up to it, as in a transformer. A page holds the hash at the latest position
written to it, which stands for all earlier ones. A row that reads a wrong, stale or overwritten page, or skips a
position, computes other tokens from there on, as on a real device.
"""

from collections.abc import Callable, Mapping, Sequence
import hashlib
import struct
import time
import zlib

from engine.adapters import AdapterWeights
from engine.batch import IN_FLIGHT, Admission, Batch, StepResult, TokenLogprobs
from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.request import FinishReason, fold_seed
from engine.sampling_params import SamplingParams

ROOT = 1  # hash of every sequence's start
NAN = None  # replaces a hash; compared as None, which type checkers follow
_PRIME = (1 << 61) - 1
_WORD = (1 << 64) - 1
_UNWRITTEN = 0
_FEW = 256  # masks with at most this many bits are scanned one by one


def follow_token(state: int, token: int) -> int:
  """Returns the hash of the sequence with one more token: a polynomial modulo a prime, one product a token."""
  return (state * 6364136223846793005 + token + 1) % _PRIME


def adapter_root(path: str) -> int:
  """Returns the hash of every sequence's start under the adapter of a folder; "": without an adapter."""
  return follow_token(ROOT, zlib.crc32(path.encode())) if path else ROOT


def _scatter(value: int) -> int:
  """Returns 64 bits, each of which depends on all of `value` (splitmix64's finalizer, Steele et al., OOPSLA 2014)."""
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
  value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
  return value ^ value >> 31


def params_key(params: SamplingParams, seed: int) -> int:
  """Returns the sampling parameters that shape every token; a row with another request's parameters gets other tokens.

  Floats are rounded to float32, as on a real device and in protobuf. `seed` counts only if sampling is random.
  """
  values = [params.presence_penalty, params.frequency_penalty, params.repetition_penalty]
  values += [number for pair in sorted(params.logit_bias) for number in pair]
  if params.temperature > 0:
    values += [params.temperature, params.top_p, params.min_p, params.top_k, seed >> 16, seed & 0xFFFF]
  packed = struct.pack(f"<{len(values)}f", *values)
  return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def sample_token(
  state: int,
  key: int,
  params: SamplingParams,
  num_output_tokens: int,
  vocab_size: int,
  eos: tuple[int, ...],
  mask: bytes | None = None,
) -> int:
  """Returns the token after a prefix; 1 in 16 is end-of-sequence.

  Args:
    state: the hash of all earlier tokens.
    key: params_key() of the request.
    params: give allowed tokens and min_tokens.
    num_output_tokens: output tokens so far, for min_tokens.
    vocab_size, eos: the model's.
    mask: the request's constraint, as in engine.constraint.
  """
  value = _scatter(state ^ key)
  token = eos[value // 16 % len(eos)] if eos and value % 16 == 0 else value // 16 % vocab_size
  ends: Sequence[int] = ()
  if num_output_tokens < params.min_tokens:
    ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos)
  if mask is not None:
    bits = int.from_bytes(mask, "little")
    for end in ends:
      bits &= ~(1 << end)
    return _choose(bits or int.from_bytes(mask, "little"), token, value // 16)
  if params.allowed_token_ids is not None:
    choices = [choice for choice in params.allowed_token_ids if choice not in ends] or params.allowed_token_ids
    return token if token in choices else choices[value // 16 % len(choices)]
  while token in ends:
    token = (token + 1) % vocab_size
  return token


def _choose(bits: int, token: int, value: int) -> int:
  """Returns a set bit: of few, each with equal chance; of many, the first from `token` on."""
  count = bits.bit_count()
  if count <= _FEW:
    for _ in range(value % count):
      bits &= bits - 1
  elif bits >> token:
    bits = bits >> token << token
  return (bits & -bits).bit_length() - 1


def logprob(token: int, state: int | None, num_top: int, vocab_size: int) -> TokenLogprobs:
  """Returns made-up log probabilities that differ by position, exact as float32; NaN state has none.

  Alternatives are tokens of the vocabulary, each once, from `token` on.
  """
  if state is None:
    return TokenLogprobs(token, float("nan"), ())
  value = -(state % 65536) / 1024
  to_next = -1 if token >= num_top else 1
  top = [((token + i * to_next) % vocab_size, value - i) for i in range(min(num_top, vocab_size))]
  return TokenLogprobs(token, value, tuple(top))


def expected_tokens(
  prompt_token_ids: Sequence[int],
  params: SamplingParams,
  seed: int | None = None,
  *,
  vocab_size: int,
  eos_token_ids: tuple[int, ...],
  adapter_path: str = "",
) -> tuple[tuple[int, ...], FinishReason]:
  """Returns the tokens and the finish reason that a client must receive for a request, whatever else the server does.

  Args:
    prompt_token_ids: the model's input (template and special tokens included).
    params: the request's; `seed`, if given, replaces its seed.
    seed: this output's seed; for output i of several, the request's seed plus i. None only if temperature is 0.
    vocab_size, eos_token_ids: the model's, as in GetModelInfo.
    adapter_path: folder of the request's adapter; "": none.

  Returns:
    Token ids without the one that ended the output, and STOP or LENGTH. Stop strings cut the stream earlier.
  """
  if seed is None:
    seed = params.seed
  if seed is None and params.temperature > 0:
    raise ValueError(f"temperature={params.temperature:g} without a seed is not predictable; set seed")
  root = adapter_root(adapter_path)
  tokens, reason = run_alone(prompt_token_ids, params, fold_seed(seed or 0), vocab_size, eos_token_ids, root=root)
  return tokens[:-1] if reason is FinishReason.STOP else tokens, reason


def run_alone(
  prompt_token_ids: Sequence[int],
  params: SamplingParams,
  seed: int,
  vocab_size: int,
  eos_token_ids: tuple[int, ...],
  constraint: Constraint | None = None,
  root: int = ROOT,
) -> tuple[tuple[int, ...], FinishReason]:
  """Runs one request without pages, batches or schedules; returns all tokens, the last included, and the finish reason.

  Args: seed: 32 bits, as in Admission. constraint: is used up. root: of `adapter_root`. The others are as above.
  """
  state = root
  for token in prompt_token_ids:
    state = follow_token(state, token)
  key = params_key(params, seed)
  ends = set(params.stop_token_ids) | set(() if params.ignore_eos else eos_token_ids)
  outputs: list[int] = []
  while True:
    mask = None if constraint is None else constraint.allowed()
    token = sample_token(state, key, params, len(outputs), vocab_size, eos_token_ids, mask)
    outputs.append(token)
    if constraint is not None:
      constraint.accept(token)
    if token in ends or (constraint is not None and constraint.is_done):
      return tuple(outputs), FinishReason.STOP
    if len(outputs) == params.max_tokens:
      return tuple(outputs), FinishReason.LENGTH
    state = follow_token(state, token)


class Slot:
  """The device-resident row of a request.

  Attributes:
    table: its pages, in order.
    last_token: the latest sampled token, input of the next step.
    num_rejected: drafts of its latest row that were rejected.
    state: the hash of its first num_hashed tokens; NAN once one of them was.
    ends: the hash at the end of each full page.
    root: the hash of no tokens, which each adapter has of its own.
  """

  __slots__ = ("admission", "key", "table", "last_token", "num_rejected", "state", "num_hashed", "ends", "root")

  def __init__(self, admission: Admission):
    self.admission = admission
    self.key = params_key(admission.params, admission.seed)
    self.table = list(admission.block_ids)
    self.last_token = self.num_rejected = 0
    self.root = ROOT
    self.rewind()

  def rewind(self) -> None:
    """Resets the row to before its first token."""
    self.state: int | None = self.root
    self.num_hashed = 0
    self.ends: list[int | None] = []


class FakeDevice:
  """Implements engine.batch.Runner. Values exist only at result(), and steps run in the order of launch.

  Attributes:
    poisoned: maps a request id to the position whose KV becomes NaN, as does all that attends to it.
    poison: a token id with the same effect in a prompt; None is none.
    compiles_after_ready: as ModelRunner's.
  """

  compiles_after_ready = 0

  def __init__(self, config: EngineConfig, step_s: float = 0.0, clock: Callable[[], float] = time.monotonic):
    """Args: step_s: seconds a step takes, from its launch or from the end of the previous step if that is later."""
    self.config = config
    self.poisoned: Mapping[str, int] = {}
    self.poison: int | None = None
    self._step_s = step_s
    self._clock = clock
    self._ready_at = 0.0
    self._slots: dict[int, Slot] = {}
    self._pages: list[int | None] = [_UNWRITTEN] * (config.num_blocks + 1)
    self._queue: list[FakeLaunched] = []
    self._poisoned_pages: list[int] = []  # copies to do before the next launched step
    self._roots: dict[int, int] = {0: ROOT}  # adapter slot -> hash of no tokens

  def launch(self, batch: Batch) -> "FakeLaunched":
    if self._step_s:
      self._ready_at = max(self._clock(), self._ready_at) + self._step_s
    launched = FakeLaunched(self, batch, self._ready_at, self._poisoned_pages)
    self._poisoned_pages = []
    self._queue.append(launched)
    return launched

  def write_adapter(self, slot: int, weights: AdapterWeights) -> None:
    """Implements engine.batch.AdapterWriter: the adapter's folder decides its tokens."""
    self._roots[slot] = adapter_root(weights.path)

  def poison_page(self, block: int) -> None:
    """Fills a page with NaN after the launched steps, for fault injection."""
    self._poisoned_pages.append(block)

  def export_blocks(self, block_ids: tuple[int, ...]) -> tuple[int | None, ...]:
    """Returns the contents of these pages after all launched steps."""
    if self._queue:
      self.run_until(self._queue[-1])
    return tuple([self._pages[block] for block in block_ids])

  def run_until(self, launched: "FakeLaunched") -> None:
    """Executes queued steps in order of launch, up to and including `launched`."""
    while launched.values is None:
      step = self._queue.pop(0)
      for block in step.poisoned_pages:
        self._pages[block] = NAN
      step.values = self._execute(step.batch)
    if self._step_s:
      left = launched.ready_at - self._clock()
      if left > 0:
        time.sleep(left)

  def _execute(self, batch: Batch) -> StepResult:
    self._admit(batch)
    masks: dict[int, list[bytes]] = {}  # of each logit row that samples
    for row, mask in batch.masks:
      masks.setdefault(row, []).append(mask)
    bad_rows: set[int] = set()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    tokens: list[int] = []
    row_ends: list[int] = []
    for row, slot in enumerate(batch.slots):
      tokens += self._run_row(batch, row, self._slots[slot], masks, bad_rows, logprobs)
      row_ends.append(len(tokens))
    return StepResult(tokens, frozenset(bad_rows), logprobs, tuple(row_ends) if batch.num_drafts else ())

  def _admit(self, batch: Batch) -> None:
    for admission in batch.admissions:
      slot = self._slots[admission.slot] = self._make_slot(admission)
      slot.root = self._roots[admission.adapter_slot]
      slot.rewind()
      for block, content in zip(admission.block_ids, admission.imported or (), strict=False):
        self._pages[block] = content
    for slot, _, block in batch.new_blocks:
      self._slots[slot].table.append(block)

  def _make_slot(self, admission: Admission) -> Slot:
    return Slot(admission)

  def _run_row(
    self,
    batch: Batch,
    row: int,
    slot: Slot,
    masks: Mapping[int, Sequence[bytes]],
    bad_rows: set[int],
    logprobs: dict[int, tuple[TokenLogprobs, ...]],
  ) -> list[int]:
    """Reads the pages before the row, writes the row's pages, and samples.

    Does not write KV of rejected guesses: a page has one hash, that of its latest position.
    """
    start, params = self._start_of(batch, row, slot), slot.admission.params
    inputs = batch.token_ids[row] or (slot.last_token,)
    if inputs[0] == IN_FLIGHT:
      inputs = (slot.last_token, *inputs[1:])
    known = len(inputs) - (batch.num_drafts[row] if batch.num_drafts else 0)
    self._read(slot, start)
    wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    bad_position = self.poisoned.get(batch.request_ids[row], -1)
    states = self._write(slot, start, inputs[:known], bad_position, wants_logprobs)
    row_masks = masks.get(row, (None,) * (len(inputs) - known + 1))
    tokens = [self._sample(batch, row, slot, start + known, row_masks[0], bad_rows)]
    for end, guess in enumerate(inputs[known:], start + known):
      if guess != tokens[-1] or row in bad_rows:
        break
      states += self._write(slot, end, (guess,), bad_position, wants_logprobs)
      tokens.append(self._sample(batch, row, slot, end + 1, row_masks[len(tokens)], bad_rows))
    if batch.samples[row]:
      slot.last_token, slot.num_rejected = tokens[-1], len(inputs) - known + 1 - len(tokens)
    if wants_logprobs:
      logprobs[row] = self._logprobs(batch, row, slot, start, states, tokens)
    return tokens

  def _start_of(self, batch: Batch, row: int, slot: Slot) -> int:
    """Returns the position of a row's first token, without rejected drafts of the step before."""
    is_behind = batch.behind and batch.behind[row]
    return batch.starts[row] - (slot.num_rejected if is_behind else 0)

  def _sample(self, batch: Batch, row: int, slot: Slot, end: int, mask: bytes | None, bad_rows: set[int]) -> int:
    """Returns the token after the first `end` positions; 0 if the row samples none."""
    config = self.config
    if slot.state is None:
      if batch.num_logits[row]:
        bad_rows.add(row)
    elif batch.samples[row]:
      params, num_outputs = slot.admission.params, end - slot.admission.num_prompt_tokens
      return sample_token(slot.state, slot.key, params, num_outputs, config.vocab_size, config.eos_token_ids, mask)
    return 0

  def _read(self, slot: Slot, start: int) -> None:
    """Sets slot.state to the hash of the first `start` positions, as its pages hold it."""
    block_size, pages = self.config.block_size, self._pages
    if slot.num_hashed != start:  # a first row that begins after its shared prefix
      if slot.num_hashed > start:
        slot.rewind()
      self._hash(slot, slot.admission.token_ids[slot.num_hashed : start], -1, None)
    num_full, rest = divmod(start, block_size)
    table, ends = slot.table, slot.ends
    if rest and slot.state != pages[table[num_full]] or ends != [pages[block] for block in table[:num_full]]:
      found = [pages[block] for block in table[: num_full + (rest > 0)]]
      slot.state = NAN if NAN in found else hash((*found, start)) % _PRIME

  def _write(self, slot: Slot, start: int, inputs: Sequence[int], bad_position: int, remembers: bool) -> list:
    """Computes the row's positions and fills their pages; returns the hash at each, if it `remembers`."""
    block_size, table, pages = self.config.block_size, slot.table, self._pages
    states: list[int | None] = []
    self._hash(slot, inputs, bad_position, states if remembers else None)
    end = start + len(inputs)
    for index in range(start // block_size, end // block_size):
      pages[table[index]] = slot.ends[index]
    if end % block_size:
      pages[table[end // block_size]] = slot.state
    return states

  def _hash(self, slot: Slot, token_ids: Sequence[int], bad_position: int, states: list[int | None] | None) -> None:
    """Adds tokens to slot.state, ends and num_hashed."""
    block_size, state, position = self.config.block_size, slot.state, slot.num_hashed
    poison, poison_end = self.poison, 0 if self.poison is None else slot.admission.num_prompt_tokens
    for token in token_ids:
      if state is not None:
        bad = position == bad_position or position < poison_end and token == poison
        state = NAN if bad else follow_token(state, token)
      position += 1
      if position % block_size == 0:
        slot.ends.append(state)
      if states is not None:
        states.append(state)
    slot.state, slot.num_hashed = state, position

  def _logprobs(
    self, batch: Batch, row: int, slot: Slot, start: int, states: list, tokens: Sequence[int]
  ) -> tuple[TokenLogprobs, ...]:
    """Returns log probabilities of the last logit positions of a row at `start`; each is of the following token."""
    params, prompt, vocab_size = slot.admission.params, slot.admission.token_ids, self.config.vocab_size
    first = start + batch.counts[row] - batch.num_logits[row]
    end = start + len(states)
    entries = []
    for position in range(first, end):
      if position >= end - len(tokens) and batch.samples[row]:
        entries.append(logprob(tokens[position - end], states[position - end], params.logprobs or 0, vocab_size))
      else:
        entries.append(logprob(prompt[position + 1], states[position - end], params.prompt_logprobs or 0, vocab_size))
    return tuple(entries)


class FakeLaunched:
  """A launched step, which runs when its result is read."""

  __slots__ = ("batch", "ready_at", "poisoned_pages", "values", "_device")

  def __init__(self, device: FakeDevice, batch: Batch, ready_at: float, poisoned_pages: Sequence[int]):
    self._device = device
    self.batch = batch
    self.ready_at = ready_at
    self.poisoned_pages = poisoned_pages
    self.values: StepResult | None = None

  def result(self) -> StepResult:
    """Waits for the step and reads its values."""
    self._device.run_until(self)
    assert self.values is not None
    return self.values
