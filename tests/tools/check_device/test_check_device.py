"""What check_device reads from compilers' texts and what it makes of it; the tool itself runs the compilers."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from engine.shapes import StepShape
from tools.check_device import facts, judge, programs
from tools.check_device.facts import KernelUse, Thunk

ROOT = pathlib.Path(__file__).resolve().parents[3]
KV, WEIGHT, WHOLE = 33 * 2 * 16 * 64, 256 * 512, 4 * 256 * 512

HEAD = (
  "HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1, 0}: (3, {}, must-alias) }, "
  "entry_computation_layout={(bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[33,2,16,64]{3,2,1,0:T(8,128)(2,1)}, "
  "/*index=2*/f32[]{:T(128)}, s32[65]{0:T(128)})->(bf16[33,2,16,64]{3,2,1,0:T(8,128)(2,1)}, (s32[65]{0:T(128)}))}\n"
)


def hlo(*lines: str, fused: str = "") -> str:
  """A module whose entry holds `lines`, and one fusion's computation."""
  body = "\n".join(f"  {line}" for line in lines)
  return f"""{HEAD}
%fused_computation (param_0: bf16[256,512]) -> bf16[512,256] {{
  %param_0 = bf16[256,512]{{1,0}} parameter(0)
{fused}
}}

ENTRY %main (w: bf16[256,512], kv: bf16[33,2,16,64]) -> bf16[33,2,16,64] {{
  %w = bf16[256,512]{{1,0}} parameter(0), metadata={{op_name="params[0]"}}
  %kv = bf16[33,2,16,64]{{3,2,1,0}} parameter(1)
{body}
}}
"""


def moved(text: str) -> list[str]:
  return [line.split(" = ")[0] for line in facts.moved(text, {KV}, {WEIGHT}, {WHOLE})]


@pytest.mark.parametrize(
  "line",
  [
    "%a = bf16[33,2,16,64]{3,2,1,0} copy(%kv)",
    "ROOT %a = bf16[33,2,16,64]{0,1,2,3} transpose(%kv), dimensions={3,2,1,0}",
    "%a = bf16[33,2,16,64]{3,2,1,0:S(1)} copy(%kv)",  # whole KV into the vector memory
    "%a = bf16[33,2,16,64]{3,2,1,0} select(%mask, %kv, %kv)",
    "%a = (bf16[33,2,16,64]{3,2,1,0}, bf16[33,2,16,64]{3,2,1,0:S(1)}, u32[]) copy-start(%kv)",
    '%a = bf16[33,2,16,64]{3,2,1,0:S(1)} custom-call(%x, %y), custom_call_target="ConcatBitcast"',  # slices of KV
    "%a = bf16[512,256]{1,0} transpose(%w), dimensions={1,0}",
    "%a = f32[256,512]{1,0} convert(%w)",
    "%a = f8e4m3fn[512,256]{1,0} transpose(%q), dimensions={1,0}",
    "%a = bf16[1024,512]{1,0} all-gather(%w), dimensions={0}",
    "%a = (s32[], /*index=1*/bf16[512,256]{1,0}) fusion(%w), kind=kLoop, calls=%fused_computation",
  ],
)
def test_what_moves_kv_or_a_weight_is_found(line):
  fused = "  ROOT %c = bf16[512,256]{1,0} transpose(%param_0), dimensions={1,0}"
  assert moved(hlo(line, fused=fused if "calls=" in line else "")) == ["a"]


@pytest.mark.parametrize(
  "line",
  [
    "%a = bf16[33,32,64]{2,1,0} bitcast(%kv)",
    "%a = bf16[33,2,16,64]{3,2,1,0} scatter(%kv, %i, %u), to_apply=%assign",
    "%a = (bf16[64,64]{1,0}, bf16[33,2,16,64]{3,2,1,0}) custom-call(%kv), output_to_operand_aliasing={{1}: (0, {})}",
    "%a = (s32[], bf16[33,2,16,64]{3,2,1,0}) while(%t), condition=%c, body=%b",
    "%a = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} copy(%w)",  # a prefetch
    "%a = (bf16[256,512]{1,0:S(1)}, bf16[256,512]{1,0}, u32[]) copy-start(%w)",
    '%a = bf16[256,512]{1,0:S(1)} custom-call(%x, %y), custom_call_target="ConcatBitcast"',
    "%a = bf16[256,512]{1,0} add(%x, %x)",  # an activation of a weight's size
    "%a = f32[64,2048]{1,0} copy(%x)",  # logits of a weight's size
    "%a = bf16[64,64]{1,0} copy(%x)",
    "%a = bf16[512,256]{1,0} fusion(%w), kind=kCustom, calls=%fused_computation",
  ],
)
def test_what_reads_or_writes_in_place_is_not(line):
  fused = "  ROOT %c = bf16[512,256]{1,0} dot(%param_0, %param_0), lhs_contracting_dims={1}"
  assert moved(hlo(line, fused=fused)) == []


