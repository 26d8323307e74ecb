"""Serves requests with random drafts straight on a device, and compares them with those without drafts.

No scheduler takes part: the driver makes any batch that the Batch contract allows. Rows come in any order, chunks of
prompts lie beside decodes, and drafts are right, wrong or right up to some position. A step may be launched behind one
whose tokens and drafts are in flight, and requests lose their slot at any time and get another one.
"""

import copy
import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np

from engine.batch import IN_FLIGHT, MAX_DRAFT_MASKS, MAX_DRAFTS, Admission, Batch, Runner, StepResult, TokenLogprobs
from engine.device.runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from tests.fakes import FakeConstraint, tokens_of


@dataclasses.dataclass
class DraftedRequest:
  """A request and what it has brought so far.

  Attributes:
    truth: its outputs without drafts; None while these are made.
    slot: None while it waits.
    num_computed: its positions with KV.
    is_last_on_device: last_tokens holds its newest token.
    ends: token ids that end it.
  """

  prompt: list[int]
  params: SamplingParams
  seed: int
  constraint: FakeConstraint | None
  ends: frozenset[int]
  truth: "DraftedRequest | None" = None
  slot: int | None = None
  num_computed: int = 0
  is_last_on_device: bool = False
  outputs: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  is_bad: bool = False

  @property
  def tokens(self) -> list[int]:
    return self.prompt + self.outputs

  @property
  def is_done(self) -> bool:
    ended = bool(self.outputs) and self.outputs[-1] in self.ends
    return self.is_bad or ended or len(self.outputs) == self.params.max_tokens

  def take_tokens(self, tokens: tuple[int, ...], entries: list[TokenLogprobs]) -> None:
    """Takes the tokens of a row up to its end."""
    for index, token in enumerate(tokens):
      if self.is_done:
        break
      self.outputs.append(token)
      if entries:
        self.logprobs.append(entries[index])
      if self.constraint is not None:
        self.constraint.accept(token)


class DraftLimits(NamedTuple):
  """What a device takes: rungs, slots, tokens of the vocabulary, end-of-sequence ids, and blocks and their tokens."""

  shapes: tuple[StepShape, ...]
  num_slots: int
  table_width: int
  vocab_size: int
  eos_token_ids: tuple[int, ...]
  block_size: int


def limits_of(runner: ModelRunner) -> DraftLimits:
  """Returns the limits of a runner, which needs a full table of blocks for each slot."""
  spec = runner.spec
  shapes, eos = tuple(runner.steps), runner._packer._eos
  return DraftLimits(shapes, spec.num_slots, spec.table_width, spec.model.vocab_size, eos, spec.block_size)


@dataclasses.dataclass
class DraftCounts:
  """What happened.

  Attributes:
    rows: with drafts.
    accepted, rejected: drafts.
    in_flight: rows with drafts after a token in flight.
    behind: rows behind rejected drafts.
    across: those of them that the rejection moved to another block.
    bad: bad rows.
    preempted: requests that lost their slot.
  """

  rows: int = 0
  accepted: int = 0
  rejected: int = 0
  in_flight: int = 0
  behind: int = 0
  across: int = 0
  bad: int = 0
  preempted: int = 0

  def __add__(self, other: "DraftCounts") -> "DraftCounts":
    own, more = dataclasses.astuple(self), dataclasses.astuple(other)
    return DraftCounts(*(one + another for one, another in zip(own, more, strict=True)))


