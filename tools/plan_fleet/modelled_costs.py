"""Models step costs of a device that nobody measured: a roofline, with tensor parallelism. Knows no flag.

Peaks are the vendors' data sheets. Each of tp devices reads and multiplies its share of the weights and KV, and the
devices all-reduce the hidden states twice a layer (Megatron-LM, arXiv:1909.08053). Over a ring, each sends and receives
2 (tp - 1) / tp of the bytes. Every result of this module says "modelled".
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from engine.errors import ConfigError
from tools.simulate.step_costs import StepCosts, roofline


@dataclasses.dataclass(frozen=True)
class DevicePeaks:
  """A device's peaks.

  Attributes:
    tflops: bfloat16, dense, 10^12 a second.
    gb_s: memory, 10^9 bytes a second.
    memory_gb: 10^9 bytes.
    link_gb_s: to the other devices of its group in one direction, 10^9 bytes a second.
    ladder: platform for engine.shapes.choose_ladder.
  """

  tflops: float
  gb_s: float
  memory_gb: float
  link_gb_s: float
  ladder: str


# NVIDIA's data sheets of H100 SXM and H200 SXM (NVLink 4: 900 GB/s both ways); Google Cloud's pages of TPU v5e and v6e
# (inter-chip interconnect of 1,600 and 3,584 Gbit/s both ways).
DEVICES = {
  "h100": DevicePeaks(989, 3350, 80, 450, "gpu"),
  "h200": DevicePeaks(989, 4800, 141, 450, "gpu"),
  "v5e": DevicePeaks(197, 819, 16, 100, "tpu"),
  "v6e": DevicePeaks(918, 1640, 32, 224, "tpu"),
}
# Shapes of the published config.json files.
MODELS: dict[str, dict[str, Any]] = {
  "llama-3-8b": {
    "_name_or_path": "Llama-3-8B's shape",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
  },
  "llama-3-70b": {
    "_name_or_path": "Llama-3-70B's shape",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
  },
}
COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY = 0.7, 0.9  # as benchmarks/costs/llama_8b_h200_roofline.json
OVERHEAD_S = 0.0005  # of a step
REDUCE_LATENCY_S = 10e-6  # of an all-reduce, whatever its size
MEMORY_SHARE = 0.9  # of the memory, for weights and KV
_BYTES = 2  # bfloat16
_LEAST_KV_TOKENS = 2048


def read_model_shape(name: str) -> Mapping[str, Any]:
  """Returns the shape of a name in MODELS, or of a config.json. Raises ConfigError."""
  if name in MODELS:
    return MODELS[name]
  path = pathlib.Path(name)
  path = path / "config.json" if path.is_dir() else path
  try:
    value = json.loads(path.read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"model_shape={name} is none of {', '.join(MODELS)}, and no config.json ({error}); set --model_shape"
    ) from error
  if not isinstance(value, dict):
    raise ConfigError(f"model_shape={name} holds no JSON object; give a Llama-shaped config.json")
  return {"_name_or_path": name} | value


def model_costs(shape: Mapping[str, Any], device: str, tp: int, max_tokens: int, block_size: int) -> StepCosts:
  """Returns the modelled table of tp devices, with the KV pool that fits them in `about`.

  Raises:
    ConfigError: the device is unknown, tp does not divide the heads, or the weights do not fit.
  """
  if device not in DEVICES:
    raise ConfigError(f"device={device} is unknown; set --device to one of {', '.join(DEVICES)}")
  peaks = DEVICES[device]
  heads = shape.get("num_attention_heads", 0)
  if tp < 1 or (heads and heads % tp):
    raise ConfigError(f"tp={tp} does not divide the {heads} attention heads; set --tp to a divisor")
  table = roofline(
    shape,
    tflops=peaks.tflops * tp,
    gb_s=peaks.gb_s * tp,
    compute_efficiency=COMPUTE_EFFICIENCY,
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    overhead_s=OVERHEAD_S,
    max_tokens=max_tokens,
    bytes_per_value=_BYTES,
  )
  vocab_weights = shape["hidden_size"] * shape["vocab_size"]
  weight_bytes = (int(table.about["weights"]) + vocab_weights) * _BYTES  # embedding table and output layer
  kv_bytes = peaks.memory_gb * 1e9 * MEMORY_SHARE * tp - weight_bytes
  kv_copies = max(1, tp // (shape.get("num_key_value_heads") or heads))  # heads are replicated over more devices
  kv_tokens = int(kv_bytes / (table.kv_bytes_per_token * kv_copies))
  if kv_tokens < _LEAST_KV_TOKENS:
    raise ConfigError(
      f"tp={tp} of {device} leaves {max(0, kv_tokens)} tokens of KV beside {weight_bytes / 1e9:.1f} GB of weights, at "
      f"least {_LEAST_KV_TOKENS} are needed; raise --tp"
    )
  reduce_s = 2 * shape["num_hidden_layers"] * REDUCE_LATENCY_S if tp > 1 else 0.0
  sent = 2 * (tp - 1) / tp * shape["hidden_size"] * _BYTES * 2 * shape["num_hidden_layers"]
  token_s = sent / (peaks.link_gb_s * 1e9 * BANDWIDTH_EFFICIENCY)
  return dataclasses.replace(
    table,
    rung_s=tuple((tokens, seconds + reduce_s + tokens * token_s) for tokens, seconds in table.rung_s),
    about={
      **table.about,
      "source": "modelled, not measured",
      "device": device,
      "tp": tp,
      "block_size": block_size,
      "num_blocks": kv_tokens // block_size,
      "ladder": peaks.ladder,
    },
  )