@pytest.mark.parametrize(
  ("inside", "lines"),
  [
    ("  ROOT %c = bf16[256,512]{1,0} convert(%p)", ["a"]),
    ("  ROOT %c = bf16[256,512]{1,0} dot(%p, %p), lhs_contracting_dims={1}", []),
    ("  ROOT %c = bf16[256,512]{1,0} multiply(%x, %x)", []),
  ],
)
@pytest.mark.parametrize("dtype", ["s8", "s4"])
def test_a_narrow_weight_that_is_widened_outside_of_a_matmul_is_found(inside, lines, dtype):
  head = "" if "%x" in inside else f"  %p = {dtype}[256,512]{{1,0}} parameter(0)\n"
  text = hlo("%a = bf16[256,512]{1,0} fusion(%w), kind=kLoop, calls=%fused_computation", fused=head + inside)
  assert [line.split(" = ")[0] for line in facts.widened(text, {WEIGHT})] == lines


def test_the_operands_of_products():
  text = (
    hlo("%a = s32[64,512]{1,0} dot(%q, %s), lhs_contracting_dims={1}", fused="")
    .replace("{body}", "")
    .replace("  %kv =", "  %q = s8[64,256]{1,0} parameter(2)\n  %s = s8[256,512]{1,0} parameter(3)\n  %kv =")
  )
  assert facts.operand_types(text) == ["s8 x s8"]
  library = '%y = bf16[64,512]{1,0} custom-call(%q, %s), custom_call_target="__cublas$lt$matmul$f8"'
  assert facts.operand_types(library) == ["f8e4m3fn x f8e4m3fn"]


def test_an_all_gather_of_a_weight_inside_of_a_fusion_is_found():
  line = "%f = bf16[64,64]{1,0} fusion(%w), calls=%fused_computation"
  inside = "  %g = bf16[1024,512]{1,0} all-gather(%param_0)\n  ROOT %c = bf16[64,64]{1,0} dot(%param_0, %g)"
  assert moved(hlo(line, fused=inside)) == ["g"]


def test_arguments_that_are_updated_in_place_and_their_padded_bytes():
  assert facts.aliased(HEAD) == [1, 3]
  # The head size of 64 takes a row of 128, 65 entries take 128, and a scalar a whole row.
  assert facts.argument_bytes(HEAD) == [256 * 512 * 2, 33 * 2 * 16 * 128 * 2, 4, 128 * 4]
  assert facts.argument_bytes(HEAD.replace(":T(8,128)(2,1)", "")) == [256 * 512 * 2, KV * 2, 4, 128 * 4]


def test_a_compiled_program_is_read_as_it_is():
  """On the CPU's compiler, whose words are the same: one program updates its argument in place, the other copies it."""

  def write(kv, new):
    return kv.at[3].set(new)

  kv, new = jax.ShapeDtypeStruct((33, 4096), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.float32)
  in_place = jax.jit(write, donate_argnums=0).lower(kv, new).compile()
  memory, text = in_place.memory_analysis(), in_place.as_text()
  assert text is not None and memory is not None
  assert facts.aliased(text) == [0] and facts.argument_bytes(text) == [33 * 4096 * 4, 4096 * 4]
  assert memory.alias_size_in_bytes == facts.argument_bytes(text)[0]
  assert facts.moved(text, {33 * 4096}, ()) == []
  copying = jax.jit(write).lower(kv, new).compile().as_text()
  assert copying is not None
  assert facts.aliased(copying) == [] and facts.moved(copying, {33 * 4096}, ())


def test_sorts_and_loops_are_found():
  def programs(k):
    return jax.jit(lambda x: jax.lax.top_k(x, k)), jax.jit(lambda x: jnp.sort(x)), jax.jit(lambda x: jnp.cumsum(x))

  x = jax.ShapeDtypeStruct((4, 500), jnp.float32)
  found = [facts.sorts_and_loops(program.lower(x).compile().as_text() or "") for program in programs(20)]
  assert [bool(names) for names in found] == [True, True, False]
  line = (
    '  %a.1 = (f32[4,16], s32[4,16]) custom-call(%x), custom_call_target="__gpu$TopK", metadata={op_name="f/sort ("}'
  )
  assert facts.sorts_and_loops(line) == ["a.1"]
  assert facts.sorts_and_loops("  ROOT %w = (s32[]) while(%t), condition=%c, body=%b") == ["w"]


