"""The modelled step: its roofline by hand, its terms, the figures that the documents state, and bad input."""

import pytest

from engine.errors import ConfigError
from tools.check_device import judge
from tools.step_cost import ATTENTION_READS, LAUNCH_S, LAUNCHES_OUTSIDE, READ_S, main, measure_loads, model_step

_LAYER = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336  # weights of a layer of Llama-3-8B
_WEIGHTS = 2 * (32 * _LAYER + 4096 * 128256)  # bytes, with the head
_KEYS = 32 * 2 * 8 * 128 * 2  # bytes a position


def test_the_roofline_is_bytes_over_the_peak_and_operations_for_many_rows():
  assert model_step("llama3-8b", 1, "h200", 64, 1024).roofline == pytest.approx((_WEIGHTS + 65536 * _KEYS) / 4.8e12)
  many = model_step("llama3-8b", 1, "v6e", 2048, 1)
  assert many.roofline == pytest.approx(2048 * (_WEIGHTS + 4 * 32 * 32 * 128) / 918e12)


def test_the_terms_are_launches_latency_and_the_rest():
  step = model_step("llama3-8b", 1, "h200", 1, 1024)
  kernels = 32 * judge.MAX_LAUNCHES_A_LAYER + LAUNCHES_OUTSIDE
  assert step.terms["launches"] == pytest.approx(kernels * LAUNCH_S["gpu"])
  assert step.terms["latency"] == pytest.approx((kernels + 32 * (ATTENTION_READS - 1)) * READ_S["gpu"])
  assert step.total == pytest.approx(step.roofline + sum(step.terms.values()))
  shared = model_step("llama3-8b", 8, "h200", 1, 1024)
  assert shared.roofline == pytest.approx(step.roofline / 8) and shared.terms["sums"] > 64 * 10e-6


def test_slower_reads_are_the_larger_term():
  fast, slow = (model_step("llama3-8b", 1, "h200", 64, 1024, share) for share in (0.9, 0.8))
  assert slow.terms["reads"] == pytest.approx(fast.roofline * 0.25) and slow.roofline == fast.roofline


def test_the_modelled_8b_step_on_an_h200_is_what_the_documents_say():
  figures = [round(model_step("llama3-8b", 1, "h200", rows, 1024).over_roofline, 2) for rows in (1, 64)]
  assert figures == [1.29, 1.24]


def test_loads_are_those_of_the_plan():
  loads = measure_loads(64, 1024, 32, 8, 128)
  assert loads.sum() == 64 * 8 * 16 and loads.mean() / loads.max() >= 0.9


@pytest.mark.parametrize(
  ("model", "tp", "device", "words"),
  [
    ("llama3-8b", 3, "h200", "tp=3 does not divide the 8 KV heads"),
    ("llama3-8b", 1, "b200", "device=b200 is unknown.*h100, h200"),
    ("llama9", 1, "h200", "give a Llama-shaped model folder"),
  ],
)
def test_unknown_shapes_and_devices_are_refused(model: str, tp: int, device: str, words: str):
  with pytest.raises(ConfigError, match=words):
    model_step(model, tp, device, 1, 1024)


@pytest.mark.parametrize("flag", ["--steps=64", "--steps=0x5", "--bandwidth_share=0", "--tp=-1", "--tp=3"])
def test_bad_flags_are_refused(flag: str, capsys: pytest.CaptureFixture[str]):
  with pytest.raises(SystemExit):
    main(["--model=llama3-8b", flag])
  assert flag.partition("=")[0].strip("-") in capsys.readouterr().err


def test_the_command_says_that_it_models(capsys: pytest.CaptureFixture[str]):
  assert main(["--device=v6e", "--steps=8x1024"]) == 0
  head, _, *lines = capsys.readouterr().out.splitlines()
  assert head.startswith("modelled, not measured")
  assert [line.split()[:3] for line in lines] == [
    ["llama3.2-1b", "1", "x"],
    ["llama3-8b", "1", "x"],
    ["llama3-70b", "8", "x"],
  ]
