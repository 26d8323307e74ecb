"""A worker of tools.gpu without a device: hangs, aborts or answers wrongly by the kernel that a job names."""

import os
import sys
import time

from tools.gpu import protocol


class Wrong(Exception):
  """As tools.gpu.cases.Wrong, which needs jax."""

  figures = {"query_error": 1e-3, "error": 2e-3, "wrong": ["values in the pool: token 7"]}


def run(job: protocol.Job) -> dict:
  if job.get("op") == "prefill":
    print("F1126 cuda.cc:7] Check failed: CUDA_ERROR_ILLEGAL_INSTRUCTION", file=sys.stderr, flush=True)
    os.abort()
  if job.get("op") == "decode":
    time.sleep(600)
  if job.get("op") == "write":
    raise Wrong("values in the pool: token 7")
  if job.get("op") == "tma tiles":
    raise NotImplementedError("no such copy")
  return {"error": 1e-3}


if __name__ == "__main__":
  jobs = {"prepare": lambda job: protocol.Prepared(lambda: None, lambda _: run(job)), "usable": lambda: True}
  sys.exit(protocol.serve({"device": "fake"}, **jobs))
