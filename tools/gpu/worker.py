"""Runs jobs on the GPU in its own process, for tools/gpu/__main__.py; decides nothing.

python -m tools.gpu.worker device|interpret|emulate|compile
"""

from collections.abc import Callable
import dataclasses
import os
import sys
from typing import Any

from tools.gpu import protocol


def main(mode: str) -> int:
  """Serves jobs until standard input ends; returns the exit code."""
  import jax
  import jax.numpy as jnp

  from tools.gpu import debugger, jobs, timing

  debugger.allow_tracing()

  if mode == "compile":
    from tools.check_device import targets

    device = targets.devices(targets.TARGETS["h200"])[0]
  else:
    device = jax.devices()[0]
    wanted = "gpu" if mode == "device" else "cpu"
    if device.platform != wanted:
      raise RuntimeError(f"{mode}: JAX's first device is {device.platform} ({device.device_kind}), not a {wanted}")
  faults: list[Exception] = []
  if mode == "emulate":
    from tools.ptx_emulator import mosaic

    faults = mosaic.emulate_kernels().faults
  effort = timing.Effort(samples=1, least_s=1e-6) if mode in ("interpret", "emulate") else timing.Effort()
  setting = jobs.Setting(device, mode, effort)

  def usable() -> bool:
    try:
      return float(jnp.ones((), jnp.float32) + jnp.float32(1)) == 2.0
    except Exception:  # an illegal address breaks the process for good
      return False

  hello = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}

  def prepare(job: protocol.Job) -> protocol.Prepared:
    prepared = jobs.prepare(job, setting)
    return dataclasses.replace(prepared, run=lambda compiled: quote_faults(lambda: prepared.run(compiled), faults))

  # An error leaves an interpreter's memory and barriers as they were.
  spoilt = mode in ("interpret", "emulate")
  return protocol.serve(hello, prepare, usable, min(8, os.cpu_count() or 1), is_spoilt_by_failure=spoilt)


def quote_faults(run: Callable[[], Any], faults: list[Exception]) -> Any:
  """Runs a job; raises the emulator's own error in place of JAX's, which quotes it behind a traceback."""
  faults.clear()
  try:
    return run()
  except Exception as error:
    raise faults[0] if faults else error from None


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
