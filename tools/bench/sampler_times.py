"""Times the sampler alone, by the rows' parameters; for tools/bench/engine.py. Knows only the model's vocabulary."""

from collections.abc import Sequence
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.batch import Admission, Batch
from engine.device import sampler
from engine.device.model_input import unpack
from engine.device.step_packer import Packer
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from pallas_kernels import native
from tools.measure import best_and_median

_PARAMS = {
  "greedy": SamplingParams(temperature=0.0),
  "temperature": SamplingParams(),
  "top_k, top_p": SamplingParams(top_k=50, top_p=0.9),
  "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1),
  "logprobs": SamplingParams(temperature=0.0, logprobs=20),
}
_SAMPLINGS = 8  # samplings in one call, one after the other, so that the call itself does not count


def _packed(params: SamplingParams, num_rows: int) -> tuple[np.ndarray, Any]:
  """Returns a decode step's array and its layout, with the same parameters for all rows."""
  packer = Packer(num_rows, 1, 16, ())
  for slot in range(num_rows):
    packer.admit(Admission(slot, (1, 2), 1, (1,), params, slot))
  slots, ones = tuple(range(num_rows)), (1,) * num_rows
  layout = packer.layout(StepShape(num_rows, num_rows, num_rows))
  names = tuple(map(str, slots))
  batch = Batch(0, layout.shape, names, slots, ones, ones, ones, (True,) * num_rows, ((),) * num_rows)
  return packer.pack(batch, layout)[0], layout


def sampler_times(vocab_size: int, batches: Sequence[int], seconds: float) -> list[dict[str, Any]]:
  """Returns the seconds of one sampling of all rows (`s`), for each number of rows and each kind of request.

  Args:
    seconds: duration for each.
  """
  small = jax.default_backend() == "cpu"
  kernels = [native.choose_implementation(name, jax.default_backend()) for name in ("argmax", "sampling", "adjust")]
  found = []
  for num_rows in batches:
    _, layout = _packed(_PARAMS["greedy"], num_rows)

    def repeat(logits, packed, state, layout=layout):
      rows = unpack(layout, packed).sampling

      def sample(logits):
        return sampler.sample(logits, rows, state, not small, None, *kernels)

      def step(_, carry):
        logits, _ = carry
        found = sample(logits)
        return logits.at[:, 0].add(found.tokens.astype(jnp.float32) * 1e-9), found

      nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(sample, logits))
      # A loop, not unrolled samplings: a GPU's compiler would take minutes.
      return jax.lax.fori_loop(0, _SAMPLINGS, step, (logits, nothing))

    logits = jax.random.normal(jax.random.key(num_rows), (num_rows, vocab_size)) * 4.0
    lines, words = (num_rows + 1, vocab_size), (num_rows + 1, -(-vocab_size // 32))
    state = sampler.SlotState(jnp.zeros(lines, jnp.int32), jnp.zeros(lines, jnp.float32), jnp.zeros(words, jnp.int32))
    packed = jnp.zeros(layout.size, jnp.int32)
    options = {"xla_backend_optimization_level": 1} if small else None
    program = jax.jit(repeat).lower(logits, packed, state).compile(options)
    for name, params in _PARAMS.items():
      packed = jnp.asarray(_packed(params, num_rows)[0])

      def call(program=program, logits=logits, packed=packed, state=state):
        jax.block_until_ready(program(logits, packed, state))

      took = best_and_median(call, seconds)[1] / 1e3 / _SAMPLINGS
      found.append({"batch": num_rows, "asked": name, "s": took})
      print(f"sampler, {num_rows} rows, {name}: {1e3 * took:.3f} ms", file=sys.stderr, flush=True)
  return found
