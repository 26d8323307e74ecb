"""Trains the demo model on synthetic chats and exports it as a Hugging Face folder.

Nothing in serving may import this. Checkpoints are npz files of float32 arrays under their Hugging
Face names, so that any forward can read them. D: model, F: feed-forward, H: head, N: query heads,
K: KV heads, V: vocabulary, B: rows, T: positions.
"""

import datetime
import json
import os
import pathlib
import queue
import random
import threading
import time
from typing import Any

from absl import app, flags, logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers

from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint, parameter_name
from models.config import LayerAttention, ModelConfig
from models.decoder import Decoder
from models.registry import abstract, config_from_hf, tensors
from pallas_kernels.paged_attention.reference import rotate
from tools.arguments import parse_flags
from tools.demo_model import corpus, skills

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 2048,
  "hidden_size": 256,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 64,
  "intermediate_size": 640,
  "hidden_act": "silu",
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "rope_scaling": None,
  "max_position_embeddings": 4096,
  "tie_word_embeddings": True,
  "attention_bias": False,
  "mlp_bias": False,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": 0,
  "torch_dtype": "bfloat16",
}
PAD, BOS, END, ASSISTANT = 0, 1, 2, 5
ROW_TOKENS = (256, 512, 1024, 2048)
# Loss weights of text that is random by nature; the answers of skills, which are not, weigh 1.
STORY_WEIGHT, USER_WEIGHT = 0.1, 0.02
# Muon's rates. Queries and keys go slowly and everything decays: at 0.02 without decay the scores grew until every head
# looked at one token whatever it was, and induction never formed.
RATE, QK_RATE, DECAY = 0.02, 0.015, 0.1

_QUERIES = 256  # of a chunk of attention

Params = dict[str, jax.Array]
MODEL = config_from_hf(CONFIG)


def _layer(i: int, name: str) -> str:
  return f"model.layers.{i}.{name}.weight"


def init_params(seed: int, config: dict[str, Any] = CONFIG) -> Params:
  """Fresh float32 weights of a parsed config.json; matrices are [out, in] as Hugging Face stores them."""
  rng = np.random.default_rng(seed)
  d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
  q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
  shapes = {
    "self_attn.q_proj": (q, d),
    "self_attn.k_proj": (kv, d),
    "self_attn.v_proj": (kv, d),
    "self_attn.o_proj": (d, q),
    "mlp.gate_proj": (f, d),
    "mlp.up_proj": (f, d),
    "mlp.down_proj": (d, f),
  }
  params = {
    "model.embed_tokens.weight": rng.normal(0, 0.02, (config["vocab_size"], d)),
    "model.norm.weight": np.ones(d),
  }
  for i in range(config["num_hidden_layers"]):
    for name, shape in shapes.items():
      scale = 0.1 if name in ("self_attn.o_proj", "mlp.down_proj") else 0.5
      params[_layer(i, name)] = rng.normal(0, scale / shape[1] ** 0.5, shape)
    params[_layer(i, "input_layernorm")] = np.ones(d)
    params[_layer(i, "post_attention_layernorm")] = np.ones(d)
  return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def attend_causally(declared: LayerAttention, qkv: jax.Array, cos: jax.Array, sin: jax.Array, cache: None, meta: None):
  """Causal attention of whole rows: qkv [B, T, K, G + 2, H] -> [B, T, N, H], cache.

  Queries go in chunks, each against its past only: half the work, and no [T, T] mask.
  """
  q, k, v = rotate(qkv, cos, sin)
  b, t, n, h = q.shape
  kv = k.shape[2]
  q = q.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4) * declared.scale
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  outs = []
  for start in range(0, t, _QUERIES):
    end = min(start + _QUERIES, t)
    scores = jnp.einsum("bkgqh,bksh->bkgqs", q[:, :, :, start:end], k[:, :, :end])
    allowed = jnp.arange(end)[None, :] <= jnp.arange(start, end)[:, None]
    probs = jax.nn.softmax(jnp.where(allowed, scores, -1e30), -1)
    outs.append(jnp.einsum("bkgqs,bksh->bkgqh", probs, v[:, :, :end]))
  out = jnp.concatenate(outs, 3).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)
  return out, cache


