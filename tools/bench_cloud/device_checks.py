"""Identifies a cloud machine's device and checks its results, one check a process. Compares no speeds.

  python -m tools.bench_cloud.device_checks facts
  python -m tools.bench_cloud.device_checks answers [--tiny]
  python -m tools.bench_cloud.device_checks attention [--tiny]

`facts` prints the device, its memory and the versions. `answers` runs the demo model in the engine on questions with
known answers. `attention` compares the engine's paged attention with the reference on the same device, and times it.
Each prints one line of JSON; its "error" describes a failure.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import importlib.metadata
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.accelerator import ask_nvidia_smi, read_machine
from engine.device.build import find_devices
from engine.device.kernel_choice import attention_candidates
from engine.device.options import BuildOptions
from engine.errors import EngineError
from engine.settings import UNBOUNDED_QUEUE
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.plan import Geometry
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer
from tools.arguments import CommandParser
from tools.bench_offline import OfflineRun
from tools.demo_model.skills import SKILLS, is_correct, make_instances
from tools.measure import ROOT, best_and_median
from tools.workload import WorkRequest

DEMO = ROOT / "models" / "demo"
_LONGEST_ANSWER = 48
# Least share of right answers for each skill. In bf16 near ties may flip; wrong attention gets almost none right.
_LEAST_RIGHT = 0.75
# Largest norm of the difference over the reference's norm. bf16 keeps 8 bits of keys, values and weights.
_NORM_ERROR = {"bfloat16": 2e-2, "float32": 1e-4}
_CALLS = 8  # calls of attention in a timed program


def read_facts(_tiny: bool) -> dict[str, Any]:
  """Returns the device, its memory in bytes, and the versions of its software."""
  devices = find_devices(0)
  first, versions = devices[0], {}
  for package in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {
    "platform": first.platform,
    "device": first.device_kind,
    "num_devices": len(devices),
    "memory_bytes": (first.memory_stats() or {}).get("bytes_limit", 0),
    "compute_capability": str(getattr(first, "compute_capability", "")),
    "driver": read_machine(report=ask_nvidia_smi()).driver,
    "versions": versions,
  }


def check_answers(tiny: bool) -> dict[str, Any]:
  """Returns the demo model's right answers by skill; the engine runs all requests at once."""
  count = 2 if tiny else 8
  options = BuildOptions(
    model_dir=str(DEMO),
    token_budgets=(8, 32, 128),
    max_num_seqs=32,
    prefill_chunk=128,
    max_model_len=2048,
    **UNBOUNDED_QUEUE,
  )
  run, tokenizer = OfflineRun(options), Tokenizer(DEMO)
  asked = [(skill, instance) for skill in SKILLS for instance in make_instances(skill, count, 77)]
  prompts = [
    tokenizer.encode_chat([Message(message["role"], message["content"]) for message in instance.messages])
    for _, instance in asked
  ]
  requests = [WorkRequest(index, 0.0, tuple(prompt), _LONGEST_ANSWER) for index, prompt in enumerate(prompts)]
  right: dict[str, int] = dict.fromkeys(SKILLS, 0)
  for (skill, instance), outcome in zip(asked, run.serve(requests), strict=True):
    tokens = list(outcome.tokens)
    ends = [tokens.index(token) for token in run.built.config.eos_token_ids if token in tokens]
    right[skill] += is_correct(instance, tokenizer.decode(tokens[: min(ends, default=len(tokens))]))
  wrong = [f"{skill}: {found} of {count} right" for skill, found in right.items() if found < _LEAST_RIGHT * count]
  return {
    "attention": run.built.attention,
    "dtype": str(run.built.runner.spec.dtype),
    "kv_dtype": api.name_kv_dtype(run.built.runner.kv[0].dtype),
    "right": right,
    "of_each": count,
    "load_s": round(run.built.load_s, 2),
    "warmup_s": round(run.built.warmup_s, 2),
    "notes": list(run.built.fallbacks),
  } | ({"error": "; ".join(wrong)} if wrong else {})


