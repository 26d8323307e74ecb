"""Trains the demo model's EAGLE-3 head (arXiv:2503.01840) and exports it as a folder for --draft_model.

Nothing in serving may import this. The loss is the cross-entropy against the demo model's probabilities, in several
passes over each row: the first has the demo model's features, each further one the head's own output of the pass before
it, as in serving after that many proposals. B: rows, T: positions, D: model, N: query heads, K: KV heads, H: head.
"""

import collections
import json
import pathlib
import random
import time
from typing import NamedTuple

from absl import app, flags, logging
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers

from models.layers import rotation
from pallas_kernels.paged_attention.reference import rotate
from tools.arguments import parse_flags
from tools.demo_model import corpus
from tools.demo_model.train import (
  ASSISTANT,
  CONFIG,
  END,
  MODEL,
  USER_WEIGHT,
  Data,
  Params,
  apply_gradients,
  attend_causally,
  decoder,
  init_optimizer,
  logits,
  read_weights,
)

FEATURE_LAYERS = (1, 2, 3)
HEAD_CONFIG = CONFIG | {
  "architectures": ["LlamaForCausalLMEagle3"],
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 320,
  "draft_vocab_size": 768,
  "tie_word_embeddings": False,
  "norm_before_residual": False,
  "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
}
_EPS = CONFIG["rms_norm_eps"]
_STORY_WEIGHT = 1.0  # the demo model's probabilities are no noise, unlike the tokens of a story
_PASS_DECAY = 0.8  # weight of a pass relative to the one before it, as in EAGLE-3's training
_WARM_UP_STEPS = 50
_LOG_STEPS = 25


class Lesson(NamedTuple):
  """What the demo model says about a batch.

  Attributes:
    features: f32[B, T, 3 * D], its features at each position.
    expected: f32[B, T, V'], its probabilities of the next token within the head's vocabulary.
    best: int32[B, T], its likeliest next token, of its own vocabulary.
  """

  features: jax.Array
  expected: jax.Array
  best: jax.Array


def count_tokens(tok: tokenizers.Tokenizer, num_rows: int = 400) -> collections.Counter[int]:
  """Returns how often each token occurs in answers of fixed texts."""
  rng, found = random.Random(99), collections.Counter()
  for _ in range(num_rows):
    for turn in corpus.chat(rng, 512, corpus.MIXTURE):
      ids = tok.encode(turn.text(), add_special_tokens=False).ids
      start = ids.index(ASSISTANT) + 1 if ASSISTANT in ids else len(ids)
      found.update(ids[start:])
  return found


def choose_vocabulary(tok: tokenizers.Tokenizer) -> np.ndarray:
  """Returns the ids of the most frequent tokens of answers, int64[V'] in order; rare ones fill the rest."""
  size = HEAD_CONFIG["draft_vocab_size"]
  found = count_tokens(tok) + collections.Counter({END: 1})
  ids = [token for token, _ in found.most_common(size)]
  ids += [token for token in range(CONFIG["vocab_size"]) if token not in found][: size - len(ids)]
  return np.array(sorted(ids), np.int64)


