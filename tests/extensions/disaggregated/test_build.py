"""What two engines cannot be built of is refused before anything is loaded."""

import pytest

from engine.device import build as build_lib
from engine.device.options import BuildOptions
from engine.errors import ConfigError
from extensions.disaggregated.build import build_any

OPTIONS = {"batching": "disaggregated", "num_devices": 0, "token_budgets": (8,)}


@pytest.mark.parametrize(
  ("num_devices", "options", "said"),
  [
    (1, {}, "splits 1 devices into 0 for prefill and 1 for decode.*set --num_devices and --prefill_devices"),
    (2, {"prefill_devices": 2}, "splits 2 devices into 2 for prefill and 0 for decode"),
    (3, {"deterministic": True}, "1 devices for prefill and 2 for decode split.* set --prefill_devices to half"),
  ],
  ids=str,
)
def test_devices_that_cannot_be_split_are_refused(num_devices, options, said, monkeypatch):
  monkeypatch.setattr(build_lib, "find_devices", lambda count: [None] * num_devices)
  with pytest.raises(ConfigError, match=said):
    build_any(BuildOptions("nowhere", **(OPTIONS | options)), lambda *_: None, lambda _: None)


def test_one_engine_is_no_disaggregated_one():
  with pytest.raises(ConfigError, match="batching=disaggregated needs two engines.*set --batching=chunked"):
    build_lib.build_engine(BuildOptions("nowhere", **OPTIONS), lambda *_: None, lambda _: None)
