"""What a step's values mean for one request: where its output ends, what its constraint says, which entries are new.

Pure functions of a request and values, apart from constraints, which advance by the tokens that they accept. May not
change a request; the scheduler does, at commit.
"""

from collections.abc import Iterator, Sequence

from engine.batch import Batch, StepResult, TokenLogprobs
from engine.constraint import CONSTRAINT_BROKE, Constraint, ConstraintFailed, DraftingConstraint, Verdicts
from engine.request import Request, RequestStatus

_MOST_FORCED = 64  # tokens that follow those of a step at once, at 20 us each


def judge_rows(rows: Sequence[Request], batch: Batch, result: StepResult) -> Verdicts:
  """Passes the new tokens of a step to their constraints, which advance; returns what these say.

  Args:
    rows: the request of each row of `batch`.
    batch, result: a step and its values.
  """
  done, failed, num_taken, forced = [], {}, {}, {}
  for row in dict.fromkeys(row for row, _ in batch.masks):
    request = rows[row]
    constraint = request.constraint
    if constraint is None or request.status is RequestStatus.FINISHED or row in result.bad_rows:
      continue
    num_drafts = batch.num_drafts[row] if batch.num_drafts else 0
    tokens = result.tokens_of(row)
    taken = 0
    try:
      for token in cut_tokens_at_end(request, batch.starts[row] + batch.counts[row] - num_drafts, tokens):
        constraint.accept(token)
        taken += 1
        if constraint.is_done:
          done.append(row)
          break
    except ConstraintFailed as error:
      failed[row] = str(error)
    except Exception:  # foreign code, whose errors may affect only this request
      failed[row] = CONSTRAINT_BROKE
    if len(tokens) > 1 and (row in failed or constraint.is_done):
      num_taken[row] = taken
    elif request.takes_forced and row not in failed and request.stop_ids.isdisjoint(tokens):
      try:
        for token in _force_tokens(request, constraint, taken):
          forced[row] = (*forced.get(row, ()), token)
        if forced.get(row) and constraint.is_done:
          done.append(row)
      except ConstraintFailed as error:
        failed[row], num_taken[row] = str(error), taken
      except Exception:  # foreign code, whose errors may affect only this request
        failed[row], num_taken[row] = CONSTRAINT_BROKE, taken
  return Verdicts(frozenset(done), failed, num_taken, forced)


def cut_tokens_at_end(request: Request, end: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
  """Returns a row's tokens up to the one that ends the request; the first token follows `end` positions."""
  tokens = tokens[: request.max_computed_tokens - end + 1]
  for index, token in enumerate(tokens):
    if token in request.stop_ids:
      return tokens[: index + 1]
  return tokens


def split_logprobs(
  request: Request,
  end: int,
  entries: tuple[TokenLogprobs, ...],
  num_tokens: int,
) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]:
  """Splits a row's entries, the last at position end - 1, into those of new tokens and new ones of the prompt.

  The entry of position p describes the token at p + 1. A recomputed prompt is reported only once.
  """
  params = request.params
  token_logprobs = entries[-num_tokens:] if num_tokens and params.logprobs is not None else ()
  if params.prompt_logprobs is None:
    return token_logprobs, ()
  first = end - len(entries)
  begin = max(request.num_prompt_logprobs, first)
  stop = min(end, request.num_prompt_tokens - 1)
  return token_logprobs, entries[begin - first : stop - first] if begin < stop else ()


def _force_tokens(request: Request, constraint: Constraint, num_new: int) -> Iterator[int]:
  """Yields the tokens that must follow the request's output and `num_new` more, after the constraint accepts each.

  Raises the errors of the constraint.
  """
  if not isinstance(constraint, DraftingConstraint):
    return
  most = request.params.max_tokens - len(request.output_token_ids) - num_new
  for _ in range(min(most, _MOST_FORCED)):
    token = -1 if constraint.is_done else constraint.find_forced()
    if token < 0:
      return
    constraint.accept(token)
    yield token
    if token in request.stop_ids:
      return
