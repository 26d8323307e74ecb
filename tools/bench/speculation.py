"""Measures what draft tokens are worth, with an oracle that knows the outputs; prints one JSON line.

  python -m tools.bench.speculation [--shape=llama-125m] [--rows=1] [--acceptance=0.7] [--drafts=3] [--turns=10]

Three engines of one model take turns: one without speculation, one whose drafter proposes the true next token with the
chance --acceptance, and another token otherwise, and another one without. An engine's place in memory changes its
speed, so the one with speculation is built between the others. A turn generates --tokens tokens for each of `rows`
sequences by each engine, and compares them with the first engine's. --acceptance=0 measures the cost of hopeless
drafts.

  ratio       the mean seconds of both engines without speculation over those with it, the median over turns
  quartiles   of the ratios of turns; `least` is that of the worst turn
  same        median and quartiles of one engine without speculation to the other: what differs from 1 there is noise
  total       the ratio of the seconds of all turns
  ceiling     expected tokens of a row in a step, if all its drafts were verified at no cost
  rung        of most steps with speculation

With --draft_model, drafts also cost what a draft model of that shape costs: it runs with random weights and the
vocabulary of the other model, and the oracle replaces its tokens. With --draft_model=eagle that is an EAGLE-3 head of
the model's shape.
"""

from collections.abc import Sequence
import functools
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time

from engine.batch import MAX_DRAFTS
from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.recorder import EngineStats
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import UNBOUNDED_QUEUE
from engine.speculation.drafter import Draft
from engine.speculation.model_drafter import MODEL, ModelDrafter
from tools.arguments import CommandParser, positive_int
from tools.make_random_model import find_bench_model
from tools.measure import freeze_start

EAGLE = "eagle"  # the value of --draft_model for a head
_PROMPT_TOKENS = 16


@functools.cache  # a real drafter would not seed a generator for each guess of a step
def _guess_output(name: str, output: tuple[int, ...], acceptance: float) -> tuple[int, ...]:
  """Returns an output in which each token is the true one with the chance `acceptance`, and otherwise another one."""
  return tuple(
    token if random.Random(f"{name} {place}").random() < acceptance else token ^ 1 for place, token in enumerate(output)
  )


class OracleDrafter:
  """Implements engine.speculation.drafter.Drafter with known outputs. Each position is right or wrong, always alike."""

  def __init__(self, acceptance: float):
    """Args: acceptance: chance that the token at a position is the true one, 0 to 1."""
    self.outputs: dict[str, tuple[int, ...]] = {}  # what follows the last dash of a request's id -> its true output
    self._acceptance = acceptance

  def update(self, request: Request) -> bool:
    """See Drafter."""
    return True

  def propose(self, request: Request, count: int) -> Draft:
    """See Drafter."""
    return Draft(self.guess_tokens(request.id, len(request.output_token_ids), count), "oracle")

  def guess_tokens(self, request_id: str, first: int, count: int) -> tuple[int, ...]:
    """Returns the proposed output tokens [first, first + count) of a request, or fewer at its end."""
    name = request_id.rpartition("-")[2]
    guesses = _guess_output(name, self.outputs.get(name, ()), self._acceptance)
    return guesses[first : first + count]

  def forget(self, request_id: str) -> None:
    """See Drafter."""

  def num_indexed(self, request_id: str) -> int:
    """See Drafter."""
    return 0

  def restore_index(self, request: Request, num_indexed: int) -> None:
    """See Drafter."""


class OracleModel(ModelDrafter):
  """Takes the oracle's tokens in place of those of the draft model, as many and as often."""

  def __init__(self, oracle: OracleDrafter):
    super().__init__()
    self._oracle = oracle

  def take_proposal(self, request_id: str, position: int, tokens: Sequence[int]) -> None:
    """See ModelDrafter."""
    super().take_proposal(
      request_id, position, self._oracle.guess_tokens(request_id, position - _PROMPT_TOKENS, len(tokens))
    )


def write_draft_shape(folder: pathlib.Path, draft_model: str, model: pathlib.Path) -> str:
  """Writes the config.json of a draft model with the vocabulary and length of `model`, or of a head.

  A head has the width of `model`, and a quarter of its tokens, as published heads have. Returns the folder.
  """
  served = json.loads((model / "config.json").read_text("utf-8"))
  if draft_model == EAGLE:
    raw = served | {
      "architectures": ["LlamaForCausalLMEagle3"],
      "num_hidden_layers": 1,
      "draft_vocab_size": served["vocab_size"] // 4,
      "tie_word_embeddings": False,
    }
  else:
    raw = json.loads((find_bench_model(draft_model)[0] / "config.json").read_text("utf-8"))
    raw |= {key: served[key] for key in ("vocab_size", "max_position_embeddings")}
  (folder / "config.json").write_text(json.dumps(raw))
  return str(folder)


