"""Finds the packages for this machine, for the set-up: a name on standard output, a line for people on standard error.

  python3 -m tools.find_accelerator [--accelerator=cpu|cuda12|cuda13|tpu]

Runs before anything is installed: the standard library alone, under Python 3.9 and later. Installs nothing.
"""

import argparse
import pathlib
import sys

from engine.accelerator import (
  ACCELERATORS,
  DriverReport,
  MachineAccelerators,
  ask_nvidia_smi,
  choose_accelerator,
  read_machine,
)
from engine.errors import ConfigError


def lock_file(accelerator: str) -> str:
  """Returns the file of locked packages for an accelerator, by its name in the checkout."""
  return "requirements.lock" if accelerator == "cpu" else f"requirements-{accelerator}.lock"


def describe_choice(accelerator: str, found: MachineAccelerators, is_chosen: bool) -> str:
  """Returns one line on what the set-up installs, and why."""
  has = found.describe() or (
    f"NVIDIA driver {found.driver} without a GPU for this machine or container"
    if found.driver
    else "neither an NVIDIA GPU nor a TPU"
  )
  installs = f"installing for {accelerator} from {lock_file(accelerator)}"
  if is_chosen:
    return f"sluice: ACCELERATOR={accelerator}: {installs}; this machine has {has}"
  others = "|".join(name for name in ACCELERATORS if name != accelerator)
  return f"sluice: this machine has {has}: {installs}; ACCELERATOR={others} chooses another"


def main(arguments=None) -> int:
  """Runs the command line; returns 1 after one line if the machine's accelerator cannot be used."""
  parser = argparse.ArgumentParser("python3 -m tools.find_accelerator", description=__doc__)
  parser.add_argument("--accelerator", default="", help="accelerator to install for; empty: the machine's own")
  parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("/"), help="folder with /proc, /dev and /sys")
  args = parser.parse_args(arguments)
  if args.accelerator and args.accelerator not in ACCELERATORS:
    print(
      f"sluice: ACCELERATOR={args.accelerator} is none of {', '.join(ACCELERATORS)}; set one of them", file=sys.stderr
    )
    return 1
  try:
    report = ask_nvidia_smi() if args.root == pathlib.Path("/") else DriverReport()
    found = read_machine(args.root, report)
    name = args.accelerator or choose_accelerator(found)
  except ConfigError as error:
    print(f"sluice: {error}", file=sys.stderr)
    return 1
  print(describe_choice(name, found, bool(args.accelerator)), file=sys.stderr)
  print(name)
  return 0


if __name__ == "__main__":
  sys.exit(main())
