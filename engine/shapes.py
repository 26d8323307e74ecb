"""Chooses all shapes: the ladder of a server, and the rung of a step. Pure Python; no other module may choose one.

Token budget: the padded tokens of a step. Rung: one StepShape, compiled once. Ladder: all rungs of a server, one for
each token budget. A shape that is not on the ladder raises an error and never compiles.
"""

import bisect
import dataclasses

from engine.errors import ConfigError, ShapeNotOnLadder


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class StepShape:
  """A rung: a compiled step. Static in programs, key of executables, unit of cost in the simulator.

  Attributes:
    tokens: T, the token budget.
    rows: S, the most sequences.
    logits: L, the most logit rows: positions whose next token is sampled or reported.
  """

  tokens: int
  rows: int
  logits: int


class ShapeLadder:
  """One rung for each token budget, which also determines rows and logit rows.

  Each rung has as many rows, and as many logit rows, as it has tokens, up to `max_num_seqs`. A row has at least one
  token, and a token at most one logit row. So a step of at most `max_num_seqs` rows and `max_logits` logit rows fits
  the rung that its tokens fit.
  """

  def __init__(self, token_budgets: tuple[int, ...], max_num_seqs: int):
    """Args: token_budgets: strictly increasing, the smallest at least 2 (a one-row matmul is slow on CPU)."""
    check_token_budgets(token_budgets)
    if max_num_seqs < 1:
      raise ConfigError(f"max_num_seqs={max_num_seqs} must be at least 1; set --max_num_seqs")
    if max_num_seqs > token_budgets[-1]:
      raise ConfigError(
        f"max_num_seqs={max_num_seqs} exceeds the top token budget {token_budgets[-1]}: a step of "
        "only decodes would not fit; lower --max_num_seqs or extend --token_budgets"
      )
    self.token_budgets = tuple(token_budgets)
    self.max_num_seqs = max_num_seqs
    rows = [min(tokens, max_num_seqs) for tokens in token_budgets]
    self._rungs = tuple(StepShape(*each) for each in zip(token_budgets, rows, rows, strict=True))

  @property
  def max_tokens(self) -> int:
    """The most tokens one step can hold."""
    return self.token_budgets[-1]

  @property
  def max_logits(self) -> int:
    """The most logit rows one step can hold."""
    return self._rungs[-1].logits

  def rungs(self) -> tuple[StepShape, ...]:
    """Returns all rungs, smallest first; the server compiles no other shape."""
    return self._rungs

  def fit(self, num_tokens: int) -> StepShape:
    """Returns the smallest rung that holds `num_tokens`, or raises ShapeNotOnLadder."""
    index = bisect.bisect_left(self.token_budgets, num_tokens)
    if num_tokens < 1 or index == len(self._rungs):
      raise ShapeNotOnLadder(
        f"a step of {num_tokens} tokens is outside 1..{self.max_tokens} of {self.token_budgets}; "
        "lower --prefill_chunk or extend --token_budgets"
      )
    return self._rungs[index]


def check_token_budgets(token_budgets: tuple[int, ...]) -> None:
  """Raises ConfigError unless the budgets increase strictly, from 2 or more."""
  if not token_budgets or list(token_budgets) != sorted(set(token_budgets)) or token_budgets[0] < 2:
    raise ConfigError(
      f"token budgets {token_budgets} must be strictly increasing and start at 2 or more; "
      "set --token_budgets, for example 8,16,32,64,128,256,384,512"
    )


# --- The ladder of a server -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LadderDefault:
  """The default ladder of a platform.

  Attributes:
    of: the platform, as words of a sentence.
    token_budgets, max_num_seqs, prefill_chunk: as in LadderChoice.
  """

  of: str
  token_budgets: tuple[int, ...]
  max_num_seqs: int
  prefill_chunk: int


# Small steps, because a laptop's CPU computes all padding.
PADDED = LadderDefault("a device that computes padding", (8, 16, 32, 64, 128, 256, 384, 512), 64, 512)
# A CPU's own kernels skip padding, so rungs may be wide: steps of 1, 9, 17 and 40 rows of a 125M model take as long as
# with twice as many rungs, and a start compiles fewer programs. From 32 rows on, time is proportional to rows, so a
# larger chunk would only lengthen the gaps of other requests.
UNPADDED_CPU = LadderDefault("a CPU whose kernels skip padding", (8, 32, 64, 256, 512), 64, 192)
# For an 8B model in bfloat16, an H200 computes up to 180 tokens while it reads the weights, and an H100 up to 260. So
# 256 rows decode in about the time of one, and rungs below differ only by attention and logits. Above, time is
# proportional to tokens, and a rung is at most half as large again as the previous one. 2048 tokens take 36 ms; a
# larger step saves no time and lengthens the gaps of other requests. (Calculated with 0.8 of the peak in products and
# 0.9 in reads.)
GPU = LadderDefault("a GPU", (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048), 256, 2048)
# A TPU's tiles have 16 rows of bfloat16, so it would compute 8 tokens as 16. 1024 tokens of an 8B model take 22 ms on
# one v6e and 26 ms on four v5e. The 32 GB of a v6e hold the weights and KV of 128 rows of 800 tokens. (Calculated with
# 0.7 of the peak; not measured, hence few rungs, powers of two.)
TPU = LadderDefault("a TPU", (16, 32, 64, 128, 256, 512, 1024), 128, 1024)

