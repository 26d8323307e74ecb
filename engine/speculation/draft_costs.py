"""Knows what steps cost with and without drafts, and chooses the drafts that pay. Pure Python; may not know requests.

Times are learned from the steps themselves, because no table knows what verifying costs on a machine. What is not known
is tried, at the expense of the DraftCredit, which also bounds what wrong estimates cost.

With overlap, a step is planned while the device computes another one, so the host's part is hidden. Requests whose
drafts are in flight may wait for them instead: then the next step is planned alone, and shows the host's part.
"""

from collections.abc import Sequence
import math
import operator
from typing import Any, NamedTuple

from engine.batch import Batch
from engine.config import EngineConfig
from engine.speculation.credit import DraftCredit
from engine.speculation.draft_choice import DraftChoice, StepOption, add_caution, choose_drafts, limit_seconds
from engine.speculation.draft_fills import DraftFills
from engine.speculation.step_quantile import StepQuantile
from engine.speculation.step_seconds import UNKNOWN, StepSeconds

# Of so many steps without drafts the time of one is noted, at 20 us right after a step: first this number, and twice as
# many after each note, since the latest drafts.
_LEAST_STEPS_A_NOTE = 4
_MOST_STEPS_A_NOTE = 64
_FIRST_NOTES = 64  # plain steps of which all are noted
_FIRST_DRAFTED = 2  # steps with drafts, of which none is noted: their code runs for the first time
# One in so many plain steps takes longer, in plain steps of its size, than a ratio that is learned: each longer one
# raises it, and each other one lowers it by a share. With it, real steps vary, and a step as long as some plain ones
# does not lengthen the longest gaps between tokens.
_LONG_ONE_IN = 20
_RAISES_BY = 0.05
_MOST_LATE_RATIO = 2.0
# Beside the longest contexts, a plain step is among the longest gaps as it is, and drafts must not lengthen it. So a
# step with drafts also takes at most the longest of three times: what this share of plain steps does not exceed, what
# the median plain step may take with drafts, and this ratio of its own time without.
_HIGH_SHARE = 0.985
_LEAST_RATIO = 1.02
# A plain step that drafts slow takes at most so many times as long for them. A longer one waited for other work.
_MOST_SLOWED = 2.0
# A choice takes the host long right before a step, when its caches are cold. So one with drafts holds for so many more
# steps that are planned alike, with the same chances to this part, or with better ones if it took all drafts.
_MOST_REPEATS = 15
_CHANCE_PARTS = 50


class PlannedStep(NamedTuple):
  """A step before drafts.

  Attributes:
    num_tokens: useful tokens.
    num_decodes: decode rows.
    num_constrained: those of them with a constraint.
    num_others: other rows, which are of prompts.
    most_drafts: drafts that tokens and logit rows of the largest rung allow.
    num_padding: tokens that the device would compute as padding.
    may_wait: every running request has a decode in it, so that the next step may wait for it.
    is_behind: drafts of its requests are in flight.
  """

  num_tokens: int
  num_decodes: int
  num_constrained: int
  num_others: int
  most_drafts: int
  num_padding: int
  may_wait: bool = False
  is_behind: bool = False


