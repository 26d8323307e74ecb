"""Trains the demo model's draft model: a small decoder that imitates the demo model's distributions on its own texts.

Nothing in serving may import this. The loss is the cross-entropy against the demo model's probabilities, which say more
than the one next token of a text whose grammar is random. B: rows, T: positions, V: vocabulary.
"""

import json
import pathlib
import time

from absl import app, flags, logging
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from models.registry import config_from_hf
from tools.arguments import parse_flags
from tools.demo_model import corpus
from tools.demo_model.train import (
  CONFIG,
  USER_WEIGHT,
  Data,
  Params,
  apply_gradients,
  export,
  forward,
  init_optimizer,
  init_params,
  logits,
  read_weights,
)

DRAFT_CONFIG = CONFIG | {
  "hidden_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "intermediate_size": 384,
}
MODEL = config_from_hf(DRAFT_CONFIG)
_STORY_WEIGHT = 1.0  # the demo model's probabilities are no noise, unlike the tokens of a story
_WARM_UP_STEPS = 50
_LOG_STEPS = 50


def imitation_loss(params: Params, teacher: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
  """Returns the weighted mean cross-entropy against the teacher, and the share of answers that agrees with it."""
  tokens, positions = batch["tokens"][:, :-1], batch["positions"][:, :-1]
  expected = jax.lax.stop_gradient(logits(teacher, forward(teacher, tokens, positions)))
  given = logits(params, forward(params, tokens, positions, MODEL), MODEL)
  loss = -jnp.sum(jax.nn.softmax(expected) * jax.nn.log_softmax(given), -1)
  agrees = jnp.argmax(expected, -1) == jnp.argmax(given, -1)
  weight = batch["weights"][:, 1:]
  of_answers = weight > USER_WEIGHT
  return jnp.sum(loss * weight) / jnp.sum(weight), jnp.sum(agrees * of_answers) / jnp.sum(of_answers)


def _update(params: Params, state: dict[str, Params], teacher: Params, batch, step: jax.Array, scale: jax.Array):
  (loss, agreement), grads = jax.value_and_grad(imitation_loss, has_aux=True)(params, teacher, batch)
  return *apply_gradients(params, state, grads, step, scale), loss, agreement


update = jax.jit(_update, donate_argnums=(0, 1))


def train(tok: tokenizers.Tokenizer, folder: pathlib.Path, teacher: Params, minutes: float) -> Params:
  """Trains for `minutes` of computing; exports the weights to `folder` every two minutes and at the end."""
  f = flags.FLAGS
  params = init_params(0, DRAFT_CONFIG)
  state = init_optimizer(params)
  shares = [float(share) for share in f.row_shares]
  data = Data(tok, f.batch_tokens, f.seed, corpus.MIXTURE | json.loads(f.mixture), shares, _STORY_WEIGHT)
  seconds = exported = 0.0
  step, recent = 0, []
  while seconds < 60 * minutes:
    begin = time.monotonic()
    progress = seconds / (60 * minutes)
    scale = min(1.0, (step + 1) / _WARM_UP_STEPS, (1 - progress) / f.decay)
    batch = data.get(progress)
    params, state, *numbers = update(params, state, teacher, batch, jnp.float32(step + 1), jnp.float32(scale))
    recent.append([float(number) for number in numbers])
    step += 1
    seconds += min(20.0, time.monotonic() - begin)
    if step % _LOG_STEPS == 0:
      loss, agreement = np.mean(recent, 0)
      recent = []
      logging.info("step %d, %.0f s, lr x%.3f, loss %.4f, agreement %.4f", step, seconds, scale, loss, agreement)
    if seconds - exported > 120:
      exported = seconds
      export(folder, params, DRAFT_CONFIG)
  export(folder, params, DRAFT_CONFIG)
  used = time.process_time()
  logging.info("end: %d steps, %d tokens, %.0f s, %.0f s of a core", step, step * f.batch_tokens, seconds, used)
  return params


def main(_) -> None:
  """Trains the draft model."""
  f = flags.FLAGS
  folder = pathlib.Path(f.export)
  tok = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  train(tok, folder, read_weights(f.teacher), f.minutes)


if __name__ == "__main__":
  flags.DEFINE_string("export", None, "Hugging Face folder; holds the tokenizer.", required=True)
  flags.DEFINE_string("teacher", "models/demo", "Folder of the demo model.")
  flags.DEFINE_float("minutes", 20, "Training time, of which the end is the decay.")
  flags.DEFINE_float("decay", 0.4, "Share of the time in which the learning rate falls to 0.")
  flags.DEFINE_integer("batch_tokens", 1024, "Tokens per step.")
  flags.DEFINE_integer("seed", 7, "Seed of the texts.")
  flags.DEFINE_string("mixture", "{}", "JSON: changed shares of corpus.MIXTURE.")
  flags.DEFINE_list("row_shares", ["80", "20", "0", "0"], "Shares of rows of 256, 512, 1024 and 2048 tokens.")
  app.run(main, flags_parser=parse_flags)
