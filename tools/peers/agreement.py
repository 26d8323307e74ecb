"""Decides whether two engines gave the same tokens except for ties: by tokens first, then by logits. Runs no model.

Greedy outputs of two correct programs differ if two logits lie within f32 noise, and all later tokens then differ too.
A request that differs is therefore judged by itself. For each token, given its engine's own earlier tokens, the margin
is the distance of its logit from the largest in transformers' f32 forward. At most TIE, it was as good a choice.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from engine.errors import ConfigError

TIE = 1e-4  # for logits with a standard deviation of about 4


@dataclasses.dataclass(frozen=True)
class Agreement:
  """One engine's tokens compared with the reference's.

  Attributes:
    identical: requests with every token equal.
    differing: ids of the others.
    first_tokens: requests with an equal first token.
    agreeing_tokens: tokens before each request's first difference, in sum.
    num_tokens: all tokens.
  """

  identical: int
  differing: tuple[int | str, ...]
  first_tokens: int
  agreeing_tokens: int
  num_tokens: int

  @property
  def agreeing_prefix(self) -> float:
    """The share of tokens before each request's first difference."""
    return self.agreeing_tokens / self.num_tokens

  def beside_sluice(self) -> dict[str, int]:
    """Returns how many tokens of a peer of lower precision equal Sluice's; other tokens follow a first other one."""
    return {
      "requests": self.identical + len(self.differing),
      "first_tokens": self.first_tokens,
      "agreeing_tokens": self.agreeing_tokens,
      "tokens": self.num_tokens,
    }

  def judged(self, margins: Mapping[int | str, Sequence[float]]) -> dict[str, Any]:
    """Returns the verdict for the report; `margins` are those of every differing request.

    Returns:
      same_tokens: whether every differing request differs at ties only; None without a judge.
      worst_margin: the largest margin among them.
      beyond_ties: tokens whose margin is over TIE.
    """
    judged = bool(margins) or not self.differing
    found = [margin for identity in self.differing for margin in margins.get(identity, ())]
    beyond = sum(not margin <= TIE for margin in found)
    return {
      "identical_requests": self.identical,
      "differing_requests": list(self.differing),
      "agreeing_prefix": round(self.agreeing_prefix, 4),
      "same_tokens": beyond == 0 if judged else None,
      "worst_margin": max(found, default=0.0) if judged else None,
      "beyond_ties": beyond if judged else None,
    }


def compare(reference: Mapping[int | str, Sequence[int]], tokens: Mapping[int | str, Sequence[int]]) -> Agreement:
  """Compares forced greedy outputs of the same requests.

  Raises:
    ConfigError: a request is missing, or its length differs.
  """
  prefixes: dict[int | str, int] = {}
  for identity, expected in reference.items():
    found = tokens.get(identity, ())
    if len(found) != len(expected):
      raise ConfigError(f"request {identity!r}: {len(expected)} tokens against {len(found)}; both must be forced")
    pairs = enumerate(zip(expected, found, strict=True))
    prefixes[identity] = next((at for at, (one, other) in pairs if one != other), len(expected))
  differing = tuple(identity for identity, prefix in prefixes.items() if prefix < len(reference[identity]))
  return Agreement(
    identical=len(reference) - len(differing),
    differing=differing,
    first_tokens=sum(prefix > 0 for prefix in prefixes.values()),
    agreeing_tokens=sum(prefixes.values()),
    num_tokens=sum(map(len, reference.values())),
  )


def count_choices(margins: Iterable[Sequence[float]]) -> dict[str, Any]:
  """Returns how near an engine of lower precision is to the judge's f32.

  Args: margins: of every judged request's tokens, in order.

  Returns:
    f32_choices: share of tokens that f32 chooses after the same tokens, ties included; None without a judge.
    mean_margin: mean distance of a token's logit from the largest, in f32.
  """
  found = [margin for request in margins for margin in request]
  if not found:
    return {"f32_choices": None, "mean_margin": None}
  chosen = sum(margin <= TIE for margin in found)
  return {"f32_choices": round(chosen / len(found), 4), "mean_margin": round(sum(found) / len(found), 5)}