SEQUENCE = """\
000: kCommandBuffer [source       | next=006 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_gather_fusion grid: [64, 1, 1] threads: [128, 1, 1]
    002: kDynamicSliceFusion [prev=001 (1) | next=004 (1)] kDynamicSliceFusion
        003: kCustomCall [source | sink] kCustomCall
    004: kCublasLtMatmul [prev=002 (1) | sink        ] kCublasLtMatmul
    005: kCopy         [prev=004 (1) | sink        ] kCopy
006: kWhile         [prev=000 (1) | sink         ]
condition:
    007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        008: kCustomKernel [source | sink] loop_select_fusion_3 grid: [1, 1, 1] threads: [64, 1, 1]
"""

METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer_1"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "dynamic_slice_fusion.5"
    thunk_id: 2
  }
  thunk_kind: "kDynamicSliceFusion"
}
"""


def test_thunks_and_launches():
  sequence = facts.thunks(SEQUENCE)
  assert [thunk for thunk in sequence if thunk.depth == 0] == [Thunk(0, 0, "kCommandBuffer"), Thunk(6, 0, "kWhile")]
  assert sum(thunk.kind == "kCommandBuffer" for thunk in sequence) == 2
  # The call on slices is one launch; what is behind it counts again.
  assert [thunk.number for thunk in facts.launches(sequence)] == [1, 2, 4, 5, 7, 8]
  assert facts.thunk_names(METADATA) == {2: "dynamic_slice_fusion.5"}


def test_where_an_instruction_comes_from():
  fused = '  ROOT %c = bf16[512,256]{1,0} transpose(%param_0), metadata={op_name="jit(step)/mlp/dot" id=3}'
  found = facts.origins(hlo("%f = bf16[512,256]{1,0} fusion(%w), kind=kLoop, calls=%fused_computation", fused=fused))
  assert found["w"] == "params[0]" and found["f"] == "jit(step)/mlp/dot" and found["kv"] == ""


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'write_kernel' for 'sm_90a'
ptxas info    : Function properties for write_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 29.949 ms
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'prefill_kernel' for 'sm_90a'
ptxas info    : Function properties for prefill_kernel
    96 bytes stack frame, 60 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""


def test_registers_and_spills():
  assert facts.kernel_uses(PTXAS) == [KernelUse("write_kernel", 40, 0), KernelUse("prefill_kernel", 168, 160)]
  assert facts.kernel_uses("") == []
  with pytest.raises(ValueError, match="printed an unknown line"):
    facts.kernel_uses(PTXAS.replace("bytes spill loads", "bytes of something"))


def rung(**changes) -> dict:
  """The facts of a rung of four layers with nothing wrong: 5 launches around 9 a layer."""
  layer = [("kCustomKernel", f"fusion.{i}", "jit(step)/jit(_run_block)/mlp/dot_general") for i in range(9)]
  layer[0] = ("kCustomKernel", "norm", "jit(step)/jit(_run_block)/attention/mul")
  outside = [("kCopy", "copy", "jit(step)/slice")] * 2
  return {
    "target": "h200",
    "attention": "gpu",
    "model": "tiny",
    "tokens": 64,
    "rows": 64,
    "seconds": 1.5,
    "cpu_seconds": 1.25,
    "layers": 4,
    "deterministic": False,
    "adapters": False,
    "quantization": "none",
    "matmuls": ["__cublas$lt$matmul"],
    "kv_bytes": 1000,
    "kv_device_bytes": 1000,
    "donated_arrays": 7,
    "aliased_arrays": 7,
    "donated_bytes": 1200,
    "alias_bytes": 1200,
    "argument_bytes": 3 * 2**30,
    "temp_bytes": 500,
    "temp_limit": 500,
    "devices": 1,
    "collectives": [],
    "gather_limit": 100,
    "moved": [],
    "widened": [],
    "operands": ["bf16 x bf16"],
    "shared_transfers": 40,
    "misplaced_transfers": [],
    "sorts_and_loops": [],
    "command_buffers": 1,
    "outside": [],
    "launches": [*outside, *layer * 4, *outside, *outside[:1]],
    "shallow_layers": 1,
    "shallow_launches": 14,
    "kernels": [{"name": "write", "registers": 40, "spill_bytes": 0}],
    "violations": [],
  } | changes


def test_how_matmuls_are_done_is_read():
  tile = (
    '"num_stages":4,"num_warps":"4","output_tiles":[{"sizes":["1","64","128"]}]},"kind":"__triton_nested_gemm_fusion"'
  )
  lines = (
    "%a = f32[16,128,384]{2,1,0} fusion(%w), kind=kCustom, calls=%fused_computation, backend_config={" + tile + "}",
    '%b = (bf16[8,8]{1,0}, s8[9]{0}) custom-call(%w), custom_call_target="__cublas$lt$matmul"',
    "%c = f32[256,256]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
  )
  fused = "  ROOT %d = f32[16,128,384]{2,1,0} dot(%param_0, %param_0)"
  assert sorted(facts.matmuls(hlo(*lines, fused=fused))) == [
    "__cublas$lt$matmul",
    "dot",
    "triton 64x128, 4 stages, 4 warps",
  ]


def collective(opcode: str, elements: int = 10, is_conditional: bool = False) -> dict:
  return {"opcode": opcode, "elements": elements, "is_conditional": is_conditional}


SUMS = [collective("all-reduce")] * 9  # of four layers and the embedding
SHARED = {"devices": 8, "collectives": [*SUMS, collective("all-gather", 100), collective("all-to-all", 900, True)]}


def test_collective_operations_of_a_good_rung_have_no_violations():
  assert judge.violations(rung(**SHARED), []) == []
  apart = {"command_buffers": 7, "outside": ["kAllReduce"], "shallow_launches": 8}  # 11 launches a layer
  assert judge.violations(rung(**SHARED, **apart), []) == []
  assert judge.violations(rung(**apart), []) != []


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"collectives": SUMS}, "one device, but 9 collective operations"),
    ({"devices": 8, "collectives": [*SUMS, *SUMS[:4]]}, "3 all-reduces a layer instead of 2"),
    ({"devices": 8, "collectives": SUMS[:5]}, "1 all-reduces a layer instead of 2"),
    ({"devices": 8, "collectives": [*SUMS, collective("all-gather", 101)]}, "gathers 101 numbers, over 100"),
    ({"devices": 8, "collectives": [*SUMS, collective("all-gather", 101, True)]}, "gathers 101 numbers, over 100"),
    ({"devices": 8, "collectives": [*SUMS, collective("all-to-all")]}, "all-to-all of 10 numbers in every step"),
  ],
)
def test_other_collective_operations_are_violations(changes: dict, words: str):
  assert judge.violations(rung(**changes), []) == [words]


def test_collective_operations_are_found_in_calls_and_branches():
  text = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %a)
}

%layer (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %r = f32[8,16]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%branch.1 (x: f32[8,16]) -> f32[8,64] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %g = (f32[8,16]{1,0}, f32[8,64]{1,0}) all-gather-start(%x), dimensions={1}
}

%branch.2 (x: f32[8,16]) -> f32[8,64] {
  ROOT %x = f32[8,64]{1,0} constant(0)
}

ENTRY %main (x: f32[8,16]) -> f32[8,64] {
  %x = f32[8,16]{1,0} parameter(0)
  %one = f32[8,16]{1,0} call(%x), to_apply=%layer
  %two = f32[8,16]{1,0} call(%one), to_apply=%layer
  ROOT %c = f32[8,64]{1,0} conditional(%p, %two, %two), branch_computations={%branch.1, %branch.2}
}
"""
  found = [(one.opcode, one.elements, one.is_conditional) for one in facts.collectives(text)]
  assert found == [("all-reduce", 128, False), ("all-reduce", 128, False), ("all-gather", 512, True)]


