"""Runs a request file through transformers, in torch's own environment. Imports nothing of Sluice.

It uses transformers' continuous batching. With --way=static it uses batches of its compiled decode over a static cache
instead (torch.compile runs if transformers finds a GPU). Each batch has prompts of like lengths, padded on the left,
and runs until the longest output is done. tools.gpu.engine starts it with a Python that has torch and transformers
(3.10 or later). It has tools.bench_offline's interface: a request file in, a token file and one JSON line out.
"""

import argparse
import json
import resource
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, GenerationConfig  # pyright: ignore[reportMissingImports]
from transformers.utils import logging  # pyright: ignore[reportMissingImports]

from tools.peers import face, transformers_batching


def generate(manager, requests, prefix):
  """Submits all requests at once and waits; returns (wall seconds, id -> tokens)."""
  start = time.perf_counter()
  tokens = {}
  transformers_batching.generate(manager, requests, prefix, tokens.__setitem__)
  return time.perf_counter() - start, tokens


def generate_static(model, requests, batch, cache_len, most_s=0.0):
  """Serves the requests in batches of one size; returns (wall seconds, id -> tokens).

  The decode is compiled for `cache_len` tokens; another length would be compiled anew. After `most_s` seconds, if not
  0, no further batch begins; those with the longest prompts come last.
  """
  start = time.perf_counter()
  tokens = {}
  order = sorted(requests, key=lambda request: (len(request["prompt"]), request["output_len"]))
  for at in range(0, len(order), batch):
    if most_s and time.perf_counter() - start > most_s:
      break
    group = order[at : at + batch]
    rows = group + group[-1:] * (batch - len(group))  # one shape, one compiled program
    width = max(len(request["prompt"]) for request in group)
    ids = [[0] * (width - len(request["prompt"])) + request["prompt"] for request in rows]
    mask = [[0] * (width - len(request["prompt"])) + [1] * len(request["prompt"]) for request in rows]
    count = max(request["output_len"] for request in group)
    made = model.generate(
      torch.tensor(ids, device=model.device),
      attention_mask=torch.tensor(mask, device=model.device),
      generation_config=GenerationConfig(
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=count,
        cache_implementation="static",
        max_cache_len=cache_len,
      ),
    )
    for request, row in zip(group, made[:, width:].tolist(), strict=False):
      tokens[request["id"]] = row[: request["output_len"]]
  return time.perf_counter() - start, tokens


def serve(model, args, requests):
  """Warms up, then runs the file; returns (seconds to warm up, wall seconds, id -> tokens)."""
  begin = time.perf_counter()
  # The same file with outputs of at most 4 tokens: every code path, and every shape class of torch.compile.
  short = [{**request, "output_len": min(4, request["output_len"])} for request in requests]
  if args.way == "static":
    cache_len = max(len(request["prompt"]) for request in requests) + max(request["output_len"] for request in requests)
    generate_static(model, short, args.batch, cache_len)
    warmup_s = time.perf_counter() - begin
    return warmup_s, *generate_static(model, requests, args.batch, cache_len, args.most_s)
  total_tokens = sum(len(request["prompt"]) + request["output_len"] for request in requests)
  # transformers sizes the cache by a GPU's memory, but not by a CPU's.
  blocks = 2 * (total_tokens // args.page_size + len(requests)) if args.device == "cpu" else None
  with transformers_batching.batching(
    model,
    page_size=args.page_size,
    num_blocks=blocks,
    max_len=max(request["output_len"] for request in requests),
    max_requests=args.max_requests or None,
    max_batch_tokens=args.max_batch_tokens or None,
    compile_level=args.compile_level,
  ) as manager:
    generate(manager, short, "warm")
    warmup_s = time.perf_counter() - begin
    return warmup_s, *generate(manager, requests, "run")


def main():
  """Loads, warms up with a few short requests, runs the file, writes the figures."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", required=True)
  parser.add_argument("--requests", required=True)
  parser.add_argument("--output_tokens", required=True)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--way", choices=("batching", "static"), default="batching")
  parser.add_argument("--batch", type=int, default=64, help="sequences at once, with --way=static")
  parser.add_argument(
    "--most_s", type=float, default=0.0, help="with --way=static: seconds after which no batch begins; 0: no limit"
  )
  parser.add_argument("--device", default="cpu", help="as torch calls it")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
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

  requests = face.read_requests(args.requests)
  begin = time.perf_counter()
  model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=getattr(torch, args.dtype), attn_implementation=args.attention
  )
  model.to(args.device).eval()
  load_s = time.perf_counter() - begin
  warmup_s, wall_s, tokens = serve(model, args, requests)
  requests = [request for request in requests if request["id"] in tokens]
  total_tokens = sum(len(request["prompt"]) + request["output_len"] for request in requests)
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
        "requests": len(requests),
        "wall_s": round(wall_s, 4),
        "output_tok_s": round(output_tokens / wall_s, 3),
        "total_tok_s": round(total_tokens / wall_s, 3),
        "load_s": round(load_s, 3),
        "warmup_s": round(warmup_s, 3),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": model.config._attn_implementation,  # the actual value: some versions switch by themselves
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "settings": {
          name: getattr(args, name)
          for name in (
            "way",
            "device",
            "dtype",
            "threads",
            "attention",
            "max_requests",
            "max_batch_tokens",
            "page_size",
            "compile_level",
          )
        },
      }
    ),
    flush=True,
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