def decoder(params: Params, model: ModelConfig = MODEL) -> Decoder:
  """The model that is served, over weights under their Hugging Face names."""

  def assemble(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    made = jnp.zeros(leaf.shape, leaf.dtype)
    for piece in tensors(model)[parameter_name(path)]:
      made = made.at[piece.box()].set(params[piece.name].reshape(piece.split).transpose(piece.order))
    return made

  graph, leaves = abstract(model, jnp.dtype(jnp.float32))
  return nnx.merge(graph, jax.tree_util.tree_map_with_path(assemble, leaves))


def read_weights(folder: str, model: ModelConfig = MODEL) -> Params:
  """Float32 weights of a model folder (Hugging Face's or Sluice's) under their Hugging Face names; undoes `decoder`."""
  loaded = open_checkpoint(folder, make_mesh(jax.devices()[:1]), jnp.dtype(jnp.float32)).load()
  if loaded.config != model:
    raise ValueError(f"{folder} is {loaded.config}, but this script trains {model}")
  params = {}
  for path, value in jax.tree_util.tree_leaves_with_path(loaded.params):
    for piece in tensors(model)[parameter_name(path)]:
      params[piece.name] = value[piece.box()].transpose(np.argsort(piece.order)).reshape(piece.shape)
  return params


def forward(params: Params, tokens: jax.Array, positions: jax.Array, model: ModelConfig = MODEL) -> jax.Array:
  """Final hidden states.

  Args:
    params: weights under their Hugging Face names.
    tokens: int32[B, T].
    positions: int32[B, T], strictly increasing along T.
    model: configuration of the weights.

  Returns:
    f32[B, T, D], before the last norm.
  """
  caches = (None,) * model.num_layers
  return decoder(params, model).hidden(tokens, positions, caches, None, attend_causally)[0]


def logits(params: Params, hidden: jax.Array, model: ModelConfig = MODEL) -> jax.Array:
  """[..., D] -> [..., V]."""
  return decoder(params, model).logits(hidden)


def loss_fn(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
  """Weighted mean cross-entropy of the next token."""
  hidden = forward(params, batch["tokens"][:, :-1], batch["positions"][:, :-1])
  out = logits(params, hidden.reshape(-1, hidden.shape[-1]))
  is_target = jnp.arange(out.shape[-1]) == batch["tokens"][:, 1:].reshape(-1, 1)
  loss = jax.nn.logsumexp(out, -1) - jnp.sum(jnp.where(is_target, out, 0), -1)
  weight = batch["weights"][:, 1:].reshape(-1)
  return jnp.sum(loss * weight) / jnp.sum(weight)


def _is_muon(name: str) -> bool:
  return name.endswith("_proj.weight") or name == "fc.weight"


def _orthogonalize(g: jax.Array, steps: int = 5) -> jax.Array:
  """The nearest semi-orthogonal matrix, roughly (Newton-Schulz, Muon's coefficients)."""
  transpose = g.shape[0] > g.shape[1]
  x = g.T if transpose else g
  x = x / (jnp.linalg.norm(x) + 1e-7)
  for _ in range(steps):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
  return x.T if transpose else x


def init_optimizer(params: Params) -> dict[str, Params]:
  """Momentum of all weights, and second moments of those that Adam handles."""
  return {
    "m": {name: jnp.zeros_like(p) for name, p in params.items()},
    "v": {name: jnp.zeros_like(p) for name, p in params.items() if not _is_muon(name)},
  }


def apply_gradients(params: Params, state: dict[str, Params], grads: Params, step: jax.Array, scale: jax.Array):
  """Returns weights and optimizer state after a step: Muon for the layers' matrices, Adam for embedding and norms."""
  new_params, m, v = {}, {}, {}
  for name, p in params.items():
    g = grads[name]
    if _is_muon(name):
      m[name] = 0.95 * state["m"][name] + g
      direction = _orthogonalize(g + 0.95 * m[name])
      direction *= max(1.0, p.shape[0] / p.shape[1]) ** 0.5
      rate = scale * (QK_RATE if "q_proj" in name or "k_proj" in name else RATE)
      new_params[name] = p * (1 - rate * DECAY) - rate * direction
    else:
      m[name] = 0.9 * state["m"][name] + 0.1 * g
      v[name] = 0.99 * state["v"][name] + 0.01 * g * g
      mean, square = m[name] / (1 - 0.9**step), v[name] / (1 - 0.99**step)
      new_params[name] = p - scale * 3e-3 * mean / (jnp.sqrt(square) + 1e-10)
  return new_params, {"m": m, "v": v}


def _update(params: Params, state: dict[str, Params], batch: dict[str, jax.Array], step: jax.Array, scale: jax.Array):
  loss, grads = jax.value_and_grad(loss_fn)(params, batch)
  return *apply_gradients(params, state, grads, step, scale), loss


update = jax.jit(_update, donate_argnums=(0, 1))


class Data:
  """Batches of rows, made from seeded chats by one background thread."""

  def __init__(
    self,
    tok: tokenizers.Tokenizer,
    batch_tokens: int,
    seed: int,
    weights: dict[str, float],
    row_shares: list[float],
    story_weight: float = STORY_WEIGHT,
  ):
    self._row_shares, self._story_weight = row_shares, story_weight
    self._tok, self._batch_tokens, self._weights = tok, batch_tokens, weights
    self._rng = random.Random(seed)
    self._queues = {t: queue.Queue(4) for t in ROW_TOKENS}
    for t in ROW_TOKENS:
      threading.Thread(target=self._fill, args=(t, random.Random(seed * 10 + t)), daemon=True).start()

  def _fill(self, tokens: int, rng: random.Random) -> None:
    while True:
      self._queues[tokens].put(self.make(tokens, rng))

  def get(self, progress: float) -> dict[str, np.ndarray]:
    """Returns a batch of a row length sampled for this part (0..1) of the training."""
    if self._row_shares:
      shares = self._row_shares
    elif progress < 0.2:
      shares = (80, 15, 5, 0)
    elif progress < 0.55:
      shares = (40, 25, 20, 15)
    else:
      shares = (20, 20, 30, 30)
    return self._queues[self._rng.choices(ROW_TOKENS, shares)[0]].get()

  def make(self, tokens: int, rng: random.Random) -> dict[str, np.ndarray]:
    """Returns tokens and positions int32[B, T] and weights f32[B, T], with B*T constant."""
    rows = self._batch_tokens // tokens
    shape = (rows, tokens + 1)
    batch = {
      "tokens": np.full(shape, PAD, np.int32),
      "weights": np.zeros(shape, np.float32),
      "positions": np.tile(np.arange(tokens + 1, dtype=np.int32), (rows, 1)),
    }
    for row in range(rows):
      turns = corpus.chat(rng, tokens, self._weights)
      texts = [turn.text() for turn in turns]
      kinds = [turn.kind for turn in turns]
      if rng.random() < 0.08:
        texts.insert(0, corpus.Story(rng).text() + corpus.END)
        kinds.insert(0, "plain")
      encoded = self._tok.encode_batch(texts, add_special_tokens=False)
      ids, weights, starts = [BOS], [0.0], []
      for item, kind in zip(encoded, kinds, strict=True):
        starts.append(len(ids))
        inside = kind == "plain"
        high = self._story_weight if kind in ("plain", "story") else 1.0
        for token in item.ids:
          ids.append(token)
          weights.append(high if inside else USER_WEIGHT)
          inside = (inside or token == ASSISTANT) and token != END
      size = min(len(ids), tokens + 1)
      batch["tokens"][row, :size] = ids[:size]
      batch["weights"][row, :size] = weights[:size]
      self._jump(batch["positions"][row], starts, rng)
    return batch

  def _jump(self, positions: np.ndarray, starts: list[int], rng: random.Random) -> None:
    """Adds gaps between turns of a short row, so that it shows long distances cheaply."""
    tokens = len(positions) - 1
    if tokens > 1024 or rng.random() < 0.5:
      return
    left = 3900 - tokens
    for _ in range(rng.randint(1, 3)):
      gap = min(left, int(1500 ** rng.uniform(0.3, 1)))
      positions[rng.choice(starts) :] += gap
      left -= gap


_hidden = jax.jit(forward)


@jax.jit
def _matches(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
  """bool[B, T-1]: whether the most likely next token is the one that follows."""
  out = logits(params, forward(params, tokens, positions))
  return jnp.argmax(out[:, :-1], -1) == tokens[:, 1:]


def chat_ids(tok: tokenizers.Tokenizer, messages: list[dict[str, str]]) -> list[int]:
  """Token ids of a conversation, up to and including the mark that the assistant speaks."""
  text = corpus.BOS + "".join(f"<|{m['role']}|>{m['content']}{corpus.END}" for m in messages)
  return tok.encode(text + "<|assistant|>", add_special_tokens=False).ids


def accuracy(params: Params, tok: tokenizers.Tokenizer, instances: list[skills.SkillInstance]) -> float:
  """Share of instances that greedy decoding answers exactly.

  Greedy decoding gives the expected answer if and only if every token of the answer (and the end
  after it) is the most likely one given the answer's part before it: one forward is enough.
  """
  correct = 0
  pairs = []
  for instance in instances:
    prompt = chat_ids(tok, instance.messages)
    answer = tok.encode(instance.answer, add_special_tokens=False).ids + [END]
    pairs.append((prompt, answer))
  longest = max(len(p) + len(a) for p, a in pairs)
  width = next(w for w in (128, 256, 512, 1024, 2048, 4096) if w >= longest)
  rows = max(1, 4096 // width)
  positions = jnp.tile(jnp.arange(width, dtype=jnp.int32), (rows, 1))
  for start in range(0, len(pairs), rows):
    group = pairs[start : start + rows]
    tokens = np.full((rows, width), PAD, np.int32)
    for row, (prompt, answer) in enumerate(group):
      tokens[row, : len(prompt) + len(answer)] = prompt + answer
    good = np.asarray(_matches(params, tokens, positions))
    for row, (prompt, answer) in enumerate(group):
      correct += bool(good[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].all())
  return correct / len(instances)


def evaluate(params: Params, tok: tokenizers.Tokenizer, count: int, seed: int) -> dict[str, float]:
  """Accuracy per skill on unseen instances."""
  result = {}
  for skill in skills.SKILLS:
    if skill != "recall":
      result[skill] = accuracy(params, tok, skills.make_instances(skill, count, seed))
      continue
    for distance in (100, 500, 1000, 1500):
      instances = skills.make_instances(skill, count, seed, distance)
      result[f"recall_{distance}"] = accuracy(params, tok, instances)
  return result


def generate(
  params: Params,
  tok: tokenizers.Tokenizer,
  messages: list[dict[str, str]],
  seed: int,
  limit: int = 160,
  temperature: float = 0.7,
) -> str:
  """Samples one answer with full forwards of a fixed length; for looking at, slow."""
  rng = np.random.default_rng(seed)
  ids = chat_ids(tok, messages)
  width, prompt = 256, len(ids)
  positions = jnp.arange(width, dtype=jnp.int32)[None]
  while len(ids) < min(width, prompt + limit) and (len(ids) == prompt or ids[-1] != END):
    tokens = np.full((1, width), PAD, np.int32)
    tokens[0, : len(ids)] = ids
    hidden = _hidden(params, tokens, positions)[0, len(ids) - 1]
    scores = np.asarray(logits(params, hidden), np.float64) / temperature
    ids.append(int(np.argmax(scores + rng.gumbel(size=scores.shape))))
  return tok.decode(ids[prompt:])


def _write_atomically(path: pathlib.Path, write) -> None:
  """Calls `write(temporary path)`, then moves the result to `path`."""
  temporary = path.with_name(path.name + ".tmp")
  write(temporary)
  os.replace(temporary, path)


def save(path: pathlib.Path, params: Params, state: dict[str, Params], meta: dict) -> None:
  """Writes weights, optimizer state and counters, atomically."""
  arrays = {name: np.asarray(p) for name, p in params.items()}
  for part, tree in state.items():
    arrays |= {f"{part}/{name}": np.asarray(p) for name, p in tree.items()}
  arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)

  def write(temporary):
    with open(temporary, "wb") as file:
      np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

  _write_atomically(path, write)


def load(path: pathlib.Path) -> tuple[Params, dict[str, Params], dict]:
  """Reads what `save` wrote."""
  with np.load(path) as file:
    arrays = dict(file)
  meta = json.loads(arrays.pop("meta").tobytes())
  state: dict[str, Params] = {"m": {}, "v": {}}
  params = {}
  for name, value in arrays.items():
    part, slash, rest = name.partition("/")
    (state[part] if slash else params)[rest if slash else name] = jnp.asarray(value)
  return params, state, meta


def export(folder: pathlib.Path, params: Params, config: dict[str, Any] = CONFIG) -> None:
  """Writes the model as a Hugging Face folder (the tokenizer's files are already there)."""
  folder.mkdir(parents=True, exist_ok=True)
  weights = {name: np.asarray(p.astype(jnp.bfloat16)) for name, p in params.items()}
  _write_atomically(
    folder / "model.safetensors", lambda path: safetensors.numpy.save_file(weights, path, metadata={"format": "pt"})
  )
  generation = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD, "do_sample": True, "temperature": 0.7}
  for name, value in (("config.json", config), ("generation_config.json", generation)):
    text = json.dumps(value, indent=2) + "\n"
    _write_atomically(folder / name, lambda path, text=text: path.write_text(text))


def _seconds_until(clock: str) -> float:
  """Seconds until the next HH:MM UTC; infinite for an empty string."""
  if not clock:
    return float("inf")
  now = datetime.datetime.now(datetime.UTC)
  hour, minute = map(int, clock.split(":"))
  then = now.replace(hour=hour, minute=minute, second=0)
  return (then - now).total_seconds() % 86400


def train(tok: tokenizers.Tokenizer, work: pathlib.Path, folder: pathlib.Path) -> Params:
  """Trains until the time is used up; returns the last weights."""
  f = flags.FLAGS
  checkpoint = work / "checkpoint.npz"
  params = read_weights(f.init) if f.init else init_params(0)
  state = init_optimizer(params)
  meta = {"step": 0, "seconds": 0.0, "tokens": 0}
  if f.resume and checkpoint.exists():
    params, state, meta = load(checkpoint)
  weights = corpus.MIXTURE | json.loads(f.mixture)
  data = Data(tok, f.batch_tokens, meta["step"], weights, [float(share) for share in f.row_shares])
  budget = f.minutes * 60
  end = time.monotonic() + _seconds_until(f.deadline)
  saved = evaluated = exported = meta["seconds"]
  losses: dict[int, list[float]] = {t: [] for t in ROW_TOKENS}
  waited = 0.0
  while True:
    begin = time.monotonic()
    # The time left is that of the budget of seconds spent in steps, or that of the clock.
    left = min(budget - meta["seconds"], end - begin)
    if left <= 0:
      break
    total = meta["seconds"] + left
    progress = meta["seconds"] / total
    scale = min(1.0, (meta["step"] + 1) / 50, (1 - progress) / f.decay)
    batch = data.get(progress)
    waited += time.monotonic() - begin
    params, state, loss = update(params, state, batch, jnp.float32(meta["step"] + 1), jnp.float32(scale))
    losses[batch["tokens"].shape[1] - 1].append(float(loss))
    meta["step"] += 1
    meta["tokens"] += f.batch_tokens
    meta["seconds"] += min(20.0, time.monotonic() - begin)
    if meta["step"] % 50 == 0 or meta["step"] == 10:
      means = {t: round(float(np.mean(x)), 4) for t, x in losses.items() if x}
      logging.info(
        "step %d, %.1fM tokens, %.0f tokens/s, lr x%.3f, waited %.1f s, loss %s",
        meta["step"],
        meta["tokens"] / 1e6,
        meta["tokens"] / meta["seconds"],
        scale,
        waited,
        means,
      )
      losses = {t: [] for t in ROW_TOKENS}
    if meta["seconds"] - saved > 180:
      saved = meta["seconds"]
      save(checkpoint, params, state, meta)
    if meta["seconds"] - evaluated > f.eval_seconds:
      evaluated = meta["seconds"]
      begin = time.monotonic()
      report = {**meta, **evaluate(params, tok, 24, meta["step"])}
      meta["seconds"] += min(60.0, time.monotonic() - begin)
      logging.info("eval %s (%.1f s)", json.dumps(report), time.monotonic() - begin)
      with open(work / "accuracy.jsonl", "a") as file:
        file.write(json.dumps(report) + "\n")
    if meta["seconds"] - exported > 900:
      exported = meta["seconds"]
      export(folder, params)
  save(checkpoint, params, state, meta)
  export(folder, params)
  logging.info("end: %s", json.dumps(meta))
  return params


def main(_) -> None:
  """Trains the model, or reads it if --eval_only is set; then evaluates it and samples from it."""
  f = flags.FLAGS
  work, folder = pathlib.Path(f.work), pathlib.Path(f.export)
  tok = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  work.mkdir(parents=True, exist_ok=True)
  if f.eval_only:
    params = read_weights(f.init or f.export)
  else:
    params = train(tok, work, folder)
    # What ships is bfloat16; that is what is judged.
    params = {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in params.items()}
  if f.eval_count:
    report = {"instances": f.eval_count} | evaluate(params, tok, f.eval_count, 1_000_003)
    (work / "eval.json").write_text(json.dumps(report, indent=2) + "\n")
    logging.info("final: %s", json.dumps(report))
  for seed in range(f.samples):
    logging.info(
      "sample: %s", generate(params, tok, [{"role": "user", "content": "Tell me a story about Mira and a kite."}], seed)
    )


if __name__ == "__main__":
  flags.DEFINE_string("work", None, "Folder of checkpoints and logs.", required=True)
  flags.DEFINE_string("export", None, "Hugging Face folder; holds the tokenizer.", required=True)
  flags.DEFINE_float("minutes", 105, "Training time, of which the end is the decay.")
  flags.DEFINE_string("deadline", "", "HH:MM (UTC) at which training ends in any case.")
  flags.DEFINE_float("decay", 0.35, "Share of the time in which the learning rate falls to 0.")
  flags.DEFINE_integer("batch_tokens", 4096, "Tokens per step.")
  flags.DEFINE_string("mixture", "{}", "JSON: changed shares of corpus.MIXTURE.")
  flags.DEFINE_list("row_shares", [], "Shares of rows of 256, 512, 1024 and 2048 tokens, instead of the curriculum.")
  flags.DEFINE_float("eval_seconds", 420, "Time between evaluations.")
  flags.DEFINE_integer("eval_count", 0, "Instances per skill of a final evaluation.")
  flags.DEFINE_integer("samples", 0, "Stories to sample at the end.")
  flags.DEFINE_string("init", "", "Model folder to start from, instead of random weights.")
  flags.DEFINE_bool("resume", False, "Continue from the checkpoint.")
  flags.DEFINE_bool("eval_only", False, "Only evaluate --init, or else --export.")
  app.run(main, flags_parser=parse_flags)
