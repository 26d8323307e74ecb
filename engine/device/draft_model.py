"""A draft model or an EAGLE-3 head beside the model that is served: its weights and KV on the device.

May call only compiled executables. Its programs run after each step, in order of launch. Nothing that it computes
changes an output: it proposes tokens, and the served model verifies them. So KV that it lacks, such as that of blocks
from a host pool, costs acceptance only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from engine.batch import Batch
from engine.device import kv_cache
from engine.device.draft_programs import NO_TOKENS_KEY, fill_key, propose_key
from engine.device.programs import ProgramSpec, layer_key
from engine.device.step_call import call_unchecked
from engine.shapes import ShapeLadder, StepShape


class LaunchedDraft(NamedTuple):
  """What the draft model does after a step.

  Attributes:
    found: int32[proposals, S], or a marker that exists when the program is done.
    has_proposals: `found` are proposals.
    held: arrays that the program may still read.
  """

  found: jax.Array
  has_proposals: bool
  held: Any

  def wait_for_proposals(self, samples: Sequence[bool], bad_rows: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Waits for the program, which proposes; returns the proposals of each row that samples and is not bad."""
    columns = np.asarray(self.found)
    by_row = columns.T.tolist()
    return {row: tuple(by_row[row]) for row, wants in enumerate(samples) if wants and row not in bad_rows}


class DraftModel:
  """Owns the arrays and executables of a draft model. Attributes: kv: its buffers, by layer."""

  def __init__(
    self,
    spec: ProgramSpec,
    params: tuple[jax.Array, ...],
    ladder: ShapeLadder,
    made: Mapping[StepShape | str, jax.stages.Compiled],
  ):
    """Allocates the KV buffers.

    Args:
      spec: of the draft model.
      params: its leaves, as in spec.params.
      ladder: the ladder of the steps.
      made: the executables of `draft_programs.draft_programs` or `eagle_programs.head_programs`.
    """
    self._params = params
    self._fill = {shape: call_unchecked(made[fill_key(shape)]) for shape in ladder.rungs()}
    self._propose = {shape: call_unchecked(made[propose_key(shape)]) for shape in ladder.rungs()}
    self.kv: kv_cache.Buffers = tuple(made[layer_key(buffer)]() for buffer in spec.kv)
    self._make_no_tokens = made[NO_TOKENS_KEY]
    self._last_tokens: jax.Array | None = None  # before the next step; None after a step that it left out

  def launch(
    self, batch: Batch, last_tokens: jax.Array, output: jax.Array, packed: Any, states: Sequence[jax.Array] = ()
  ) -> LaunchedDraft | None:
    """Starts the program that follows a step, and returns at once; None if `batch` wants nothing of the draft model.

    Args:
      batch: the step.
      last_tokens, output: results of programs.step.
      packed: its packed array, which must stay as it is until the program is done.
      states: for a head, those of the step's layers, one array.
    """
    if not (batch.num_proposals or batch.fills_draft):
      self._last_tokens = None
      return None
    if self._last_tokens is None:
      self._last_tokens = self._make_no_tokens()
    execute = (self._propose if batch.num_proposals else self._fill)[batch.shape]
    held = self.kv, self._last_tokens
    arguments = self._last_tokens, last_tokens, output, packed, *states
    *kv, self._last_tokens, found = execute(*self._params, *self.kv, *arguments)
    self.kv = tuple(kv)
    return LaunchedDraft(found, bool(batch.num_proposals), held)
