"""Writes the model and the requests for Sluice and its twins on a GPU. Measures nothing.

python -m tools.gpu.twin --shape=llama3-8b --dtype=bfloat16 --requests=256 --lengths=100,1024 --out=DIR
"""

from collections.abc import Sequence
import json
import os
import pathlib
import shutil
import sys

from tools.arguments import CommandParser, positive_int
from tools.bench.engine import model_folder
from tools.make_random_model import write_model
from tools.workload import synthetic, write_requests


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.gpu.twin", "Write a random model and requests.")
  parser.add_argument("--shape", required=True, help="a folder of models/shapes")
  parser.add_argument("--dtype", default="bfloat16", help="of the weights")
  parser.add_argument("--requests", type=positive_int, default=256)
  parser.add_argument("--lengths", default="100,1024", help="shortest and longest prompt, output")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  args = parser.parse_args(arguments)
  raw = json.loads((pathlib.Path(model_folder(args.shape)) / "config.json").read_text("utf-8"))
  if not (args.out / "model" / "config.json").exists():  # written last
    shutil.rmtree(args.out / "model", ignore_errors=True)  # remains of an interrupted run
    processes = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # each holds two gigabytes of an 8B model
    write_model(args.out / "model", raw, seed=0, dtype=args.dtype, num_shards=8, num_processes=processes)
  low, high = args.lengths.split(",")
  lengths = f"uniform:{low}:{high}"
  requests = synthetic(args.requests, lengths, lengths, raw["vocab_size"], seed=0)
  with open(args.out / "requests.jsonl", "w", encoding="utf-8") as file:
    write_requests(file, requests, {"requests": args.requests, "lengths": lengths, "seed": 0})
  print(json.dumps({"output_tokens": sum(request.output_len for request in requests)}))
  return 0


if __name__ == "__main__":
  sys.exit(main())