def test_a_good_rung_has_no_violations():
  assert judge.violations(rung(), [KernelUse("write", 40, 0)]) == []
  assert judge.launches_a_layer(rung()) == 9
  assert judge.violations(rung(tokens=128, shallow_launches=11), []) == []  # a launch more a layer, the prefill kernel
  assert judge.violations(rung(quantization="int8", shallow_launches=11), []) == []
  assert judge.violations(rung(quantization="fp8", operands=["f8e4m3fn x f8e4m3fn"]), []) == []
  assert judge.violations(rung(quantization="int4", operands=["bf16 x bf16"]), []) == [
    "products are bf16 x bf16, and not all bf16 x s4"
  ]
  assert judge.violations(rung(adapters=True, shallow_launches=11), []) == []
  one_way = {"deterministic": True, "matmuls": ["triton 64x128, 4 stages, 4 warps"] * 3}
  assert judge.violations(rung(**one_way, shallow_launches=11), []) == []
  shown = judge.layer_launches(rung())
  assert len(shown) == 9 and "norm" in shown[0]


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"aliased_arrays": 6}, "6 of 7 donated"),
    ({"alias_bytes": 1100}, "1100 bytes are updated in place"),
    ({"kv_device_bytes": 2000}, "padded from 1000"),
    ({"moved": ["copy.1 = bf16[9]{0} copy(%kv)"]}, "copy.1"),
    ({"widened": ["fusion.1 = bf16[9]{0} fusion(%w)"]}, "widens a weight outside of a matmul: fusion.1"),
    ({"quantization": "w8a8", "operands": ["bf16 x bf16", "s8 x s8"]}, "bf16 x bf16, s8 x s8, and not all s8 x s8"),
    ({"sorts_and_loops": ["sort.3"]}, "sorts or loops: sort.3"),
    ({"temp_bytes": 501}, "501 bytes of temporaries"),
    ({"misaligned": ["call.1: argument 2 is at byte 128 of its buffer"]}, "multiple of 256 bytes: call.1: argument 2"),
    ({"misplaced_transfers": ["8x1x1x64xbf16"] * 9}, "in shared memory differently: 8x1x1x64xbf16"),
    ({"shared_transfers": 0}, "no transfer between registers and shared memory was seen"),
    ({"command_buffers": 2}, "2 command buffers"),
    ({"command_buffers": 0}, "0 command buffers"),
    ({"outside": ["kConditional"]}, "kConditional"),
    ({"not_bundled": "it has constants"}, "cannot be stored in an executable bundle: it has constants"),
    ({"shallow_launches": 11}, "10 launches a layer are over 9"),
    ({"tokens": 128, "shallow_launches": 8}, "11 launches a layer are over 10"),
    ({"deterministic": True, "matmuls": ["triton 64x128, 4 stages, 4 warps", "__cublas$gemm"]}, "in 2 ways: __cublas"),
    ({"deterministic": True, "matmuls": ["__cublas$lt$matmul"] * 2}, "in 1 ways: __cublas"),
    ({"deterministic": True, "matmuls": []}, "none is seen"),
  ],
)
def test_each_wrong_fact_is_a_violation(changes, said):
  (line,) = judge.violations(rung(**changes), [])
  assert said in line


