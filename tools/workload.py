"""Makes and reads request files: lengths, arrival times and token ids from a seed. Standard library; runs no model.

A request file is JSON lines. The first may be `{"trace": {...}}`, which says how the rest was made; every other is
`{"id": 0, "arrival_s": 0.0, "prompt": [token ids], "output_len": 40}`. The same seed gives the same file on every
machine. Lengths, arrivals and token ids come from streams of their own, so changing one leaves the others alone.

  python -m tools.workload --num_requests=64 --prompt_len=lognormal:64:8:512 --output_len=lognormal:64:4:256 \\
      --vocab_size=32000 --output=requests.jsonl
  python -m tools.workload --trace=benchmarks/traces/azure_conv_500.csv --scale=0.1 --vocab_size=2048 \\
      --output=requests.jsonl
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import csv
import dataclasses
import datetime
import json
import math
import random
import sys
from typing import Any, TextIO

from engine.errors import ConfigError
from tools.arguments import CommandParser, positive_float, positive_int

LOGNORMAL_SIGMA = 0.8  # spread of ln(length); ShareGPT's prompts have about 1.2, chat turns about 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class WorkRequest:
  """One line of a request file.

  Attributes:
    id: as in the file; unique.
    arrival_s: seconds after the start at which it is to be sent.
    prompt: token ids, at least one.
    output_len: exactly how many tokens to generate.
  """

  id: int | str
  arrival_s: float
  prompt: tuple[int, ...]
  output_len: int


# --- Lengths ----------------------------------------------------------------------------------------------------------


def _normal_cdf(x: float) -> float:
  return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _clipped_lognormal_mean(mu: float, sigma: float, low: float, high: float) -> float:
  """Mean of min(max(exp(N(mu, sigma)), low), high), in closed form."""
  below = _normal_cdf((math.log(low) - mu) / sigma)
  above = 1 - _normal_cdf((math.log(high) - mu) / sigma)
  inside = math.exp(mu + sigma * sigma / 2) * (
    _normal_cdf((math.log(high) - mu - sigma * sigma) / sigma)
    - _normal_cdf((math.log(low) - mu - sigma * sigma) / sigma)
  )
  return low * below + inside + high * above


def lognormal(mean: float, low: int, high: int, sigma: float = LOGNORMAL_SIGMA) -> Callable[[random.Random], int]:
  """Log-normal lengths clipped to [low, high], with `mean` the mean AFTER clipping."""
  if not low < mean < high or low < 1:
    raise ConfigError(f"lognormal:{mean}:{low}:{high} needs 1 <= low < mean < high; change the numbers")
  bottom, top = math.log(low) - 10 * sigma, math.log(high) + 10 * sigma
  for _ in range(80):  # the clipped mean grows with mu
    mu = (bottom + top) / 2
    bottom, top = (mu, top) if _clipped_lognormal_mean(mu, sigma, low, high) < mean else (bottom, mu)
  return lambda rng: min(max(round(rng.lognormvariate(mu, sigma)), low), high)


def loguniform(low: int, high: int) -> Callable[[random.Random], int]:
  """Lengths whose logarithm is uniform: as many between 20 and 200 as between 200 and 2,000."""
  if not 1 <= low <= high:
    raise ConfigError(f"loguniform:{low}:{high} needs 1 <= low <= high; change the numbers")
  return lambda rng: min(max(round(math.exp(rng.uniform(math.log(low), math.log(high)))), low), high)


def parse_lengths(spec: str) -> Callable[[random.Random], int]:
  """A distribution by name: `fixed:64`, `uniform:8:64`, `loguniform:20:2000`, `lognormal:MEAN:LOW:HIGH[:SIGMA]`."""
  kind, *texts = spec.split(":")
  try:
    if kind == "lognormal" and len(texts) in (3, 4):
      return lognormal(float(texts[0]), int(texts[1]), int(texts[2]), *map(float, texts[3:]))
    numbers = [int(text) for text in texts]
    if kind == "fixed" and len(numbers) == 1 and numbers[0] >= 1:
      return lambda rng: numbers[0]
    if kind == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
      return lambda rng: rng.randint(numbers[0], numbers[1])
    if kind == "loguniform" and len(numbers) == 2:
      return loguniform(*numbers)
  except ValueError:
    pass
  raise ConfigError(
    f"length distribution {spec!r} is unknown; use fixed:64, uniform:8:64, loguniform:20:2000 or "
    "lognormal:MEAN:LOW:HIGH[:SIGMA], with lengths of at least 1"
  )


# --- Arrivals ---------------------------------------------------------------------------------------------------------


def arrivals(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
  """Arrival times in seconds, the first at 0.

  Gaps are gamma-distributed with mean 1/rate and coefficient of variation 1/sqrt(burstiness), as in vLLM's
  `bench serve`: 1 is a Poisson process, below 1 is burstier, above 1 is more even. An infinite rate is one burst.
  """
  if not (rate > 0 and 0 < burstiness < math.inf):
    raise ConfigError(f"rate={rate} and burstiness={burstiness} must be above 0, burstiness finite; change them")
  rng = random.Random(f"{seed}/arrivals")
  times, now = [], 0.0
  for _ in range(num_requests):
    times.append(now)
    if rate < math.inf:
      now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
  return times


# --- Whole workloads --------------------------------------------------------------------------------------------------


def _with_tokens(lengths: Iterable[tuple[float, int, int]], vocab_size: int, seed: int) -> list[WorkRequest]:
  """Adds made-up token ids to (arrival_s, prompt length, output length) rows."""
  if vocab_size < 1:
    raise ConfigError(f"vocab_size={vocab_size} must be at least 1; pass the model's")
  rng = random.Random(f"{seed}/tokens")
  vocabulary = range(vocab_size)
  return [
    WorkRequest(index, arrival_s, tuple(rng.choices(vocabulary, k=prompt_len)), output_len)
    for index, (arrival_s, prompt_len, output_len) in enumerate(lengths)
  ]


def synthetic(
  num_requests: int,
  prompt_len: str,
  output_len: str,
  vocab_size: int,
  seed: int = 0,
  rate: float = math.inf,
  burstiness: float = 1.0,
) -> list[WorkRequest]:
  """Requests whose lengths follow two distributions (see parse_lengths) and whose arrivals follow a rate."""
  draw_prompt, draw_output = parse_lengths(prompt_len), parse_lengths(output_len)
  prompt_rng, output_rng = random.Random(f"{seed}/prompt_len"), random.Random(f"{seed}/output_len")
  rows = (
    (time, draw_prompt(prompt_rng), draw_output(output_rng)) for time in arrivals(num_requests, rate, burstiness, seed)
  )
  return _with_tokens(rows, vocab_size, seed)


def read_trace(path: str) -> list[tuple[float, int, int]]:
  """Rows (seconds since the first, prompt tokens, output tokens) of a public trace.

  Reads Azure's LLM inference traces (`TIMESTAMP,ContextTokens,GeneratedTokens`) and length lists without times
  (`num_prefill_tokens,num_decode_tokens,...`, every arrival 0).

  Raises:
    ConfigError: no such file, missing columns, a negative length, or times that go back.
  """
  try:
    with open(path, newline="", encoding="utf-8") as file:
      lines = csv.DictReader(line for line in file if not line.startswith("#"))
      rows, columns = list(lines), set(lines.fieldnames or ())
  except OSError as error:
    raise ConfigError(f"trace {path} cannot be read: {error.strerror}; check --trace") from error
  try:
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
      # Seven digits of a second; fromisoformat reads six and drops the rest.
      times = [datetime.datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
      found = [
        ((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
      ]
    elif {"num_prefill_tokens", "num_decode_tokens"} <= columns:
      found = [(0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows]
    else:
      raise ConfigError(
        f"trace {path} has columns {sorted(columns)}; known are TIMESTAMP,ContextTokens,GeneratedTokens "
        "and num_prefill_tokens,num_decode_tokens"
      )
  except (ValueError, TypeError) as error:
    raise ConfigError(f"trace {path} has a row that cannot be read: {error}; repair or remove it") from error
  if not found:
    raise ConfigError(f"trace {path} has no rows; give one with at least one request")
  before = 0.0
  for number, (arrival_s, *lengths) in enumerate(found, 1):
    if min(lengths) < 0:
      raise ConfigError(
        f"trace {path}, row {number}: a length of {min(lengths)} tokens is below 0; repair or remove the row"
      )
    if arrival_s < before:
      raise ConfigError(
        f"trace {path}, row {number}: it arrives {before - arrival_s:.3f} s before the row above it; sort rows by time"
      )
    before = arrival_s
  return found


def scale_rows(
  rows: Sequence[tuple[float, int, int]],
  length_scale: float = 1.0,
  rate_scale: float = 1.0,
  num_requests: int | None = None,
  max_len: int | None = None,
) -> list[tuple[float, int, int]]:
  """Rows of a trace with lengths and arrival rate scaled to a machine; the arguments are those of from_trace."""

  def scaled(row: tuple[float, int, int]) -> tuple[float, int, int]:
    prompt, output = (max(1, round(length * length_scale)) for length in row[1:])
    if max_len is not None:
      output = min(output, max_len - 1)
      prompt = min(prompt, max_len - output)
    return row[0] / rate_scale, prompt, output

  return [scaled(row) for row in rows[:num_requests]]


def from_trace(
  rows: Sequence[tuple[float, int, int]],
  vocab_size: int,
  seed: int = 0,
  length_scale: float = 1.0,
  rate_scale: float = 1.0,
  num_requests: int | None = None,
  max_len: int | None = None,
) -> list[WorkRequest]:
  """Replays a trace, lengths and arrival rate scaled to the machine.

  Args:
    rows: as read_trace returns them.
    vocab_size: of the model.
    seed: for the made-up token ids.
    length_scale: lengths are multiplied by this, and are at least 1.
    rate_scale: arrivals come this many times as often.
    num_requests: only the first so many.
    max_len: prompt and output together are cut to this many tokens, the prompt first; None leaves them.
  """
  return _with_tokens(scale_rows(rows, length_scale, rate_scale, num_requests, max_len), vocab_size, seed)


def share_prefixes(
  requests: Sequence[WorkRequest], num_prefixes: int, prefix_len: int, vocab_size: int, seed: int = 0
) -> list[WorkRequest]:
  """Lets prompts begin alike, as behind a system prompt: lengths and arrivals stay as they are.

  Args:
    requests: whose first tokens are replaced.
    num_prefixes: so many beginnings; each request draws one.
    prefix_len: tokens of a beginning; a shorter prompt takes all but its last token from it.
    vocab_size, seed: of the made-up tokens and the draw, which come from a stream of their own.
  """
  rng = random.Random(f"{seed}/prefixes")
  prefixes = [tuple(rng.choices(range(vocab_size), k=prefix_len)) for _ in range(num_prefixes)]
  changed = []
  for request in requests:
    prefix = prefixes[rng.randrange(num_prefixes)][: len(request.prompt) - 1]
    changed.append(dataclasses.replace(request, prompt=prefix + request.prompt[len(prefix) :]))
  return changed


# --- Files ------------------------------------------------------------------------------------------------------------


def write_requests(file: TextIO, requests: Iterable[WorkRequest], trace: dict[str, Any]) -> None:
  """Writes a request file; `trace` says how it was made."""
  file.write(json.dumps({"trace": trace}) + "\n")
  for request in requests:
    file.write(json.dumps(dataclasses.asdict(request), separators=(",", ":")) + "\n")


def write_tokens(path: str, tokens: Mapping[int | str, Sequence[int]]) -> None:
  """Writes a line {"id": ..., "tokens": [...]} for each request."""
  with open(path, "w", encoding="utf-8") as file:
    for identity, ids in tokens.items():
      file.write(json.dumps({"id": identity, "tokens": list(ids)}, separators=(",", ":")) + "\n")


def read_tokens(path: str) -> dict[int | str, list[int]]:
  """Reads what write_tokens wrote."""
  with open(path, encoding="utf-8") as file:
    return {line["id"]: line["tokens"] for line in map(json.loads, file)}


def read_requests(path: str) -> list[WorkRequest]:
  """Reads a request file, checking every field; raises ConfigError naming the line."""
  requests: list[WorkRequest] = []
  seen: set[int | str] = set()
  try:
    with open(path, encoding="utf-8") as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          request = _parse_line(line, f"{path}, line {number}", first=not requests)
          if request is None:
            continue
          if request.id in seen:
            raise ConfigError(f"{path}, line {number}: id {request.id!r} occurs twice; make ids unique")
          seen.add(request.id)
          requests.append(request)
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"requests {path} cannot be read: {error}; check --requests") from error
  if not requests:
    raise ConfigError(f"requests {path} holds no request; make one with python -m tools.workload")
  return requests


def _parse_line(line: str, where: str, *, first: bool) -> WorkRequest | None:
  """One request, or None for the line that only describes the file."""
  form = '{"id": 0, "arrival_s": 0.0, "prompt": [token ids], "output_len": 40}'
  try:
    value = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{where} is not JSON ({error}); a line is {form}") from error
  if first and isinstance(value, dict) and "trace" in value and "prompt" not in value:
    return None
  try:
    identity, arrival_s, prompt, output_len = (value[key] for key in ("id", "arrival_s", "prompt", "output_len"))
  except (TypeError, KeyError) as error:
    raise ConfigError(f"{where} lacks {error}; a line is {form}") from error
  whole = (int,)
  problems = [
    (type(identity) not in (int, str), "id", identity, "a whole number or a string"),
    (
      type(arrival_s) not in (int, float) or not 0 <= arrival_s < math.inf,
      "arrival_s",
      arrival_s,
      "a finite number of seconds, 0 or more",
    ),
    (type(output_len) not in whole or output_len < 1, "output_len", output_len, "a whole number of at least 1"),
    (
      not isinstance(prompt, list) or not prompt or any(type(token) not in whole or token < 0 for token in prompt),
      "prompt",
      prompt,
      "a list of at least one token id",
    ),
  ]
  for wrong, name, got, wanted in problems:
    if wrong:
      raise ConfigError(f"{where}: {name}={got!r:.60} must be {wanted}; a line is {form}")
  return WorkRequest(identity, float(arrival_s), tuple(prompt), output_len)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_shape_arguments(parser: CommandParser) -> None:
  """The flags that describe a workload, shared with bench_serving."""
  parser.add_argument("--trace", help="a public trace (CSV) to replay instead of the two distributions")
  parser.add_argument(
    "--scale", type=positive_float, default=1.0, help="with --trace: lengths and arrival rate are multiplied by this"
  )
  parser.add_argument("--rate_scale", type=positive_float, help="with --trace: arrival rate factor instead of --scale")
  parser.add_argument("--num_requests", type=positive_int, help="how many (default: 64, or the whole trace)")
  parser.add_argument("--prompt_len", default="lognormal:64:8:512", help="distribution of prompt lengths, in tokens")
  parser.add_argument("--output_len", default="lognormal:64:4:256", help="distribution of forced output lengths")
  parser.add_argument(
    "--rate",
    type=positive_float,
    default=math.inf,
    help="requests a second; inf is one burst, or the times that the --trace has",
  )
  parser.add_argument("--burstiness", type=positive_float, default=1.0, help="1 is Poisson, below 1 burstier (gamma)")
  parser.add_argument("--max_len", type=positive_int, help="with --trace: cut prompt + output to so many tokens")
  parser.add_argument("--num_prefixes", type=positive_int, help="prompts begin with one of so many shared prefixes")
  parser.add_argument("--prefix_len", type=positive_int, default=64, help="with --num_prefixes: their tokens")
  parser.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and token ids")


def from_arguments(args: Any, vocab_size: int, max_len: int | None = None) -> tuple[list[WorkRequest], dict[str, Any]]:
  """Requests and their description from the flags of add_shape_arguments.

  A finite rate with a trace keeps the trace's lengths and draws the times anew.
  """
  if args.trace:
    rate_scale = args.rate_scale if args.rate_scale is not None else args.scale
    max_len = args.max_len or max_len
    rows = scale_rows(read_trace(args.trace), args.scale, rate_scale, args.num_requests, max_len)
    about = {"trace": args.trace, "length_scale": args.scale, "rate_scale": rate_scale, "max_len": max_len}
    if args.rate < math.inf:
      times = arrivals(len(rows), args.rate, args.burstiness, args.seed)
      rows = [(arrival_s, *row[1:]) for arrival_s, row in zip(times, rows, strict=True)]
      about |= {"rate": args.rate, "burstiness": args.burstiness, "rate_scale": None}
    requests = _with_tokens(rows, vocab_size, args.seed)
  else:
    requests = synthetic(
      args.num_requests or 64, args.prompt_len, args.output_len, vocab_size, args.seed, args.rate, args.burstiness
    )
    about = {
      "prompt_len": args.prompt_len,
      "output_len": args.output_len,
      "rate": args.rate if args.rate < math.inf else "inf",
      "burstiness": args.burstiness,
    }
  if args.num_prefixes:
    requests = share_prefixes(requests, args.num_prefixes, args.prefix_len, vocab_size, args.seed)
    about |= {"num_prefixes": args.num_prefixes, "prefix_len": args.prefix_len}
  return requests, about | {"seed": args.seed, "num_requests": len(requests)}


def main(argv: Sequence[str] | None = None) -> int:
  """Writes a request file and one line about it to stderr."""
  parser = CommandParser("tools.workload", __doc__)
  add_shape_arguments(parser)
  parser.add_argument("--vocab_size", type=positive_int, required=True, help="token ids are below this")
  parser.add_argument("--output", required=True, help="request file to write, - for standard output")
  args = parser.parse_args(argv)
  try:
    requests, trace = from_arguments(args, args.vocab_size)
  except ConfigError as error:
    parser.error(str(error))
  if args.output == "-":
    write_requests(sys.stdout, requests, trace)
  else:
    with open(args.output, "w", encoding="utf-8") as file:
      write_requests(file, requests, trace)
  prompts, outputs = [len(request.prompt) for request in requests], [request.output_len for request in requests]
  print(
    f"{len(requests)} requests over {requests[-1].arrival_s:.1f} s, prompt tokens mean "
    f"{sum(prompts) / len(prompts):.1f} ({min(prompts)} to {max(prompts)}), output tokens mean "
    f"{sum(outputs) / len(outputs):.1f} ({min(outputs)} to {max(outputs)})",
    file=sys.stderr,
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