# Prompts of these lengths prefill together; then each row decodes a token. Heads of Llama-3-8B and of -3.2-1B.
_LENGTHS = (1, 17, 64, 500, 1024, 33)
_HEADS = ((32, 8, 128, None), (32, 8, 64, None), (32, 8, 128, 256))


def check_attention(tiny: bool) -> dict[str, Any]:
  """Compares this device's attention with the reference, and times decodes of a full batch."""
  device = find_devices(1)[0]
  names, reason = attention_candidates("auto", device)
  dtype = jnp.dtype("float32" if device.platform == "cpu" else "bfloat16")
  lengths, heads = ((5, 17, 33), ((4, 2, 64, 8),)) if tiny else (_LENGTHS, _HEADS)

  def check_support(name: str) -> None:
    page = api.preferred_block_size(name)
    for num_heads, num_kv_heads, head_dim, window in heads:
      api.check_supported(name, Geometry(1, 1, 1, page, num_heads, num_kv_heads, head_dim, window), dtype)

  name, unsupported = api.choose_attention(names, check_support)
  page, checks, wrong = api.preferred_block_size(name), [], []
  for num_heads, num_kv_heads, head_dim, window in heads:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "sliding_window": window}
    error = compare_with_reference(name, lengths, page, dtype, shape)
    about = f"{num_heads} and {num_kv_heads} heads of {head_dim}, window {window}"
    checks.append({"what": about, "norm_error": error})
    if not error <= _NORM_ERROR[dtype.name]:
      wrong.append(f"{about}: differs from the reference by {error:.1e} of its norm, over {_NORM_ERROR[dtype.name]}")
  rows, length = (4, 64) if tiny else (32, 4096)
  timed = time_decode(name, rows, length, page, dtype, 4 if tiny else 32, 2 if tiny else 8, 64 if tiny else 128)
  return {"attention": name, "dtype": dtype.name, "checks": checks, **timed} | {
    "notes": [note for note in (reason, unsupported) if note],
    **({"error": "; ".join(wrong)} if wrong else {}),
  }


