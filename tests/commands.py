"""Sluice's commands, run as a user runs them; or here, where the start of a process is no part of the test."""

import contextlib
import importlib
import io
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


def run_here(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
  """As `run_module`, but in this process, which has jax already: starting one takes seconds."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      code = importlib.import_module(module).main(arguments)
    except SystemExit as stop:
      code = stop.code
  return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())
