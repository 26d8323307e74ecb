"""Makes and reads request files: lengths, arrival times and token ids from a seed. Standard library; runs no model.

A request file is JSON lines. The first may be `{"trace": {...}}`, which describes how the file was made. Every other is
`{"id": 0, "arrival_s": 0.0, "prompt": [token ids], "output_len": 40}`, with "tenant" and "priority" if a request has
them. The same seed gives the same file on every machine. Lengths, arrivals, token ids, tenants and priorities have
separate random streams, so changing one leaves the others alone.

  python -m tools.workload --num_requests=64 --prompt_len=lognormal:64:8:512 --output_len=lognormal:64:4:256 \
      --vocab_size=32000 --output=requests.jsonl
  python -m tools.workload --trace=benchmarks/traces/azure_conv_500.csv --scale=0.1 --vocab_size=2048 \
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

PROMPT_LEN, OUTPUT_LEN = "lognormal:64:8:512", "lognormal:64:4:256"  # defaults
LOGNORMAL_SIGMA = 0.8  # standard deviation of ln(length); ShareGPT's prompts have about 1.2, chat turns about 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class WorkRequest:
  """One line of a request file.

  Attributes:
    id: the line's id; unique.
    arrival_s: seconds from the start to the intended sending time.
    prompt: token ids, at least one.
    output_len: exact number of tokens to generate.
    tenant: the tenant, for policy fair.
    priority: lower goes first, under policy priority; under policy tiers, 0 or less is interactive.
  """

  id: int | str
  arrival_s: float
  prompt: tuple[int, ...]
  output_len: int
  tenant: str = ""
  priority: int = 0


# --- Lengths ----------------------------------------------------------------------------------------------------------


def _normal_cdf(x: float) -> float:
  return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _clipped_lognormal_mean(mu: float, sigma: float, low: float, high: float) -> float:
  """Returns the mean of min(max(exp(N(mu, sigma)), low), high), in closed form."""
  below = _normal_cdf((math.log(low) - mu) / sigma)
  above = 1 - _normal_cdf((math.log(high) - mu) / sigma)
  inside = math.exp(mu + sigma * sigma / 2) * (
    _normal_cdf((math.log(high) - mu - sigma * sigma) / sigma)
    - _normal_cdf((math.log(low) - mu - sigma * sigma) / sigma)
  )
  return low * below + inside + high * above


def lognormal(mean: float, low: int, high: int, sigma: float = LOGNORMAL_SIGMA) -> Callable[[random.Random], int]:
  """Returns log-normal lengths clipped to [low, high]; `mean` is the mean AFTER clipping."""
  if not low < mean < high or low < 1:
    raise ConfigError(f"lognormal:{mean}:{low}:{high} needs 1 <= low < mean < high; change the numbers")
  bottom, top = math.log(low) - 10 * sigma, math.log(high) + 10 * sigma
  for _ in range(80):  # the clipped mean grows with mu
    mu = (bottom + top) / 2
    bottom, top = (mu, top) if _clipped_lognormal_mean(mu, sigma, low, high) < mean else (bottom, mu)
  return lambda rng: min(max(round(rng.lognormvariate(mu, sigma)), low), high)


def loguniform(low: int, high: int) -> Callable[[random.Random], int]:
  """Returns lengths whose logarithm is uniform: as many between 20 and 200 as between 200 and 2,000."""
  if not 1 <= low <= high:
    raise ConfigError(f"loguniform:{low}:{high} needs 1 <= low <= high; change the numbers")
  return lambda rng: min(max(round(math.exp(rng.uniform(math.log(low), math.log(high)))), low), high)


def parse_lengths(spec: str) -> Callable[[random.Random], int]:
  """Parses a distribution: `fixed:64`, `uniform:8:64`, `loguniform:20:2000` or `lognormal:MEAN:LOW:HIGH[:SIGMA]`."""
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
  """Returns arrival times in seconds, the first at 0.

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
  """Returns requests whose lengths follow two distributions (see parse_lengths) and whose arrivals follow a rate."""
  draw_prompt, draw_output = parse_lengths(prompt_len), parse_lengths(output_len)
  prompt_rng, output_rng = random.Random(f"{seed}/prompt_len"), random.Random(f"{seed}/output_len")
  rows = (
    (time, draw_prompt(prompt_rng), draw_output(output_rng)) for time in arrivals(num_requests, rate, burstiness, seed)
  )
  return _with_tokens(rows, vocab_size, seed)


