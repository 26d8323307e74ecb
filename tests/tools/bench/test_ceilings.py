"""Ceilings: arithmetic by hand, and that a figure has those of its own moment."""

from tools.bench import ceilings
from tools.bench.ceilings import Ceilings, CeilingWatch


def test_the_roofline_is_the_longer_of_both():
  found = Ceilings(bytes_s=100.0, flops_s=1000.0)
  assert found.seconds(200, 1000) == 2.0
  assert found.seconds(200, 5000) == 5.0
  assert found.shares(200, 1000, 4.0) == {"of_read": 0.5, "of_rate": 0.25, "of_roofline": 0.5}


def test_a_figure_has_the_ceilings_before_and_after_it(monkeypatch):
  speeds = iter([(10.0, 300.0, 8.0), (20.0, 100.0, 12.0), (60.0, 200.0, 16.0)])
  monkeypatch.setattr(ceilings, "measure", lambda dtype, seconds: Ceilings(*next(speeds)))
  watch = CeilingWatch("float32", 1.0, devices=2)
  assert watch.around() == Ceilings(30.0, 400.0, 20.0)
  assert watch.around() == Ceilings(80.0, 300.0, 28.0)
  assert watch.best() == Ceilings(120.0, 600.0, 32.0)
  assert watch.range() == {"bytes_s": [20.0, 120.0], "flops_s": [200.0, 600.0]}
