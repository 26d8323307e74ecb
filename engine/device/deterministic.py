"""Checks and trials for --deterministic. May not change arithmetic.

With --deterministic, a request has the same bits alone, in any batch, in any chunks, with cached prefixes and after
preemption. The bits are those of log probabilities, and so of tokens (with temperature, given a seed). Three things
could change them:

  A library may sum in an order that depends on the step's shape. So all steps have one shape, unless every kernel's
  sums depend only on their row (api.ACROSS_SHAPES, and packed matmuls with WeightForm.ordered). Then the ladder stays,
  and only the sampler, which XLA compiles, has the shape of the largest step in every step (programs.py).

  An all-reduce may order the sum of an element by its place in the array. So devices that share a layer gather each
  other's parts and add them in their own order (models.layers.sum_over_devices).

  A prompt and a decode could use different kernels. So attention sends both through one (Geometry.invariant).

`try_determinism` then checks the compiled programs on the device, because libraries do not document the order of sums.
"""

from collections.abc import Sequence
import random
import struct

from engine.batch import Admission, Batch, Runner, StepResult
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.shapes import ShapeLadder, StepShape
from pallas_kernels.paged_attention import api

_TRIED_TOKENS = 8


def check_determinism_support(attention: Sequence[str]) -> None:
  """Rejects kernels that cannot be deterministic, before loading.

  Args:
    attention: candidates, see api.candidates.

  Raises:
    ConfigError: with the value, the limit and the remedy.
  """
  for name in attention:
    if name not in api.WITHIN_A_SHAPE:
      raise ConfigError(
        f"deterministic: attention={name} may sum in different orders for a prompt and a decode; supported are "
        f"{', '.join(api.WITHIN_A_SHAPE)}; set --attention=reference"
      )


def needs_one_size(attention: str, matmul: str) -> bool:
  """Returns whether every step must have the same shape, because a kernel's sums depend on more than their row."""
  return not (attention in api.ACROSS_SHAPES and matmul == "packed")


def describe_cost(ladder: ShapeLadder) -> str:
  """Returns a line for the server's log on the padding that determinism costs."""
  shape, *larger = ladder.rungs()
  if larger:
    return (
      f"deterministic: every kernel's sums depend on their row alone, so all {len(larger) + 1} step sizes stay; only "
      f"the sampler is padded, to {ladder.max_num_seqs} rows in every step"
    )
  tokens, rows = shape.tokens, shape.rows
  return (
    f"deterministic: every step is padded to {tokens} tokens and {rows} rows, a decode of one row too; prompts go in "
    f"chunks of at most {tokens}; a single --token_budgets of at least --max_num_seqs chooses another size"
  )


def try_determinism(runner: Runner, config: EngineConfig, ladder: ShapeLadder) -> dict[int, bytes]:
  """Runs a prompt token by token, whole, and after neighbors on every rung, and compares bits.

  It needs an unused pool. The next admission overwrites all that it leaves.

  Returns:
    Position -> bits of the log probabilities there.

  Raises:
    ConfigError: the bits differ.
  """
  trial = _Trial(runner, config)
  shapes = ladder.rungs()
  alone = trial.run(shapes[0], 1, 0)
  ways = [(shapes[-1], min(trial.num_tokens, shapes[-1].tokens), 0)]
  for shape in shapes:
    neighbors = min(shape.rows - 1, shape.tokens // 2) if trial.has_neighbors else 0
    ways.append((shape, min(trial.num_tokens, shape.tokens - neighbors), neighbors))
  for shape, chunk, neighbors in ways:
    found = trial.run(shape, chunk, neighbors)
    wrong = [position for position in sorted(found) if found[position] != alone[position]]
    if wrong:
      raise ConfigError(
        f"deterministic: on this device position {wrong[0]} of a trial prompt has other bits in chunks of {chunk} "
        f"beside {neighbors} rows ({shape.tokens} tokens a step) than alone; set another --attention, --matmul or "
        "--token_budgets, or serve without --deterministic"
      )
  return alone


class _Trial:
  """A prompt with log probabilities at as many positions as a step has logit rows."""

  def __init__(self, runner: Runner, config: EngineConfig):
    self._runner, self._config = runner, config
    self.num_tokens = min(_TRIED_TOKENS, config.max_model_len - 1, (config.num_blocks - 1) * config.block_size)
    self.num_tokens = max(1, self.num_tokens)
    rng = random.Random(0)
    self._tokens = [rng.randrange(config.vocab_size) for _ in range(self.num_tokens + 1)]
    self._num_blocks = -(-self.num_tokens // config.block_size)
    self.has_neighbors = config.num_blocks > self._num_blocks

  def run(self, shape: StepShape, chunk: int, neighbors: int) -> dict[int, bytes]:
    """Returns position -> bits, with `neighbors` rows of one token before the prompt's row in every step."""
    found: dict[int, bytes] = {}
    for start in range(0, self.num_tokens, chunk):
      count = min(chunk, self.num_tokens - start)
      num_logits = min(count, shape.logits - neighbors)
      result = self._runner.launch(self._batch(shape, start, count, num_logits, neighbors)).result()
      found |= self._bits(result, neighbors, start + count - num_logits)
    return found

  def _bits(self, result: StepResult, row: int, first: int) -> dict[int, bytes]:
    return {
      position: b"".join(
        struct.pack("<if", token, value) for token, value in ((entry.token_id, entry.logprob), *entry.top)
      )
      for position, entry in enumerate(result.logprobs[row], first)
    }

  def _batch(self, shape: StepShape, start: int, count: int, num_logits: int, neighbors: int) -> Batch:
    plain = SamplingParams(1, temperature=0.0)
    shown = SamplingParams(1, temperature=0.0, prompt_logprobs=min(MAX_LOGPROBS, self._config.vocab_size))
    slot, blocks = neighbors, tuple(range(1, self._num_blocks + 1))
    # All keys of the neighbors lie in one block, because their results do not matter.
    admissions = [Admission(row, (row,), 1, (self._num_blocks + 1,), plain, 0) for row in range(neighbors)]
    if start == 0:
      admissions.append(Admission(slot, self._tokens, len(self._tokens), blocks, shown, 0))
    numbers = tuple(range(neighbors + 1))
    return Batch(
      step=-1,
      shape=shape,
      request_ids=tuple(map(str, numbers)),
      slots=numbers,
      starts=(0,) * neighbors + (start,),
      counts=(1,) * neighbors + (count,),
      num_logits=(1,) * neighbors + (num_logits,),
      samples=(False,) * (neighbors + 1),
      token_ids=tuple((row % self._config.vocab_size,) for row in range(neighbors))
      + (tuple(self._tokens[start : start + count]),),
      admissions=tuple(admissions),
    )
