"""Builds a whole decode step of Llama-3-8B with random weights, as the engine compiles it; serves no request."""

import dataclasses

import jax
import jax.numpy as jnp

from engine.batch import Admission, Batch
from engine.device import programs
from engine.device.step_packer import Packer
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from tools.check_device.programs import case, make_spec
from tools.gpu import timing
from tools.gpu.cases import Wrong
from tools.gpu.protocol import Prepared

_SPREAD = 0.02  # standard deviation of the weights


def prepare(rows: int, context: int, setting) -> Prepared:
  """Prepares a step in which `rows` sequences of `context` tokens get one more each. `setting`: jobs.Setting."""
  attention = "reference" if setting.tiny else "gpu"  # the interpreter is not part of the engine's programs
  sizes = dataclasses.replace(
    case("tiny" if setting.tiny else "llama3-8b"), pool_tokens=rows * (context + 128), max_num_seqs=max(2, rows)
  )
  spec = make_spec(sizes, [setting.device], attention, 1 if setting.tiny else sizes.model.num_layers)
  shape = StepShape(sizes.max_num_seqs, sizes.max_num_seqs, sizes.max_num_seqs)

  def run(compiled):
    params = tuple(random_weight(leaf.shape, leaf.dtype, jax.random.key(i)) for i, leaf in enumerate(spec.params))
    carry = spec.kv, spec.last_tokens, spec.slot_state
    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), carry)
    packed = jax.device_put(_packed(spec, shape, rows, context), setting.device)
    outputs = []

    def program(carry):
      kv, last, state, output = compiled(params, *carry, packed)
      outputs[:] = [output]
      return kv, last, state

    _, found = timing.measure(program, carry, (), 1, setting.effort)
    if bool((outputs[0][0][1, :rows] != 0).any()):
      raise Wrong("the step's logits hold NaN or Inf")
    embed = 0 if sizes.model.tie_embeddings else sizes.model.vocab_size * sizes.model.model_dim
    weights = sum(leaf.size for leaf in spec.params) - embed
    cached = rows * context * sizes.model.num_kv_heads * 2 * sizes.model.head_dim * spec.model.num_layers
    return found | {"bytes": 2 * (weights + cached), "times": 1}

  def compile_it():
    return programs.step_program(spec, shape).compile()

  return Prepared(compile_it, lambda compiled: {} if setting.mode == "compile" else run(compiled))


def random_weight(shape: tuple[int, ...], dtype: jnp.dtype, key: jax.Array) -> jax.Array:
  """Returns a random matrix, or the ones of a norm."""
  if len(shape) == 1:
    return jnp.ones(shape, dtype)
  return _random(shape, dtype, key)


@jax.jit(static_argnums=(0, 1))
def _random(shape, dtype, key):
  return jax.random.normal(key, shape, dtype) * jnp.asarray(_SPREAD, dtype)


def _packed(spec: programs.ProgramSpec, shape: StepShape, rows: int, context: int):
  """Returns the step's array: each row's blocks are contiguous, the newest token is on the device."""
  packer = Packer(spec.num_slots, spec.table_width, spec.block_size, (0,) * spec.num_eos)
  blocks = -(-context // spec.block_size)
  for slot in range(rows):
    ids = tuple(range(1 + slot * blocks, 1 + (slot + 1) * blocks))
    packer.admit(Admission(slot, [0] * context, context, ids, SamplingParams(temperature=0.0), seed=slot))
  batch = Batch(
    step=0,
    shape=shape,
    request_ids=tuple(map(str, range(rows))),
    slots=tuple(range(rows)),
    starts=(context - 1,) * rows,
    counts=(1,) * rows,
    num_logits=(1,) * rows,
    samples=(True,) * rows,
    token_ids=((),) * rows,
  )
  return packer.pack(batch, spec.layout(shape))[0]