def read_trace(path: str) -> list[tuple[float, int, int]]:
  """Returns the rows (seconds since the first, prompt tokens, output tokens) of a public trace.

  Reads Azure's LLM inference traces (`TIMESTAMP,ContextTokens,GeneratedTokens`) and length lists without times
  (`num_prefill_tokens,num_decode_tokens,...`, every arrival 0).

  Raises:
    ConfigError: the file is missing, lacks columns, has a negative length, or its times go back.
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
  """Scales a trace's lengths and arrival rate; arguments as in from_trace."""

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
  """Returns a trace's requests, with lengths and arrival rate scaled to the machine.

  Args:
    rows: as read_trace returns them.
    vocab_size: the model's.
    seed: seed of the made-up token ids.
    length_scale: factor of lengths, which stay at least 1.
    rate_scale: factor of the arrival rate.
    num_requests: length of the prefix of the trace to use.
    max_len: limit for prompt and output together, in tokens; the prompt is cut first. None sets no limit.
  """
  return _with_tokens(scale_rows(rows, length_scale, rate_scale, num_requests, max_len), vocab_size, seed)


def share_prefixes(
  requests: Sequence[WorkRequest], num_prefixes: int, prefix_len: int, vocab_size: int, seed: int = 0
) -> list[WorkRequest]:
  """Gives prompts shared prefixes, as system prompts do; keeps lengths and arrivals.

  Args:
    requests: their first tokens are replaced.
    num_prefixes: number of prefixes; each request gets one at random.
    prefix_len: tokens of a prefix; a shorter prompt takes all but its last token from it.
    vocab_size, seed: for the tokens and the choice, which have their own random stream.
  """
  rng = random.Random(f"{seed}/prefixes")
  prefixes = [tuple(rng.choices(range(vocab_size), k=prefix_len)) for _ in range(num_prefixes)]
  changed = []
  for request in requests:
    prefix = prefixes[rng.randrange(num_prefixes)][: len(request.prompt) - 1]
    changed.append(dataclasses.replace(request, prompt=prefix + request.prompt[len(prefix) :]))
  return changed


def make_senders(count: int, num_tenants: int, batch_share: float, seed: int) -> list[tuple[str, int]]:
  """Returns (tenant, priority) for each of `count` requests.

  Args:
    count: requests.
    num_tenants: tenant k sends a share in proportion to 1 / (k + 1), as by Zipf's law; with 1, tenants have no name.
    batch_share: share of requests with priority 1; the others have 0.
    seed: seed of two separate random streams.
  """
  if not 0 <= batch_share <= 1:
    raise ConfigError(f"batch_share={batch_share} must be at least 0 and at most 1; set --batch_share")
  names = [f"tenant{number}" if num_tenants > 1 else "" for number in range(num_tenants)]
  weights = [1 / (number + 1) for number in range(num_tenants)]
  tenants = random.Random(f"{seed}/tenants").choices(names, weights, k=count)
  priorities = random.Random(f"{seed}/priorities")
  return [(tenant, int(priorities.random() < batch_share)) for tenant in tenants]


# --- Files ------------------------------------------------------------------------------------------------------------


def write_requests(file: TextIO, requests: Iterable[WorkRequest], trace: dict[str, Any]) -> None:
  """Writes a request file; `trace` describes how it was made."""
  file.write(json.dumps({"trace": trace}) + "\n")
  for request in requests:
    values = dataclasses.asdict(request).items()
    line = {name: value for name, value in values if name not in _ABSENT or value != _ABSENT[name]}
    file.write(json.dumps(line, separators=(",", ":")) + "\n")


_ABSENT = {"tenant": "", "priority": 0}  # defaults of a line without them


def write_tokens(path: str, tokens: Mapping[int | str, Sequence[int]]) -> None:
  """Writes a line {"id": ..., "tokens": [...]} for each request."""
  with open(path, "w", encoding="utf-8") as file:
    for identity, ids in tokens.items():
      file.write(json.dumps({"id": identity, "tokens": list(ids)}, separators=(",", ":")) + "\n")


def read_tokens(path: str) -> dict[int | str, list[int]]:
  """Reads a file of write_tokens."""
  with open(path, encoding="utf-8") as file:
    return {line["id"]: line["tokens"] for line in map(json.loads, file)}


