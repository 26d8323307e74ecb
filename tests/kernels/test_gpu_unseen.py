"""Bugs that Pallas' interpreter runs without a wrong number or a race; the emulator of PTX notices each.

tests/tools/ptx_emulator/test_bugs.py runs the same bugs, and this shows why it has to. The interpreter has neither
swizzles nor tiles. It cuts a copy at the end of each dimension, where a bulk copy knows only bytes. And it takes
another way through the decode kernel's queries, because it has no two views of the same bytes.
"""

import pytest

from pallas_kernels.paged_attention import gpu_decode, gpu_write
from tests.kernels import test_gpu_decode, test_gpu_write, unseen_bugs
from tests.kernels.seeded import seed_bug

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("gpu_interpreter")]

_TOKENS = test_gpu_write.Case(11, padding=3, group=2, head_dim=128, tile=8)
_ROWS = test_gpu_decode._case("unseen", ((1, 40), (2, 100)), 64, 1, pairs=1, group=3)


@pytest.mark.parametrize("name", ["warpgroup_lowering", "no_whole_tiles"])
def test_the_interpreter_sees_nothing_wrong_in_the_write_kernel(name: str, capfd: pytest.CaptureFixture[str]) -> None:
  _, old, new = unseen_bugs.BUGS[name]
  test_gpu_write.check_without_races(_TOKENS, capfd, seed_bug(gpu_write, old, new))


def test_the_interpreter_sees_nothing_wrong_in_the_decode_kernel(capfd: pytest.CaptureFixture[str]) -> None:
  _, old, new = unseen_bugs.BUGS["queries_copied_into_tiles"]
  test_gpu_decode.check(_ROWS, capfd, seed_bug(gpu_decode, old, new))
