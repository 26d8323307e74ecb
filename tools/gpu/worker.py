"""Runs jobs on the GPU in its own process, for tools/gpu/__main__.py; decides nothing.

python -m tools.gpu.worker device|interpret|compile
"""

import os
import sys

from tools.gpu import protocol


def main(mode: str) -> int:
  """Serves jobs until standard input ends; returns the exit code."""
  import jax
  import jax.numpy as jnp

  from tools.gpu import jobs, timing

  if mode == "compile":
    from tools.check_device import targets

    device = targets.devices(targets.TARGETS["h200"])[0]
  else:
    device = jax.devices()[0]
    wanted = {"device": "gpu", "interpret": "cpu"}[mode]
    if device.platform != wanted:
      raise RuntimeError(f"{mode}: JAX's first device is {device.platform} ({device.device_kind}), not a {wanted}")
  effort = timing.Effort(samples=1, least_s=1e-6) if mode == "interpret" else timing.Effort()
  setting = jobs.Setting(device, mode, effort)

  def usable() -> bool:
    if mode == "interpret":
      return False  # an error leaves the interpreter's memory and barriers as they were
    try:
      return float(jnp.ones((), jnp.float32) + jnp.float32(1)) == 2.0
    except Exception:  # an illegal address breaks the process for good
      return False

  hello = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
  return protocol.serve(hello, lambda job: jobs.prepare(job, setting), usable, threads=min(8, os.cpu_count() or 1))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
