"""What tools.bench.engine's part `trace` reads from a profile; only a GPU makes one."""

import jax
import pytest

from tools.bench.step_trace import summarize

# Two steps of two kernels: 10 us each, the second one overlaps the first by 4 us; 20 us between the steps.
DEVICE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 }
    events { metadata_id: 2 offset_ps: 6000000 duration_ps: 10000000 }
    events { metadata_id: 1 offset_ps: 36000000 duration_ps: 10000000 }
    events { metadata_id: 2 offset_ps: 42000000 duration_ps: 10000000 }
  }
  lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "attend" } }
}
"""
HOST = """
planes {
  name: "/host:CPU"
  lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 8000000 } }
  event_metadata { key: 1 value { id: 1 name: "Execute" } }
}
"""


def test_kernels_gaps_and_calls_a_step() -> None:
  found = summarize(jax.profiler.ProfileData.from_text_proto(DEVICE + HOST), steps=2)
  assert found == {
    "steps": 2,
    "busy_us": 16.0,
    "span_us": 26.0,
    "kernels": [("gemm", 10.0, 1.0), ("attend", 10.0, 1.0)],
    "host": [("Execute", 4.0, 0.5)],
  }


def test_a_profile_without_kernels_is_refused() -> None:
  with pytest.raises(RuntimeError, match="no kernel of a GPU"):
    summarize(jax.profiler.ProfileData.from_text_proto(HOST), steps=2)
