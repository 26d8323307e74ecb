"""Compares an engine with speculation and one without on one text at a time; prints a JSON line for each kind of text.

  python -m tools.bench.speculative_texts [--speculation=auto] [--turns=9] [--requests=10] [--rows=1]

Both engines serve the demo model on this thread, greedily. The kinds are those of the model's skills (stories, copies,
reversals, JSON, recall), JSON under a schema (`schema`), and three that copy. `repeat` is a story that the prompt
holds twice and begins again. `longest` is twelve words, the longest copies that the model was trained on. `again` is
JSON that the conversation already holds, since the user repeats a question. The model's answers to the last two are
right, with 13 and 20 tokens; it copies nothing longer to its end.

There are three engines: one without speculation, one with it, and another one without. An engine's place in memory
changes its speed by up to a tenth, so the one with speculation is built between the others. Each group of `rows`
requests is served by all three in changing order, so that other work on the machine meets them all. All outputs must be
the same.

  ratio       seconds without speculation, the mean of both engines, over those with it: for each group the median over
              turns, summed over groups
  quartiles   of the ratios of single groups and turns
  same        the same two figures of both engines without speculation: what differs from 1 there is noise
  least       the ratio of the fastest servings of each group, which other work delays least
  host_us     the engine thread's processor time for an output token, without and with speculation; medians over turns
  tokens_per_step, rung, drafts, accepted, forced   of the engine with speculation; the rung is that of most steps
"""

from collections.abc import Iterator, Sequence
import json
import pathlib
import random
import statistics
import sys
import time
from typing import NamedTuple

from tokenizers import Tokenizer

from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import SPECULATION, UNBOUNDED_QUEUE
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler, OutputGrammar
from server.text.tokenizer import load_tokenizer
from tools.arguments import CommandParser, positive_int
from tools.bench.speculation import find_quartiles, find_rung
from tools.demo_model import corpus
from tools.demo_model.measure_draft import KINDS, make_messages
from tools.demo_model.train import chat_ids
from tools.make_random_model import find_bench_model
from tools.measure import commit, freeze_start, machine

_OUTPUT = 96
_LONGEST = 512  # tokens of a prompt and its output
_BEGUN = 12  # tokens of the third copy of a story
_COPIED_WORDS = 12
_MORE_KINDS = ("schema", "repeat", "longest", "again")
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


class _TextServing(NamedTuple):
  """Attributes: outputs: tokens of each request; host_s: processor time of the engine's thread."""

  outputs: list[tuple[int, ...]]
  seconds: float
  host_s: float


def serve(
  built: Built, name: str, prompts: list[list[int]], ignores_eos: bool, grammar: OutputGrammar | None
) -> _TextServing:
  """Serves the prompts together, from submission to the last token."""
  params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=ignores_eos)
  requests = [
    Request(f"{name}-{row}", prompt, params, constraint=None if grammar is None else grammar.copy())
    for row, prompt in enumerate(prompts)
  ]
  began, host = time.perf_counter(), time.thread_time()
  for request in requests:
    built.engine.submit(request)
  while built.engine.num_live:
    built.engine.step()
  host, seconds = time.thread_time() - host, time.perf_counter() - began
  return _TextServing([tuple(request.output_token_ids) for request in requests], seconds, host)


def make_prompts(plain: Built, tokenizer: Tokenizer, kind: str, count: int) -> list[list[int]]:
  """Returns token ids of `count` prompts of a kind."""
  if kind in ("longest", "again"):
    rng = random.Random(3)
    return [chat_ids(tokenizer, _make_copy(kind, rng)) for _ in range(count)]
  source = {"schema": "json", "repeat": "story"}.get(kind, kind)
  prompts = [chat_ids(tokenizer, messages) for messages in make_messages(source, count)]
  if kind != "repeat":
    return prompts
  stories = [serve(plain, f"story-{each}", [prompt], False, None).outputs[0] for each, prompt in enumerate(prompts)]
  return [[*prompt, *story, *story, *story[:_BEGUN]] for prompt, story in zip(prompts, stories, strict=True)]


def _make_copy(kind: str, rng: random.Random) -> list[dict[str, str]]:
  """Returns a conversation that the model was not trained on, and whose answer copies text of it."""
  if kind == "again":
    turn = corpus.skill_turn("json", rng, held_out=True)
    question = {"role": "user", "content": turn.user}
    return [question, {"role": "assistant", "content": turn.answer or ""}, question]
  while True:
    text = f"Copy: {' '.join(rng.sample(corpus.ALL_WORDS, _COPIED_WORDS))}"
    if corpus.is_held_out(text):
      return [{"role": "user", "content": text}]


