"""What --deterministic asks of a build: refusals, the ladder that keeps the promise, a trial. Changes no arithmetic.

The promise: a request has the same bits (log probabilities, and so tokens; with temperature, given a seed) alone, in
any batch, in any chunks, with prefixes from the cache and after preemption. Two things could break it:

  the shape of a step decides in which order a library adds: so there is one shape for every step, but where kernels
  make each sum in an order that only its row decides (api.ACROSS_SHAPES, packed matmuls that are told to:
  models/linear.py: WeightForm.ordered); there the ladder stays, and
  the sampler, which XLA compiles, has the shape of the largest step in each (programs.py);
  a prompt and a decode go through different kernels: so the attention sends both through one (Geometry.invariant).

`try_out` then holds the compiled programs to it on the device at hand, since libraries promise nothing about rows.
"""

from collections.abc import Sequence
import random
import struct
from typing import Any

from engine.batch import Admission, Batch, Runner, StepResult
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.shapes import ShapeLadder, StepShape
from pallas_kernels.paged_attention import api

# A sum of two parts is the same in either order; of more, it depends on where in the buffer a value lies.
_MOST_DEVICES = 2
_TRIED_TOKENS = 8


def check(devices: Sequence[Any], attention: Sequence[str]) -> None:
  """Refuses what cannot keep the promise, before anything is loaded.

  Args:
    devices: those of one engine.
    attention: candidates, see api.candidates.

  Raises:
    ConfigError: with the value, the limit and the remedy.
  """
  if len(devices) > _MOST_DEVICES:
    raise ConfigError(
      f"deterministic: over {len(devices)} devices a sum is made in an order that depends on its place in the batch; "
      f"at most {_MOST_DEVICES} can be guaranteed; lower --num_devices"
    )
  for name in attention:
    if name not in api.WITHIN_A_SHAPE:
      raise ConfigError(
        f"deterministic: attention={name} may add in different orders for a prompt and a decode; those that do not are "
        f"{', '.join(api.WITHIN_A_SHAPE)}; set --attention=reference"
      )


def needs_one_size(attention: str, matmul: str) -> bool:
  """Whether every step must have the same shape: a kernel's sums depend on more than their row."""
  return not (attention in api.ACROSS_SHAPES and matmul == "packed")


def cost(ladder: ShapeLadder) -> str:
  """What the mode costs in shapes, as one line for whoever starts the server."""
  shape, *larger = ladder.rungs()
  if larger:
    return (
      f"deterministic: each kernel's sums depend on their row alone, so the {len(larger) + 1} step sizes stay; only "
      f"the sampler is padded, to {ladder.max_num_seqs} rows in every step"
    )
  tokens, rows = shape.tokens, shape.rows
  return (
    f"deterministic: every step is padded to {tokens} tokens and {rows} rows, a decode of one row too; prompts go in "
    f"chunks of at most {tokens}; a single --token_budgets of at least --max_num_seqs chooses another size"
  )


def try_out(runner: Runner, config: EngineConfig, ladder: ShapeLadder) -> dict[int, bytes]:
  """Runs a prompt token by token, at once, and behind neighbours on every rung, and compares bits.

  Leaves nothing behind but what the next admission writes over. The pool must be unused.

  Returns:
    Position -> bits of the log probabilities there, which are the same whichever way.

  Raises:
    ConfigError: they are not.
  """
  trial = _Trial(runner, config)
  shapes = ladder.rungs()
  alone = trial.run(shapes[0], 1, 0)
  ways = [(shapes[-1], min(trial.num_tokens, shapes[-1].tokens), 0)]
  for shape in shapes:
    neighbours = min(shape.rows - 1, shape.tokens // 2) if trial.has_neighbours else 0
    ways.append((shape, min(trial.num_tokens, shape.tokens - neighbours), neighbours))
  for shape, chunk, neighbours in ways:
    found = trial.run(shape, chunk, neighbours)
    wrong = [position for position in sorted(found) if found[position] != alone[position]]
    if wrong:
      raise ConfigError(
        f"deterministic: on this device position {wrong[0]} of a trial prompt has other bits in chunks of {chunk} "
        f"beside {neighbours} rows ({shape.tokens} tokens a step) than alone; set other --attention, --matmul or "
        "--token_budgets, or serve without --deterministic"
      )
  return alone


class _Trial:
  """A prompt whose log probabilities are read at as many positions as a step has logit rows for."""

  def __init__(self, runner: Runner, config: EngineConfig):
    self._runner, self._config = runner, config
    self.num_tokens = min(_TRIED_TOKENS, config.max_model_len - 1, (config.num_blocks - 1) * config.block_size)
    self.num_tokens = max(1, self.num_tokens)
    rng = random.Random(0)
    self._tokens = [rng.randrange(config.vocab_size) for _ in range(self.num_tokens + 1)]
    self._num_blocks = -(-self.num_tokens // config.block_size)
    self.has_neighbours = config.num_blocks > self._num_blocks

  def run(self, shape: StepShape, chunk: int, neighbours: int) -> dict[int, bytes]:
    """Position -> bits; `neighbours` rows of one token come before the prompt's in every step."""
    found: dict[int, bytes] = {}
    for start in range(0, self.num_tokens, chunk):
      count = min(chunk, self.num_tokens - start)
      num_logits = min(count, shape.logits - neighbours)
      result = self._runner.launch(self._batch(shape, start, count, num_logits, neighbours)).result()
      found |= self._bits(result, neighbours, start + count - num_logits)
    return found

  def _bits(self, result: StepResult, row: int, first: int) -> dict[int, bytes]:
    return {
      position: b"".join(
        struct.pack("<if", token, value) for token, value in ((entry.token_id, entry.logprob), *entry.top)
      )
      for position, entry in enumerate(result.logprobs[row], first)
    }

  def _batch(self, shape: StepShape, start: int, count: int, num_logits: int, neighbours: int) -> Batch:
    plain = SamplingParams(1, temperature=0.0)
    shown = SamplingParams(1, temperature=0.0, prompt_logprobs=min(MAX_LOGPROBS, self._config.vocab_size))
    slot, blocks = neighbours, tuple(range(1, self._num_blocks + 1))
    # The neighbours' keys all lie in one block: what becomes of them is of no interest.
    admissions = [Admission(row, (row,), 1, (self._num_blocks + 1,), plain, 0) for row in range(neighbours)]
    if start == 0:
      admissions.append(Admission(slot, self._tokens, len(self._tokens), blocks, shown, 0))
    numbers = tuple(range(neighbours + 1))
    return Batch(
      step=-1,
      shape=shape,
      request_ids=tuple(map(str, numbers)),
      slots=numbers,
      starts=(0,) * neighbours + (start,),
      counts=(1,) * neighbours + (count,),
      num_logits=(1,) * neighbours + (num_logits,),
      samples=(False,) * (neighbours + 1),
      token_ids=tuple((row % self._config.vocab_size,) for row in range(neighbours))
      + (tuple(self._tokens[start : start + count]),),
      admissions=tuple(admissions),
    )
