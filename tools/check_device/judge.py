"""Judges the facts of every compiled rung, and formats their table. Pure: reads facts, makes none."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.check_device.facts import KernelUse
from tools.ptx_emulator.executable import MOSAIC_ALIGNMENT

# With one attention kernel: two norms, four matmuls with their residuals, SwiGLU's product, KV write and attention.
MAX_LAUNCHES_A_LAYER = 9
MAX_LAUNCHES_OWN_MATMULS = 12  # deterministic, or int8: XLA's own matmuls do not fuse the residual
MAX_LAUNCHES_ROUNDED = 19  # w8a8 and fp8: up to three kernels norm and round the rows of each product
MAX_LAUNCHES_ADAPTERS = 37  # pallas_kernels/low_rank's reference, which also transposes A; not tuned for a GPU
SUMS_A_LAYER = 2  # over the devices that share it: after attention, and after the MLP
# Of every product, by quantization.
_OPERANDS = {"w8a8": "s8 x s8", "fp8": "f8e4m3fn x f8e4m3fn", "int4": "bf16 x s4"}
_SHOWN = 5  # copies to print; there may be some a layer


def launches_a_layer(rung: Mapping[str, Any]) -> float:
  """Returns launches a layer of a step, from it at two depths: all launches outside the layers cancel out."""
  return (len(rung["launches"]) - rung["shallow_launches"]) / (rung["layers"] - rung["shallow_layers"])


def violations(rung: Mapping[str, Any], kernels: Sequence[KernelUse]) -> list[str]:
  """Returns a line for each violation of a rung.

  Args:
    rung: as tools.check_device.compile writes it. GPU facts are checked where they exist.
    kernels: ptxas's output for the kernels that this rung was the first to need.
  """
  found = []
  if rung["aliased_arrays"] != rung["donated_arrays"]:
    found.append(f"{rung['aliased_arrays']} of {rung['donated_arrays']} donated arrays are updated in place")
  elif rung["kv_device_bytes"] != rung["kv_bytes"]:
    found.append(f"KV takes {rung['kv_device_bytes']} bytes on the device, padded from {rung['kv_bytes']}")
  if rung["alias_bytes"] != rung["donated_bytes"]:
    found.append(f"{rung['alias_bytes']} bytes are updated in place, but donated arrays have {rung['donated_bytes']}")
  found += _collectives(rung)
  for text in rung["moved"][:_SHOWN]:
    found.append(f"moves a KV buffer or a weight: {text[:200]}")
  if len(rung["moved"]) > _SHOWN:
    found.append(f"moves a KV buffer or a weight {len(rung['moved']) - _SHOWN} times more; --out lists them")
  expected = _OPERANDS.get(rung["quantization"])
  if expected and rung["operands"] != [expected]:
    found.append(f"products are {', '.join(rung['operands'])}, and not all {expected}")
  for text in rung["widened"][:_SHOWN]:
    found.append(f"widens a weight outside of a matmul: {text[:200]}")
  if rung["sorts_and_loops"] and "launches" in rung:
    found.append(f"sorts or loops: {', '.join(rung['sorts_and_loops'][:_SHOWN])}")
  if rung["temp_bytes"] > rung["temp_limit"]:
    found.append(f"{rung['temp_bytes']} bytes of temporaries are over {rung['temp_limit']}")
  if "not_bundled" in rung:
    found.append(f"cannot be stored in an executable bundle: {rung['not_bundled']}")
  for text in sorted(set(rung["misplaced_transfers"]))[:_SHOWN]:
    found.append(f"threads and TMA place elements of a slice in shared memory differently: {text}")
  for text in rung.get("misaligned", ())[:_SHOWN]:
    found.append(f"a kernel's array must be at a multiple of {MOSAIC_ALIGNMENT} bytes: {text}")
  if "launches" in rung:
    if rung["attention"] == "gpu" and not rung["shared_transfers"]:  # only Mosaic GPU shows them
      found.append("no transfer between registers and shared memory was seen, so none was checked")
    # Sums over devices, and conditionals with them, are outside of command buffers.
    if rung["devices"] == 1 and (rung["command_buffers"] != 1 or rung["outside"]):
      found.append(
        f"{rung['command_buffers']} command buffers instead of one, and outside of them: "
        f"{', '.join(sorted(set(rung['outside']))) or 'nothing'}"
      )
  if "shallow_launches" in rung:
    own = rung["deterministic"] or rung["quantization"] != "none"
    most = MAX_LAUNCHES_OWN_MATMULS if own else MAX_LAUNCHES_A_LAYER
    most = MAX_LAUNCHES_ROUNDED if rung["quantization"] in _OPERANDS else most
    most = MAX_LAUNCHES_ADAPTERS if rung["adapters"] else most
    # Prefill and decode kernels: a deterministic step has the former, a step of no more tokens than rows the latter.
    # The portable kernels are always both, and a third one sums the parts of split rows.
    if rung["attention"] == "portable":
      most += 2
    else:
      most += rung["tokens"] > rung["rows"] and not rung["deterministic"]
    # The sums, and the addition of a residual, which follows its sum and so cannot be part of a matmul.
    most += SUMS_A_LAYER + 1 if rung["devices"] > 1 else 0
    if launches_a_layer(rung) > most + 0.1:  # the compiler may fuse one layer in ten differently, such as the first
      found.append(f"{launches_a_layer(rung):g} launches a layer are over {most}")
    if rung["deterministic"]:
      found += _many_ways(rung["matmuls"])
  for kernel in kernels:
    if kernel.spill_bytes:
      found.append(f"kernel {kernel.name} spills {kernel.spill_bytes} bytes ({kernel.registers} registers)")
  return found


def sums_a_layer(rung: Mapping[str, Any]) -> float:
  """Returns the all-reduces a layer of a step, apart from the one of the embedding."""
  sums = [one for one in rung["collectives"] if one["opcode"] == "all-reduce" and not one["is_conditional"]]
  return (len(sums) - 1) / rung["layers"]


def _collectives(rung: Mapping[str, Any]) -> list[str]:
  """Finds collective operations beyond two sums a layer, one for the embedding and small ones of the sampler."""
  found = []
  if rung["devices"] == 1:
    return [f"one device, but {len(rung['collectives'])} collective operations"] if rung["collectives"] else []
  if sums_a_layer(rung) != SUMS_A_LAYER:
    found.append(f"{sums_a_layer(rung):g} all-reduces a layer instead of {SUMS_A_LAYER}")
  for one in rung["collectives"]:
    if one["opcode"] == "all-gather" and one["elements"] > rung["gather_limit"]:
      found.append(f"gathers {one['elements']} numbers, over {rung['gather_limit']}")
    elif one["opcode"] not in ("all-gather", "all-reduce") and not one["is_conditional"]:
      found.append(f"{one['opcode']} of {one['elements']} numbers in every step")
  return found


def _many_ways(matmuls: Sequence[str]) -> list[str]:
  """Finds matmuls that do not use one kernel of XLA: a library may choose by rows, or anew at each start."""
  ways = sorted(set(matmuls))
  if len(ways) != 1 or not ways[0].startswith("triton"):
    return [f"deterministic, but matmuls are done in {len(ways)} ways: {'; '.join(ways) or 'none is seen'}"]
  return []


def layer_launches(rung: Mapping[str, Any]) -> list[str]:
  """Returns the launches of the last layer, in order: kind, instruction, and its place in the program."""
  end = max((i + 1 for i, (_, _, origin) in enumerate(rung["launches"]) if "_run_block" in origin), default=0)
  layer = rung["launches"][:end][-round(launches_a_layer(rung)) :]
  return [f"{kind:19s} {name:34s} {origin.removeprefix('jit(step)/')}".rstrip() for kind, name, origin in layer]


def table(rungs: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line a rung. Registers and spills are the largest of the kernels that ptxas compiled for the rung.

  GiB are a device's weights, KV, sampler state and temporaries: the memory of a step. Aliased is the part that a step
  updates in place; the check has a small KV pool, and a server can use the remaining memory for a larger one.
  """
  names = (
    "target",
    "model",
    "rung",
    "compile s",
    "CPU s",
    "GiB",
    "aliased MiB",
    "moved",
    "temp MiB",
    "limit MiB",
    "sums a layer",
  )
  rows: list[tuple[str, ...]] = [(*names, "buffers", "a layer", "registers", "spilled", "wrong")]
  for rung in rungs:
    gpu, kernels = "launches" in rung, rung["kernels"]
    rows.append(
      (
        rung["target"],
        rung["model"],
        f"{rung['tokens']}x{rung['rows']}",
        f"{rung['seconds']:.1f}",
        f"{rung['cpu_seconds']:.1f}",
        f"{(rung['argument_bytes'] + rung['temp_bytes']) / 2**30:.1f}",
        f"{rung['alias_bytes'] / 2**20:.1f}",
        str(len(rung["moved"])),
        f"{rung['temp_bytes'] / 2**20:.1f}",
        f"{rung['temp_limit'] / 2**20:.0f}",
        f"{sums_a_layer(rung):g}" if rung["devices"] > 1 else "-",
        str(rung["command_buffers"]) if gpu else "-",
        f"{launches_a_layer(rung):g}" if gpu and "shallow_launches" in rung else "-",
        str(max((kernel["registers"] for kernel in kernels), default="-")),
        str(max((kernel["spill_bytes"] for kernel in kernels), default="-")),
        str(len(rung["violations"])),
      )
    )
  widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
  return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