def init_head(seed: int, embedding: np.ndarray) -> Params:
  """Returns fresh float32 weights under the names of EAGLE-3's checkpoints; matrices are [out, in].

  Args: embedding: f32[V', D], the demo model's rows of the head's vocabulary, with which the head of tokens begins.
  """
  rng, c = np.random.default_rng(seed), HEAD_CONFIG
  d, f, h = c["hidden_size"], c["intermediate_size"], c["head_dim"]
  q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
  shapes = {
    "fc": (d, 3 * d),
    "midlayer.self_attn.q_proj": (q, 2 * d),
    "midlayer.self_attn.k_proj": (kv, 2 * d),
    "midlayer.self_attn.v_proj": (kv, 2 * d),
    "midlayer.self_attn.o_proj": (d, q),
    "midlayer.mlp.gate_proj": (f, d),
    "midlayer.mlp.up_proj": (f, d),
    "midlayer.mlp.down_proj": (d, f),
  }
  params = {"lm_head.weight": embedding}
  for name, shape in shapes.items():
    scale = 0.1 if name.endswith(("o_proj", "down_proj")) else 0.5
    params[f"{name}.weight"] = rng.normal(0, scale / shape[1] ** 0.5, shape)
  norms = "input_layernorm", "hidden_norm", "post_attention_layernorm"
  params |= {f"midlayer.{name}.weight": np.ones(d) for name in norms} | {"norm.weight": np.ones(d)}
  return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def read_vocabulary(folder: str) -> np.ndarray:
  """Returns the demo model's ids of the tokens of a folder that `export_head` wrote, int32[V']."""
  offsets = safetensors.numpy.load_file(f"{folder}/model.safetensors")["d2t"]
  return (offsets + np.arange(len(offsets))).astype(np.int32)


def read_head(folder: str) -> Params:
  """Returns the float32 weights of a folder that `export_head` wrote, without its vocabulary."""
  found = safetensors.numpy.load_file(f"{folder}/model.safetensors")
  return {name: jnp.asarray(value, jnp.float32) for name, value in found.items() if name not in ("d2t", "t2d")}


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
  """RMSNorm of the last axis."""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + _EPS) * scale


def shift(x: jax.Array) -> jax.Array:
  """Returns [B, T, ...] moved by one position, with zeros at the first one."""
  return jnp.pad(x, [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)])[:, :-1]


class _Keys(NamedTuple):
  """Keys and values of a pass, rotated: f32[B, T, K, H] each."""

  keys: jax.Array
  values: jax.Array


def _attend(q: jax.Array, passes: list[_Keys]) -> jax.Array:
  """Attention of a pass: [B, T, N, H] -> [B, T, N * H].

  A query of pass j at position t sees the first pass up to t - j, then pass i at t - j + i. Serving has features of the
  demo model up to the last accepted token only, too.
  """
  b, t, n, h = q.shape
  num_kv = passes[0].keys.shape[2]
  q = q.reshape(b, t, num_kv, n // num_kv, h) * h**-0.5
  last = len(passes) - 1
  line = jnp.arange(t)
  scores = [jnp.where(line <= line[:, None] - last, jnp.einsum("btkgh,bskh->bkgts", q, passes[0].keys), -1e30)]
  later = []
  for number, keys in enumerate(passes[1:], 1):
    back = last - number
    moved = _Keys(*(jnp.pad(each, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, :t] for each in keys))
    later.append(moved)
    scores.append(jnp.einsum("btkgh,btkh->bkgt", q, moved.keys)[..., None])
  weights = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
  out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :t], passes[0].values)
  for place, moved in enumerate(later):
    out += jnp.einsum("bkgt,btkh->btkgh", weights[..., t + place], moved.values)
  return out.reshape(b, t, n * h)


