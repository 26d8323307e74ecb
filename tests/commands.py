"""Sluice's commands, run as a user runs them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_module(module: str, *arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
  """Runs `python -m module arguments` from the root, with `text` to read and these variables, and waits."""
  return subprocess.run(
    [sys.executable, "-m", module, *arguments],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    input=text,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
