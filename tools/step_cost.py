"""Models the time of a decode step on devices that are not here, term by term, beside the roofline.

  python -m tools.step_cost                    1B, 8B, and 70B over 8 devices, on H100, H200 and v6e
  python -m tools.step_cost --model=llama3-8b --device=h200 --steps=64x1024

Nothing is measured: every line says "modelled". The roofline is the larger of bytes over the peak bandwidth and
operations over the peak of products (Williams et al., 2009). The model adds what a step has beyond it:

  reads      the peak bandwidth that a kernel does not reach
  balance    attention waits for the SM that the plan gives most keys (plan.py)
  small      what kernels without weights or keys read and write, in the cache of a GPU, and passes over the logits
  launches   a constant for each kernel of a layer (tools/check_device/judge.py) and outside of the layers
  latency    reads that wait for one another at the start of a kernel
  sums       all-reduces of several devices: a constant, and their bytes over the links

Each constant has its source beside it. A factor of reads of 0.8 instead of 0.9 makes most steps an eighth slower, and
which of both cuBLASLt reaches is known only on a device.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import sys

import numpy as np

from engine.errors import ConfigError
from pallas_kernels.paged_attention.plan import Geometry, make_plan
from pallas_kernels.paged_attention.tuning import tuning_for
from tools.arguments import CommandParser
from tools.check_device import judge
from tools.check_device.programs import names as shape_names
from tools.measure import ROOT
from tools.plan_fleet.modelled_costs import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, DEVICES, REDUCE_LATENCY_S
from tools.report.accounting import Flops

MODELS = (("llama3.2-1b", 1), ("llama3-8b", 1), ("llama3-70b", 8))
STEPS = ("1x1024", "8x1024", "64x1024")
# An empty kernel in a CUDA graph on an H100 (Spector et al., "Look Ma, No Bubbles", hazyresearch.stanford.edu, 2025). A
# TPU runs a step as one program; a kernel there waits for its first copy only.
LAUNCH_S = {"gpu": 1.3e-6, "tpu": 0.0}
# A read of global memory on an H100 takes 479 cycles (Luo et al., arXiv:2402.13499), at 1.755 GHz. For a TPU, the
# latency of a copy into vector memory is not published; the value is an assumption.
READ_S = {"gpu": 479 / 1.755e9, "tpu": 1e-6}
# Reads that wait for one another: SM's list, item, row and its length, block table, keys (gpu_decode.py).
ATTENTION_READS = 5
# Outside of the layers, and not in a branch that only sampling takes: `python -m tools.check_device --target=h200
# --model=tiny --token_budgets=64 --out=FILE`.
LAUNCHES_OUTSIDE = 40
# Bytes a second that kernels read of each other's results: an H100's second-level cache as measured ("Nvidia's H100:
# Funny L2, and Tons of Bandwidth", chipsandcheese.com, 2023). A matmul reads its rows while weights come from memory.
CACHE_BYTES_S = 5.5e12
# The most that one SM reads: 64 bytes a cycle from the second-level cache, as on a V100 (Jia et al., arXiv:1804.06826);
# not published for an H100. With two rings of two stages it has 128 KB under way, which is as much in 1.1 us.
SM_BYTES_S = 64 * 1.755e9
LOGIT_PASSES = 4  # the head writes them; then one pass finds NaN and two the likeliest token
_KIND, _SMS, _BLOCK = "NVIDIA H200", 132, 64  # an H100 SXM has as many SMs, and the same settings in tuning.py
_BYTES = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class StepTime:
  """A modelled step, in seconds.

  Attributes:
    roofline: bytes or operations over the peak.
    terms: what is beyond it, by name; see the module docstring.
  """

  roofline: float
  terms: Mapping[str, float]

  @property
  def total(self) -> float:
    return self.roofline + sum(self.terms.values())

  @property
  def over_roofline(self) -> float:
    return self.total / self.roofline


def measure_loads(rows: int, context: int, heads: int, kv_heads: int, head_dim: int) -> np.ndarray:
  """Returns the blocks of keys that the plan gives each SM of an H100 or H200 (plan.py); padding counts as one."""
  rung = max(8, 1 << (rows - 1).bit_length())
  geometry = Geometry(rung, rung, -(-context // _BLOCK), _BLOCK, heads, kv_heads, head_dim)
  tuning = tuning_for(_KIND, head_dim, _BLOCK)
  plan = make_plan(geometry, tuning.split_tokens, _SMS, tuning.decode_ctas_per_sm)
  lens, starts = np.zeros(rung, np.int32), np.minimum(np.arange(rung + 1), rows).astype(np.int32)
  lens[:rows] = context
  pieces = plan.split(plan.make_work(starts, lens))
  items = pieces["decode_items"][: pieces["worker_starts"][-1]]
  sm = np.repeat(np.arange(plan.num_workers) % _SMS, np.diff(pieces["worker_starts"]))
  return np.bincount(sm, np.maximum(items[:, 3] - items[:, 2], 1), _SMS)


def model_step(
  model: str, tp: int, device: str, rows: int, context: int, read_share: float = BANDWIDTH_EFFICIENCY
) -> StepTime:
  """Models a step of `rows` decodes with `context` positions each.

  Args:
    model: a folder of models/shapes.
    tp: devices that share it.
    device: a name of modelled_costs.DEVICES.
    read_share: of the peak bandwidth, that kernels reach.

  Raises:
    ConfigError: the shape or the device is unknown, or tp does not divide the KV heads.
  """
  if device not in DEVICES:
    raise ConfigError(f"device={device} is unknown; set --device to one of {', '.join(DEVICES)}")
  folder = ROOT / "models" / "shapes" / model
  flops = Flops.of_model(str(folder))
  config = json.loads((folder / "config.json").read_text("utf-8"))
  hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
  kv_heads = config.get("num_key_value_heads") or heads
  head_dim = config.get("head_dim") or hidden // heads
  if kv_heads % tp:
    raise ConfigError(f"tp={tp} does not divide the {kv_heads} KV heads of {model}; set --tp to a divisor")
  peaks = DEVICES[device]
  kind, bandwidth = peaks.ladder, peaks.gb_s * 1e9
  weights = (flops.token + flops.row) / 2 * _BYTES / tp
  keys = rows * context * layers * 2 * kv_heads * head_dim * _BYTES / tp
  work = flops.of(rows, rows, rows * context) / tp
  products_s = work / (peaks.tflops * 1e12)
  roofline = max((weights + keys) / bandwidth, products_s)

  # Two norms read and write a row, SwiGLU reads two and writes one, the KV write reads and writes its queries and keys.
  wide = 2 * (heads + 2 * kv_heads) * head_dim + 3 * config["intermediate_size"]
  small = layers * rows * _BYTES * (4 * hidden + wide / tp)
  logits = LOGIT_PASSES * rows * config["vocab_size"] / tp * 4
  balance_s = 0.0
  if kind == "gpu":
    loads = measure_loads(rows, context, heads // tp, kv_heads // tp, head_dim)
    block = _BLOCK * 2 * head_dim * _BYTES
    # An SM with more than its share has the bandwidth of those that have ended, up to its own limit.
    last_s = max(loads.max() * block / SM_BYTES_S, loads.sum() * block / (bandwidth * read_share))
    balance_s = layers * last_s - keys / (bandwidth * read_share)
  reached_s = max((weights + keys) / (bandwidth * read_share), products_s / COMPUTE_EFFICIENCY)
  a_layer = judge.MAX_LAUNCHES_A_LAYER + (1 if tp > 1 else 0)  # a residual follows its sum
  kernels = layers * a_layer + LAUNCHES_OUTSIDE
  terms = {
    "reads": reached_s - roofline,
    "balance": max(0.0, balance_s),
    "small": small / (CACHE_BYTES_S if kind == "gpu" else bandwidth * read_share) + logits / (bandwidth * read_share),
    "launches": kernels * LAUNCH_S[kind],
    "latency": (kernels + layers * (ATTENTION_READS - 1)) * READ_S[kind],
  }
  if tp > 1:
    sent = 2 * (tp - 1) / tp * rows * hidden * _BYTES
    link_s = sent / (peaks.link_gb_s * 1e9 * BANDWIDTH_EFFICIENCY)
    terms["sums"] = judge.SUMS_A_LAYER * layers * (REDUCE_LATENCY_S + link_s)
  return StepTime(roofline, terms)


def _parse_step(text: str) -> tuple[int, int]:
  rows, _, context = text.partition("x")
  if not (rows.isdecimal() and context.isdecimal() and int(rows) and int(context)):
    raise ConfigError(f"steps={text} is no ROWSxCONTEXT of numbers from 1, such as 64x1024; set --steps")
  return int(rows), int(context)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.step_cost", "Model the time of decode steps beside the roofline.")
  shapes = [name for name in shape_names() if name.startswith("llama3")]
  parser.add_argument("--model", choices=shapes, help="only this shape")
  parser.add_argument("--tp", type=int, default=0, help="devices that share the model; 0: 8 for 70B, else 1")
  parser.add_argument("--device", choices=sorted(DEVICES), action="append", help="default: h100, h200 and v6e")
  parser.add_argument("--steps", default=",".join(STEPS), help="steps as ROWSxCONTEXT, with commas between")
  parser.add_argument(
    "--bandwidth_share", type=float, default=BANDWIDTH_EFFICIENCY, help="of the peak bandwidth, that kernels reach"
  )
  args = parser.parse_args(arguments)
  if not 0 < args.bandwidth_share <= 1:
    parser.error(f"bandwidth_share={args.bandwidth_share} is not above 0 and at most 1; set --bandwidth_share")
  if args.tp < 0:
    parser.error(f"tp={args.tp} is negative; set --tp to 1 or more, or leave it at 0")
  known = dict(MODELS)
  models = [args.model] if args.model else list(known)
  lines = []
  try:
    for model in models:
      tp = args.tp or known.get(model, 1)
      for device in args.device or ("h100", "h200", "v6e"):
        for step in args.steps.split(","):
          time = model_step(model, tp, device, *_parse_step(step), args.bandwidth_share)
          terms = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in time.terms.items())
          lines.append(
            f"{model:11s} {f'{tp} x {device}':8s} {step:>8s}  {1e3 * time.roofline:7.2f}  {1e3 * time.total:7.2f}  "
            f"{time.over_roofline:5.2f}  {terms}"
          )
  except ConfigError as error:
    parser.error(str(error))
  print(f"modelled, not measured; kernels reach {args.bandwidth_share:g} of the peak bandwidth; times in ms")
  print("model       devices      step  roofline     step   over  beyond the roofline")
  print("\n".join(lines))
  return 0


if __name__ == "__main__":
  sys.exit(main())
