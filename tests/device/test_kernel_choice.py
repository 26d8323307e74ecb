"""Which attention a device gets; what cannot run there is refused or replaced before anything compiles."""

import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jaxlib import xla_client
import pytest

from engine.device.build import build_engine
from engine.device.kernel_choice import attention_candidates, check_dtype, choose_attention, choose_matrix_form
from engine.device.options import BuildOptions
from engine.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5e")


def gpu(capability: str, name: str = "NVIDIA A100") -> SimpleNamespace:
  return SimpleNamespace(platform="gpu", device_kind=name, compute_capability=capability)


@pytest.mark.parametrize(
  ("requested", "device", "names"),
  [
    ("auto", CPU, ("cpu", "reference")),
    ("cpu", CPU, ("cpu",)),
    ("auto", TPU, ("tpu", "reference")),
    ("auto", gpu("8.0"), ("portable", "reference")),
    ("auto", gpu("8.6"), ("portable", "reference")),
    ("auto", gpu("8.9"), ("portable", "reference")),
    ("auto", gpu("9.0"), ("gpu", "portable", "reference")),
    ("auto", gpu("10.0"), ("portable", "reference")),
    ("auto", gpu("12.1"), ("portable", "reference")),
    ("gpu", gpu("9.0"), ("gpu",)),
    ("portable", gpu("9.0"), ("portable",)),
    ("reference", gpu("8.0"), ("reference",)),
    ("reference", TPU, ("reference",)),
  ],
)
def test_what_a_device_can_run(requested, device, names):
  assert attention_candidates(requested, device) == (names, "")


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.1", "10.0", "12.0"])
def test_hopper_kernels_are_refused_on_other_gpus(capability):
  with pytest.raises(ConfigError) as refused:
    attention_candidates("gpu", gpu(capability))
  assert str(refused.value) == (
    "attention=gpu cannot run on this machine's device (NVIDIA A100): gpu needs compute capability 9.0 (Hopper: H100, "
    f"H200, H20, GH200), not {capability}; set --attention=auto, or --attention=reference, which runs anywhere, slowly"
  )


@pytest.mark.parametrize(
  ("device", "words"),
  [
    (
      gpu("7.5", "Tesla T4"),
      "on Tesla T4: gpu needs .* and portable needs compute capability 8.0 or newer .*, not 7.5; ",
    ),
    (gpu("gfx942", "MI300X"), "on MI300X: gpu needs .* and portable needs .*, not gfx942; "),
    (SimpleNamespace(platform="rocm", device_kind="MI300X"), "on MI300X: no kernels are for platform rocm; "),
  ],
  ids=["Turing", "AMD", "other platform"],
)
def test_a_device_without_a_kernel_gets_the_reference_with_reason_and_cost(device, words):
  names, reason = attention_candidates("auto", device)
  assert names == ("reference",)
  assert re.fullmatch(f"attention=reference {words}the reference loops over keys .* slower", reason)


A100, H200 = gpu("8.0"), gpu("9.0", "NVIDIA H200")


@pytest.mark.parametrize(
  ("device", "changes", "dtype", "kv_dtype", "name", "reason"),
  [
    (H200, {}, "bfloat16", "bfloat16", "gpu", ""),
    (H200, {"head_dim": 80}, "bfloat16", "bfloat16", "portable", r"\(gpu\): head_dim=80 .* are 64, 128"),
    (H200, {}, "float32", "float32", "portable", r"\(gpu\): dtype=float32 .* are bfloat16"),
    (A100, {"head_dim": 256}, "float16", "float16", "portable", ""),
    (A100, {}, "bfloat16", "uint8", "portable", ""),
    (A100, {"head_dim": 72}, "bfloat16", "bfloat16", "portable", ""),
    (
      A100,
      {"head_dim": 512},
      "bfloat16",
      "bfloat16",
      "reference",
      r"\(portable\): head_dim=512 .* of 8 from 16 to 256;",
    ),
    (A100, {"head_dim": 20}, "bfloat16", "bfloat16", "reference", r"\(portable\): head_dim=20 .*; the reference loops"),
    (A100, {"num_heads": 65, "num_kv_heads": 1}, "bfloat16", "bfloat16", "reference", "65 query heads .* are 1 to 64"),
    (A100, {}, "bfloat16", "int8", "reference", "kv_dtype=int8: .* has no int8 KV; set --kv_dtype to auto or fp8;"),
    (TPU, {}, "bfloat16", "bfloat16", "tpu", ""),
    (TPU, {}, "float16", "float16", "reference", r"\(tpu\): dtype=float16 .*; the reference loops over keys"),
  ],
)
def test_the_best_kernel_that_has_the_model_is_taken(device, changes, dtype, kv_dtype, name, reason):
  shape = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128} | changes
  group = SimpleNamespace(**shape, window=None)
  model = SimpleNamespace(groups=(group,), max_position=1024)
  names, _ = attention_candidates("auto", device)
  chosen = choose_attention(BuildOptions("any"), names, model, jnp.dtype(dtype), jnp.dtype(kv_dtype))
  assert chosen[0] == name
  assert re.search(reason, chosen[1]) if reason else not chosen[1]