def measure_kind(
  engines: dict[str, Built], kind: str, groups: list[list[list[int]]], turns: int, grammar: OutputGrammar | None
) -> dict[str, object]:
  """Returns the figures of a kind; raises AssertionError if an output differs.

  Args: engines: `plain`, `drafted` and `again`.
  """
  names, drafted = ("drafted", "plain", "again"), engines["drafted"]
  servings: dict[str, list[list[_TextServing]]] = {name: [[] for _ in groups] for name in names}
  before = drafted.engine.stats()
  for turn in range(turns + 1):
    if turn == 1:  # the first one warms up
      before = drafted.engine.stats()
    for index, prompts in enumerate(groups):
      first = (turn + index) % 3
      found = {
        name: serve(engines[name], f"{kind}-{turn}-{index}-{name}", prompts, kind == "repeat", grammar)
        for name in (*names[first:], *names[:first])
      }
      if any(each.outputs != found["plain"].outputs for each in found.values()):
        raise AssertionError("drafts changed an output")
      if turn:
        for name, served in found.items():
          servings[name][index].append(served)
  after = drafted.engine.stats()
  tokens = sum(len(output) for each in servings["plain"] for output in each[0].outputs)
  medians = {name: sum(statistics.median(s.seconds for s in each) for each in servings[name]) for name in names}
  least = {name: sum(min(s.seconds for s in each) for each in servings[name]) for name in names}
  host = {name: statistics.median(map(sum, _by_turn(servings[name]))) for name in names}
  return {
    "kind": kind,
    "ratio": round((medians["plain"] + medians["again"]) / 2 / medians["drafted"], 3),
    "quartiles": _compare_servings(
      [a + b for a, b in zip(servings["plain"], servings["again"], strict=True)],
      [a + a for a in servings["drafted"]],
    ),
    "same": [round(medians["plain"] / medians["again"], 3), *_compare_servings(servings["plain"], servings["again"])],
    "least": round((least["plain"] + least["again"]) / 2 / least["drafted"], 3),
    "host_us": [round(1e6 * host[name] / tokens, 1) for name in ("plain", "drafted")],
    "tokens": tokens,
    "tokens_per_step": round(turns * tokens / (after.num_steps - before.num_steps), 2),
    "rung": find_rung(drafted, before),
    "drafts": after.drafts.tokens - before.drafts.tokens,
    "accepted": after.drafts.accepted - before.drafts.accepted,
    "forced": after.drafts.forced - before.drafts.forced,
  }


def _by_turn(servings: list[list[_TextServing]]) -> list[list[float]]:
  """Returns the processor times of each turn's servings."""
  return [[served.host_s for served in turn] for turn in zip(*servings, strict=True)]


def _compare_servings(some: list[list[_TextServing]], others: list[list[_TextServing]]) -> list[float]:
  """Returns the quartiles of the ratios of seconds, pair by pair."""
  return find_quartiles(
    [
      one.seconds / other.seconds
      for ones, twos in zip(some, others, strict=True)
      for one, other in zip(ones, twos, strict=True)
    ]
  )


def _build(model: pathlib.Path, speculation: str, overlap: str, limit: float) -> Built:
  options = BuildOptions(
    str(model),
    max_model_len=_LONGEST,
    max_num_seqs=64,
    num_blocks=64 * _LONGEST // 16,
    block_size=16,
    overlap=overlap,
    speculation=speculation,
    draft_step_limit=limit,
    prefix_cache_scope="off",
    **UNBOUNDED_QUEUE,
  )
  return build_engine(options, lambda *_: None, lambda _: None)


def measure_texts(
  kinds: Sequence[str], speculation: str, requests: int, rows: int, turns: int, overlap: str, limit: float = 0.0
) -> Iterator[dict[str, object]]:
  """Yields the figures of each kind; see the module."""
  model, _ = find_bench_model("demo")
  values = {"plain": "none", "drafted": speculation, "again": "none"}
  engines = {name: _build(model, value, overlap, limit) for name, value in values.items()}
  plain = engines["plain"]
  loaded = load_tokenizer(model, max_prompt_bytes=1 << 20)
  assert loaded is not None, "the demo model has a tokenizer"
  config = plain.config
  compiler = ConstraintCompiler(loaded, config.vocab_size, config.eos_token_ids)
  grammar = compiler.compile(pb.OutputConstraint(json_schema=json.dumps(_SCHEMA)))
  tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
  freeze_start()
  for kind in kinds:
    prompts = make_prompts(plain, tokenizer, kind, requests)
    groups = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
    yield measure_kind(engines, kind, groups, turns, grammar if kind == "schema" else None)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("bench_speculative_texts", __doc__)
  choices = [kind for kind in SPECULATION if kind not in ("none", "draft")]
  parser.add_argument("--speculation", default="auto", choices=choices, help="of the drafted engine")
  parser.add_argument("--kinds", default=",".join((*KINDS, *_MORE_KINDS)), help="kinds of text")
  parser.add_argument("--requests", type=positive_int, default=10, help="texts of each kind")
  parser.add_argument("--rows", type=positive_int, default=1, help="texts that are served together, at most 64")
  parser.add_argument("--turns", type=positive_int, default=9, help="turns of each engine, after one to warm up")
  parser.add_argument("--overlap", default="auto", choices=("auto", "true", "false"), help="see the server's flag")
  parser.add_argument("--draft_step_limit", type=float, default=0.0, help="see the server's flag")
  args = parser.parse_args(argv)
  kinds = args.kinds.split(",")
  if unknown := set(kinds) - {*KINDS, *_MORE_KINDS}:
    parser.error(f"--kinds: {', '.join(sorted(unknown))} is not one of {', '.join((*KINDS, *_MORE_KINDS))}")
  if args.rows > 64:
    parser.error(f"--rows={args.rows} is above 64, the sequences that run at once; lower it")
  chosen = {key: getattr(args, key) for key in ("speculation", "overlap", "rows", "draft_step_limit")}
  print(json.dumps({"machine": machine(), "commit": commit()} | chosen))
  try:
    some = (args.speculation, args.requests, args.rows, args.turns, args.overlap, args.draft_step_limit)
    for found in measure_texts(kinds, *some):
      print(json.dumps(found), flush=True)
  except EngineError as error:
    return parser.failed(error)
  return 0


if __name__ == "__main__":
  sys.exit(main())