def generate(built: Built, turn: str, rows: int, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
  """Returns the seconds after all prompts were computed, and the outputs, of `tokens` greedy tokens each."""
  engine = built.engine
  requests = []
  for row in range(rows):
    prompt = [3 + (7 * row + place) % 200 for place in range(_PROMPT_TOKENS)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    requests.append(Request(f"{turn}-{row}", prompt, params))
    engine.submit(requests[-1])
  while not all(request.output_token_ids for request in requests):
    engine.step()
  began = time.perf_counter()
  while engine.num_live:
    engine.step()
  return time.perf_counter() - began, [tuple(request.output_token_ids) for request in requests]


def build(
  model: pathlib.Path,
  tokens: int,
  drafts: int,
  overlap: str,
  is_random: bool,
  draft_model: str = "",
  draft_step_limit: float = 0.0,
) -> Built:
  """Builds an engine of the default ladder, with speculation if `drafts` is above 0."""
  longest = _PROMPT_TOKENS + tokens + 16
  options = BuildOptions(
    str(model),
    random_weights=is_random,
    max_model_len=longest,
    num_blocks=64 * (longest // 16 + 2),
    block_size=16,
    overlap=overlap,
    speculation="none" if not drafts else MODEL if draft_model else "ngram",
    draft_model=draft_model if drafts else "",
    num_speculative_tokens=drafts or 1,
    draft_step_limit=draft_step_limit,
    prefix_cache_scope="off",
    **UNBOUNDED_QUEUE,
  )
  return build_engine(options, lambda *_: None, lambda _: None)


def find_rung(built: Built, before: EngineStats) -> int:
  """Returns the tokens of the rung that most of the engine's steps since `before` have."""
  after, earlier = built.engine.stats().steps_by_rung, before.steps_by_rung
  return max(after, key=lambda rung: after[rung] - earlier.get(rung, 0))


def find_quartiles(ratios: Sequence[float]) -> list[float]:
  """Returns the first and the third quartile, rounded."""
  ratios = sorted(ratios)
  return [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)]


def measure(
  model: pathlib.Path,
  rows: int,
  acceptance: float,
  drafts: int,
  tokens: int,
  turns: int,
  overlap: str,
  is_random: bool,
  draft_model: str = "",
  draft_step_limit: float = 0.0,
) -> dict[str, object]:
  """Returns the figures of one setting."""
  more = (overlap, is_random, draft_model, draft_step_limit)
  plain, drafted, again = (build(model, tokens, count, *more) for count in (0, drafts, 0))
  oracle = OracleDrafter(acceptance)
  drafted.engine.replace_drafter(OracleModel(oracle) if draft_model else oracle)
  _, outputs = generate(plain, "first", rows, tokens)
  oracle.outputs = {str(row): output for row, output in enumerate(outputs)}
  order = [drafted, plain, again]
  drafted.runner.seal()  # the last engine compiled after it was ready
  freeze_start()
  seconds: dict[Built, list[float]] = {built: [] for built in order}
  started = drafted.engine.stats()
  num_steps = 0
  for turn in range(turns + 1):
    first = turn % 3
    for built in order[first:] + order[:first]:
      steps_before = built.engine.stats().num_steps
      took, found = generate(built, f"{turn}", rows, tokens)
      if found != outputs:
        raise AssertionError("drafts changed an output")
      if turn:  # the first one warms up
        seconds[built].append(took)
        num_steps += built.engine.stats().num_steps - steps_before if built is drafted else 0
  base = [(one + other) / 2 for one, other in zip(seconds[plain], seconds[again], strict=True)]
  ratios = [each / mine for each, mine in zip(base, seconds[drafted], strict=True)]
  same = [one / other for one, other in zip(seconds[plain], seconds[again], strict=True)]
  made = rows * (tokens - 1)
  return {
    "ratio": round(statistics.median(ratios), 3),
    "quartiles": find_quartiles(ratios),
    "least": round(min(ratios), 3),
    "same": [round(statistics.median(same), 3), *find_quartiles(same)],
    "total": round(sum(base) / sum(seconds[drafted]), 3),
    "tokens_per_s": round(made / statistics.median(seconds[drafted]), 1),
    "plain_tokens_per_s": round(made / statistics.median(base), 1),
    "tokens_per_row_and_step": round(turns * (tokens - 1) / num_steps, 2),
    "rung": find_rung(drafted, started),
    "ceiling": round(sum(acceptance**place for place in range(drafts + 1)), 2),
    "compiles_after_ready": drafted.runner.compiles_after_ready,
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("bench_speculation", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="a folder of models/shapes, with random weights, or demo")
  parser.add_argument("--rows", type=positive_int, default=1, help="sequences that decode")
  parser.add_argument("--acceptance", type=float, default=0.7, help="chance that a draft is the true token, 0 to 1")
  parser.add_argument("--drafts", type=positive_int, default=3, help=f"most drafts of a row, at most {MAX_DRAFTS}")
  parser.add_argument("--tokens", type=positive_int, default=96, help="tokens of each sequence")
  parser.add_argument("--turns", type=positive_int, default=10, help="turns of each engine, after one to warm up")
  parser.add_argument("--overlap", default="false", choices=("auto", "true", "false"), help="see the server's flag")
  parser.add_argument(
    "--draft_model", default="", help="a folder of models/shapes, demo_draft, or eagle; empty: no passes"
  )
  parser.add_argument("--draft_step_limit", type=float, default=0.0, help="see the server's flag; 0: no limit")
  args = parser.parse_args(argv)
  if not 0 <= args.acceptance <= 1:
    parser.error(f"--acceptance={args.acceptance:g} is outside 0 to 1")
  chosen = {
    key: getattr(args, key)
    for key in ("shape", "rows", "acceptance", "drafts", "tokens", "overlap", "draft_step_limit")
  }
  try:
    model, is_random = find_bench_model(args.shape)
    figures = args.rows, args.acceptance, args.drafts, args.tokens, args.turns, args.overlap
    with tempfile.TemporaryDirectory() as folder:
      draft = write_draft_shape(pathlib.Path(folder), args.draft_model, model) if args.draft_model else ""
      found = measure(model, *figures, is_random, draft, args.draft_step_limit)
  except EngineError as error:
    return parser.failed(error)
  print(json.dumps(chosen | ({"draft_model": args.draft_model} if args.draft_model else {}) | found))
  return 0


if __name__ == "__main__":
  sys.exit(main())