def test_a_spill_is_a_violation_and_many_copies_are_few_lines():
  assert judge.violations(rung(), [KernelUse("prefill", 168, 160)]) == [
    "kernel prefill spills 160 bytes (168 registers)"
  ]
  lines = judge.violations(rung(moved=[f"copy.{i} = bf16[9]{{0}} copy(%kv)" for i in range(32)]), [])
  assert len(lines) == 6 and "27 times more" in lines[-1]


def test_the_table_has_a_line_a_rung_also_where_nothing_is_launched():
  tpu = {key: value for key, value in rung(target="v5e", kernels=[]).items() if key not in ("launches", "outside")}
  head, gpu_line, tpu_line = judge.table([rung(violations=["x"]), tpu])
  assert head.split()[0] == "target" and gpu_line.split()[:6] == ["h200", "tiny", "64x64", "1.5", "1.2", "3.0"]
  assert gpu_line.split()[-5:] == ["1", "9", "40", "0", "1"]
  assert tpu_line.split()[-5:] == ["-"] * 4 + ["0"]


def test_a_compiler_that_is_missing_is_one_violation_and_its_message():
  """This environment has neither plugin, so the compiling process must fail, and the tool must say so."""
  done = subprocess.run(
    [sys.executable, "-m", "tools.check_device", "--target=h200", "--model=tiny", "--token_budgets=8"],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 1 and "h200, tiny: exit code" in done.stderr, done.stderr
  assert done.stdout.endswith("0 rungs compiled, 1 violations\n")


def test_the_features_of_a_head_fill_whole_tiles_of_a_tpu():
  """A TPU would pad other rows, and then KV takes more memory than the engine counted."""
  case = programs.case("tiny")
  served = programs.make_spec(case, jax.devices("cpu")[:1], "tpu", 3)
  _, _, proposals = programs.make_head_programs(case, served, StepShape(8, 8, 8))
  pool, features = proposals.spec.kv
  assert features.shape == (pool.shape[0], 8, 128)


def test_a_job_that_is_none_is_refused():
  done = subprocess.run(
    [sys.executable, "-m", "tools.check_device", "--small", "--model=demo"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
