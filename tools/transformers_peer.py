"""Runs a request file through transformers' continuous batching, in torch's own environment. Imports nothing of Sluice.

Started by tools.compare_transformers with that environment's Python (3.10 or later). The face is that of
tools.bench_offline: a request file in, a token file and one JSON line on standard output out.
"""

import argparse
import json
import resource
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
  AutoModelForCausalLM,
  ContinuousBatchingConfig,
  GenerationConfig,
)
from transformers.utils import logging  # pyright: ignore[reportMissingImports]


def read_requests(path):
  """The request lines of a file, its first line skipped where it only describes the file."""
  with open(path, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file if line.strip()]
  return [line for line in lines if "prompt" in line]


def generate(manager, requests, prefix):
  """Submits all requests at once and waits; returns (wall seconds, id -> tokens)."""
  start = time.perf_counter()
  names = {}
  for request in requests:
    name = f"{prefix}{request['id']}"
    names[name] = request["id"]
    manager.add_request(request["prompt"], request_id=name, max_new_tokens=request["output_len"], eos_token_id=-1)
  tokens = {}
  while len(tokens) < len(requests):
    result = manager.get_result(timeout=1)
    if result is None:
      if not manager.is_running():
        raise SystemExit("transformers' generation thread stopped before all requests were done")
    elif result.error:
      raise SystemExit(f"transformers failed on request {result.request_id}: {result.error}")
    elif result.is_finished():
      tokens[names[result.request_id]] = list(result.generated_tokens)
  return time.perf_counter() - start, tokens


def main():
  """Loads, warms up with a few short requests, runs the file, writes the figures."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", required=True)
  parser.add_argument("--requests", required=True)
  parser.add_argument("--output_tokens", required=True)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
  parser.add_argument("--max_requests", type=int, default=0, help="sequences a step; 0: transformers decides")
  parser.add_argument("--max_batch_tokens", type=int, default=0, help="tokens a step; 0: transformers decides")
  parser.add_argument("--page_size", type=int, default=256)
  parser.add_argument("--compile_level", type=int, default=0, help="0: eager mode, 1: torch.compile, dynamic shapes")
  args = parser.parse_args()
  logging.set_verbosity_error()
  logging.disable_progress_bar()
  torch.set_num_threads(args.threads)
  torch.set_grad_enabled(False)

  requests = read_requests(args.requests)
  total_tokens = sum(len(request["prompt"]) + request["output_len"] for request in requests)
  begin = time.perf_counter()
  model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=args.attention)
  model.eval()
  load_s = time.perf_counter() - begin
  config = ContinuousBatchingConfig(
    page_size=args.page_size,
    num_blocks=2 * (total_tokens // args.page_size + len(requests)),
    max_batch_tokens=args.max_batch_tokens or None,
    max_requests_per_batch=args.max_requests or None,
    allow_block_sharing=False,
    default_compile_level=args.compile_level,
  )
  generation = GenerationConfig(
    do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(request["output_len"] for request in requests)
  )
  begin = time.perf_counter()
  with model.continuous_batching_context_manager(
    generation_config=generation, continuous_batching_config=config, block=True, timeout=30
  ) as manager:
    # The same file with outputs of at most 4 tokens: every code path, and every shape class torch.compile may want.
    generate(manager, [{**request, "output_len": min(4, request["output_len"])} for request in requests], "warm")
    warmup_s = time.perf_counter() - begin
    wall_s, tokens = generate(manager, requests, "run")
  for request in requests:
    if len(tokens[request["id"]]) != request["output_len"]:
      raise SystemExit(
        f"transformers gave {len(tokens[request['id']])} tokens for request {request['id']}, "
        f"not {request['output_len']}"
      )
  with open(args.output_tokens, "w", encoding="utf-8") as file:
    for request in requests:
      file.write(json.dumps({"id": request["id"], "tokens": tokens[request["id"]]}) + "\n")
  output_tokens = sum(map(len, tokens.values()))
  print(
    json.dumps(
      {
        "wall_s": round(wall_s, 4),
        "output_tok_s": round(output_tokens / wall_s, 3),
        "total_tok_s": round(total_tokens / wall_s, 3),
        "load_s": round(load_s, 3),
        "warmup_s": round(warmup_s, 3),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "settings": {
          name: getattr(args, name)
          for name in ("threads", "attention", "max_requests", "max_batch_tokens", "page_size", "compile_level")
        },
      }
    ),
    flush=True,
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
