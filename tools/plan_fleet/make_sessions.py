"""Makes a trace of conversations with shared prefixes, in Mooncake's form. Standard library; runs no model.

  python -m tools.plan_fleet.make_sessions --num_requests=20000 --rate=5 --output=sessions.jsonl

A conversation begins with one of --num_systems system prompts (by Zipf's law) and has turns. Each turn's prompt is the
whole text so far and a new message. Conversations begin by a Poisson process; a next turn comes after the answer's time
and a pause. Each hash id stands for a piece of --key_tokens tokens and all before it. The same flags give the same
file.
"""

from collections.abc import Sequence
import json
import math
import pathlib
import random
import sys

from engine.errors import ConfigError
from tools import workload
from tools.arguments import CommandParser, output_file, positive_float, positive_int

_TOKEN_S = 0.03  # seconds of an output token, in the time of a next turn
_WARM_UP = 5  # times the approximate length of a conversation; the trace begins in the middle of some


def make_sessions(
  num_requests: int,
  rate: float,
  *,
  num_systems: int = 20,
  system_len: str = "lognormal:2000:512:8192",
  message_len: str = "lognormal:400:16:4096",
  output_len: str = "lognormal:300:8:2048",
  mean_turns: float = 4.0,
  pause_s: float = 60.0,
  max_len: int = 32768,
  key_tokens: int = 512,
  seed: int = 0,
) -> list[dict]:
  """Returns the lines of the trace, in order of arrival.

  Args:
    rate: requests a second, on average.
    num_systems: system prompts; prompt k begins a share of conversations in proportion to 1 / (k + 1).
    system_len, message_len, output_len: distributions of tools.workload.parse_lengths, in tokens.
    mean_turns: of a conversation; their number is geometric.
    pause_s: mean of the exponential pause before a next turn, seconds.
    max_len: a conversation ends before prompt and output would exceed it.
    key_tokens: tokens of a piece.

  Raises:
    ConfigError: a value is out of its range.
  """
  if mean_turns < 1:
    raise ConfigError(f"mean_turns={mean_turns:g} must be at least 1; set --mean_turns")
  rng = random.Random(f"{seed}/sessions")
  lengths = [workload.parse_lengths(spec) for spec in (system_len, message_len, output_len)]
  systems = [lengths[0](rng) for _ in range(num_systems)]
  if min(systems) + 2 > max_len:
    raise ConfigError(f"max_len={max_len} is below the shortest system prompt, {min(systems)} tokens; set --max_len")
  weights = [1 / (number + 1) for number in range(num_systems)]
  next_id = 0

  def new_ids(count: int) -> list[int]:
    nonlocal next_id
    next_id += count
    return list(range(next_id - count, next_id))

  system_ids = [new_ids(length // key_tokens) for length in systems]
  lines: list[dict] = []
  now, end_s = -_WARM_UP * mean_turns * (pause_s + _TOKEN_S), num_requests / rate
  while True:
    now += rng.expovariate(rate / mean_turns)
    if now > end_s:  # later conversations begin after it, so all lines up to it are known
      found = sorted((line for line in lines if 0 <= line["timestamp"] <= end_s * 1e3), key=_by_time)
      if len(found) >= num_requests:
        return found[:num_requests]
      end_s = now * 1.1
    system = rng.choices(range(num_systems), weights)[0]
    ids, text, when = list(system_ids[system]), systems[system], now
    while True:
      prompt, output = text + lengths[1](rng), lengths[2](rng)
      if prompt + output > max_len:
        break
      ids += new_ids(prompt // key_tokens - len(ids))
      rest = new_ids(1) if prompt % key_tokens else []  # a piece that is not full is of this turn alone
      line = {"timestamp": round(when * 1e3), "input_length": prompt, "output_length": output}
      lines.append(line | {"hash_ids": ids + rest})
      text = prompt + output
      when += output * _TOKEN_S + rng.expovariate(1 / pause_s)
      if rng.random() < 1 / mean_turns:
        break


def _by_time(line: dict) -> float:
  return line["timestamp"]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line for bad input."""
  parser = CommandParser("tools.plan_fleet.make_sessions", __doc__)
  parser.add_argument("--num_requests", type=positive_int, default=20000, help="lines of the trace")
  parser.add_argument("--rate", type=positive_float, default=5.0, help="requests a second")
  parser.add_argument("--num_systems", type=positive_int, default=20, help="system prompts")
  parser.add_argument("--system_len", default="lognormal:2000:512:8192", help="their lengths, in tokens")
  parser.add_argument("--message_len", default="lognormal:400:16:4096", help="lengths of new messages")
  parser.add_argument("--output_len", default="lognormal:300:8:2048", help="lengths of answers")
  parser.add_argument("--mean_turns", type=positive_float, default=4.0, help="turns of a conversation")
  parser.add_argument("--pause_s", type=positive_float, default=60.0, help="mean pause before a next turn")
  parser.add_argument("--max_len", type=positive_int, default=32768, help="limit for prompt + output")
  parser.add_argument("--key_tokens", type=positive_int, default=512, help="tokens of a hash id")
  parser.add_argument("--seed", type=int, default=0, help="seed of everything")
  parser.add_argument("--output", type=output_file, required=True, help="trace to write")
  args = parser.parse_args(argv)
  try:
    values = {name: value for name, value in vars(args).items() if name != "output"}
    if not math.isfinite(args.rate * args.pause_s * args.mean_turns):
      raise ConfigError(
        f"rate={args.rate:g}, pause_s={args.pause_s:g} and mean_turns={args.mean_turns:g} must be finite"
      )
    lines = make_sessions(**values)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    pathlib.Path(args.output).write_text(text, "utf-8")
  except (ConfigError, OSError) as error:
    return parser.failed(error)
  print(f"{args.output}: {len(lines)} requests", file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(main())