def run_pass(
  params: Params, embedded: jax.Array, features: jax.Array, positions: jax.Array, passes: list[_Keys]
) -> tuple[jax.Array, list[_Keys]]:
  """Runs the head once over all positions.

  Args:
    embedded: f32[B, T, D], embeddings of the tokens.
    features: f32[B, T, D], features of the positions before.
    positions: int32[B, T].
    passes: keys and values of the passes before.

  Returns:
    Hidden states before the last norm, f32[B, T, D], and the passes with this one.
  """
  c, (b, t) = HEAD_CONFIG, positions.shape
  n, num_kv, h = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

  def layer(name: str) -> jax.Array:
    return params[f"midlayer.{name}.weight"]

  both = normalize(embedded, layer("input_layernorm")), normalize(features, layer("hidden_norm"))
  # The first token has no feature before it; zeros instead of its embedding, too, keep its key and value out.
  x = jnp.concatenate(both, -1) * (jnp.arange(t) > 0)[:, None]
  q = (x @ layer("self_attn.q_proj").T).reshape(b, t, num_kv, n // num_kv, h)
  k, v = ((x @ layer(f"self_attn.{name}_proj").T).reshape(b, t, num_kv, 1, h) for name in "kv")
  q, k, v = rotate(jnp.concatenate([q, k, v], 3), *rotation(positions, MODEL.layers[0]))
  passes = [*passes, _Keys(k, v)]
  y = features + _attend(q, passes) @ layer("self_attn.o_proj").T
  normed = normalize(y, layer("post_attention_layernorm"))
  gated = jax.nn.silu(normed @ layer("mlp.gate_proj").T) * (normed @ layer("mlp.up_proj").T)
  return y + gated @ layer("mlp.down_proj").T, passes


def score_tokens(params: Params, hidden: jax.Array) -> jax.Array:
  """[..., D] -> f32[..., V'], the head's logits."""
  return normalize(hidden, params["norm.weight"]) @ params["lm_head.weight"].T


def run_passes(
  params: Params, embedded: jax.Array, states: jax.Array, positions: jax.Array, num_passes: int
) -> list[jax.Array]:
  """Returns the logits of each pass over all positions, f32[B, T, V'].

  Args:
    embedded, positions: as in run_pass.
    states: f32[B, T, 3 * D], the demo model's at each position.
    num_passes: 1 or more.
  """
  features, passes, found = shift(states @ params["fc.weight"].T), [], []
  for _ in range(num_passes):
    hidden, passes = run_pass(params, embedded, features, positions, passes)
    found.append(score_tokens(params, hidden))
    features = shift(hidden)
  return found


def learn_from_teacher(teacher: Params, ids: jax.Array, tokens: jax.Array, positions: jax.Array) -> Lesson:
  """Runs the demo model over int32[B, T]. Args: ids: int32[V'], the head's vocabulary."""
  model = decoder(teacher)
  hidden, _, features = model.hidden_and_features(
    FEATURE_LAYERS, tokens, positions, (None,) * MODEL.num_layers, None, attend_causally
  )
  scores = logits(teacher, hidden)
  expected = jax.nn.softmax(scores)[..., ids]
  return jax.lax.stop_gradient(Lesson(jnp.concatenate(features, -1), expected, jnp.argmax(scores, -1)))


def head_loss(
  params: Params, teacher: Params, ids: jax.Array, batch: dict[str, jax.Array], num_passes: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the weighted mean cross-entropy, and the share of answers' tokens that each pass has right, f32[passes]."""
  tokens, positions = batch["tokens"][:, :-1], batch["positions"][:, :-1]
  lesson = learn_from_teacher(teacher, ids, tokens, positions)
  embedded = teacher["model.embed_tokens.weight"][tokens]
  weight = batch["weights"][:, 1:]
  of_answers = weight > USER_WEIGHT
  loss, right, line = jnp.float32(0), [], jnp.arange(tokens.shape[1])
  for number, given in enumerate(run_passes(params, embedded, lesson.features, positions, num_passes)):
    own = weight * (line > number)
    entropy = -jnp.sum(lesson.expected * jax.nn.log_softmax(given), -1)
    loss += _PASS_DECAY**number * jnp.sum(entropy * own) / jnp.sum(own)
    agrees = (ids[jnp.argmax(given, -1)] == lesson.best) & (own > 0)
    right.append(jnp.sum(agrees * of_answers) / jnp.sum(of_answers))
  return loss, jnp.stack(right)


def _update(
  params: Params, state: dict[str, Params], teacher: Params, ids: jax.Array, batch, step, scale, num_passes: int
):
  (loss, right), grads = jax.value_and_grad(head_loss, has_aux=True)(params, teacher, ids, batch, num_passes)
  return *apply_gradients(params, state, grads, step, scale), loss, right


update = jax.jit(_update, donate_argnums=(0, 1), static_argnums=7)


def export_head(folder: pathlib.Path, params: Params, ids: np.ndarray) -> None:
  """Writes the head as a folder of config.json and model.safetensors, bfloat16."""
  folder.mkdir(parents=True, exist_ok=True)
  weights = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in params.items()}
  weights["d2t"] = ids - np.arange(len(ids))
  weights["t2d"] = np.isin(np.arange(CONFIG["vocab_size"]), ids)
  safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
  (folder / "config.json").write_text(json.dumps(HEAD_CONFIG, indent=2) + "\n")


def train_head(tok: tokenizers.Tokenizer, folder: pathlib.Path, teacher: Params) -> Params:
  """Trains for --steps; exports the weights to `folder` every two minutes and at the end."""
  f = flags.FLAGS
  vocabulary = choose_vocabulary(tok)
  ids = jnp.asarray(vocabulary, jnp.int32)
  embedding = np.asarray(teacher["model.embed_tokens.weight"])[vocabulary]
  params = read_head(f.init) if f.init else init_head(0, embedding)
  state = init_optimizer(params)
  shares = [float(share) for share in f.row_shares]
  data = Data(tok, f.batch_tokens, f.seed, corpus.MIXTURE | json.loads(f.mixture), shares, _STORY_WEIGHT)
  exported = began = time.monotonic()
  recent = []
  for step in range(f.steps):
    progress = step / f.steps
    scale = jnp.float32(min(1.0, (step + 1) / _WARM_UP_STEPS, (1 - progress) / f.decay))
    num_passes = int(f.passes[int(progress * len(f.passes))])
    batch, number = data.get(progress), jnp.float32(step + 1)
    params, state, loss, right = update(params, state, teacher, ids, batch, number, scale, num_passes)
    if recent and len(recent[0]) != 1 + num_passes:
      recent = []
    recent.append([float(loss), *np.asarray(right).tolist()])
    now = time.monotonic()
    if (step + 1) % _LOG_STEPS == 0:
      means = " ".join(f"{value:.4f}" for value in np.mean(recent, 0))
      recent = []
      logging.info("step %d, %.0f s, loss and right by pass: %s", step + 1, now - began, means)
    if now - exported > 120:
      exported = now
      export_head(folder, params, vocabulary)
  export_head(folder, params, vocabulary)
  tokens = f.steps * f.batch_tokens
  logging.info("end: %d tokens, %.0f s, %.0f s of a core", tokens, time.monotonic() - began, time.process_time())
  return params


def main(_) -> None:
  """Trains the head."""
  f = flags.FLAGS
  tok = tokenizers.Tokenizer.from_file(f"{f.teacher}/tokenizer.json")
  train_head(tok, pathlib.Path(f.export), read_weights(f.teacher))


if __name__ == "__main__":
  flags.DEFINE_string("export", None, "Folder to write.", required=True)
  flags.DEFINE_string("teacher", "models/demo", "Folder of the demo model.")
  flags.DEFINE_string("init", "", "Folder of a head to start from, instead of random weights.")
  flags.DEFINE_integer("steps", 750, "Steps of the training.")
  flags.DEFINE_float("decay", 0.5, "Share of the steps in which the learning rate falls to 0.")
  flags.DEFINE_integer("batch_tokens", 1024, "Tokens per step.")
  flags.DEFINE_list("passes", ["3", "3", "5", "5", "5"], "Passes over each row, in equal parts of the training.")
  flags.DEFINE_integer("seed", 11, "Seed of the texts.")
  flags.DEFINE_string("mixture", "{}", "JSON: changed shares of corpus.MIXTURE.")
  flags.DEFINE_list("row_shares", ["80", "20", "0", "0"], "Shares of rows of 256, 512, 1024 and 2048 tokens.")
  app.run(main, flags_parser=parse_flags)
