"""The only place that decides a shape: the ladder of a server, and the rung of a step. Pure Python.

Token budget: the tokens that a step is padded to. Rung: one StepShape, compiled once. Ladder: all rungs of a server,
one for each of its token budgets. What is not on the ladder is an error, never a compile.
"""

import bisect
import dataclasses

from engine.errors import ConfigError, ShapeNotOnLadder


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class StepShape:
  """A rung: a compiled step. Static in programs, key of executables, unit of cost in the simulator.

  Attributes:
    tokens: T, the token budget.
    rows: S, how many sequences fit.
    logits: L, how many logit rows: positions whose next token is drawn or reported on.
  """

  tokens: int
  rows: int
  logits: int


class ShapeLadder:
  """One rung for each token budget; rows and logit rows follow from the budget. No product of ladders.

  Each rung has as many rows, and as many logit rows, as it has tokens, up to `max_num_seqs`. A row has at least one
  token, and a token at most one logit row: so a step of at most `max_num_seqs` rows and `max_logits` logit rows fits
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
        "decodes alone would not fit; lower --max_num_seqs or extend --token_budgets"
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


def check_token_budgets(token_budgets: tuple[int, ...]) -> None:
  """Raises ConfigError unless they increase strictly, from 2 or more."""
  if not token_budgets or list(token_budgets) != sorted(set(token_budgets)) or token_budgets[0] < 2:
    raise ConfigError(
      f"token budgets {token_budgets} must be strictly increasing and start at 2 or more; "
      "set --token_budgets, for example 8,16,32,64,128,256,384,512"
    )


# --- The ladder of a server -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LadderDefault:
  """The ladder of a server whose user chose nothing.

  Attributes:
    of: whose it is, as words of a sentence.
    token_budgets, max_num_seqs, prefill_chunk: as in LadderChoice.
  """

  of: str
  token_budgets: tuple[int, ...]
  max_num_seqs: int
  prefill_chunk: int


# Small steps, in which a laptop's CPU computes all padding.
PADDED = LadderDefault("a device that computes padding", (8, 16, 32, 64, 128, 256, 384, 512), 64, 512)
# A CPU's own kernels leave padding out, so a rung may be wide: steps of 1, 9, 17 and 40 rows of a 125M model take as
# long as with twice as many rungs, and a start has fewer programs to compile. From 32 rows on a step takes as long as
# it has rows: a larger chunk would only lengthen the gaps that others see.
UNPADDED_CPU = LadderDefault("a CPU whose kernels leave padding out", (8, 32, 64, 256, 512), 64, 192)
# An 8B model in bfloat16: up to 180 tokens are computed on an H200 while its weights are read, and up to 260 on an
# H100. So 256 rows decode in about the time of one, and rungs below differ by attention and logits alone. Above, time
# goes with tokens, and a rung is at most half as large again as the one below. 2048 tokens take 36 ms: a larger step
# saves no time, and is a longer gap between others' tokens. (Calculated, from 0.8 of the peak in products and 0.9 in
# reads.)
GPU = LadderDefault("a GPU", (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048), 256, 2048)
# A TPU's tiles have 16 rows of bfloat16, so 8 tokens would be computed as 16. 1024 tokens of an 8B model take one v6e
# 22 ms and four v5e 26, and beside its weights the 32 GB of a v6e hold KV of 128 rows of 800 tokens. (Calculated,
# from 0.7 of the peak; no TPU was measured, hence few rungs, powers of two.)
TPU = LadderDefault("a TPU", (16, 32, 64, 128, 256, 512, 1024), 128, 1024)

# Where every step has one size, it is at least so large: where weights are read from far memory, this many tokens
# take little longer than one.
_LEAST_TOKENS = {"cpu": 1}
_LEAST_TOKENS_ELSEWHERE = 128


@dataclasses.dataclass(frozen=True)
class LadderChoice:
  """The ladder of a server and what goes with it.

  Attributes:
    token_budgets: of its rungs.
    max_num_seqs: rows of the largest rungs: sequences that run at once.
    prefill_chunk: most prompt tokens of a step, before it grows to the edge of its rung.
    reason: what was chosen and why, as one line for whoever starts the server.
  """

  token_budgets: tuple[int, ...]
  max_num_seqs: int
  prefill_chunk: int
  reason: str

  @property
  def ladder(self) -> ShapeLadder:
    """Its rungs."""
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
  """The ladder of a server. What the user chose is kept, also where it equals a default; the rest goes with it.

  Args:
    platform: of the device, as JAX calls it: cpu, gpu (or cuda, rocm) or tpu.
    leaves_out_padding: the device's kernels compute the tokens in use alone.
    one_size: every step must have the same shape (deterministic, where a kernel's sums depend on the shape).
    chunked: a step has at most `prefill_chunk` prompt tokens; else as many as the top rung holds.
    token_budgets, max_num_seqs, prefill_chunk: what the user chose; None: nobody chose.
    all_rungs: keep rungs that no step can need, and of a CPU's kernels take the finer ladder: to measure them.

  Raises:
    ConfigError: what was chosen does not fit together, or not the default of the rest.
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
  # Where every step has one size, a lone decode pays for all rows: few of them then, on whatever device.
  if platform == "cpu":
    return UNPADDED_CPU if leaves_out_padding else PADDED
  if one_size:
    return PADDED
  return TPU if platform == "tpu" else GPU


def check_prefill_chunk(prefill_chunk: int, top: int) -> None:
  """Raises ConfigError unless it is within the top token budget."""
  if prefill_chunk < 1:
    raise ConfigError(f"prefill_chunk={prefill_chunk} must be at least 1; set --prefill_chunk")
  if prefill_chunk > top:
    raise ConfigError(
      f"prefill_chunk={prefill_chunk} exceeds the top token budget {top}; "
      "lower --prefill_chunk or extend --token_budgets"
    )


def reachable_budgets(token_budgets: tuple[int, ...], max_num_seqs: int, most_prompt_tokens: int) -> tuple[int, ...]:
  """Those that a step can be padded to: it has so many tokens of prompts at most, and one of each other row."""
  most = most_prompt_tokens + max_num_seqs - 1
  edges = (0, *token_budgets[:-1])
  return tuple(budget for budget, below in zip(token_budgets, edges, strict=True) if below < most)
