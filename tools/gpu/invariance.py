"""Checks --deterministic on a GPU: one request in many batches, through the engine, bit for bit.

Weights are random, with Llama-3-8B's shapes in few layers: differences arise within a layer.
"""

import dataclasses
from typing import Any

import jax

from engine.config import EngineConfig
from engine.device import deterministic, programs
from engine.device.runner import Making, ModelRunner
from engine.errors import ConfigError
from engine.shapes import choose_ladder
from tools.bench import batch_invariance
from tools.check_device.programs import case, make_spec
from tools.gpu.cases import Wrong
from tools.gpu.protocol import Prepared
from tools.gpu.step import random_weight

_LAYERS = 4
_BUDGETS = (8, 32, 128, 512)  # one of which is tested
_TINY_WAYS = 3


def prepare(setting) -> Prepared:
  """Compiles the --deterministic step; runs the trial, and every variant. `setting`: jobs.Setting."""
  attention = "reference" if setting.tiny else "gpu"  # the interpreter is not part of the engine's programs
  sizes = dataclasses.replace(
    case("tiny" if setting.tiny else "llama3-8b"), max_model_len=512, pool_tokens=8192, max_num_seqs=16
  )
  layers = 1 if setting.tiny else _LAYERS
  spec = make_spec(sizes, [setting.device], attention, layers, deterministic=True)
  platform = "cpu" if setting.tiny else "gpu"
  choice = choose_ladder(
    platform,
    one_size=deterministic.needs_one_size(attention, "xla"),
    token_budgets=_BUDGETS,
    max_num_seqs=sizes.max_num_seqs,
  )
  budgets, ladder = choice.token_budgets, choice.ladder

  def compile_it():
    if setting.mode == "compile":
      return programs.step_program(spec, ladder.rungs()[-1]).compile()
    weights = tuple(random_weight(leaf.shape, leaf.dtype, jax.random.key(i)) for i, leaf in enumerate(spec.params))
    with Making(programs.all_programs(spec, ladder.rungs())) as making:
      return ModelRunner(spec, weights, ladder, (0,), making.wait(lambda *_: None))

  def run(made) -> dict[str, Any]:
    if setting.mode == "compile":
      return {}
    config = EngineConfig(
      vocab_size=sizes.model.vocab_size,
      max_model_len=sizes.max_model_len,
      num_blocks=sizes.pool_tokens // spec.block_size - 1,
      block_size=spec.block_size,
      token_budgets=budgets,
      max_num_seqs=sizes.max_num_seqs,
      prefill_chunk=budgets[-1],
    )
    try:
      deterministic.try_determinism(made, config, ladder)
    except ConfigError as error:
      raise Wrong(str(error)) from error
    ways = batch_invariance.ways(config)[: _TINY_WAYS if setting.tiny else None]
    preemptions = 0
    for name, subject in batch_invariance.SUBJECTS.items():
      alone = batch_invariance.serve(made, config, subject).bits
      for way in ways:
        served = batch_invariance.serve(made, config, subject, **way)
        preemptions += served.stats.num_preemptions
        if served.bits != alone:
          raise Wrong(f"the {name} request has other bits served as {way} than alone")
    num_ways = len(ways) * len(batch_invariance.SUBJECTS)
    return {"ways": num_ways, "preemptions": preemptions, "tokens_a_step": budgets[-1]}

  return Prepared(compile_it, run)
