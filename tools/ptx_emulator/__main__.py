"""Runs each kernel of paged attention on a tiny batch under many schedules, and compares every result.

  python -m tools.ptx_emulator [--schedules=20] [--first=1] [--kernels=write_bf16,decode_fp8]
  python -m tools.ptx_emulator --record=DIR      only compiles, and writes each kernel to a file
  python -m tools.ptx_emulator --recorded=DIR    runs these files, without the compilers

A schedule is a seed: of the order of blocks and warps, of when copies and products end, and of what shared memory holds
at first. Each must give dense attention, and the bits of the first one. A kernel compiles once. Exit code 1 if a kernel
does something undefined, never ends, or is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys
import time

import numpy as np

from tools.arguments import CommandParser, positive_int
from tools.gpu.cases import Wrong
from tools.ptx_emulator import subjects
from tools.ptx_emulator.block import KernelFault
from tools.ptx_emulator.compiled import ArrayCall
from tools.ptx_emulator.subjects import Subject


def recorded_path(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the file of a kernel."""
  return folder / f"{name}.json.gz"


def compile_subject(subject: Subject) -> ArrayCall:
  """Compiles a subject's kernel. Raises ImportError or RuntimeError if the compilers are not installed."""
  from tools.ptx_emulator import mosaic, triton

  program = subject.program(subject.module)
  if subject.entry:
    return triton.compile_kernels(*program, subject.target)[subject.entry]
  (kernel,) = mosaic.compile_kernels(*program)
  return kernel


def run_schedules(subject: Subject, kernel: ArrayCall, seeds: Sequence[int]) -> None:
  """Runs a kernel once a seed.

  Raises:
    KernelFault: it does something undefined, or never ends; the text names the seed.
    Wrong: it gives wrong numbers, or other bits than with the first seed.
  """
  first: list[bytes] = []
  for seed in seeds:
    try:
      found = [np.ascontiguousarray(array).tobytes() for array in subject.judge(kernel.run(subject.inputs, seed))]
    except (KernelFault, Wrong) as error:
      raise type(error)(f"{subject.name}, schedule {seed}: {error}") from error
    first = first or found
    if found != first:
      raise Wrong(f"{subject.name}: schedule {seed} gives other bits than schedule {seeds[0]}")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.ptx_emulator", "Run GPU kernels' PTX on a CPU under many schedules.")
  parser.add_argument("--kernels", default=",".join(subjects.NAMES), help="kernels and dtypes of their pool")
  parser.add_argument("--schedules", type=positive_int, default=20, help="a kernel")
  parser.add_argument("--first", type=positive_int, default=1, help="seed of the first schedule")
  parser.add_argument("--record", type=pathlib.Path, help="compile, write files into this folder, and run nothing")
  parser.add_argument("--recorded", type=pathlib.Path, help="take the kernels from the files in this folder")
  args = parser.parse_args(arguments)
  names = args.kernels.split(",")
  if unknown := set(names) - set(subjects.NAMES):
    parser.error(f"--kernels: {', '.join(sorted(unknown))} is not one of {', '.join(subjects.NAMES)}")
  failed = 0
  for name in names:
    subject = subjects.make_subject(name)
    kernel = ArrayCall.load(recorded_path(args.recorded, name)) if args.recorded else compile_subject(subject)
    if args.record:
      kernel.save(recorded_path(args.record, name))
      continue
    started = time.process_time()
    try:
      run_schedules(subject, kernel, range(args.first, args.first + args.schedules))
    except (KernelFault, Wrong) as error:
      failed += 1
      print(error, flush=True)
    else:
      took = time.process_time() - started
      print(f"{name}: {args.schedules} schedules, the same bits, {took:.1f} s of CPU time", flush=True)
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
