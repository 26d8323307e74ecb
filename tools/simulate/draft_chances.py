"""Makes up the drafts of simulated requests from two chances, given or measured from a step trace. Imports no jax.

A simulated device samples zeros, so a right draft is 0 and a wrong one is 1. Whether the token at a position is
foreseen depends on the request and the position alone, as with a real text.
"""

import dataclasses
import random
from typing import Any

from engine.errors import ConfigError
from engine.request import Request
from engine.speculation.drafter import NO_DRAFT, Draft
from tools.simulate.step_points import read_trace_entries

_RIGHT, _WRONG = 0, 1


@dataclasses.dataclass(frozen=True)
class DraftChances:
  """What drafters find in the requests.

  Attributes:
    acceptance: chance that a draft is accepted after accepted ones, 0 to 1.
    share: chance that a decoding request has drafts at a position, above 0 and up to 1.
  """

  acceptance: float
  share: float = 1.0

  def __post_init__(self):
    if not 0 <= self.acceptance <= 1:
      raise ConfigError(f"acceptance={self.acceptance:g} must be from 0 to 1; set --draft_acceptance")
    if not 0 < self.share <= 1:
      raise ConfigError(f"share={self.share:g} must be above 0 and at most 1; set --draft_share")


class ChanceDrafter:
  """Implements engine.speculation.drafter.Drafter by chances."""

  def __init__(self, chances: DraftChances):
    self._chances = chances

  def update(self, request: Request) -> bool:
    """See Drafter."""
    return _chance_of(request, "share") < self._chances.share

  def propose(self, request: Request, count: int) -> Draft:
    """See Drafter. A proposal is right up to its first token that was not foreseen."""
    if _chance_of(request, "share") >= self._chances.share:
      return NO_DRAFT
    right = 0
    while right < count and _chance_of(request, "draft", right) < self._chances.acceptance:
      right += 1
    return Draft((_RIGHT,) * right + (_WRONG,) * (count - right), "chance")

  def forget(self, request_id: str) -> None:
    """See Drafter."""

  def num_indexed(self, request_id: str) -> int:
    """See Drafter."""
    return 0

  def restore_index(self, request: Request, num_indexed: int) -> None:
    """See Drafter."""


def _chance_of(request: Request, what: str, ahead: int = 0) -> float:
  return random.Random(f"{what} {request.id} {len(request.output_token_ids) + ahead}").random()


def count_accepted(drafts: tuple[int, ...]) -> int:
  """Returns how many leading drafts of a row are right."""
  return next((index for index, token in enumerate(drafts) if token != _RIGHT), len(drafts))


def measure_chances(path: str) -> DraftChances:
  """Returns the chances in a step trace of a server with speculation.

  The share counts decodes for which drafts did not pay as decodes without drafts. Drafts behind rejected ones had no
  chance, so the acceptance leaves them out.

  Raises:
    ConfigError: the file is missing, is no step trace, or has no drafts.
  """
  batches: dict[int, dict[str, Any]] = {}
  rejected: dict[str, int] = {}  # drafts of each request's latest row
  rows = drafted = tried = accepted = 0

  def add_entry(entry: dict[str, Any]) -> None:
    nonlocal rows, drafted, tried, accepted
    if entry["event"] == "schedule" and entry["batch"] is not None:
      batches[entry["batch"]["step"]] = entry["batch"]
    elif entry["event"] == "commit" and entry["step"] in batches:
      batch = batches.pop(entry["step"])
      drafts = batch.get("num_drafts") or [0] * len(batch["ids"])
      ends = entry.get("row_ends") or range(1, len(drafts) + 1)
      behind = batch.get("behind") or [0] * len(drafts)
      columns = zip(batch["ids"], batch["counts"], drafts, behind, batch["samples"], ends, strict=True)
      begin = 0
      for name, count, num_drafts, before, samples, end in columns:
        rows += bool(samples) and count == 1 + num_drafts
        found = end - begin - 1
        drafted += num_drafts > 0
        # The step before may have begun before the trace; then nobody knows what it rejected.
        if num_drafts and not (before and rejected.get(name, before)):
          accepted += found
          tried += min(num_drafts, found + 1)
        rejected[name] = num_drafts - found
        begin = end

  read_trace_entries(path, add_entry)
  if not drafted:
    raise ConfigError(f"step trace {path} holds no drafts; record one with --speculation, or set --draft_acceptance")
  return DraftChances(accepted / max(1, tried), drafted / rows)
