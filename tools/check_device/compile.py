"""Compiles a model's steps for one target, each at two depths, and writes the compilers' output. Judges nothing.

tools.check_device starts it in its own process with the environment of targets.environment. It writes facts.jsonl, one
object a rung, into --out. On standard output a line "@@ TOKENS" precedes ptxas's output for a rung.
"""

import argparse
import ctypes
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax

from engine.device import programs as device_programs
from engine.device.programs import Program, ProgramSpec
from engine.device.restore import NotRestored, to_bytes
from engine.shapes import ShapeLadder, StepShape
from tools.check_device import facts, programs, swizzles, targets
from tools.ptx_emulator.executable import find_misaligned, read_executable


def compile_rung(
  spec: ProgramSpec, shape: StepShape, dump: pathlib.Path, program: Program | None = None
) -> dict[str, Any]:
  """Returns facts of one program; the keys are those of judge.Rung where they have the same names.

  Args: program: one of `spec` to compile in place of the step.
  """
  program = program or device_programs.step_program(spec, shape, with_adapters=spec.max_loras > 0)
  before = set(dump.glob("*thunk_sequence_after_thunk_passes.txt"))
  started, cpu_started = time.perf_counter(), time.process_time()
  with swizzles.watch_shared_transfers() as transfers:
    compiled = program.compile()
  seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
  hlo, memory = compiled.as_text(), compiled.memory_analysis()
  assert hlo is not None and memory is not None, "compile-only devices say both"
  aliased, sizes = facts.aliased(hlo), facts.argument_bytes(hlo)
  donated = [program.arguments[number] for number in program.donated]
  # Without norms: any vector may have their size, and moving one costs nothing.
  matrices = [leaf for leaf in spec.params if len(leaf.shape) > 1]
  weights, whole = set(programs.shard_sizes(matrices)), {leaf.size for leaf in matrices}
  is_tpu = spec.platform == "tpu"
  found = {
    "attention": spec.attention,
    "seconds": round(seconds, 2),
    "cpu_seconds": round(cpu_seconds, 2),
    "kv_bytes": programs.shard_bytes(spec.kv),
    "kv_device_bytes": sum(sizes[number] for number in aliased[: len(spec.kv)]),
    "donated_arrays": len(jax.tree.leaves(donated)),
    "aliased_arrays": len(aliased),
    "donated_bytes": sum(sizes[number] for number in aliased),
    "alias_bytes": memory.alias_size_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
    # A TPU's compiler counts code among the temporaries: both grow by the same 1.6 MB with each layer.
    "temp_bytes": max(0, memory.temp_size_in_bytes - (memory.generated_code_size_in_bytes if is_tpu else 0)),
    "temp_limit": programs.temp_limit(spec, shape),
    "shared_transfers": transfers.count,
    "misplaced_transfers": transfers.misplaced,
    "sorts_and_loops": facts.sorts_and_loops(hlo),
    "matmuls": facts.matmuls(hlo),
    "devices": spec.mesh.size,
    "collectives": [dataclasses.asdict(each) for each in facts.collectives(hlo)],
    "gather_limit": programs.gather_limit(spec, shape),
    "moved": facts.moved(hlo, set(programs.shard_sizes(spec.kv)), weights, whole),
    "operands": sorted(set(facts.operand_types(hlo))),
    "widened": facts.widened(hlo, {size * factor for size in weights for factor in (1, 2)}),
  }
  if spec.platform == "cuda":
    runtime: Any = compiled.runtime_executable()
    found["misaligned"] = find_misaligned(read_executable(runtime.serialize()))
  try:
    found["bundle_bytes"] = len(to_bytes(compiled))
  except NotRestored as error:
    found["not_bundled"] = str(error)
  for path in set(dump.glob("*thunk_sequence_after_thunk_passes.txt")) - before:
    if not any(f".jit_{name}." in path.name for name in ("step", "fill", "propose", "fill_head", "propose_with_head")):
      continue
    sequence = facts.thunks(path.read_text("utf-8"))
    names = facts.thunk_names(path.with_name(path.name.split(".thunk_")[0] + ".thunk_metadata.txt").read_text("utf-8"))
    origin = facts.origins(hlo)
    found["outside"] = [thunk.kind for thunk in sequence if thunk.depth == 0 and thunk.kind != "kCommandBuffer"]
    found["command_buffers"] = sum(thunk.kind == "kCommandBuffer" for thunk in sequence)
    found["launches"] = [
      (thunk.kind, names.get(thunk.number, ""), origin.get(names.get(thunk.number, ""), ""))
      for thunk in facts.launches(sequence)
    ]
  return found


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(prog="python -m tools.check_device.compile", description=__doc__)
  parser.add_argument("--target", required=True, choices=sorted(targets.TARGETS))
  parser.add_argument("--model", required=True, choices=programs.names())
  parser.add_argument("--attention", required=True)
  parser.add_argument("--token_budgets", required=True)
  parser.add_argument("--deterministic", action="store_true")
  parser.add_argument("--quantization", default="none")
  parser.add_argument("--kv_dtype", default="auto")
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--adapters", action="store_true")
  parser.add_argument("--drafts", action="store_true", help="the programs of the model as its own draft model")
  parser.add_argument("--heads", action="store_true", help="those of an EAGLE-3 head, and the step that it reads")
  parser.add_argument("--max_num_seqs", type=int, default=64)
  parser.add_argument("--layers", type=int, default=0)
  parser.add_argument("--pool_tokens", type=int, default=0)
  parser.add_argument("--out", required=True, type=pathlib.Path)
  args = parser.parse_args()
  target, case = targets.TARGETS[args.target], programs.case(args.model)
  devices = targets.devices(target)
  case = dataclasses.replace(case, max_num_seqs=args.max_num_seqs, pool_tokens=args.pool_tokens or case.pool_tokens)
  layers = args.layers or case.model.num_layers
  few = min(2, layers // 2)
  budgets = tuple(int(budget) for budget in args.token_budgets.split(","))
  ladder = ShapeLadder(budgets, min(case.max_num_seqs, budgets[-1]))
  deep, shallow = (
    programs.make_spec(
      case,
      devices,
      args.attention,
      count,
      args.deterministic,
      args.quantization,
      args.adapters,
      args.kv_dtype,
      args.dtype,
    )
    for count in (layers, few)
  )
  with (args.out / "facts.jsonl").open("w") as out, targets.tracing_for(target, devices[0]):
    for shape in ladder.rungs():
      ctypes.CDLL(None).fflush(None)  # ptxas writes through C's own buffer
      print(f"\n@@ {shape.tokens}", flush=True)
      found = {"tokens": shape.tokens, "rows": shape.rows, "layers": layers}
      found |= {"deterministic": args.deterministic, "quantization": args.quantization, "adapters": args.adapters}
      found |= {"kv_dtype": args.kv_dtype, "dtype": args.dtype}
      if args.drafts or args.heads:
        wanted = programs.make_draft_programs(case, deep, shape) if args.drafts else []
        wanted += programs.make_head_programs(case, deep, shape) if args.heads else []
        for number, following in enumerate(wanted):
          if number:
            ctypes.CDLL(None).fflush(None)
            print(f"\n@@ {following.name}", flush=True)
          compiled = compile_rung(following.spec, shape, args.out, following.program)
          out.write(json.dumps(found | {"program": following.name} | compiled) + "\n")
        continue
      found |= compile_rung(deep, shape, args.out)
      if target.platform == "cuda":
        found["shallow_layers"] = few
        found["shallow_launches"] = len(compile_rung(shallow, shape, args.out)["launches"])
      out.write(json.dumps(found) + "\n")
      out.flush()


if __name__ == "__main__":
  main()
