"""The batching modes: when waiting requests may join, and how much of a prompt a step takes. May decide nothing else.

All modes share the Scheduler, executables, pages and sampler, so that users can compare them.
Every step is selective batching (Orca, OSDI 2022): linear layers see packed tokens, attention sees requests.

  static       a wave fills all places, is padded to its widest and longest, and runs until its last request ends; KV
               is reserved for prompt and max_tokens (FasterTransformer)
  dynamic      the same, but a wave waits up to a window for more requests (Triton's dynamic batching)
  continuous   requests join and leave at every step, prompts in one piece (Orca, early vLLM)
  chunked      the same, prompts in chunks and into the padding (Sarathi-Serve, OSDI 2024; vLLM V1): the default.
               If the device skips padding, chunks do not grow into it. A prompt of several steps then has equal
               chunks: a short last one would cost a step too, and full ones would lengthen others' gaps. Where no
               request runs, there are no gaps, and prompts may fill the largest rung
  disaggregated  chunked, but prompts and decodes run on different devices (extensions/disaggregated)
"""

from engine.config import EngineConfig
from engine.shapes import reachable_budgets

_ALL = 1 << 30


class Batching:
  """The hooks of a batching mode. This base class lets requests join and leave at every step.

  Attributes:
    reserves: a request takes blocks for its prompt and max_tokens when it joins, and is never preempted.
    chunk_limit, first_limit: see prompt_limit; `chunk_limit` also cuts long prompts.
    whole_prompts: a prompt joins only if it fits the step whole, unless the step has no other prompt.
    fills_padding: prompt tokens may use the padding of a step.
  """

  reserves = False

  def __init__(self, chunk_limit: int, whole_prompts: bool, fills_padding: bool, first_limit: int = 0):
    self.chunk_limit = chunk_limit
    self.first_limit = first_limit or chunk_limit
    self.whole_prompts = whole_prompts
    self.fills_padding = fills_padding

  def places(self, num_running: int, num_waiting: int, oldest_arrival: float, now: float) -> int:
    """Returns how many waiting requests may join now. Called before the admissions of a step if any wait."""
    return _ALL

  def prompt_limit(self, num_running: int) -> int:
    """Returns the most prompt tokens of a step before which `num_running` requests run."""
    return self.chunk_limit if num_running else self.first_limit

  def row_limit(self) -> int:
    """Returns the most prompt tokens of one row in a step."""
    return _ALL

  def piece(self, wanted: int, left: int) -> int:
    """Returns how many of a row's `wanted` prompt tokens go into a step with `left` free tokens."""
    if wanted <= left or self.fills_padding or self.whole_prompts:
      return min(wanted, left)
    num_steps = -(-wanted // self.chunk_limit)
    return min(-(-wanted // num_steps), left)

  def step_tokens(self, num_tokens: int, longest_row: int, num_running: int) -> int:
    """Returns the padded size of a step of `num_tokens`, before the ladder rounds it up. Called once a step."""
    return num_tokens

  def opens_at(self, num_running: int, num_waiting: int, oldest_arrival: float) -> float | None:
    """Returns the time at which waiting requests may join without another event; None if time has no effect."""
    return None

  def state(self) -> list[int]:
    """Returns the mode's state for a trace; make_batching() restores it."""
    return []


class Waves(Batching):
  """Request-level batching: one batch at a time, padded, run to completion.

  Every row pays for the longest prompt of the wave. Rows take at most `_row_limit` tokens a step, so that the padded
  step fits the ladder, and a step costs width * longest row.
  """

  reserves = True

  def __init__(self, max_tokens: int, max_width: int, window_s: float, state: list[int]):
    super().__init__(max_tokens, whole_prompts=False, fills_padding=False)
    self._max_width, self._window_s = max_width, window_s
    self._width, self._row_limit = state or (0, 0)  # rows of the wave at its start, and tokens a row in a step

  def places(self, num_running: int, num_waiting: int, oldest_arrival: float, now: float) -> int:
    if num_running or (num_waiting < self._max_width and now < oldest_arrival + self._window_s):
      return 0
    self._width, self._row_limit = 0, self.chunk_limit // min(num_waiting, self._max_width)
    return self._max_width

  def row_limit(self) -> int:
    return self._row_limit

  def piece(self, wanted: int, left: int) -> int:
    return min(wanted, left)

  def step_tokens(self, num_tokens: int, longest_row: int, num_running: int) -> int:
    self._width = self._width or num_running
    return max(num_tokens, self._width * longest_row)

  def opens_at(self, num_running: int, num_waiting: int, oldest_arrival: float) -> float | None:
    return oldest_arrival + self._window_s if num_waiting and not num_running else None

  def state(self) -> list[int]:
    return [self._width, self._row_limit]


def make_batching(config: EngineConfig, state: list[int] | None = None) -> Batching:
  """Makes the batching mode of `config.batching`, with `state`; raises ConfigError."""
  most = config.token_budgets[-1]
  match config.batching:
    case "chunked" | "disaggregated":
      chunk = first = config.prefill_chunk
      if not config.computes_padding:
        first = reachable_budgets(config.token_budgets, config.max_num_seqs, chunk)[-1]
      return Batching(chunk, whole_prompts=False, fills_padding=config.computes_padding, first_limit=first)
    case "continuous":
      return Batching(most, whole_prompts=True, fills_padding=False)
    case "dynamic":
      width = min(config.dynamic_max_batch, config.max_num_seqs)
      return Waves(most, width, config.dynamic_window_s, state or [])
    case "static":
      return Waves(most, config.max_num_seqs, 0.0, state or [])
  raise AssertionError(f"EngineConfig accepted batching={config.batching!r}")


def takes_chunks(batching: str) -> bool:
  """Returns whether `prefill_chunk` limits the prompt tokens of a step."""
  return batching in ("chunked", "disaggregated")
