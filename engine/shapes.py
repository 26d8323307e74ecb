"""The only place that decides a shape: what is not on the ladder is an error, never a compile. Pure Python."""

import bisect
import dataclasses

from engine.errors import ConfigError, ShapeNotOnLadder


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class StepShape:
  """A compiled step: static in programs, key of executables, unit of cost in the simulator.

  Attributes:
    tokens: T, the token budget the step is padded to.
    rows: S, how many sequences fit, and as many rows of logits.
  """

  tokens: int
  rows: int


class ShapeLadder:
  """One ladder of token budgets; the number of rows follows from the budget. No product of ladders."""

  def __init__(self, token_budgets: tuple[int, ...], max_num_seqs: int):
    """Args: token_budgets: strictly increasing, the smallest at least 2 (a one-row matmul is slow on CPU)."""
    if not token_budgets or list(token_budgets) != sorted(set(token_budgets)) or token_budgets[0] < 2:
      raise ConfigError(
        f"token budgets {token_budgets} must be strictly increasing and start at 2 or more; "
        "set --token_budgets, for example 8,16,32,64,128,256,384,512"
      )
    if max_num_seqs < 1:
      raise ConfigError(f"max_num_seqs={max_num_seqs} must be at least 1; set --max_num_seqs")
    if max_num_seqs > token_budgets[-1]:
      raise ConfigError(
        f"max_num_seqs={max_num_seqs} exceeds the top token budget {token_budgets[-1]}: a step of "
        "decodes alone would not fit; lower --max_num_seqs or extend --token_budgets"
      )
    self.token_budgets = tuple(token_budgets)
    self.max_num_seqs = max_num_seqs
    self._rungs = tuple(StepShape(tokens, min(tokens, max_num_seqs)) for tokens in token_budgets)

  @property
  def max_tokens(self) -> int:
    """The most tokens one step can hold."""
    return self.token_budgets[-1]

  def rungs(self) -> tuple[StepShape, ...]:
    """Everything that may ever be compiled, smallest first."""
    return self._rungs

  def fit(self, num_tokens: int) -> StepShape:
    """The smallest rung that holds `num_tokens`; raises ShapeNotOnLadder, never truncates."""
    index = bisect.bisect_left(self.token_budgets, num_tokens)
    if num_tokens < 1 or index == len(self._rungs):
      raise ShapeNotOnLadder(
        f"a step of {num_tokens} tokens is outside 1..{self.max_tokens} of {self.token_budgets}; "
        "lower --prefill_chunk or extend --token_budgets"
      )
    return self._rungs[index]