def read_requests(path: str) -> list[WorkRequest]:
  """Reads and checks a request file. Raises ConfigError with the line."""
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
    raise ConfigError(f"requests {path} has no requests; make a file with python -m tools.workload")
  return requests


def _parse_line(line: str, where: str, *, first: bool) -> WorkRequest | None:
  """Returns one request, or None for the line that describes the file."""
  form = '{"id": 0, "arrival_s": 0.0, "prompt": [token ids], "output_len": 40}'
  optional = dict(_ABSENT)
  try:
    value = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{where} is not JSON ({error}); a line is {form}") from error
  if first and isinstance(value, dict) and "trace" in value and "prompt" not in value:
    return None
  try:
    identity, arrival_s, prompt, output_len = (value[key] for key in ("id", "arrival_s", "prompt", "output_len"))
    optional |= {name: value[name] for name in _ABSENT if name in value}
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
    (type(optional["tenant"]) is not str, "tenant", optional["tenant"], "a string"),
    (type(optional["priority"]) not in whole, "priority", optional["priority"], "a whole number"),
  ]
  for wrong, name, got, wanted in problems:
    if wrong:
      raise ConfigError(f"{where}: {name}={got!r:.60} must be {wanted}; a line is {form}")
  return WorkRequest(identity, float(arrival_s), tuple(prompt), output_len, **optional)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_shape_arguments(parser: CommandParser) -> None:
  """Adds the flags that describe a workload; bench_serving shares them."""
  parser.add_argument("--trace", help="a public trace (CSV) to replay instead of the two distributions")
  parser.add_argument(
    "--scale", type=positive_float, default=1.0, help="with --trace: lengths and arrival rate are multiplied by this"
  )
  parser.add_argument("--rate_scale", type=positive_float, help="with --trace: arrival rate factor instead of --scale")
  parser.add_argument("--num_requests", type=positive_int, help="number of requests (default: 64, or the whole trace)")
  parser.add_argument("--prompt_len", default=PROMPT_LEN, help="distribution of prompt lengths, in tokens")
  parser.add_argument("--output_len", default=OUTPUT_LEN, help="distribution of forced output lengths")
  parser.add_argument(
    "--rate",
    type=positive_float,
    default=math.inf,
    help="requests a second; inf is one burst, or the times that the --trace has",
  )
  parser.add_argument("--burstiness", type=positive_float, default=1.0, help="1 is Poisson, below 1 burstier (gamma)")
  parser.add_argument("--max_len", type=positive_int, help="with --trace: limit for prompt + output, in tokens")
  parser.add_argument(
    "--num_prefixes", type=positive_int, help="number of shared prefixes; each prompt begins with one"
  )
  parser.add_argument("--prefix_len", type=positive_int, default=64, help="with --num_prefixes: tokens of a prefix")
  parser.add_argument(
    "--num_tenants",
    type=positive_int,
    default=1,
    help="number of tenants that send requests, with unequal shares (Zipf)",
  )
  parser.add_argument("--batch_share", type=float, default=0.0, help="share of requests that have priority 1, not 0")
  parser.add_argument(
    "--seed", type=int, default=0, help="seed of lengths, arrivals, token ids, tenants and priorities"
  )


def has_senders(args: Any) -> bool:
  """Whether the flags set tenants or priorities."""
  return args.num_tenants > 1 or args.batch_share != 0.0


def from_arguments(args: Any, vocab_size: int, max_len: int | None = None) -> tuple[list[WorkRequest], dict[str, Any]]:
  """Makes requests and their description from the flags of add_shape_arguments.

  With a trace, a finite rate keeps the trace's lengths and samples new arrival times.
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
  if has_senders(args):
    senders = make_senders(len(requests), args.num_tenants, args.batch_share, args.seed)
    requests = [
      dataclasses.replace(request, tenant=tenant, priority=priority)
      for request, (tenant, priority) in zip(requests, senders, strict=True)
    ]
    about |= {"num_tenants": args.num_tenants, "batch_share": args.batch_share}
  return requests, about | {"seed": args.seed, "num_requests": len(requests)}


def main(argv: Sequence[str] | None = None) -> int:
  """Writes a request file, and one line about it to stderr."""
  parser = CommandParser("tools.workload", __doc__)
  add_shape_arguments(parser)
  parser.add_argument("--vocab_size", type=positive_int, required=True, help="vocabulary size; token ids are below it")
  parser.add_argument("--output", required=True, help="request file to write; - is standard output")
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
