"""Measures the demo model's draft model, or its EAGLE-3 head, by kind of text; prints a JSON line for each kind.

  python -m tools.demo_model.measure_draft [--draft_model=models/demo_draft] [--requests=20] [--turns=5]

The served model generates greedily and at temperature 0.7. `acceptance` is the share of its tokens that the draft model
finds likeliest after the true tokens before them, which is the chance that a draft after accepted ones is right.
A head has the demo model's features up to the last token of the step before, so for a head this is the chance of the
first draft. `tokens_per_step` is what steps with seven drafts would bring. `ratio` is the median over turns of the
tokens a second with --speculation=draft to those without, one sequence at a time.
"""

from collections.abc import Callable, Sequence
import contextlib
import json
import pathlib
import random
import statistics
import time

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from engine.batch import MAX_DRAFTS
from extensions.python_api.llm import LLM
from extensions.python_api.sampling_params import SamplingParams
from models.eagle_head import is_eagle_config
from tools.arguments import parse_flags
from tools.demo_model import corpus, skills
from tools.demo_model.train import PAD, Params, chat_ids, forward, logits, read_weights
from tools.demo_model.train_draft import MODEL
from tools.demo_model.train_eagle import learn_from_teacher, read_head, read_vocabulary, run_passes

_MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
_LONGEST = 512  # tokens of a prompt and its output
_OUTPUT = 120
# (prompt, output) -> for each draft of a step, whether it would be right at each place of the output
FindAgreement = Callable[[list[int], list[int]], Sequence[list[bool]]]
KINDS = ("story", "copy", "reverse", "json", "recall")


def make_messages(kind: str, count: int) -> list[list[dict[str, str]]]:
  """Returns conversations that the model was not trained on."""
  if kind != "story":
    return [each.messages for each in skills.make_instances(kind, count, 5, 200 if kind == "recall" else None)]
  rng = random.Random(5)
  texts = [
    f"Tell me a story about {rng.choice(corpus.NAMES)} and a {rng.choice(corpus.OBJECTS)}." for _ in range(count)
  ]
  return [[{"role": "user", "content": text}] for text in texts]


