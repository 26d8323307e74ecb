"""Decides which decodes of a step get draft tokens, and how many. Pure Python; may not touch blocks, rows or clocks.

The Scheduler plans a step without drafts, and then lengthens decodes by those that pay. Drafts never change an output:
the device samples a token at each position with the request's own parameters, and a draft is accepted if it equals the
sample before it. So this module decides about speed alone, and whatever fails here costs drafts only.

Costs of trying stay small. A request whose drafts fail sleeps, for twice as many steps after each failure, and then is
tried again. One without a draft sleeps too, for up to _LONGEST_GAP steps, since a look takes as long for several new
tokens as for one. A sleeping request costs a step nothing, and steps before `next_look` are not looked at. Of the other
requests, a step looks at those whose latest drafts were accepted, and at a limited number of the rest in turn.

Costs are bounded, too: see draft_costs.py, which knows what steps take, and credit.py.

A draft model on the device takes time whether its proposals are used or not. So it proposes only after steps where
drafts as good as its latest ones would pay, and steps with proposals are measured apart from others. Where it does not
pay at all, it rests; see draft_fills.py.

With overlap, a step is planned while the tokens of the one before are unknown. A drafter then guesses past the token
and the drafts in flight, so its drafts are less likely. If all requests have drafts, the next step may wait instead
until these are committed. Then nothing is unknown.

Drafts suit one number of rejected drafts before them alone. If their row turns out to begin elsewhere, they are lost,
and so known to be rejected before they are computed: the drafts of the next row follow the token before them.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
import dataclasses
import heapq
import itertools
import logging
from typing import Any, NamedTuple

from engine.batch import Batch, StepResult
from engine.config import EngineConfig
from engine.constraint import ConstrainedDraft, DraftingConstraint
from engine.request import Request
from engine.speculation.acceptance import AcceptanceRates, Trials, forget_trials
from engine.speculation.draft_choice import list_chances
from engine.speculation.draft_costs import DraftCosts, PlannedStep
from engine.speculation.drafter import NO_DRAFT, Draft, Drafter
from engine.speculation.model_drafter import MODEL, JointDrafter, ModelDrafter
from engine.speculation.ngram import NgramDrafter

_log = logging.getLogger(__name__)

AWAKE = -1
GRAMMAR = "grammar"  # the source of tokens that a constraint leaves no choice about
_LONGEST_SLEEP = 256  # steps
# A request whose drafts are accepted more often does not rest after failures: a step that costs the same with drafts
# gains from few.
_SLEEPLESS_RATE = 0.12
# A request without a draft is looked at again after 1, 2, 4, ... steps. See credit.py for what looks cost.
_LONGEST_GAP = 16
# One that copied before may copy again: a later look would begin the copy later.
_LONGEST_GAP_OF_COPIES = 2
_LEAST_COPIED = 1.0  # accepted drafts of one source, of which older ones count less
_ACCEPTED_A_TRIAL = 7  # drafts, after which a request may try others: what it gained pays for its own trials
_NEVER = 1 << 62  # a step
_MOST_LOOKS = 32  # requests without accepted drafts that a step looks at, at 1.5 us each
# After drafts that did not pay, the next 2, 4, 8, ... steps propose none, up to so many. When half the requests have
# finished since, a step looks again: a quarter of them costs 1 % of mean TPOT in trials without any accepted draft.
_DECLINE_STEPS = 32
_LIMITED_STEPS = 256  # the same where one draft already makes a step too long
_REQUESTS_LEFT = 0.5
# The trials of a row without drafts count less and less, or one bad moment would leave it without for ever.
_KEEP_BESIDE_DRAFTS = 0.97  # in a step in which others have some
_KEEP_OF_DECLINED = 0.7  # in one without, after which a pause follows


class DraftCandidate(NamedTuple):
  """A decode of the planned step that may get drafts.

  Attributes:
    row: its index among the decodes.
    tokens: the drafts, after the last known token or the token in flight; at least one.
    masks: for a constrained request, the mask after each draft; else ().
    rate: the chance that the first draft is accepted.
    later: the chance that a draft is accepted after accepted ones.
    num_unknown: guesses before the drafts.
    source: of the drafts.
    trials: of the request; see acceptance.py.
  """

  row: int
  tokens: tuple[int, ...]
  masks: tuple[bytes, ...]
  rate: float
  later: float
  num_unknown: int = 0
  source: str = ""
  trials: Trials = {}

  def list_chances(self, num_unknown: int) -> list[float]:
    """Returns the chance that the first 1, 2, ... drafts are accepted, behind `num_unknown` guesses."""
    return list_chances(self.rate, len(self.tokens), num_unknown, self.later)


class _Tracked:
  """What is known of a request's drafts.

  Attributes:
    request: None after its finish.
    trials: of its drafts; see acceptance.py.
    num_failures: rows in a row without an accepted draft.
    num_misses: looks in a row that found no draft.
    num_unspent: accepted drafts, less _ACCEPTED_A_TRIAL for each row without any.
    wakes_at: step at which it is looked at again, or AWAKE. Of a constrained request only the drafter's drafts rest.
    is_tired: it sleeps after failures, and forgets half of its trials then.
    draft: the proposal for the next step.
    num_expected: rejected drafts before its row to which the proposal fits.
    rows: of each row with drafts in flight, in order, the source and `num_expected`.
    is_lost: the drafts in flight are known to be rejected.
    may_force: each step looks at it, because its constraint may leave no choice about tokens.
  """

  __slots__ = (
    "draft",
    "is_lost",
    "is_tired",
    "may_force",
    "num_expected",
    "num_failures",
    "num_misses",
    "num_unspent",
    "request",
    "rows",
    "trials",
    "wakes_at",
  )

  def __init__(self, request: Request):
    self.request: Request | None = request
    self.trials: Trials = {}
    self.num_failures = self.num_misses = self.num_unspent = 0
    self.wakes_at = AWAKE
    self.is_tired = False
    self.draft = NO_DRAFT
    self.num_expected = 0
    self.rows: list[tuple[str, int]] = []
    self.is_lost = False
    self.may_force = request.constraint is not None and not request.takes_forced


class Speculation:
  """Proposes drafts, learns how many are accepted and what steps cost, and chooses the drafts that pay.

  Call order of a step: find_drafts, then make_candidate for decodes, then choose_counts and start_row for the chosen
  rows; after the step note_row for each row with drafts, and costs.note_step.

  Attributes:
    drafter: proposes the drafts.
    costs: chooses those that pay.
    model: takes what a draft model on the device proposed; None without one.
    waits: the next step waits for the drafts of the latest choose_counts.
    next_look: steps before this one have no drafts, and need no find_drafts.
  """

  def __init__(self, config: EngineConfig):
    self._most = config.num_speculative_tokens
    self._overlap = config.overlap
    self.model = ModelDrafter() if config.has_draft_model else None
    self.drafter: Drafter = NgramDrafter() if self.model is None else JointDrafter(self.model)
    if self.model is not None and config.speculation == MODEL:
      self.drafter = self.model
    self._num_proposals, self._block_size = config.num_proposals, config.block_size
    self._most_drafts = min(config.token_budgets[-1], config.max_num_seqs)  # and rows, of the largest rung
    self.waits = False
    self.next_look = 0
    self._no_looks_until = 0  # step before which the credit allows no looks
    self._tracked: dict[str, _Tracked] = {}
    # A request is in one of these, or a drafter failed on it. Most short ones stay fresh: not tracked, never looked at.
    self._fresh: dict[str, Request] = {}
    self._lively: dict[str, _Tracked] = {}  # with a constraint, or with accepted drafts in its latest row with drafts
    self._awake: OrderedDict[str, _Tracked] = OrderedDict()  # others, in the order in which steps look at them
    self._sleepers: list[tuple[int, int, _Tracked]] = []  # heap by step; the number makes entries differ
    self._num_sleeps = 0
    self._proposing: dict[str, _Tracked] = {}  # requests with a draft for the next step, or a constraint
    self._forces = config.speculation == "auto"
    self.constrained_drafts: dict[str, ConstrainedDraft] = {}  # of the latest planned step, for a trace
    self._rates = AcceptanceRates()
    self.costs = DraftCosts(config)
    # Of a draft model: refusals in a row, the step before which it proposes nothing, the latest with proposals.
    self._num_refusals, self._no_proposals_until, self._proposing_step = 0, -1, -1
    self._num_declines, self._pause_until = 0, -1  # choices of no draft in a row; step before which nothing is proposed
    self._num_declined = 0  # requests at the latest of these choices; 0: it was followed by another one, or a look
    self._step = 0  # for which find_drafts() has made proposals
    self._has_failed = False  # a drafter has raised an error

  def replace_drafter(self, drafter: Drafter) -> None:
    """Proposes drafts by `drafter` alone; a ModelDrafter also takes what the draft model proposes. Before requests."""
    self.drafter = drafter
    if isinstance(drafter, ModelDrafter):
      self.model = drafter

  def _estimate_rate(self, tracked: _Tracked, source: str) -> float:
    """Returns the chance that the request's next draft of `source` is accepted."""
    is_trial = tracked.num_unspent >= _ACCEPTED_A_TRIAL or self.costs.allows_trials(source == MODEL)
    return self._rates.estimate_rate(tracked.trials, source, is_trial)

  def _estimate_later(self, tracked: _Tracked, source: str) -> float:
    """Returns the chance of each further draft after accepted ones.

    One draft is trial enough, so further ones count at what is proved. A draft model's proposals are paid for already.
    """
    return self._rates.estimate_later(tracked.trials, source, source == MODEL and self.costs.allows_trials(True))

  def _make_free(self, row: int, tracked: _Tracked, tokens: tuple[int, ...], num_unknown: int) -> DraftCandidate:
    """Returns the candidate of a request without a constraint, whose drafts follow `num_unknown` guesses."""
    source = tracked.draft.source
    rate, later = self._estimate_rate(tracked, source), self._estimate_later(tracked, source)
    return DraftCandidate(row, tokens, (), rate, later, num_unknown, source, tracked.trials)

  # Requests.

  def add_request(self, request: Request) -> None:
    """Starts to watch a request, unless it is watched already or wants no drafts."""
    if self.costs.fills is not None:
      num_cached = request.num_cached_tokens // self._block_size
      wants_model = request.speculation not in ("none", "ngram")
      self.costs.fills.admit_request(request.id, request.block_table, num_cached, wants_model)
    if request.speculation == "none":
      return
    if self._awaits_proposals:
      self._fresh.pop(request.id, None)
    if request.id in self._fresh or request.id in self._tracked:
      return
    may_force = request.constraint is not None and not request.takes_forced
    if not may_force and not self._awaits_proposals:
      self._fresh[request.id] = request
      self.next_look = min(self.next_look, self._no_looks_until)
    else:
      tracked = self._tracked[request.id] = _Tracked(request)
      (self._lively if may_force else self._awake)[request.id] = tracked
      self.next_look = 0

  def end_request(self, request_id: str) -> None:
    """Drops all state of a request, known or not."""
    if self.costs.fills is not None:
      self.costs.fills.end_request(request_id)
    if self._fresh.pop(request_id, None) is not None:
      self._end_pause()
      return
    tracked = self._tracked.pop(request_id, None)
    if tracked is None:
      return
    self._end_pause()
    tracked.request = None
    self._set_aside(request_id)
    try:
      self.drafter.forget(request_id)
    except Exception:
      self._note_error(request_id)

  @property
  def _num_requests(self) -> int:
    return len(self._tracked) + len(self._fresh)

  def _end_pause(self) -> None:
    """Ends the pause after drafts that did not pay, if many requests have finished since."""
    if self._num_declined and self._num_requests <= _REQUESTS_LEFT * self._num_declined:
      self._num_declined, self._pause_until, self.next_look = 0, -1, 0

  def _sleep(self, tracked: _Tracked, until: int, is_tired: bool = True) -> None:
    """Lets a request rest until step `until`."""
    if tracked.request is not None:
      tracked.wakes_at, tracked.is_tired = until, is_tired
      self._set_aside(tracked.request.id)
      self._num_sleeps += 1
      heapq.heappush(self._sleepers, (until, self._num_sleeps, tracked))

  def _wake_requests(self, step: int) -> None:
    sleepers = self._sleepers
    while sleepers and sleepers[0][0] <= step:
      until, _, tracked = heapq.heappop(sleepers)
      if tracked.request is not None and tracked.wakes_at == until:
        tracked.wakes_at = AWAKE
        if tracked.is_tired:
          forget_trials(tracked.trials, 0.5)
        self._awake[tracked.request.id] = tracked

  def _note_error(self, request_id: str) -> None:
    """Takes a request's drafts away after an error of a drafter, which it logs once. Call it in `except`."""
    if not self._has_failed:
      self._has_failed = True
      _log.exception("a drafter failed; the request continues without drafts, and later errors are not logged")
    self._set_aside(request_id)

  def _set_aside(self, request_id: str) -> None:
    """Stops looking at a request."""
    self._lively.pop(request_id, None)
    self._awake.pop(request_id, None)
    self._proposing.pop(request_id, None)

  # Planning.

  @property
  def _awaits_proposals(self) -> bool:
    """Whether a draft model may propose tokens for some request. If not, looks are as without one."""
    return self.model is not None and (self.costs.fills is None or self.costs.fills.has_requests)

  @property
  def _may_look(self) -> bool:
    """Whether the next step may look at requests without accepted drafts. A draft model's proposals need no search."""
    return self._awaits_proposals or (self.drafter is not self.model and self.costs.credit.allows_looks)

  def _take_turns(self) -> list[tuple[str, _Tracked]]:
    """Returns the requests that the next step looks at."""
    looks = [*self._lively.items()]
    if not self._may_look:
      return looks
    awake, fresh = self._awake, self._fresh
    while fresh and len(awake) < _MOST_LOOKS:
      request_id = next(iter(fresh))
      awake[request_id] = self._tracked[request_id] = _Tracked(fresh.pop(request_id))
    if awake:
      some = list(itertools.islice(awake.items(), _MOST_LOOKS))
      looks += some
      if len(awake) > _MOST_LOOKS:
        for request_id, _ in some:
          awake.move_to_end(request_id)
    return looks

  def find_drafts(self, step: int) -> bool:
    """Makes the proposals for step `step`; returns whether a request has one that may pay."""
    self.skip_drafts()
    self._step = step
    credit = self.costs.credit
    if step < self._pause_until or not (credit.allows_drafts or self._awaits_proposals):
      self.next_look = self._pause_until if step < self._pause_until else step + _LONGEST_GAP
      return False
    if self._sleepers:
      self._wake_requests(step)
    found: dict[str, _Tracked] = {}
    drafter, most = self.drafter, self._most + 1  # the first token may stand for one in flight
    num_lively = len(self._lively)
    looks = self._take_turns()
    num_tokens = 0
    for number, (request_id, tracked) in enumerate(looks):
      request = tracked.request
      if request is None or request.slot < 0 or (request.constraint is not None and request.num_in_flight):
        continue
      try:
        num_indexed = drafter.num_indexed(request_id)
        draft = drafter.propose(request, most + request.num_drafts) if drafter.update(request) else NO_DRAFT
        num_new = drafter.num_indexed(request_id) - num_indexed
      except Exception:  # it may cost drafts only
        self._note_error(request_id)
        continue
      num_tokens += num_new if number >= num_lively else 0
      if tracked.may_force:
        if isinstance(request.constraint, DraftingConstraint):
          tracked.draft = draft
          found[request_id] = tracked
      elif draft.tokens:
        tracked.draft = draft
        found[request_id] = tracked
      else:
        self._note_miss(tracked, request, step)
    if len(looks) > num_lively and not self._awaits_proposals:
      credit.charge_look(len(looks) - num_lively, num_tokens, self.costs.plain_seconds)
    self._proposing = found
    self.next_look = self._find_next_look(step)
    return bool(found)

  def _find_next_look(self, step: int) -> int:
    """Returns the next step to look at after step `step`."""
    credit = self.costs.credit
    if not self._may_look:  # the credit grows with each noted step
      self._no_looks_until = max(step + credit.steps_to_look, self.costs.next_note + 2)
    if self._proposing or self._lively:
      return step + 1
    if self._awake or self._fresh:
      return max(step + 1, self._no_looks_until)
    return max(self._sleepers[0][0], self._no_looks_until) if self._sleepers else _NEVER

  def _note_miss(self, tracked: _Tracked, request: Request, step: int) -> None:
    """Notes a look that found no draft that may pay. The more in a row, the longer the request rests."""
    if self._awaits_proposals or tracked.rows:
      return  # a proposal of a model ages, drafts in flight may succeed
    if self.drafter is not self.model and self.drafter.num_indexed(request.id) < request.num_prompt_tokens:
      return  # a long prompt takes several updates
    copied = self.costs.credit.has_reserve and any(each >= _LEAST_COPIED for each, _ in tracked.trials.values())
    gap = min(_LONGEST_GAP_OF_COPIES if copied else _LONGEST_GAP, 1 << tracked.num_misses)
    tracked.num_misses += 1
    if gap > 1:
      self._sleep(tracked, step + gap, is_tired=False)

  def may_pay(self, planned: PlannedStep, num_unknown: int) -> bool:
    """Returns whether drafts would pay in a step of decodes without constraints. If not, the step gets none.

    Args:
      planned: the step, of which all requests decode.
      num_unknown: 1 if the last token of each request is in flight, else 0.
    """
    candidates = []
    if self.costs.knows_step(planned):
      for tracked in self._proposing.values():
        tokens = tracked.draft.tokens[num_unknown : num_unknown + self._most]
        if tokens:
          candidates.append(self._make_free(0, tracked, tokens, num_unknown))
    if candidates and any(self.choose_counts(self._step, planned, candidates)):
      return True
    self.skip_drafts()
    return False

  def skip_drafts(self) -> None:
    """Leaves the next step without drafts, at no cost."""
    self._proposing = {}
    self.constrained_drafts = {}

  @property
  def has_drafts(self) -> bool:
    """Whether the latest find_drafts() found a draft, or a constraint that may have one."""
    return bool(self._proposing)

  def make_candidate(self, row: int, request: Request, most: int) -> DraftCandidate | None:
    """Returns the drafts of a decode of the planned step, at most `most`; None without any.

    Args:
      row: index among the step's decodes.
      request: num_in_flight counts its row in this step, and one more if its last token is still in flight.
      most: drafts that its length and its blocks allow.
    """
    tracked = self._proposing.get(request.id)
    if tracked is None or most <= 0:
      return None
    if request.constraint is not None:
      return self._make_constrained(row, request, tracked, min(most, self._most))
    num_unknown = request.num_in_flight - 1
    if tracked.is_lost:
      tracked.num_expected = request.num_drafts
    else:
      tracked.num_expected = 0
      num_unknown += request.num_drafts
    tokens = tracked.draft.tokens[num_unknown : num_unknown + min(most, self._most)]
    return self._make_free(row, tracked, tokens, num_unknown) if tokens else None

  def _make_constrained(self, row: int, request: Request, tracked: _Tracked, most: int) -> DraftCandidate | None:
    """Returns the draft that the request's constraint makes of the drafter's."""
    constraint = request.constraint
    if not isinstance(constraint, DraftingConstraint):
      return None
    if self._step < tracked.wakes_at:
      tracked.draft = NO_DRAFT
    elif tracked.wakes_at != AWAKE:
      tracked.wakes_at = AWAKE
      forget_trials(tracked.trials, 0.5)
    rate_of_draft = self._estimate_rate(tracked, tracked.draft.source) if tracked.draft.tokens else 0.0
    forces = self._forces and request.speculation != "ngram"
    rate = self._estimate_rate(tracked, GRAMMAR) if forces and tracked.may_force else 0.0
    if max(rate_of_draft, rate) <= 0:
      return None
    try:
      draft = constraint.find_draft(tracked.draft.tokens[:most], most, forces)
    except Exception:  # foreign code, whose errors may cost drafts only
      self._note_error(request.id)
      return None
    if not draft.tokens:
      return None
    self.constrained_drafts[request.id] = draft
    if draft.is_forced:
      tracked.draft = Draft(draft.tokens, GRAMMAR)
    else:
      rate = rate_of_draft
    source = tracked.draft.source
    later = self._estimate_later(tracked, source)
    return DraftCandidate(row, draft.tokens, draft.masks, rate, later, 0, source, tracked.trials)

  def knows_step(self, planned: PlannedStep) -> bool:
    """Returns whether drafts can be chosen for such a step; see DraftCosts."""
    return self.costs.knows_step(planned)

  def choose_counts(self, step: int, planned: PlannedStep, candidates: Sequence[DraftCandidate]) -> list[int]:
    """Returns the number of drafts of each candidate in step `step`, which `knows_step`; sets `waits`."""
    proposing = any(candidate.source == MODEL for candidate in candidates)
    if proposing and not planned.num_others and not self.costs.knows_proposing(planned):
      return [0] * len(candidates)  # until the plain steps with proposals are measured
    choice = self.costs.choose_counts(
      planned,
      [candidate.list_chances(candidate.num_unknown) for candidate in candidates],
      [not candidate.masks for candidate in candidates],
      proposing,
      [list_chances(candidate.later, len(candidate.tokens)) for candidate in candidates],
    )
    self.waits = choice.waits
    if not planned.is_behind and not planned.num_others:
      keep = _KEEP_BESIDE_DRAFTS if any(choice.counts) else _KEEP_OF_DECLINED
      for candidate, count in zip(candidates, choice.counts, strict=True):
        if not count:
          forget_trials(candidate.trials, keep)
    if any(choice.counts):
      self._num_declines = self._num_declined = 0
    elif not planned.is_behind and not planned.num_others:
      self._num_declines += 1
      if self.costs.is_limited:  # for other requests, too
        self._pause_until, self._num_declined = step + _LIMITED_STEPS, 0
      else:
        self._pause_until = step + min(_DECLINE_STEPS, 1 << self._num_declines)
        self._num_declined = self._num_requests
    return choice.counts

  # A draft model.

  def plan_draft_model(self, batch: Batch, in_flight: Collection[int]) -> Batch:
    """Returns a planned step with what a draft model computes after it.

    Args: in_flight: uncommitted steps before it.
    """
    if batch.new_blocks and self.costs.fills is not None:
      names = dict(zip(batch.slots, batch.request_ids, strict=True))
      for slot, _, block in batch.new_blocks:
        self.costs.fills.note_blocks(names.get(slot, ""), (block,))
    num_proposals = self.choose_proposals(batch, in_flight)
    if num_proposals:
      return dataclasses.replace(batch, num_proposals=num_proposals)
    return dataclasses.replace(batch, fills_draft=True) if self.wants_fill(batch) else batch

  def wants_fill(self, batch: Batch) -> bool:
    """Returns whether a draft model fills its KV after a planned step without proposals."""
    return self.costs.fills is not None and self.costs.fills.wants_fill(batch.request_ids)

  def choose_proposals(self, batch: Batch, in_flight: Collection[int]) -> int:
    """Returns how many tokens the draft model proposes after a planned step: 0 if drafts would not pay.

    Args: in_flight: uncommitted steps before it.
    """
    step = batch.step
    # With overlap, what an uncommitted step proposes comes first.
    if not self._awaits_proposals or step < self._no_proposals_until or self._proposing_step in in_flight:
      return 0
    num_rows = batch.samples.count(True)
    most = self._most_drafts - num_rows
    if most <= 0 or not num_rows:
      return 0
    chances, is_free, num_constrained = self._expect_proposals(batch)
    planned = PlannedStep(num_rows, num_rows, num_constrained, 0, most, 0, may_wait=True)
    if not chances or not self.costs.knows_step(planned):
      return 0
    is_trial = not self.costs.knows_proposing(planned)
    if not is_trial and any(self.costs.choose_counts(planned, chances, is_free, proposing=True).counts):
      self._num_refusals = 0
    else:  # trials pause too, because not every step is measured
      self._num_refusals += 1
      self._no_proposals_until = step + min(_DECLINE_STEPS, 1 << self._num_refusals)
      if not is_trial:
        return 0
    self._proposing_step = step
    return self._num_proposals

  def _expect_proposals(self, batch: Batch) -> tuple[list[list[float]], list[bool], int]:
    """Returns what to expect of proposals after a planned step.

    Returns:
      For each row that may have them, the chances of its drafts, and whether it has no constraint; and the number of
      rows with one.
    """
    fills = self.costs.fills
    if fills is None:
      return [], [], 0
    found, all_free, num_constrained = [], [], 0
    num_drafts = batch.num_drafts or (0,) * len(batch.slots)
    for request_id, samples, count in zip(batch.request_ids, batch.samples, num_drafts, strict=True):
      tracked = self._tracked.get(request_id) if samples else None
      request = tracked and tracked.request
      if tracked is None or request is None:
        continue
      is_free = request.constraint is None
      num_constrained += not is_free
      if tracked.wakes_at > batch.step or not fills.has_kv(request_id) or len(found) == _MOST_LOOKS:
        continue
      rate = self._estimate_rate(tracked, MODEL)
      if count:
        source, _ = tracked.rows[-1]
        if source != MODEL and self._estimate_rate(tracked, source) >= rate:
          continue  # others do as well
      found.append(list_chances(rate, self._most, int(self._overlap and is_free and not (count and self.waits))))
      all_free.append(is_free)
    return found, all_free, num_constrained

  def take_proposals(self, rows: Sequence[Request], result: StepResult) -> None:
    """Takes what the draft model proposed after the step that was just committed."""
    if self.model is None:
      return
    for row, proposed in result.proposals.items():
      request = rows[row]
      if request.id in self._tracked:
        self.model.take_proposal(request.id, request.num_prompt_tokens + len(request.output_token_ids), proposed)

  def start_row(self, request: Request) -> None:
    """Notes that the request's drafts are in the planned step."""
    tracked = self._tracked[request.id]
    if not tracked.rows:
      tracked.is_lost = False
    tracked.rows.append((tracked.draft.source, tracked.num_expected))

  # Results.

  def note_row(self, request: Request, num_drafts: int, num_accepted: int, step: int, num_before: int = 0) -> None:
    """Learns from the drafts of a live request.

    Args:
      step: the next step to be planned.
      num_before: rejected drafts of the request's row before. If others were expected, these drafts show nothing.
    """
    tracked = self._tracked.get(request.id)
    if tracked is None:
      return
    self.next_look = 0
    source, num_expected = tracked.rows.pop(0)
    if source == MODEL and self.costs.fills is not None:
      self.costs.fills.note_row(num_drafts, num_accepted)
    tracked.is_lost = bool(tracked.rows) and tracked.rows[0][1] != num_drafts - num_accepted
    if num_expected != num_before:
      return
    self._rates.note_row(tracked.trials, source, num_drafts, num_accepted)
    if num_accepted:
      tracked.num_unspent += num_accepted
      tracked.num_failures = tracked.num_misses = 0
      if self._awake.pop(request.id, None):
        self._lively[request.id] = tracked
      return
    if not tracked.may_force and self._lively.pop(request.id, None):
      self._awake[request.id] = tracked
    tracked.num_failures += 1
    tracked.num_unspent = max(0, tracked.num_unspent - _ACCEPTED_A_TRIAL)
    if self._estimate_rate(tracked, source) > _SLEEPLESS_RATE:
      return
    pause = min(_LONGEST_SLEEP, 1 << tracked.num_failures - 1) - 1
    if tracked.may_force:
      tracked.wakes_at = step + pause
    elif pause:
      self._sleep(tracked, step + pause)

  # For traces.

  def state(self) -> dict[str, Any]:
    """Returns all state of later decisions as plain JSON values; restore_state() is the inverse."""
    return {
      "rates": self._rates.state(),
      "costs": self.costs.state(),
      **self._model_state(),
      "next_look": [self.next_look, self._no_looks_until],
      "declined": [self._num_declined, self._num_declines, self._pause_until],
      "requests": {
        name: {
          "trials": {source: list(totals) for source, totals in tracked.trials.items()},
          "num_failures": tracked.num_failures,
          "num_misses": tracked.num_misses,
          "num_unspent": tracked.num_unspent,
          "is_tired": tracked.is_tired,
          "wakes_at": tracked.wakes_at,
          "num_expected": tracked.num_expected,
          "rows": [list(row) for row in tracked.rows],
          "is_lost": tracked.is_lost,
          "num_indexed": self.drafter.num_indexed(name),
        }
        for name, tracked in self._tracked.items()
      },
      "fresh": list(self._fresh),
      "lively": list(self._lively),
      "awake": list(self._awake),
      "sleepers": [
        [until, each.request.id] for until, _, each in sorted(self._sleepers) if each.request and each.wakes_at == until
      ],
    }

  def _model_state(self) -> dict[str, Any]:
    if self.model is None:
      return {}
    return {
      "refused": [self._num_refusals, self._no_proposals_until, self._proposing_step],
      "proposals": self.model.state(),
    }

  def restore_state(self, state: dict[str, Any], requests: Mapping[str, Request]) -> None:
    """Takes back what state() returned, for the same live requests by id."""
    self._rates.restore_state(state["rates"])
    self.costs.restore_state(state["costs"])
    if self.model is not None:
      self._num_refusals, self._no_proposals_until, self._proposing_step = state["refused"]
      self.model.restore_state(state["proposals"])
    self._num_declined, self._num_declines, self._pause_until = state["declined"]
    for name, values in state["requests"].items():
      tracked = self._tracked[name] = _Tracked(requests[name])
      tracked.trials = {source: list(totals) for source, totals in values["trials"].items()}
      tracked.num_failures, tracked.num_expected = values["num_failures"], values["num_expected"]
      tracked.num_misses, tracked.is_tired = values["num_misses"], values["is_tired"]
      tracked.num_unspent = values.get("num_unspent", 0)  # traces of earlier versions lack it
      tracked.rows, tracked.is_lost = [(source, count) for source, count in values["rows"]], values["is_lost"]
      tracked.wakes_at = values["wakes_at"]
      self.drafter.restore_index(requests[name], values["num_indexed"])
    self._lively = {name: self._tracked[name] for name in state["lively"]}
    self._awake = OrderedDict((name, self._tracked[name]) for name in state["awake"])
    for until, name in state["sleepers"]:
      self._sleep(self._tracked[name], until, self._tracked[name].is_tired)
    self.next_look, self._no_looks_until = state["next_look"]
    self._fresh = {name: requests[name] for name in state["fresh"]}
