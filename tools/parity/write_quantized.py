"""Records quantized layers as the formats' own packages make and dequantize them; tests read the file.

  PYTHONPATH=PACKAGES .venv-parity/bin/python -m tools.parity.write_quantized OUTPUT AUTOAWQ AUTOGPTQ

PACKAGES holds compressed-tensors 0.20; AUTOAWQ and AUTOGPTQ are the unpacked folders of autoawq 0.2.9 and auto-gptq
0.7.1, of which one module each is loaded. A tensor CASE.PART is what a checkpoint holds, CASE.dequantized is f32 in
[outputs, inputs], and the metadata holds each case's quantization_config.
"""

import importlib.util
import json
import math
import pathlib
import sys
import types

import torch  # pyright: ignore[reportMissingImports]

OUTPUTS, INPUTS = 32, 96


def compressed(case, weights, stored, dtype, activations=None):
  """Returns a case of compressed-tensors."""
  from compressed_tensors.compressors import BaseCompressor  # pyright: ignore[reportMissingImports]
  from compressed_tensors.quantization import QuantizationScheme  # pyright: ignore[reportMissingImports]
  from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]

  scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations, format=stored)
  args = scheme.weights
  weight = torch.randn(OUTPUTS, INPUTS).to(dtype) * 0.05
  match args.strategy:
    case "group":
      grouped = weight.reshape(OUTPUTS, INPUTS // args.group_size, args.group_size)
      low, high = grouped.amin(-1), grouped.amax(-1)
    case "channel":
      low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    case "tensor":
      low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    case _:
      rows, columns = args.block_structure
      padded = torch.nn.functional.pad(weight, (0, -INPUTS % columns, 0, -OUTPUTS % rows))
      blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
      low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
  scale, zero = calculate_qparams(low, high, args)
  compressor = BaseCompressor.get_value_from_registry(stored)
  state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
  state = compressor.compress(state, scheme)
  plain = compressor.decompress(dict(state), scheme)["weight"]
  config = {
    "quant_method": "compressed-tensors",
    "format": stored,
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
  }
  return case, config, {name: value for name, value in state.items() if value is not None}, plain


def packed_rows(values, bits):
  """int[R, C] -> int32[R, C * bits / 32], the lowest bits first."""
  shifts = torch.arange(0, 32, bits, dtype=torch.int64)
  grouped = values.to(torch.int64).reshape(values.shape[0], -1, 32 // bits)
  return (grouped << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def awq(folder, group):
  """Returns a case of AWQ, dequantized by AutoAWQ."""
  module = load("awq_packing", pathlib.Path(folder) / "awq/utils/packing_utils.py")
  codes = torch.randint(0, 16, (INPUTS, OUTPUTS))
  zeros = torch.randint(0, 16, (INPUTS // group, OUTPUTS))
  scales = (torch.rand(INPUTS // group, OUTPUTS) * 0.01 + 0.001).half()

  def pack(values):  # as WQLinear_GEMM.from_linear
    return packed_rows(values.reshape(values.shape[0], -1, 8)[:, :, module.AWQ_ORDER].reshape(values.shape), 4)

  parts = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
  plain = module.dequantize_gemm(parts["qweight"], parts["qzeros"], scales, 4, group)
  config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
  return f"awq_{group}", config, parts, plain.T


def gptq(folder, bits, group, is_symmetric):
  """Returns a case of GPTQ version 1, packed and multiplied by the identity in AutoGPTQ's layer."""
  for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
    sys.modules.setdefault(name, types.ModuleType(name))
  module = load("gptq_layer", pathlib.Path(folder) / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")
  size = INPUTS if group == -1 else group
  layer = module.QuantLinear(bits, group, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
  linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
  weight = torch.randn(OUTPUTS, INPUTS) * 0.05
  grouped = weight.reshape(OUTPUTS, INPUTS // size, size)
  top = 2**bits - 1
  if is_symmetric:
    scales, zeros = grouped.abs().amax(-1) * 2 / top, torch.full(grouped.shape[:2], 2.0 ** (bits - 1))
  else:
    scales = (grouped.amax(-1) - grouped.amin(-1)) / top
    zeros = (-grouped.amin(-1) / scales).round().clamp(1, top)
  scales = scales.half().float()
  codes = (grouped / scales[..., None]).round() + zeros[..., None]
  linear.weight.data = ((codes.clamp(0, top) - zeros[..., None]) * scales[..., None]).reshape(OUTPUTS, INPUTS)
  layer.pack(linear, scales, zeros, None)
  plain = layer(torch.eye(INPUTS)).T
  parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "g_idx")} | {"scales": layer.scales.half()}
  config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": is_symmetric, "desc_act": False}
  return f"gptq_{bits}_{'sym' if is_symmetric else 'asym'}_{abs(group)}", config, parts, plain


def load(name, path):
  """Loads a single module of a package."""
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None, path
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def main(output, autoawq, autogptq):
  """Writes all cases."""
  from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

  torch.manual_seed(0)
  group = {"strategy": "group", "group_size": 32}
  dynamic = {"num_bits": 8, "strategy": "token", "dynamic": True}
  float8 = {"num_bits": 8, "type": "float"}
  cases = [
    compressed("int4_group_bf16", {"num_bits": 4, **group}, "pack-quantized", torch.bfloat16),
    compressed("int4_zeros_f16", {"num_bits": 4, "symmetric": False, **group}, "pack-quantized", torch.float16),
    compressed("int4_output_f32", {"num_bits": 4, "strategy": "channel"}, "pack-quantized", torch.float32),
    compressed("int8_group_f16", {"num_bits": 8, **group}, "pack-quantized", torch.float16),
    compressed("int8_zeros_bf16", {"num_bits": 8, "symmetric": False, **group}, "pack-quantized", torch.bfloat16),
    compressed("w8a8_output", {"num_bits": 8, "strategy": "channel"}, "int-quantized", torch.bfloat16, dynamic),
    compressed("w8a8_tensor", {"num_bits": 8, "strategy": "tensor"}, "int-quantized", torch.float32, dynamic),
    compressed("fp8_output", {"strategy": "channel", **float8}, "float-quantized", torch.bfloat16, float8 | dynamic),
    compressed("fp8_tensor", {"strategy": "tensor", **float8}, "float-quantized", torch.float32, float8 | dynamic),
    compressed(
      "fp8_blocks",
      {"strategy": "block", "block_structure": [16, 64], **float8},
      "float-quantized",
      torch.float32,
      float8 | dynamic,
    ),
    compressed("mxfp4", {"num_bits": 4, "type": "float", **group}, "mxfp4-pack-quantized", torch.float32),
    awq(autoawq, 32),
    *(gptq(autogptq, *case) for case in ((4, 32, True), (4, 32, False), (8, 48, True), (8, -1, False))),
  ]
  tensors, configs = {}, {}
  for name, config, parts, plain in cases:
    assert name not in configs and math.prod(plain.shape) == OUTPUTS * INPUTS, name
    configs[name] = json.dumps(config)
    tensors |= {f"{name}.{part}": value.detach().contiguous() for part, value in parts.items()}
    tensors[f"{name}.dequantized"] = plain.detach().float().contiguous()
  save_file(tensors, output, metadata=configs)


if __name__ == "__main__":
  main(*sys.argv[1:])