@jax.jit
def _likeliest(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
  return jnp.argmax(logits(params, forward(params, tokens, positions, MODEL), MODEL), -1)


def find_agreement(params: Params, prompt: list[int], output: list[int]) -> list[bool]:
  """Returns for each output token whether it is the likeliest one of the draft model after the tokens before it."""
  tokens = np.full((1, _LONGEST), PAD, np.int32)
  known = prompt + output
  tokens[0, : len(known)] = known
  found = np.asarray(_likeliest(params, tokens, np.arange(_LONGEST, dtype=np.int32)[None]))[0]
  return (found[len(prompt) - 1 : len(known) - 1] == np.array(output)).tolist()


def find_head_agreement(
  params: Params, teacher: Params, vocabulary: jax.Array, prompt: list[int], output: list[int]
) -> list[list[bool]]:
  """Returns the same for a head by draft of a step: the first one after true features, each later one after its own."""
  tokens, known = np.full((1, _LONGEST), PAD, np.int32), prompt + output
  tokens[0, : len(known)] = known
  found = np.asarray(_likeliest_of_head(params, teacher, vocabulary, tokens, np.arange(_LONGEST, dtype=np.int32)[None]))
  return (found[:, len(prompt) - 1 : len(known) - 1] == np.array(output)).tolist()


@jax.jit
def _likeliest_of_head(
  params: Params, teacher: Params, vocabulary: jax.Array, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
  """int32[MAX_DRAFTS, T]: the likeliest next token of each pass, for one row."""
  lesson = learn_from_teacher(teacher, vocabulary, tokens, positions)
  embedded = teacher["model.embed_tokens.weight"][tokens]
  passes = run_passes(params, embedded, lesson.features, positions, MAX_DRAFTS)
  return jnp.stack([vocabulary[jnp.argmax(scores[0], -1)] for scores in passes])


def open_drafter(folder: str, model: str) -> FindAgreement:
  """Returns what finds the agreement of a folder's draft model or head."""
  raw = json.loads((pathlib.Path(folder) / "config.json").read_text("utf-8"))
  if is_eagle_config(raw):
    head, teacher, vocabulary = read_head(folder), read_weights(model), jnp.asarray(read_vocabulary(folder))
    return lambda prompt, output: find_head_agreement(head, teacher, vocabulary, prompt, output)
  params = read_weights(folder, MODEL)
  return lambda prompt, output: [find_agreement(params, prompt, output)] * MAX_DRAFTS


def count_steps(agrees: Sequence[list[bool]]) -> int:
  """Returns the steps that an output takes with MAX_DRAFTS drafts each. Args: agrees: of FindAgreement."""
  steps = at = 0
  size = len(agrees[0])
  while at < size:
    following = [agrees[draft][at + 1 + draft] for draft in range(min(MAX_DRAFTS, size - at - 1))]
    at += 1 + (following.index(False) if False in following else len(following))
    steps += 1
  return steps


def measure_ratio(plain: LLM, drafted: LLM, prompts: list[list[int]], wanted: SamplingParams, turns: int) -> float:
  """Returns the median ratio of tokens a second; raises AssertionError if an output differs."""
  ratios = []
  for _ in range(turns):
    seconds, outputs = [], []
    for llm in (plain, drafted):
      begin = time.perf_counter()
      outputs.append([llm.generate([prompt], wanted, progress=False)[0].outputs[0].token_ids for prompt in prompts])
      seconds.append(time.perf_counter() - begin)
    assert outputs[0] == outputs[1], "drafts changed an output"
    ratios.append(seconds[0] / seconds[1])
  return round(statistics.median(ratios), 3)


def main(_) -> None:
  """Prints the figures."""
  f = flags.FLAGS
  model = str(_MODELS / "demo")
  find_agreement_of = open_drafter(f.draft_model, model)
  tok = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
  settings = {"max_num_seqs": 16, "token_budgets": (16, 128), "prefill_chunk": 112, "max_model_len": _LONGEST}
  settings |= {"overlap": f.overlap}
  with contextlib.ExitStack() as stack:
    plain = stack.enter_context(LLM(model, speculation="none", **settings))
    drafted = None
    if f.turns:
      drafted = stack.enter_context(LLM(model, speculation="draft", draft_model=f.draft_model, **settings))
    for kind in KINDS:
      prompts = [chat_ids(tok, messages) for messages in make_messages(kind, f.requests)]
      prompts = [prompt for prompt in prompts if len(prompt) + _OUTPUT <= _LONGEST]
      line: dict[str, object] = {"kind": kind, "requests": len(prompts)}
      for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        wanted = SamplingParams(max_tokens=_OUTPUT, temperature=temperature, seed=3)
        outputs = [list(each.outputs[0].token_ids) for each in plain.generate(prompts, wanted, progress=False)]
        agrees = [find_agreement_of(*pair) for pair in zip(prompts, outputs, strict=True)]
        num_tokens = sum(map(len, outputs))
        line |= {
          f"{name}_acceptance": round(sum(sum(each[0]) for each in agrees) / num_tokens, 3),
          f"{name}_tokens_per_step": round(num_tokens / sum(map(count_steps, agrees)), 2),
        }
        if drafted is not None:
          line[f"{name}_ratio"] = measure_ratio(plain, drafted, prompts, wanted, f.turns)
      print(json.dumps(line), flush=True)


if __name__ == "__main__":
  flags.DEFINE_string("draft_model", str(_MODELS / "demo_draft"), "Folder of the draft model or the head.")
  flags.DEFINE_integer("requests", 20, "Conversations of each kind.")
  flags.DEFINE_integer("turns", 5, "Turns of each engine; 0: no ratios.")
  flags.DEFINE_string("overlap", "false", "As the server's flag.")
  app.run(main, flags_parser=parse_flags)
