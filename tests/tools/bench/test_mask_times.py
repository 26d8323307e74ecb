"""The bench of masks: its schemas compile, and every token that it takes is one that the mask allows."""

import json
import random

from tools.bench.mask_times import make_schema, measure_masks
from tools.measure import ROOT


def test_each_schema_compiles_and_is_followed():
  result = measure_masks(ROOT / "models" / "demo", 12, 3)
  assert result["schemas"] == 12 and result["tokens"] > 100 and result["vocabulary"] > 1000
  assert 0 < result["token_us"]["p50"] <= result["token_us"]["p99"] <= result["token_us"]["most"]


def test_schemas_follow_from_the_seed():
  assert json.dumps(make_schema(random.Random(5))) == json.dumps(make_schema(random.Random(5)))
