"""Serves request files with vLLM's CPU build, in its own environment. Imports nothing of Sluice.

Offline it uses `LLM`, vLLM's offline API; in real time it uses `AsyncLLM`, as vLLM's server does.
"""

import asyncio
import os
import pathlib
import time

from tools.peers import face

PARAMS = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def main():
  """See face."""
  parser = face.parser(__doc__)
  parser.add_argument("--kv_gb", type=int, default=1)
  parser.add_argument("--quantized_model", default="", help="folder that tools.quantize wrote, for int8 and int4")
  parser.add_argument(
    "--dtype", default="", help="of activations; its int4 kernel has no float32, nor its int8 kernel on AMX"
  )
  args = parser.parse_args()
  needs_bf16 = args.precision == "int4" or (args.precision == "int8" and _has_amx())
  dtype = args.dtype or ("bfloat16" if needs_bf16 else "float32")
  if args.precision != "f32" and not args.quantized_model:
    raise SystemExit(f"--precision={args.precision} needs --flag=vllm:--quantized_model=DIR, written by tools.quantize")
  os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gb)
  os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{args.threads - 1}"
  os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
  settings = {
    "model": args.quantized_model or args.model,
    "skip_tokenizer_init": True,
    "dtype": dtype,
    "max_model_len": args.max_len,
    "max_num_seqs": args.max_requests,
    "enable_prefix_caching": False,
    "seed": 0,
  }
  about = {"threads": args.threads, "kv_gb": args.kv_gb, "weights": args.precision, "kv": dtype}
  face.serve(lambda: face.Peer(about, _online(settings) if args.realtime else _offline(settings)))


def _has_amx():
  try:
    return "amx_int8" in pathlib.Path("/proc/cpuinfo").read_text("utf-8").split()
  except OSError:
    return False


def _offline(settings):
  from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

  llm = LLM(**settings, disable_log_stats=True)

  def run(requests, log, _start_s, _realtime):
    for request in requests:
      log.sent(request["id"])
    params = [SamplingParams(max_tokens=request["output_len"], **PARAMS) for request in requests]
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    for request, output in zip(requests, llm.generate(prompts, params, use_tqdm=False), strict=True):
      log.got(request["id"], output.outputs[0].token_ids)

  return run


def _online(settings):
  from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
  from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
  from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
  from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

  loop = asyncio.new_event_loop()
  names = iter(range(1 << 60))  # part of requests' names, so that each is used once, whatever the file's ids

  async def make():
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings, disable_log_stats=True))

  engine = loop.run_until_complete(make())

  async def one(request, log, at):
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    params = SamplingParams(max_tokens=request["output_len"], output_kind=RequestOutputKind.DELTA, **PARAMS)
    log.sent(request["id"])
    async for output in engine.generate({"prompt_token_ids": request["prompt"]}, params, f"run{next(names)}"):
      log.got(request["id"], output.outputs[0].token_ids)

  async def everything(requests, log, start_s, realtime):
    at = [start_s + request["arrival_s"] if realtime else start_s for request in requests]
    await asyncio.gather(*(one(request, log, time_s) for request, time_s in zip(requests, at, strict=True)))

  return lambda *run: loop.run_until_complete(everything(*run))


if __name__ == "__main__":
  main()
