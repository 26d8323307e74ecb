"""Tests the C++ kernels for older processors, whose instructions this processor has too."""

import os
import subprocess
import sys

import pytest

from pallas_kernels import native

_LEVELS = tuple(native._LEVELS)
_LOWER = _LEVELS[_LEVELS.index(native.level()) + 1 :] if native.level() in _LEVELS else ()
# Not `adjust`: its tests compare bits with XLA, which always uses this processor's own instructions.
_SUITES = ("packed_matmul", "grouped_matmul", "cpu", "argmax", "sampling_kernel")


@pytest.mark.long
@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("level", _LOWER)
def test_kernels_of_a_lower_level_are_correct(level: str) -> None:
  assert native.main([level]) == 0
  suites = [f"tests/kernels/test_{name}.py" for name in _SUITES]
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites, "-k", "not seeded"],
    cwd=native._ROOT,
    env=os.environ | {"SLUICE_NATIVE_LEVEL": level},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
