"""Measures what low precision costs: perplexity of held-out text, and the checked skills of the demo model.

  python -m tools.measure_precision [--model=demo] --precisions=int8,w8a8,int4+quantization_group_size=64,./DIR

Each precision runs in the engine, one after the other, and is compared with float32, the first. Its text is --text, or
stories that the demo model was not trained on, of which only the answers count. A precision is settings of LLM joined
by "+": a bare word is a --quantization, NAME=VALUE is any setting, and a path with a / is a folder of another format of
the same model.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import sys
from typing import Any

from engine.device.options import BuildOptions
from engine.errors import ConfigError, EngineError
from engine.model_folder import check_model_folder
from extensions.python_api.llm import LLM
from extensions.python_api.llm_settings import split_settings
from extensions.python_api.sampling_params import SamplingParams
from tools.arguments import CommandParser, output_file, positive_int
from tools.demo_model import corpus, skills
from tools.measure import commit, machine, show
from tools.text_windows import cut_windows

REFERENCE = "none"  # in float32
# Enough for 32 requests of 2,000 positions of the demo model; two executables compile faster than five.
_SETTINGS: dict[str, Any] = {"token_budgets": (64, 512), "max_num_seqs": 64, "prefill_chunk": 448, "kv_cache_mb": 512}
_SCORING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
_ANSWER = SamplingParams(max_tokens=96, temperature=0.0)
_SKILLS_SEED = 1_000_003  # that of the model card
_RECALL_DISTANCES = (100, 500, 1000, 1500)  # tokens, as on the model card
_ASSISTANT = "<|assistant|>"


@dataclasses.dataclass(frozen=True)
class Document:
  """Token ids, and for each whether its log probability counts; never the first's."""

  token_ids: list[int]
  counts: list[bool]


@dataclasses.dataclass(frozen=True)
class TextScores:
  """For each token that counts, in the order of the documents.

  Attributes:
    logprobs: its natural log probability.
    likeliest: the model's likeliest token in its place.
  """

  logprobs: list[float]
  likeliest: list[int]

  @property
  def perplexity(self) -> float:
    return math.exp(-sum(self.logprobs) / len(self.logprobs))


def parse_precision(text: str, model: str) -> tuple[str, dict[str, Any]]:
  """Returns the folder and the settings of a precision of `model`; raises ConfigError for settings that LLM refuses."""
  settings = {"dtype": "float32"} | _SETTINGS
  for part in text.split("+"):
    name, equals, value = part.partition("=")
    if equals:
      settings[name] = _parse_value(value)
    elif os.sep in part:
      model = part
      check_model_folder(pathlib.Path(model))
    else:
      settings["quantization"] = part
  BuildOptions(model, **split_settings(settings)[1])
  return model, settings


def _parse_value(text: str) -> Any:
  try:
    return json.loads(text)
  except ValueError:
    return text


def make_story_documents(llm: LLM, num_tokens: int) -> list[Document]:
  """Returns requests for stories and their answers of at least `num_tokens` tokens that count: those of the answers.

  Stories come from the training text's grammar with another seed. Training text of a fixed set does not exist.
  """
  rng, documents, counted = random.Random("held-out stories"), [], 0
  while counted < num_tokens:
    token_ids, counts = llm.tokenize(corpus.BOS, add_special_tokens=False), [False]
    for turn in corpus.story_turns(rng):
      question, _, answer = turn.text().partition(_ASSISTANT)
      for part, is_answer in ((question + _ASSISTANT, False), (answer, True)):
        ids = llm.tokenize(part, add_special_tokens=False)
        token_ids += ids
        counts += [is_answer] * len(ids)
    documents.append(Document(token_ids, counts))
    counted += sum(counts)
  return documents


def cut_documents(llm: LLM, text: str, num_tokens: int, window: int) -> list[Document]:
  """Returns the first `num_tokens` tokens of a text in windows; all but the first token of each count."""
  windows = cut_windows(llm.tokenize, text, num_tokens, window)
  return [Document(part, [False] + [True] * (len(part) - 1)) for part in windows]


def score_documents(llm: LLM, documents: Sequence[Document]) -> TextScores:
  """Returns what the engine's prompt log probabilities say about the tokens that count."""
  outputs = llm.generate([document.token_ids for document in documents], _SCORING, progress=False)
  logprobs, likeliest = [], []
  for document, output in zip(documents, outputs, strict=True):
    for counts, entry in zip(document.counts[1:], output.prompt_logprobs, strict=True):
      if counts:
        logprobs.append(entry.logprob)
        likeliest.append(entry.top[0].token_id)
  return TextScores(logprobs, likeliest)


