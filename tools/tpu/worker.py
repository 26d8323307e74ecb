"""Runs jobs on the TPU in its own process, for tools/tpu/__main__.py; decides nothing.

python -m tools.tpu.worker device|interpret|compile [TARGET]
"""

import contextlib
import importlib.metadata
import os
import pathlib
import sys
import tempfile

from tools.check_device import targets
from tools.gpu import protocol


def main(mode: str, target_name: str = "v6e") -> int:
  """Serves jobs until standard input ends; returns the exit code.

  Args:
    mode: "device", "interpret" or "compile".
    target_name: TPU of tools/check_device/targets.py for which "compile" compiles.
  """
  target = targets.TARGETS[target_name]
  if mode == "compile":
    os.environ |= targets.environment(target, pathlib.Path(tempfile.gettempdir()))
  import jax
  from jax.experimental.pallas import tpu as pltpu
  import jax.numpy as jnp

  from tools.gpu import timing
  from tools.gpu.jobs import Setting
  from tools.tpu import jobs

  tracing = contextlib.nullcontext()
  if mode == "compile":
    device = targets.devices(target)[0]
    tracing = targets.tracing_for(target, device)
  else:
    device = jax.devices()[0]
    wanted = "tpu" if mode == "device" else "cpu"
    if device.platform != wanted:
      raise RuntimeError(f"{mode}: JAX's first device is {device.platform} ({device.device_kind}), not a {wanted}")
    if mode == "interpret":
      tracing = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())
  effort = timing.Effort(samples=1, least_s=1e-6) if mode == "interpret" else timing.Effort()
  setting = Setting(device, mode, effort)

  def usable() -> bool:
    try:
      return float(jnp.ones((), jnp.float32) + jnp.float32(1)) == 2.0
    except Exception:  # a halted core
      return False

  hello = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    hello["libtpu"] = importlib.metadata.version("libtpu")
  with tracing:
    return protocol.serve(
      hello,
      lambda job: jobs.prepare(job, setting),
      usable,
      min(8, os.cpu_count() or 1),
      is_spoilt_by_failure=mode == "interpret",
    )


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
