"""Cuts a trace for the simulator and the benchmarks out of a published original. Reads and writes CSV; runs nothing.

  python -m tools.make_trace --source=AzureLLMInferenceTrace_conv.csv --output=azure_conv_5000.csv
  python -m tools.make_trace --source=sharegpt_8k_lengths.csv --rate=5 --output=sharegpt_5000.csv

From an original with times (Azure's: TIMESTAMP,ContextTokens,GeneratedTokens) the tool copies consecutive rows, from
--first on, so that bursts stay. From a list of lengths (num_prefill_tokens,num_decode_tokens) it takes rows at random,
in the order of the file, and gives them Poisson arrivals at --rate. The same original, flags and seed give the same
file, byte by byte. The file begins with the original's license and SHA-256. benchmarks/traces/README.md lists the
originals. A trace has no tenants or priorities: --num_tenants and --batch_share of tools.workload and tools.simulate
make them. Exit code 2 with one line for bad input.
"""

from collections.abc import Sequence
import datetime
import hashlib
import pathlib
import random
import sys

from engine.errors import ConfigError
from tools import workload
from tools.arguments import CommandParser, output_file, positive_float, positive_int

COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = (
  "Of Azure's LLM inference traces, github.com/Azure/AzurePublicDataset, (c) Microsoft, licence CC-BY-4.0",
  "(https://creativecommons.org/licenses/by/4.0/). Lengths in tokens, no text. Described in Patel et al., Splitwise,",
  "arXiv:2311.18677.",
)
LENGTHS = (
  "Of github.com/microsoft/sarathi-serve, licence Apache-2.0: lengths in tokens, no text. The times are made up.",
)
_EPOCH = datetime.datetime(2000, 1, 1)


def make_trace(source: str, num_requests: int, first: int, rate: float | None, seed: int) -> list[str]:
  """Returns the lines of the trace. Raises ConfigError.

  Args:
    source: path of the original.
    num_requests: rows of the trace.
    first: the first row to copy, from 0; for an original with times.
    rate: requests a second; for a list of lengths.
    seed: seed of the rows and of their times; for a list of lengths.
  """
  rows = workload.read_trace(source)
  content = pathlib.Path(source).read_bytes()
  lines = [line for line in content.decode("utf-8").splitlines() if line and not line.startswith("#")]
  timed = lines[0] == COLUMNS
  if first + num_requests > len(rows):
    raise ConfigError(
      f"num_requests={num_requests} from first={first} on is more than the {len(rows)} rows of {source}; "
      "lower one of them"
    )
  if timed != (rate is None):
    raise ConfigError(
      f"rate={rate} does not fit {source}, which has {'times' if timed else 'no times'}; "
      f"{'leave out --rate' if timed else 'set --rate'}"
    )
  if rate is None:
    about = f"{num_requests} rows from row {first} on, unchanged."
    kept = lines[1 + first : 1 + first + num_requests]
  else:
    if first:
      raise ConfigError(f"first={first} is for an original with times, and {source} has none; leave out --first")
    about = f"{num_requests} rows at random (seed {seed}), Poisson arrivals at {rate:g} requests/s."
    taken = sorted(random.Random(f"{seed}/rows").sample(range(len(rows)), num_requests))
    times = workload.arrivals(num_requests, rate, 1.0, seed)
    kept = [
      f"{(_EPOCH + datetime.timedelta(seconds=time)).isoformat(' ', 'microseconds')},{rows[row][1]},{rows[row][2]}"
      for time, row in zip(times, taken, strict=True)
    ]
  name, digest = pathlib.Path(source).name, hashlib.sha256(content).hexdigest()
  head = (*(AZURE if timed else LENGTHS), f"Made by tools.make_trace of {name} (SHA-256 {digest}):", about)
  return [*(f"# {line}" for line in head), COLUMNS, *kept]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line."""
  parser = CommandParser("tools.make_trace", __doc__)
  parser.add_argument("--source", required=True, help="the published original (CSV)")
  parser.add_argument("--num_requests", type=positive_int, default=5000, help="number of rows in the trace")
  parser.add_argument("--first", type=int, default=0, help="with times: the original's first row to copy, from 0")
  parser.add_argument("--rate", type=positive_float, help="without times: requests a second")
  parser.add_argument("--seed", type=int, default=0, help="without times: seed of rows and arrivals")
  parser.add_argument("--output", type=output_file, required=True, help="trace to write")
  args = parser.parse_args(argv)
  try:
    if args.first < 0:
      raise ConfigError(f"first={args.first} must be at least 0; set --first")
    lines = make_trace(args.source, args.num_requests, args.first, args.rate, args.seed)
    pathlib.Path(args.output).write_text("\n".join(lines) + "\n", "utf-8")
  except (ConfigError, OSError) as error:
    return parser.failed(error)
  print(f"{args.output}: {args.num_requests} requests", file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(main())