class DraftCosts:
  """The measured times of steps, and the choices that follow from them.

  Attributes:
    credit: what drafts may still cost.
    fills: decides when a draft model rests; None without one. Times of steps here are without its fills.
    plain_seconds: of the latest noted step without drafts; 0: of none.
    next_note: steps before this one need no note_step, unless they have drafts or proposals.
    is_limited: in the latest choice, one draft would have made the step longer than the limit of config allows.
  """

  def __init__(self, config: EngineConfig):
    self.credit = DraftCredit()
    self.fills = DraftFills() if config.has_draft_model else None
    self._overlap = config.overlap
    self._computes_padding = config.computes_padding
    self._step_limit = config.most_step_ratio  # of a step with drafts, and of the one after it
    self._has_limit = self._step_limit < math.inf
    self.is_limited = False
    ladder = config.ladder if config.computes_padding else None
    # The time of a step that is planned with nothing in flight has the host's part in it.
    self._alone_seconds = StepSeconds(ladder)
    self._behind_seconds = StepSeconds(ladder)  # with overlap, of steps planned while the device computed another
    self._slowed_seconds = StepSeconds(ladder)  # of such steps that follow drafts, and so repeat no step
    # The same as the first two by tokens in use, which the limit counts: a longer context makes drafts in padding cost.
    self._alone_used = self._behind_used = None
    if config.computes_padding and self._has_limit:
      self._alone_used, self._behind_used = StepSeconds(None), StepSeconds(None)
    # The same as the first two, of steps after which a draft model proposes. They take so much longer that few drafts
    # may not pay where many do.
    self._alone_proposing = StepSeconds(ladder, tries_all=True)
    self._behind_proposing = StepSeconds(ladder, tries_all=True)
    self._held_key: list[int] = []  # of the choice that holds; see choose_counts
    self._held_chances: list[int] = []  # in parts
    self._held_choice, self._num_repeats_left = DraftChoice([], 0.0), 0
    self._late_ratio = 1.0  # that of _LONG_ONE_IN
    self._usual_step, self._high_step = StepQuantile(0.5), StepQuantile(_HIGH_SHARE)  # of plain steps
    self._num_drafted = 0  # steps with drafts, up to _FIRST_DRAFTED
    # Some of the latest drafts with none in flight before them were accepted, so what follows is no trial.
    self._has_gained = False
    self.plain_seconds = 0.0
    self.next_note = 0
    self._noted_step = -1
    self._num_plain = 0  # steps without drafts up to the noted one
    self._steps_a_note = 1  # plain steps for one note
    self._slowed_steps: set[int] = set()  # uncommitted; see note_slow_step

  # What is known.

  def knows_step(self, planned: PlannedStep) -> bool:
    """Returns whether drafts can be chosen for such a step: its time without drafts is known, or does not matter."""
    if planned.num_others:
      return True
    table = self._select_table(False, self._is_behind(planned))
    return table.knows_size(planned.num_tokens) or table.estimate_step(planned.num_tokens) != UNKNOWN

  def allows_trials(self, of_model: bool) -> bool:
    """Returns whether drafts of a draft model, or others, may be verified if their acceptance is not known."""
    return self.fills.allows_trials if of_model and self.fills is not None else self.credit.allows_trials

  def knows_proposing(self, planned: PlannedStep) -> bool:
    """Returns whether the time of such a step with proposals of a draft model is known."""
    return self._select_table(True, self._is_behind(planned)).estimate_step(planned.num_tokens) != UNKNOWN

  def _is_behind(self, planned: PlannedStep) -> bool:
    """Returns whether such a step is planned while the device computes another one."""
    return self._overlap and planned.num_constrained < planned.num_decodes

  # Choices.

  def choose_counts(
    self,
    planned: PlannedStep,
    chances: Sequence[Sequence[float]],
    is_free: Sequence[bool],
    proposing: bool,
    chances_later: Sequence[Sequence[float]] = (),
  ) -> DraftChoice:
    """Chooses the drafts of a step that `knows_step`, and if it is `proposing`, `knows_proposing`.

    Args:
      chances: for each candidate, the chance that its first 1, 2, ... drafts are all accepted.
      is_free: of each candidate, whether it has no constraint.
      proposing: a draft model proposes after a step with drafts, but not after one without.
      chances_later: the chances with nothing in flight before the drafts, as far as they are proved; (): as `chances`.
        The next step waits for these alone: a trial costs less if it does not.
    """
    key = [*planned, proposing, len(chances), *is_free]
    parts: list[int] = []
    for row in (*chances, *chances_later):
      key.append(len(row))
      parts += round(_CHANCE_PARTS * row[0]), round(_CHANCE_PARTS * row[-1])
    if self._num_repeats_left and key == self._held_key and self._has_held_chances(chances, parts):
      self._num_repeats_left -= 1
      self.is_limited = False
      return self._held_choice
    choice = self._choose_anew(planned, chances, is_free, proposing, chances_later or chances)
    behind = self._is_behind(planned) and not choice.waits
    table = self._select_table(proposing, behind)
    holds = any(choice.counts) and table.knows_size(planned.num_tokens + sum(choice.counts))
    self._held_key, self._held_chances = key, parts
    self._held_choice, self._num_repeats_left = choice, _MOST_REPEATS if holds else 0
    return choice

  def _has_held_chances(self, chances: Sequence[Sequence[float]], parts: list[int]) -> bool:
    """Returns whether the choice that holds suits these chances, of as many rows and drafts."""
    if parts == self._held_chances:
      return True
    takes_all = all(count == len(row) for count, row in zip(self._held_choice.counts, chances, strict=True))
    return takes_all and all(map(operator.ge, parts, self._held_chances))

  def _select_table(self, proposing: bool, behind: bool) -> StepSeconds:
    """Returns the times of steps, by whether a draft model proposes after them, and whether others are in flight."""
    if proposing:
      return self._behind_proposing if behind else self._alone_proposing
    return self._behind_seconds if behind else self._alone_seconds

  def _choose_anew(
    self,
    planned: PlannedStep,
    chances: Sequence[Sequence[float]],
    is_free: Sequence[bool],
    proposing: bool,
    later: Sequence[Sequence[float]],
  ) -> DraftChoice:
    """Does what choose_counts does, without a choice that holds. Args: `later` is chances_later."""
    if self._alone_seconds.is_hopeful != self.credit.allows_measuring:
      for table in self._tables().values():
        table.set_hope(self.credit.allows_measuring)
    if self.fills is not None:
      for table in (self._alone_proposing, self._behind_proposing):
        table.set_hope(self.fills.has_requests)
    self.is_limited = False
    most = min(planned.most_drafts, sum(map(len, chances)))
    if planned.num_others:  # they take padding only, because the cost of steps with prompts is not learned
      most = min(most, planned.num_padding)
      return choose_drafts(chances, StepOption(planned.num_decodes, [1.0] * (most + 1)), 0.0, most)
    if self._is_behind(planned):
      return self._choose_with_next(planned, chances, is_free, proposing, later)
    base = self._alone_seconds.estimate_step(planned.num_tokens)
    table = self._select_table(proposing, behind=False)
    seconds = table.estimate_steps(planned.num_tokens, most)
    if self._has_limit:
      measured, longest = self._measure_limit(self._alone_used, table, planned.num_tokens, most, base)
      seconds = limit_seconds(seconds, measured, longest)
      self.is_limited = most > 0 and longest < measured[1] < UNKNOWN
    seconds = add_caution(seconds, base)
    return choose_drafts(chances, StepOption(planned.num_decodes, seconds), planned.num_decodes / base, most)

  def _measure_limit(
    self, used: StepSeconds | None, table: StepSeconds, num_tokens: int, most: int, base: float
  ) -> tuple[list[float], float]:
    """Returns the measured seconds of a step with 0, 1, 2, ... drafts, and the most seconds that it may take.

    Args:
      used: estimates by tokens in use, if they differ from those of `table`.
      base: seconds of the step without drafts by `table`.
    """
    if used is not None and used.knows_size(num_tokens):
      table, base = used, used.estimate_step(num_tokens)
    ratio = max(self._step_limit, self._late_ratio)
    longest = ratio * base
    if usual := self._usual_step.seconds:
      longest = min(longest, max(_LEAST_RATIO * base, self._high_step.seconds, ratio * usual))
    return table.estimate_steps(num_tokens, most, as_measured=True), longest

  def _choose_with_next(
    self,
    planned: PlannedStep,
    chances: Sequence[Sequence[float]],
    is_free: Sequence[bool],
    proposing: bool,
    later: Sequence[Sequence[float]],
  ) -> DraftChoice:
    """Chooses drafts with overlap, and whether the next step waits for them.

    The expected tokens and seconds are those of this step and the next, in which requests without a constraint have a
    row. If these all get drafts, the next step may wait instead; then this one has the device alone. Where steps that
    wait for each other bring more, a step behind drafts has none, so that a later one can begin.

    Args: as of choose_counts; `later` is chances_later.
    """
    most = min(planned.most_drafts, sum(map(len, chances)))
    num_tokens, num_free = planned.num_tokens, planned.num_decodes - planned.num_constrained
    behind = self._behind_seconds.estimate_steps(num_tokens, most)
    base = behind[0]
    table = self._select_table(proposing, behind=True)
    seconds = table.estimate_steps(num_tokens, most) if proposing else behind
    # Of the next step.
    rest = base if num_free == num_tokens else min(base, self._behind_seconds.estimate_step(num_free))
    slowed = self._slowed_seconds.estimate_step(num_free)
    after = rest if slowed == UNKNOWN else max(rest, min(slowed, _MOST_SLOWED * rest))
    without_limit = alone = self._estimate_alone(num_tokens, seconds, proposing)
    if self._has_limit:
      measured, longest = self._measure_limit(self._behind_used, table, num_tokens, most, base)
      alone = limit_seconds(alone, self._estimate_alone(num_tokens, measured, proposing, as_measured=True), longest)
      seconds = limit_seconds(seconds, measured, longest)
      if slowed != UNKNOWN and self._slowed_seconds.estimate_steps(num_free, 0, as_measured=True)[0] > longest:
        seconds = seconds[:1]
      self.is_limited = most > 0 and len(seconds) == len(alone) == 1 and measured[1] < UNKNOWN
    num_rows = planned.num_decodes + num_free
    option = StepOption(
      num_rows,
      add_caution([each + after for each in seconds], base + rest),
      row_tokens=[1 + free for free in is_free],
    )
    best = choose_drafts(chances, option, num_rows / (base + rest), most)
    if not any(best.counts) and planned.is_behind:
      return best
    required = [index for index, free in enumerate(is_free) if free]
    may_wait = planned.may_wait and len(required) == num_free
    waiting_rate = 0.0
    if len(alone) > 1 and (may_wait or planned.is_behind):
      waiting = self._estimate_alone(num_tokens, behind) if proposing else without_limit
      option = StepOption(planned.num_decodes, add_caution(waiting, base))
      waiting_rate = choose_drafts(later, option, 0.0, most).rate  # of steps of which each waits for the one before
    if planned.is_behind:  # a trial does not follow the drafts of another one
      may_follow = table.knows_size(num_tokens + sum(best.counts)) and waiting_rate <= best.rate
      return best if may_follow else DraftChoice([0] * len(chances), best.rate)
    if may_wait and waiting_rate > best.rate:
      option = StepOption(planned.num_decodes, add_caution(alone, base), required)
      waiting = choose_drafts(chances, option, num_rows / (base + rest), most)
      if any(waiting.counts):
        return waiting._replace(waits=True)
    return best

  def _estimate_alone(
    self, num_tokens: int, behind: list[float], proposing: bool = False, as_measured: bool = False
  ) -> list[float]:
    """Returns the seconds of a step with 0, 1, 2, ... drafts for which the next one waits.

    What is not measured is inferred: the device's part is at least that of steps behind others, of which larger sizes
    are known, too. What is measured may be less than a step without drafts, which is mostly the first of its rows.

    Args: behind: the seconds of steps planned behind another one.
    """
    table = self._select_table(proposing, behind=False)
    alone = table.estimate_steps(num_tokens, len(behind) - 1, behind[0], as_measured)
    host, found = alone[0] - behind[0], []
    for count, (each, other) in enumerate(zip(alone, behind, strict=True)):
      measured = table.read_seconds(num_tokens + count)
      if measured != UNKNOWN:
        found.append(min(each, measured))
      else:
        found.append(each if other == UNKNOWN else max(each, other + host))
    return found

  # Results.

  def note_slow_step(self, step: int) -> None:
    """Notes that step `step` has no drafts, but does not repeat the one before because of drafts there or refused."""
    self._slowed_steps.add(step)
    self.next_note = min(self.next_note, step)

  def note_fill(self, seconds: float) -> None:
    """Charges a draft model's fill after a step without proposals, if the time of a plain step is known."""
    if self.fills is not None and self.plain_seconds > 0:
      self.fills.charge_fill(seconds, self.plain_seconds)

  def note_step(
    self, batch: Batch, num_tokens: int, seconds: float, was_behind: bool, fill_seconds: float = 0.0
  ) -> None:
    """Learns from the time of a committed step, and counts those before it that were not noted.

    Steps without drafts that took longer for want of some are apart.

    Args:
      batch: the step.
      num_tokens: that it sampled.
      seconds: from planning, or from the commit of the step before if that is later, to its commit.
      was_behind: the step was planned while the device computed another one.
      fill_seconds: of them, those of a draft model that proposed nothing; see DraftFills.
    """
    seconds -= fill_seconds
    drafts, num_steps = batch.num_drafts, batch.step - self._noted_step
    self._noted_step = batch.step
    is_slowed = batch.step in self._slowed_steps
    self._slowed_steps.discard(batch.step)
    if self.fills is not None:
      self.fills.earn_steps(num_steps)
    if not (drafts or is_slowed or batch.num_proposals):
      self._note_plain(num_steps)
      if self._num_plain >= _FIRST_NOTES:
        self._steps_a_note = min(_MOST_STEPS_A_NOTE, max(_LEAST_STEPS_A_NOTE, 2 * self._steps_a_note))
    else:
      self._note_plain(num_steps - 1)
      num_steps = 1
      if self._num_plain >= _FIRST_NOTES:
        self._steps_a_note = _LEAST_STEPS_A_NOTE
    self.next_note = min(self._slowed_steps, default=batch.step + self._steps_a_note)
    num_drafted = len(drafts) - drafts.count(0)
    if batch.token_ids.count(()) + num_drafted != len(batch.slots):  # a prompt is in it
      return
    if not (drafts or is_slowed or batch.num_proposals):
      self.plain_seconds = seconds
      self._usual_step.note_step(seconds, num_steps)
      self._high_step.note_step(seconds, num_steps)
    else:
      has_next = self._overlap and (was_behind or not batch.masks)  # without drafts, a step would be behind this one
      starts_chain = bool(drafts) and not any(batch.behind)
      if starts_chain:
        self._has_gained = num_tokens > len(batch.slots)
      self._charge_step(batch, num_tokens, seconds, has_next, starts_chain or not self._has_gained)
    if drafts and self._num_drafted < _FIRST_DRAFTED:
      self._num_drafted += 1
      return
    # Without overlap, a plain step repeats; and with a constraint, it is planned alone in any case.
    if is_slowed and (batch.num_proposals or not was_behind and (batch.masks or not self._overlap)):
      return
    tables = [self._alone_seconds, self._behind_seconds, self._slowed_seconds]
    if self.fills is not None:
      tables += [self._alone_proposing, self._behind_proposing]
    table = tables.pop(2 if is_slowed and was_behind else was_behind + 3 * bool(batch.num_proposals))
    if not (drafts or is_slowed or batch.num_proposals):
      self._note_ratio(seconds / table.read_seconds(batch.device_tokens(self._computes_padding)))
    factor = table.note_step(batch.device_tokens(self._computes_padding), seconds, num_steps)
    for other in tables:
      other.follow_others(num_steps, factor)
    if self._alone_used is not None and self._behind_used is not None and not (is_slowed or batch.num_proposals):
      used, other = self._alone_used, self._behind_used
      if was_behind:
        used, other = other, used
      other.follow_others(num_steps, used.note_step(batch.num_tokens, seconds, num_steps))

  def _note_ratio(self, ratio: float) -> None:
    """Learns from a plain step's seconds over those expected; 0 if these were not known."""
    if ratio > 0:
      change = 1 if ratio > self._late_ratio else -1 / (_LONG_ONE_IN - 1)
      self._late_ratio = min(_MOST_LATE_RATIO, max(1.0, self._late_ratio * (1 + _RAISES_BY * change)))

  def _note_plain(self, num_steps: int) -> None:
    """Counts steps without drafts."""
    self._num_plain += num_steps
    self.credit.earn_steps(num_steps)

  def _charge_step(self, batch: Batch, num_tokens: int, seconds: float, has_next: bool, is_trial: bool) -> None:
    num_rows = len(batch.slots)
    table = self._behind_seconds if has_next else self._alone_seconds
    base = table.read_seconds(num_rows)
    if base == UNKNOWN:
      base = table.estimate_step(num_rows)
    if base != UNKNOWN:
      num_taken = seconds / base if batch.num_drafts or batch.num_proposals else min(_MOST_SLOWED, seconds / base)
      if self.fills is None or not batch.num_proposals:
        self.credit.charge_step(num_taken, num_tokens / num_rows, is_trial)
      if self.fills is not None:
        self.fills.charge_step(num_taken, num_rows, sum(batch.num_drafts), bool(batch.num_proposals))

  # For traces.

  def state(self) -> dict[str, Any]:
    """Returns all state of later choices as plain JSON values; restore_state() is the inverse."""
    tables = {name: table.state() for name, table in self._tables().items()}
    return {
      **tables,
      "credit": [self.credit.steps, self.credit.look_steps],
      **({} if self.fills is None else {"fills": self.fills.state()}),
      "held": [self._held_key, list(self._held_choice), self._num_repeats_left, self._held_chances],
      "plain_seconds": self.plain_seconds,
      "late_ratio": self._late_ratio,
      "plain_quantiles": [self._usual_step.seconds, self._high_step.seconds],
      "num_drafted": self._num_drafted,
      "has_gained": self._has_gained,
      "plain": [self._num_plain, self._noted_step, self._steps_a_note, self.next_note],
      "slowed_steps": sorted(self._slowed_steps),
    }

  def restore_state(self, state: dict[str, Any]) -> None:
    """Takes back what state() returned."""
    for name, table in self._tables().items():
      if name in state:  # traces of earlier versions lack some
        table.restore_state(state[name])
    self.credit.steps, self.credit.look_steps = state["credit"]
    if self.fills is not None:
      self.fills.restore_state(state["fills"])
    if len(held := state.get("held", ())) == 4:  # traces of earlier versions lack it, or its chances
      self._held_key, choice, self._num_repeats_left, self._held_chances = held
      self._held_choice = DraftChoice(*choice)
    self.plain_seconds = state["plain_seconds"]
    self._late_ratio = state.get("late_ratio", 1.0)  # traces of earlier versions lack these three
    self._usual_step.seconds, self._high_step.seconds = state.get("plain_quantiles", (0.0, 0.0))
    self._num_drafted = state.get("num_drafted", _FIRST_DRAFTED)
    self._has_gained = state.get("has_gained", False)
    self._num_plain, self._noted_step, self._steps_a_note, self.next_note = state["plain"]
    self._slowed_steps = set(state["slowed_steps"])

  def _tables(self) -> dict[str, StepSeconds]:
    tables = {"alone": self._alone_seconds, "behind": self._behind_seconds, "slowed": self._slowed_seconds}
    if self.fills is not None:
      tables |= {"alone_proposing": self._alone_proposing, "behind_proposing": self._behind_proposing}
    if self._alone_used is not None and self._behind_used is not None:
      tables |= {"alone_used": self._alone_used, "behind_used": self._behind_used}
    return tables
