"""Writes a LoRA adapter with random weights in PEFT's format: for tests and benchmarks. Imports no PEFT.

python -m tools.make_random_adapter --model=models/demo --output=/tmp/adapter --rank=8 --seed=1
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import sys
from typing import Any
import zlib

import numpy as np
from safetensors.numpy import load_file, save_file

from models.config import ModelConfig
from models.registry import config_from_hf, tensors
from tools.arguments import CommandParser

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """Returns the shape [outputs, inputs] of each matrix that takes an adapter, by module name."""
  return {
    piece.name.removesuffix(".weight"): (piece.shape[0], piece.shape[1])
    for parts in tensors(config).values()
    for piece in parts
    if piece.name.endswith("_proj.weight")
  }


def write_random_adapter(
  output: pathlib.Path,
  config: ModelConfig,
  ranks: Mapping[str, int],
  seed: int,
  settings: Mapping[str, Any],
  strength: float = 1.0,
) -> None:
  """Writes adapter_config.json and adapter_model.safetensors.

  Args:
    output: the folder.
    config: of the base model.
    ranks: the rank of each adapted module.
    seed: of all values.
    settings: of adapter_config.json, besides peft_type.
    strength: size of an adapter's product relative to its input, before its scale.
  """
  output.mkdir(parents=True, exist_ok=True)
  values = {}
  shapes = matrices(config)
  for module, rank in ranks.items():
    outputs, inputs = shapes[module]
    rng = np.random.default_rng([seed, zlib.crc32(module.encode())])
    key = f"base_model.model.{module}.lora_"
    values[f"{key}A.weight"] = rng.standard_normal((rank, inputs), np.float32) * np.float32(inputs**-0.5)
    b = rng.standard_normal((outputs, rank), np.float32) * np.float32(strength * rank**-0.5)
    values[f"{key}B.weight"] = b
  save_file(values, output / "adapter_model.safetensors", metadata={"format": "pt"})
  defaults = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0}
  (output / "adapter_config.json").write_text(json.dumps(defaults | dict(settings), indent=2), "utf-8")


def write_plain_adapter(
  output: pathlib.Path,
  config: ModelConfig,
  rank: int,
  seed: int,
  targets: Sequence[str] = TARGETS,
  strength: float = 1.0,
) -> None:
  """Writes an adapter of one rank, with lora_alpha equal to it, so that its scale is 1."""
  ranks = {module: rank for module in matrices(config) if module.rpartition(".")[2] in targets}
  settings = {"r": rank, "lora_alpha": rank, "target_modules": list(targets)}
  write_random_adapter(output, config, ranks, seed, settings, strength)


def read_products(folder: pathlib.Path, scales: Mapping[str, float] | float) -> dict[str, np.ndarray]:
  """Returns what an adapter adds to each weight [outputs, inputs], by module name; for merging.

  Args: scales: the factor of each module, or of all.
  """
  found = load_file(folder / "adapter_model.safetensors")
  modules = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in found}
  products = {}
  for module in sorted(modules):
    a, b = (found[f"base_model.model.{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    scale = scales[module] if isinstance(scales, Mapping) else scales
    products[module] = (b @ a * scale).astype(np.float32)
  return products


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = CommandParser("make_random_adapter", __doc__)
  parser.add_argument("--model", required=True, help="folder of the base model")
  parser.add_argument("--output", required=True, help="folder to write")
  parser.add_argument("--rank", type=int, default=8, help="rank of every matrix")
  parser.add_argument("--seed", type=int, default=0, help="seed of all values")
  parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS, help="matrices that are adapted")
  parser.add_argument("--strength", type=float, default=1.0, help="size of the product relative to its input")
  args = parser.parse_args(argv)
  try:
    config = config_from_hf(json.loads((pathlib.Path(args.model) / "config.json").read_text("utf-8")))
    write_plain_adapter(pathlib.Path(args.output), config, args.rank, args.seed, args.targets, args.strength)
  except (OSError, ValueError) as error:
    return parser.failed(error)
  print(f"{args.output}: an adapter of rank {args.rank} for {', '.join(args.targets)}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