# The least size if every step has one size: while a step reads weights from memory, this many tokens take little
# longer than one.
_LEAST_TOKENS = {"cpu": 1}
_LEAST_TOKENS_ELSEWHERE = 128


@dataclasses.dataclass(frozen=True)
class LadderChoice:
  """The ladder of a server and its limits.

  Attributes:
    token_budgets: the budgets of its rungs.
    max_num_seqs: rows of the largest rungs; sequences that run at once.
    prefill_chunk: most prompt tokens of a step, before it grows to the edge of its rung.
    reason: the choice and its reason, a line for the server's log.
  """

  token_budgets: tuple[int, ...]
  max_num_seqs: int
  prefill_chunk: int
  reason: str

  @property
  def ladder(self) -> ShapeLadder:
    """The ladder of these budgets."""
    return ShapeLadder(self.token_budgets, self.max_num_seqs)


def choose_ladder(
  platform: str,
  *,
  leaves_out_padding: bool = False,
  one_size: bool = False,
  chunked: bool = True,
  token_budgets: tuple[int, ...] | None = None,
  max_num_seqs: int | None = None,
  prefill_chunk: int | None = None,
  all_rungs: bool = False,
) -> LadderChoice:
  """Chooses the ladder of a server. It keeps the user's values and adapts the rest to them.

  Args:
    platform: JAX's platform name: cpu, gpu (or cuda, rocm) or tpu.
    leaves_out_padding: the device's kernels compute only tokens in use.
    one_size: every step must have the same shape (deterministic kernels whose sums depend on the shape).
    chunked: a step has at most `prefill_chunk` prompt tokens; otherwise as many as the top rung holds.
    token_budgets, max_num_seqs, prefill_chunk: the user's values; None: not set.
    all_rungs: keeps rungs that no step needs and uses the finer ladder on a CPU, for measurements.

  Raises:
    ConfigError: the user's values contradict each other or the defaults of the rest.
  """
  default = _default_of(platform, leaves_out_padding, one_size)
  named = {"token_budgets": token_budgets, "max_num_seqs": max_num_seqs, "prefill_chunk": prefill_chunk}
  if token_budgets is None:
    token_budgets = PADDED.token_budgets if all_rungs and default is UNPADDED_CPU else default.token_budgets
  check_token_budgets(token_budgets)
  top = token_budgets[-1]
  rows = min(default.max_num_seqs, top) if max_num_seqs is None else max_num_seqs
  chunk = min(default.prefill_chunk, top) if prefill_chunk is None else prefill_chunk
  ShapeLadder(token_budgets, rows)
  check_prefill_chunk(chunk, top)
  kept = token_budgets if all_rungs else reachable_budgets(token_budgets, rows, chunk if chunked else top)
  unreachable = token_budgets[len(kept) :]
  if one_size:
    least = max(rows, _LEAST_TOKENS.get(platform, _LEAST_TOKENS_ELSEWHERE))
    kept = (next((tokens for tokens in kept if tokens >= least), kept[-1]),)
    chunk = min(chunk, kept[-1])
  chosen = ", ".join(name for name, value in named.items() if value is not None)
  why = [f"default of {default.of}" + (f"; set: {chosen}" if chosen else "")]
  if unreachable:
    why.append(f"left out, as no step needs it: {', '.join(map(str, unreachable))}")
  if one_size:
    why.append("one size for every step")
  budgets = ",".join(map(str, kept))
  reason = f"ladder: token_budgets={budgets} max_num_seqs={rows} prefill_chunk={chunk} ({'; '.join(why)})"
  return LadderChoice(kept, rows, chunk, reason)


def _default_of(platform: str, leaves_out_padding: bool, one_size: bool) -> LadderDefault:
  # If every step has one size, a single decode pays for all rows, so they are few on every device.
  if platform == "cpu":
    return UNPADDED_CPU if leaves_out_padding else PADDED
  if one_size:
    return PADDED
  return TPU if platform == "tpu" else GPU


def check_prefill_chunk(prefill_chunk: int, top: int) -> None:
  """Raises ConfigError unless the chunk is within the top token budget."""
  if prefill_chunk < 1:
    raise ConfigError(f"prefill_chunk={prefill_chunk} must be at least 1; set --prefill_chunk")
  if prefill_chunk > top:
    raise ConfigError(
      f"prefill_chunk={prefill_chunk} exceeds the top token budget {top}; "
      "lower --prefill_chunk or extend --token_budgets"
    )


def reachable_budgets(token_budgets: tuple[int, ...], max_num_seqs: int, most_prompt_tokens: int) -> tuple[int, ...]:
  """Returns the budgets that steps can need, with at most `most_prompt_tokens` and one token of each other row."""
  most = most_prompt_tokens + max_num_seqs - 1
  edges = (0, *token_budgets[:-1])
  return tuple(budget for budget, below in zip(token_budgets, edges, strict=True) if below < most)
