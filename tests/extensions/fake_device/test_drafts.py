"""The fake device verifies drafts like a real one: any drafts in any batch give the tokens of no drafts."""

from engine.shapes import StepShape
from extensions.fake_device.device import FakeDevice
from tests.device.drafts import DraftCounts, DraftLimits, serve_with_drafts
from tests.fakes import small_config

SHAPES = (StepShape(8, 8, 8), StepShape(32, 8, 8))


def test_drafts_change_no_token():
  config = small_config(vocab_size=96, num_blocks=140, token_budgets=(8, 32), max_num_seqs=8)
  limits = DraftLimits(SHAPES, 8, 16, config.vocab_size, config.eos_token_ids, config.block_size)
  counts = DraftCounts()
  for seed in range(6):
    counts += serve_with_drafts(FakeDevice(config), limits, seed, atol=0.0)
  assert counts.accepted > 800 and counts.rejected > 400 and counts.in_flight > 100 and counts.preempted > 10, counts
  assert counts.behind > 60 and counts.across > 30, counts