class DraftDriver:
  """Serves requests on a runner by random batches."""

  def __init__(
    self,
    runner: Runner,
    limits: DraftLimits,
    requests: list[DraftedRequest],
    rng: random.Random,
    poison: int = -1,
  ):
    """Args: poison: a token whose embedding is NaN, which no wrong draft may be; -1: there is none."""
    self.runner, self.limits, self.requests, self.rng, self.poison = runner, limits, requests, rng, poison
    self.counts = DraftCounts()
    self._waiting = list(requests)
    self._free = list(range(limits.num_slots))
    self._step = 0

  def serve_all(self) -> None:
    """Runs steps until each request is done."""
    in_flight = None
    while in_flight is not None or any(not request.is_done for request in self.requests):
      planned = None
      if in_flight is None:
        planned = self._plan_step(behind=None)
      elif self.rng.random() < 0.75:
        batch, rows, _ = in_flight
        drafts = batch.num_drafts or (0,) * len(rows)
        behind = {
          id(request): drafts[row]
          for row, request in enumerate(rows)
          if batch.samples[row] and request.constraint is None and not request.is_done
        }
        planned = self._plan_step(behind)
      launched = None if planned is None else (*planned, self.runner.launch(planned[0]))
      if in_flight is not None:
        batch, rows, step = in_flight
        self._take_result(batch, rows, step.result())
      in_flight = launched
      if in_flight is not None:
        continue
      for request in self.requests:
        preempts = self.rng.random() < 0.01 and request.truth is not None
        if request.slot is not None and (request.is_done or preempts):
          self._free.append(request.slot)
          request.slot, request.num_computed = None, 0
          if not request.is_done:
            self.counts.preempted += 1
            self._waiting.append(request)
          if not request.outputs:
            request.prompt_logprobs.clear()

  def _plan_step(self, behind: dict[int, int] | None) -> tuple[Batch, list[DraftedRequest]] | None:
    """Returns a random batch and the requests of its rows.

    Args: behind: id() of requests that may have a row, whose newest token is in flight, and their drafts in flight;
      None: any, and nothing is in flight.
    """
    rng, admissions = self.rng, []
    shape = rng.choice(self.limits.shapes)
    if behind is None:
      rng.shuffle(self._free)
      while self._waiting and self._free:
        request = self._waiting.pop(0)
        request.slot, request.num_computed = self._free.pop(), 0
        request.is_last_on_device = False
        admissions.append(self._admit(request))
      live = [request for request in self.requests if request.slot is not None]
    else:
      live = [request for request in self.requests if id(request) in behind]
    admitted = [request for request in live if any(each.slot == request.slot for each in admissions)]
    others = [request for request in live if request not in admitted]
    chosen = admitted + rng.sample(others, rng.randint(0, len(others)))
    rows = []
    tokens_left, logits_left, masks_left = shape.tokens, shape.logits, MAX_DRAFT_MASKS
    for number, request in enumerate(chosen):
      kept = max(0, len(admitted) - number - 1)  # each admission has a row
      num_drafts = None if behind is None else behind[id(request)]
      row = self._plan_row(request, tokens_left - kept, logits_left - kept, masks_left, num_drafts)
      if row is None:
        assert request not in admitted
        continue
      rows.append((request, *row))
      tokens_left -= row[1]
      logits_left -= row[2]
      masks_left -= len(row[5])
    if not rows:
      assert not admissions
      return None
    rng.shuffle(rows)
    masks = []
    for index, (request, _, _, _, samples, _, more_masks, _) in enumerate(rows):
      if request.constraint is not None and samples:
        masks += [(index, request.constraint.allowed()), *((index, mask) for mask in more_masks)]
    drafts = tuple(row[7] for row in rows)
    uncommitted = tuple(behind[id(row[0])] for row in rows) if behind else ()
    batch = Batch(
      step=self._step,
      shape=shape,
      request_ids=tuple(str(self.requests.index(row[0])) for row in rows),
      slots=tuple(row[0].slot for row in rows),
      starts=tuple(row[1] for row in rows),
      counts=tuple(row[2] for row in rows),
      num_logits=tuple(row[3] for row in rows),
      samples=tuple(row[4] for row in rows),
      token_ids=tuple(row[5] for row in rows),
      admissions=tuple(admissions),
      masks=tuple(masks),
      num_drafts=drafts if any(drafts) else (),
      behind=uncommitted if any(uncommitted) else (),
    )
    self._step += 1
    for request, _, count, _, samples, _, _, _ in rows:
      request.num_computed += count
      request.is_last_on_device |= samples
    return batch, [row[0] for row in rows]

  def _admit(self, request: DraftedRequest) -> Admission:
    slot, width = request.slot, self.limits.table_width
    assert slot is not None
    blocks = tuple(range(1 + slot * width, 1 + (slot + 1) * width))
    constrained = request.constraint is not None
    tokens = tuple(request.tokens)
    return Admission(slot, tokens, len(request.prompt), blocks, request.params, request.seed, constrained)

  def _plan_row(
    self, request: DraftedRequest, tokens_left: int, logits_left: int, masks_left: int, num_drafts: int | None
  ) -> tuple[int, int, int, bool, tuple[int, ...], list[bytes], int] | None:
    """Returns start, count, number of logit rows, whether it samples, tokens, masks after drafts, number of drafts."""
    if tokens_left <= 0 or logits_left <= 0:
      return None
    rng, start, tokens = self.rng, request.num_computed, request.tokens
    is_behind = num_drafts is not None
    length = len(tokens) + (0 if num_drafts is None else 1 + num_drafts)
    if start < length - 1 or not request.outputs and not is_behind:
      count = rng.randint(1, min(tokens_left, length - start))
      wants_all = request.params.prompt_logprobs is not None and start < len(request.prompt)
      if wants_all and not request.outputs:
        count = min(count, logits_left)
      num_logits = count if wants_all and not request.outputs else 1
      return start, count, num_logits, start + count == length, tuple(tokens[start : start + count]), [], 0
    position = length - len(request.prompt)  # outputs before the row's first token
    most = min(MAX_DRAFTS, tokens_left - 1, logits_left - 1, request.params.max_tokens - position - 1)
    if request.constraint is not None:
      most = min(most, masks_left)
    count = rng.randint(0, most) if request.truth is not None and most > 0 and rng.random() < 0.8 else 0
    if position >= request.params.max_tokens:
      return None
    on_device = request.is_last_on_device or is_behind
    if not count:
      return start, 1, 1, True, () if on_device else (tokens[-1],), [], 0
    assert request.truth is not None
    truth = request.truth.outputs[position : position + count]
    drafts = truth + [rng.randrange(2, self.limits.vocab_size) for _ in range(count - len(truth))]
    for index in range(count):
      if rng.random() < 0.2:
        drafts[index] = rng.randrange(self.limits.vocab_size)
    # NaN in the KV of a rejected draft reaches the row's earlier positions: attention multiplies it by 0.
    # Behind drafts none is sure to be right, and the poison of a good request ends it.
    right = next((index for index, token in enumerate(truth) if drafts[index] != token), len(truth))
    right = 0 if num_drafts or not request.truth.is_bad else right
    drafts[right:] = [0 if draft == self.poison else draft for draft in drafts[right:]]
    last = IN_FLIGHT if is_behind or (on_device and rng.random() < 0.3) else tokens[-1]
    return start, 1 + count, 1 + count, True, (last, *drafts), self._masks_after(request, drafts), count

  def _masks_after(self, request: DraftedRequest, drafts: list[int]) -> list[bytes]:
    """Returns a mask after each draft, which allows nothing known once a draft is not allowed."""
    if request.constraint is None:
      return []
    ahead, masks = copy.deepcopy(request.constraint), []
    for draft in drafts:
      if ahead is not None and draft in tokens_of(ahead.allowed()):
        ahead.accept(draft)
        masks.append(ahead.allowed())
      else:
        ahead = None
        masks.append(self.rng.randbytes(len(request.constraint.allowed())))
    return masks

  def _take_result(self, batch: Batch, rows: list[DraftedRequest], result: StepResult) -> None:
    """Takes a step's values; asserts that exactly the right drafts are accepted."""
    assert bool(result.row_ends) == bool(batch.num_drafts)
    for row, request in enumerate(rows):
      drafts = batch.num_drafts[row] if batch.num_drafts else 0
      if request.is_done:
        continue
      if row in result.bad_rows:
        self.counts.bad += 1
        request.is_bad = True
        continue
      if batch.behind and batch.behind[row]:
        planned, start = batch.starts[row], len(request.tokens) - 1
        self.counts.behind += start < planned
        self.counts.across += start // self.limits.block_size < planned // self.limits.block_size
      tokens = result.tokens_of(row)
      assert 1 <= len(tokens) <= 1 + drafts
      entries = list(result.logprobs.get(row, ()))
      if not batch.samples[row]:
        self._take_prompt(request, entries)
        continue
      if drafts:
        self._check_acceptance(request, batch.token_ids[row][1:], tokens)
        request.num_computed -= drafts + 1 - len(tokens)
        self.counts.in_flight += batch.token_ids[row][0] == IN_FLIGHT
      wants = request.params.logprobs is not None
      known = len(entries) - len(tokens) if wants else max(0, len(entries) - 1)
      self._take_prompt(request, entries[:known])
      own = entries[known:] if wants else []
      assert not wants or [entry.token_id for entry in own] == [*tokens]
      request.take_tokens(tokens, own)
      if request.truth is not None:
        number = len(request.outputs)
        assert request.outputs == request.truth.outputs[:number], (row, batch, request)

  def _take_prompt(self, request: DraftedRequest, entries: list[TokenLogprobs]) -> None:
    """Takes log probabilities of the prompt, unless the request had them before it lost its slot."""
    if request.params.prompt_logprobs is not None and not request.outputs:
      request.prompt_logprobs += entries

  def _check_acceptance(self, request: DraftedRequest, drafts: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    assert request.truth is not None
    truth = request.truth.outputs[len(request.outputs) :]
    right = 0
    while right < min(len(drafts), len(truth)) and drafts[right] == truth[right]:
      right += 1
    if right < len(truth):  # else the rest lies behind the end
      assert len(tokens) == 1 + right, f"{len(tokens) - 1} of {drafts} are accepted, not {right}"
    assert [*drafts[: len(tokens) - 1]] == [*tokens[:-1]]
    self.counts.rows += 1
    self.counts.accepted += len(tokens) - 1
    self.counts.rejected += len(drafts) + 1 - len(tokens)


def make_mixture(rng: random.Random, count: int, vocab_size: int, eos: tuple[int, ...], poison: int = -1) -> list:
  """Returns requests of every mixture of parameters; `poison`, if not -1, is likely in some of them."""
  requests = []
  for _ in range(count):
    fields: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.3))}
    if rng.random() < 0.4:
      fields |= rng.choice(({"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9}))
    if rng.random() < 0.5:
      fields |= {
        "presence_penalty": rng.choice((0.0, 1.5)),
        "frequency_penalty": rng.choice((0.0, 0.9)),
        "repetition_penalty": rng.choice((1.0, 1.4)),
      }
    kind = rng.random()
    if kind < 0.2:
      fields["logit_bias"] = tuple((token, 4.0 * rng.random()) for token in rng.sample(range(vocab_size), 5))
    elif kind < 0.4:  # few tokens, so that penalties count them several times
      fields["allowed_token_ids"] = tuple(rng.sample(range(2, vocab_size), 4))
    elif kind < 0.5 and poison >= 0:
      fields["logit_bias"] = ((poison, 5.0),)
    if rng.random() < 0.4:
      stops = tuple(rng.sample(range(2, vocab_size), 10))
      fields |= {"min_tokens": rng.randint(1, 14), "stop_token_ids": stops, "ignore_eos": rng.random() < 0.5}
      if rng.random() < 0.5:
        fields["logit_bias"] = tuple((token, 6.0) for token in stops[:3])
        fields.pop("allowed_token_ids", None)
    fields["logprobs"] = rng.choice((None, None, 0, 3, 20))
    fields["prompt_logprobs"] = rng.choice((None, None, None, 2))
    params = SamplingParams(rng.randint(10, 40), **fields)
    ends = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos)
    constraint = FakeConstraint(vocab_size) if rng.random() < 0.25 and "allowed_token_ids" not in fields else None
    tokens = [token for token in range(2, vocab_size) if token != poison]
    prompt = [rng.choice(tokens) for _ in range(rng.randint(1, 20))]
    requests.append(DraftedRequest(prompt, params, rng.getrandbits(32), constraint, ends))
  return requests


def serve_with_drafts(
  runner: Runner, limits: DraftLimits, seed: int, count: int = 24, poison: int = -1, atol: float = 2e-4
) -> DraftCounts:
  """Serves a mixture with and without drafts, and asserts equal tokens, log probabilities and bad rows.

  Args:
    count: requests.
    poison: a token whose embedding is NaN; -1: there is none.
    atol: of log probabilities; 0: they have the same bits.
  """
  rng = random.Random(seed)
  requests = make_mixture(rng, count, limits.vocab_size, limits.eos_token_ids, poison)
  plain = copy.deepcopy(requests)
  DraftDriver(runner, limits, plain, rng).serve_all()
  for request, truth in zip(requests, plain, strict=True):
    request.truth = truth
  driver = DraftDriver(runner, limits, requests, rng, poison)
  driver.serve_all()
  for request, truth in zip(requests, plain, strict=True):
    assert request.is_bad == truth.is_bad, request
    number = len(request.outputs)
    # A bad row gives none of its tokens, so that drafts lose some in front of it.
    assert request.outputs == truth.outputs[:number] and (request.is_bad or number == len(truth.outputs)), request
    _compare_logprobs(request.logprobs, truth.logprobs[: len(request.logprobs)], atol)
    assert len(request.logprobs) == (number if request.params.logprobs is not None else 0)
    if not request.is_bad:
      _compare_logprobs(request.prompt_logprobs, truth.prompt_logprobs, atol)
  return driver.counts


def _compare_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs], atol: float) -> None:
  assert len(found) == len(expected)
  for one, other in zip(found, expected, strict=True):
    assert one.token_id == other.token_id and len(one.top) == len(other.top)
    values = [[each.logprob, *(value for _, value in each.top)] for each in (one, other)]
    np.testing.assert_allclose(*values, rtol=0, atol=atol)