@pytest.mark.parametrize(
  ("requested", "device"),
  [("gpu", CPU), ("portable", CPU), ("tpu", CPU), ("cpu", TPU), ("gpu", TPU), ("cpu", gpu("9.0"))],
)
def test_kernels_of_another_platform_are_refused(requested, device):
  with pytest.raises(ConfigError) as refused:
    attention_candidates(requested, device)
  own = {"gpu": "gpu or cuda", "portable": "gpu or cuda"}.get(requested, requested)
  assert str(refused.value) == (
    f"attention={requested} cannot run on this machine's device ({device.device_kind}): {requested} is for platform "
    f"{own}, not {device.platform}; set --attention=auto, or --attention=reference, which runs anywhere, slowly"
  )


@pytest.mark.parametrize(
  ("error", "why"),
  [
    (AssertionError(), "its plugin is missing or does not load"),
    (RuntimeError("Unable to find:\n it (set JAX_PLATFORMS='' to choose)"), "Unable to find: it"),
  ],
)
def test_a_missing_device_is_told_in_one_line(error, why, monkeypatch):
  def devices():
    raise error

  monkeypatch.setattr(jax, "devices", devices)
  with pytest.raises(ConfigError) as refused:
    build_engine(BuildOptions("any"), lambda *_: None, lambda events: None)
  said = str(refused.value)
  assert said.startswith("JAX_PLATFORMS=cpu: JAX finds no such device") and f"({why}); supported are cpu, cuda" in said
  assert "unset JAX_PLATFORMS" in said and "\n" not in said


@pytest.mark.parametrize(
  ("chosen", "share"),
  [({}, 0.95), ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, 0.6)],
  ids=str,
)
def test_a_gpu_gives_its_memory_unless_the_user_says_otherwise(chosen, share, monkeypatch):
  """As JAX's plugin reads it, when build_engine() first looks for devices."""
  for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
    monkeypatch.setenv(name, chosen.get(name, ""))
  read = {}

  def devices():
    read.update(xla_client.generate_pjrt_gpu_plugin_options())
    raise RuntimeError("no more than this")

  monkeypatch.setattr(jax, "devices", devices)
  with pytest.raises(ConfigError, match="no more than this"):
    build_engine(BuildOptions("any"), lambda *_: None, lambda events: None)
  assert read["memory_fraction"] == share


def test_a_server_for_a_device_that_is_not_there(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "server.main", "--port=0", "--compile_cache_dir="],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "rocm"},
    stderr=subprocess.PIPE,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 1 and "Traceback" not in done.stderr
  assert done.stderr.splitlines()[-1].startswith("error: JAX_PLATFORMS=rocm: JAX finds no such device (")


@pytest.mark.parametrize(
  ("device", "refused"),
  [
    (CPU, {"fp8"}),
    (TPU, {"fp8"}),
    (SimpleNamespace(platform="tpu", device_kind="TPU7x"), set()),
    (gpu("8.0"), {"int4", "fp8"}),
    (gpu("8.9", "NVIDIA L4"), {"int4"}),
    (gpu("9.0", "NVIDIA H200"), {"int4"}),
  ],
)
def test_weights_that_a_device_does_not_multiply_by_are_refused(device, refused):
  for quantization in ("auto", "none", "int8", "w8a8", "int4", "fp8"):
    options = BuildOptions("nowhere", quantization=quantization)
    if quantization in refused:
      with pytest.raises(ConfigError, match=f"quantization={quantization} is not for {device.device_kind}; set --quan"):
        choose_matrix_form(options, "xla", device)
    else:
      form, why = choose_matrix_form(options, "packed", device)
      assert not why and (form.kind == "plain") == (quantization in ("auto", "none"))


def test_a_tpu_has_no_float16():
  for device in (CPU, gpu("8.0"), TPU):
    for dtype in map(jnp.dtype, (jnp.float32, jnp.bfloat16)):
      check_dtype(dtype, device)
  check_dtype(jnp.dtype(jnp.float16), gpu("8.0"))
  with pytest.raises(ConfigError, match=f"dtype=float16: {TPU.device_kind} .* set --dtype=bfloat16"):
    check_dtype(jnp.dtype(jnp.float16), TPU)