def _place(lengths: Sequence[int], page: int) -> tuple[np.ndarray, int]:
  """Returns shuffled block tables int32[rows, width] for rows that grow by a token, and the number of blocks."""
  counts = [-(-(length + 1) // page) for length in lengths]
  ids = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
  tables, taken = np.zeros((len(lengths), max(counts)), np.int32), 0
  for row, count in enumerate(counts):
    tables[row, :count] = ids[taken : taken + count]
    taken += count
  return tables, sum(counts) + 1


def _step(
  name: str, tables: np.ndarray, page: int, rows: Sequence[tuple[int, int]], shape: dict[str, Any]
) -> tuple[api.PagedAttention, api.RaggedMeta, jax.Array]:
  """Returns the attention of a step with rows (queries, length), and its tokens' cache slots."""
  queries = [count for count, _ in rows]
  spec = ArgSpec("", tuple(rows), sum(queries), len(rows), page, tables.shape[1], **shape)
  starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
  lens = np.array([length for _, length in rows], np.int32)
  attention = api.PagedAttention(name, spec.geometry, spec.scale, device_kind=jax.devices()[0].device_kind)
  plan = attention.plan
  meta = attention.meta(
    jnp.asarray(tables),
    jnp.asarray(lens),
    jnp.asarray(starts),
    None if plan is None else jnp.asarray(plan.make_work(starts, lens)),
  )
  slots = []
  for row, (count, length) in enumerate(rows):
    position = np.arange(length - count, length)
    slots.append(tables[row, position // page] * page + position % page)
  return attention, meta, jnp.asarray(np.concatenate(slots).astype(np.int32))


def _angles(rows: Sequence[tuple[int, int]], head_dim: int) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin, f32[T, H / 2], of the tokens' positions."""
  positions = np.concatenate([np.arange(length - count, length) for count, length in rows])
  angles = positions[:, None] * 10_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
  return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _qkv(tokens: int, shape: dict[str, Any], dtype: jnp.dtype, seed: int) -> jax.Array:
  heads = shape["num_kv_heads"], shape["num_heads"] // shape["num_kv_heads"] + 2
  return jax.random.normal(jax.random.key(seed), (tokens, *heads, shape["head_dim"]), jnp.float32).astype(dtype)


def compare_with_reference(
  name: str, lengths: Sequence[int], page: int, dtype: jnp.dtype, shape: dict[str, Any]
) -> float:
  """Runs a prefill and a decode step with paged attention `name`, and with the reference in f32 on the same numbers.

  Returns:
    The larger of the two steps' norms of the difference over the reference's norm; NaN if an output is NaN.
  """
  tables, num_blocks = _place(lengths, page)
  steps = [[(length, length) for length in lengths], [(1, length + 1) for length in lengths]]

  def outputs(implementation: str, precision: jnp.dtype) -> list[np.ndarray]:
    kv = jnp.zeros(api.kv_shape(num_blocks, page, shape["num_kv_heads"], shape["head_dim"], implementation), precision)
    found = []
    for seed, rows in enumerate(steps):
      attention, meta, slots = _step(implementation, tables, page, rows, shape)
      qkv = _qkv(len(slots), shape, dtype, seed).astype(precision)
      out, kv = jax.jit(attention.attend)(qkv, *_angles(rows, shape["head_dim"]), kv, meta, slots)
      found.append(np.asarray(out, np.float32))
    return found

  pairs = zip(outputs(name, dtype), outputs("reference", jnp.dtype(jnp.float32)), strict=True)
  return max(float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)) for ours, theirs in pairs)


def time_decode(
  name: str, rows: int, length: int, page: int, dtype: jnp.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, Any]:
  """Returns the microseconds of one attention call for `rows` decodes at `length`, and the KV bytes/s that it reads."""
  shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "sliding_window": None}
  tables, num_blocks = _place([length - 1] * rows, page)
  steps = [(1, length)] * rows
  attention, meta, slots = _step(name, tables, page, steps, shape)
  angles, qkv = _angles(steps, head_dim), _qkv(rows, shape, dtype, 0)

  @functools.partial(jax.jit, donate_argnums=0)
  def program(kv: jax.Array, qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    for _ in range(_CALLS):  # each call's queries depend on the previous output, so calls cannot overlap
      out, kv = attention.attend(qkv, *angles, kv, meta, slots)
      qkv = qkv.at[:, :, :-2].set(out.reshape(qkv[:, :, :-2].shape))
    return kv, out

  kv = jnp.ones(api.kv_shape(num_blocks, page, num_kv_heads, head_dim, name), dtype)

  def run() -> None:
    nonlocal kv
    kv, _ = jax.block_until_ready(program(kv, qkv))

  best_ms, median_ms = best_and_median(run, 1.0)
  read = rows * length * num_kv_heads * 2 * head_dim * dtype.itemsize
  return {
    "decode": f"{rows} x {length}",
    "us": round(1e3 * median_ms / _CALLS, 1),
    "best_us": round(1e3 * best_ms / _CALLS, 1),
    "read_bytes_s": round(read * _CALLS / (1e-3 * median_ms)),
  }


CHECKS: dict[str, Callable[[bool], dict[str, Any]]] = {
  "facts": read_facts,
  "answers": check_answers,
  "attention": check_attention,
}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line if the check cannot run."""
  parser = CommandParser("tools.bench_cloud.device_checks", __doc__)
  parser.add_argument("check", choices=CHECKS, help="the check to run")
  parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
  args = parser.parse_args(arguments)
  try:
    with contextlib.redirect_stdout(sys.stderr):
      found = CHECKS[args.check](args.tiny)
  except (EngineError, NotImplementedError) as error:
    return parser.failed(error)
  print(json.dumps(found), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