def measure_skills(llm: LLM, count: int) -> dict[str, float]:
  """Returns the right answers of each skill in percent, greedy, on the model card's instances."""
  shares = {}
  for skill in skills.SKILLS:
    for distance in _RECALL_DISTANCES if skill == "recall" else (None,):
      instances = skills.make_instances(skill, count, _SKILLS_SEED, distance)
      outputs = llm.chat([instance.messages for instance in instances], _ANSWER, progress=False)
      right = sum(skills.is_correct(each, output.text) for each, output in zip(instances, outputs, strict=True))
      shares[skill if distance is None else f"recall_{distance}"] = round(100 * right / count, 1)
  return shares


def compare_scores(scores: TextScores, reference: TextScores) -> dict[str, float]:
  """Returns perplexity, its difference from the reference, agreement and error of log probabilities."""
  pairs = list(zip(scores.logprobs, reference.logprobs, strict=True))
  same = [a == b for a, b in zip(scores.likeliest, reference.likeliest, strict=True)]
  return {
    "perplexity": round(scores.perplexity, 5),
    "perplexity_change_percent": round(100 * (scores.perplexity / reference.perplexity - 1), 3),
    "top1_agreement_percent": round(100 * sum(same) / len(same), 2),
    "logprob_error": round(sum(abs(a - b) for a, b in pairs) / len(pairs), 5),
  }


def format_table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns a Markdown table of the measured precisions."""
  names = list(rows[0].get("skills", {}))
  head = ["precision", "perplexity", "change", "likeliest token the same", "error of log probability", *names]
  lines = [head, ["---"] * len(head)]
  for row in rows:
    figures = [f"{row['perplexity']:.4f}", f"{row['perplexity_change_percent']:+.2f} %"]
    figures += [f"{row['top1_agreement_percent']:.1f} %", f"{row['logprob_error']:.4f}"]
    lines.append([row["precision"], *figures, *(f"{row['skills'][name]:.1f}" for name in names)])
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 after one line about a model or a precision that cannot be served."""
  parser = CommandParser("tools.measure_precision", __doc__)
  parser.add_argument("--model", default="demo", help="model folder, or demo")
  parser.add_argument("--precisions", default="int8", help="what to compare with float32, separated by commas")
  parser.add_argument("--text", default="", help="file of held-out text; empty: stories of the demo model's kind")
  parser.add_argument("--num_tokens", type=positive_int, default=20_000, help="tokens of the text that count")
  parser.add_argument("--window", type=positive_int, default=512, help="tokens of a request for --text")
  parser.add_argument(
    "--skills", type=int, default=200, help="instances of each skill, of the demo model only; 0: none"
  )
  parser.add_argument("--output", type=output_file, default="", help="JSON file to write")
  args = parser.parse_args(argv)
  rows: list[dict[str, Any]] = []
  reference = None
  documents: list[Document] = []
  try:
    names = dict.fromkeys([REFERENCE, *args.precisions.split(",")])
    precisions = {name: parse_precision(name, args.model) for name in names}
    if not args.text and args.model != "demo":
      raise ConfigError(f"model={args.model} has no held-out text of its own; give --text=FILE")
    text = pathlib.Path(args.text).read_text("utf-8") if args.text else ""
    for precision, (folder, settings) in precisions.items():
      with contextlib.redirect_stdout(sys.stderr), LLM(folder, progress=False, **settings) as llm:
        if not documents:
          documents = (
            cut_documents(llm, text, args.num_tokens, args.window)
            if args.text
            else make_story_documents(llm, args.num_tokens)
          )
        scores = score_documents(llm, documents)
        reference = reference or scores
        row: dict[str, Any] = {"precision": precision, **compare_scores(scores, reference)}
        if args.skills and args.model == "demo":
          row["skills"] = measure_skills(llm, args.skills)
      rows.append(row)
      print(f"{precision}: {row}", file=sys.stderr, flush=True)
  except (EngineError, OSError, UnicodeDecodeError) as error:
    return parser.failed(error, 1)
  result = {
    "model": args.model,
    "text": args.text or "held-out stories",
    "num_tokens": sum(sum(document.counts) for document in documents),
    "skill_instances": args.skills if args.model == "demo" else 0,
    "machine": machine(),
    "commit": commit(),
    "precisions": rows,
  }
  show(result, format_table(rows), args.output)
  return 0


if __name__ == "__main__":
  sys.exit(main())
