"""Compares an engine with speculation and one without on one text at a time; prints a JSON line for each kind of text.

  python -m tools.bench.speculative_texts [--speculation=auto] [--turns=9] [--requests=10]

Both engines serve the demo model in this process, in turns, a request at a time and greedily. The kinds are those of
the model's skills (stories, copies, reversals, JSON, recall), JSON under a schema (`schema`), and a story that the
prompt holds twice and begins again (`repeat`). `ratio` is the median over turns of the output tokens a second with
speculation over those without, and `quartiles` are around it. `tokens_per_step` counts those of the drafted engine. All
outputs must be the same.
"""

from collections.abc import Sequence
import json
import statistics
import sys
import time

from tokenizers import Tokenizer

from engine.errors import EngineError
from engine.settings import SPECULATION
from extensions.python_api.llm import LLM
from extensions.python_api.sampling_params import SamplingParams
from tools.arguments import CommandParser, positive_int
from tools.demo_model.measure_draft import KINDS, make_messages
from tools.demo_model.train import chat_ids
from tools.make_random_model import find_bench_model
from tools.measure import commit, machine

_OUTPUT = 96
_BEGUN = 12  # tokens of the third copy of a story
_SCHEMA = {
  "type": "object",
  "properties": {
    "customer_name": {"type": "string", "maxLength": 8},
    "order_status": {"enum": ["waiting for payment", "on its way", "delivered"]},
    "payment_method": {"enum": ["credit card", "bank transfer"]},
    "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
    "is_a_gift": {"type": "boolean"},
  },
  "required": ["customer_name", "order_status", "payment_method", "number_of_items", "is_a_gift"],
  "additionalProperties": False,
}


def make_prompts(llm: LLM, kind: str, count: int) -> list[list[int]]:
  """Returns token ids of `count` prompts of a kind."""
  source = {"schema": "json", "repeat": "story"}.get(kind, kind)
  tokenizer = Tokenizer.from_file(str(find_bench_model("demo")[0] / "tokenizer.json"))
  prompts = [chat_ids(tokenizer, messages) for messages in make_messages(source, count)]
  if kind != "repeat":
    return prompts
  wanted = SamplingParams(max_tokens=_OUTPUT, temperature=0.0)
  stories = [output.outputs[0].token_ids for output in llm.generate(prompts, wanted, progress=False)]
  return [[*prompt, *story, *story, *story[:_BEGUN]] for prompt, story in zip(prompts, stories, strict=True)]


def measure_kind(plain: LLM, drafted: LLM, kind: str, requests: int, turns: int) -> dict[str, object]:
  """Returns the figures of a kind; raises AssertionError if an output differs."""
  prompts = make_prompts(plain, kind, requests)
  wanted = SamplingParams(
    max_tokens=_OUTPUT, temperature=0.0, json_schema=_SCHEMA if kind == "schema" else None, ignore_eos=kind == "repeat"
  )
  ratios, steps, tokens = [], 0, 0
  for turn in range(turns + 1):
    seconds, outputs = {}, {}
    for llm in (plain, drafted) if turn % 2 else (drafted, plain):
      before, began = llm.engine.stats().num_steps, time.perf_counter()
      outputs[llm] = [
        tuple(llm.generate([prompt], wanted, progress=False)[0].outputs[0].token_ids) for prompt in prompts
      ]
      seconds[llm] = time.perf_counter() - began
      if llm is drafted and turn:
        steps += llm.engine.stats().num_steps - before
        tokens += sum(map(len, outputs[llm]))
    if outputs[plain] != outputs[drafted]:
      raise AssertionError("drafts changed an output")
    if turn:  # the first one warms up
      ratios.append(seconds[plain] / seconds[drafted])
  ratios.sort()
  return {
    "kind": kind,
    "ratio": round(statistics.median(ratios), 3),
    "quartiles": [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)],
    "tokens": tokens // turns,
    "tokens_per_step": round(tokens / steps, 2),
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("bench_speculative_texts", __doc__)
  choices = [kind for kind in SPECULATION if kind != "none"]
  parser.add_argument("--speculation", default="auto", choices=choices, help="of the drafted engine")
  parser.add_argument("--kinds", default=",".join((*KINDS, "schema", "repeat")), help="kinds of text")
  parser.add_argument("--requests", type=positive_int, default=10, help="texts of each kind")
  parser.add_argument("--turns", type=positive_int, default=9, help="turns of each engine, after one to warm up")
  parser.add_argument("--overlap", default="auto", choices=("auto", "true", "false"), help="see the server's flag")
  args = parser.parse_args(argv)
  kinds = args.kinds.split(",")
  if unknown := set(kinds) - {*KINDS, "schema", "repeat"}:
    parser.error(f"--kinds: {', '.join(sorted(unknown))} is not one of {', '.join((*KINDS, 'schema', 'repeat'))}")
  model, _ = find_bench_model("demo")
  settings = {"max_num_seqs": 8, "max_model_len": 512, "prefix_cache_scope": "off", "overlap": args.overlap}
  print(
    json.dumps({"machine": machine(), "commit": commit(), "speculation": args.speculation, "overlap": args.overlap})
  )
  try:
    with (
      LLM(str(model), progress=False, speculation="none", **settings) as plain,
      LLM(str(model), progress=False, speculation=args.speculation, **settings) as drafted,
    ):
      for kind in kinds:
        print(json.dumps(measure_kind(plain, drafted, kind, args.requests, args.turns)), flush=True)
  except EngineError as error:
    return parser.failed(error)
  return 0


if __name__ == "__main__":
  sys.exit(main())
