"""Serves ten short requests by steps compiled for a GPU and run on the PTX emulator, and compares the tokens.

  python -m tools.ptx_emulator.serve --model=models/demo [--target=sm_80] [--drafts | --draft_model=demo]

The engine, its scheduler and its packed arrays are the real ones, with the KV layout and the plans of a GPU. Each step
is the program that a GPU would execute, but XLA's own matmuls replace cuBLASLt's. The same requests then run by this
CPU's programs. Greedy tokens must be equal, and their log probabilities near, also those of the 20 most likely tokens.
With --drafts the emulated steps verify drafts, of which two of three are right. With --draft_model a draft model or an
EAGLE-3 head proposes them by emulated programs of its own; about as many must be right as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
import dataclasses
import functools
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from engine.batch import Batch
from engine.device import build as engine_build
from engine.device import mesh as mesh_lib
from engine.device import programs as device_programs
from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from engine.device.pool_size import PoolSize, PoolSizer
from engine.device.programs import Program, ProgramSpec
from engine.engine import Engine
from engine.recorder import DraftCounts
from engine.request import Request, TokenEvent
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.shapes import StepShape
from engine.speculation.draft_costs import PlannedStep
from engine.speculation.speculation import DraftCandidate, Speculation
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer
from tools.arguments import CommandParser, positive_int
from tools.bench.speculation import OracleDrafter
from tools.check_device import targets
from tools.check_device.targets import Target
from tools.ptx_emulator.module import ModuleRunner, compile_module

_TEXTS = (
  "Copy: red cat sun",
  "Copy: tree book",
  "Reverse: red cat sun",
  "Reverse: moon fish",
  "37 + 5 = ?",
  "81 - 4 = ?",
  "26 + 9 = ?",
  "Make JSON: Mira is 7 years old and lives in Oslo.",
  "Make JSON: Tom is 9 years old and lives in Rome.",
  "Copy: sun",
)
# Largest difference of two log probabilities: a bf16 logit near 16 is rounded by up to 0.03, and so is a sum of them.
LOGPROB_LIMIT = 0.1
# Largest error of the log probabilities of the most likely tokens, relative in norm. One rounding to bf16 is 4e-3.
NORM_LIMIT = 1e-2
_ACCEPTANCE = 0.67  # of drafts
# One of each set of kernels: those for Hopper, and the portable ones. sm_86 and sm_89 get the code of sm_80.
GPUS = ("h200", "sm_80", "sm_120")


SHARE_LIMIT = 0.2  # largest difference of the shares of accepted drafts, since rounding changes proposals


def _move_arrays(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns abstract arrays as whole ones of a mesh's device."""
  whole = mesh_lib.replicated(mesh)
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)


def place_on_gpu(spec: ProgramSpec, target: Target) -> ProgramSpec:
  """Returns a spec of a CPU's programs as one of a GPU's, with the same arrays."""
  mesh = mesh_lib.make_mesh(targets.devices(target))
  return dataclasses.replace(
    spec,
    mesh=mesh,
    params=_move_arrays(spec.params, mesh),
    kv=_move_arrays(spec.kv, mesh),
    device_kind=mesh.devices.flat[0].device_kind,
    argmax="reference",
    sampling="reference",
    adjust="reference",
    low_rank="reference",
  )


def place_following_on_gpu(program: Program, target: Target) -> Program:
  """Returns a program of draft_programs.make_following_programs for a CPU as one for a GPU."""
  function = program.function
  assert isinstance(function, functools.partial), "its spec is bound"
  spec = place_on_gpu(function.args[0], target)
  return dataclasses.replace(
    program,
    function=functools.partial(function.func, spec, *function.args[1:]),
    arguments=_move_arrays(program.arguments, spec.mesh),
    results=_move_arrays(program.results, spec.mesh),
    compiler_options=device_programs.step_options(spec),
  )


class EmulatedPrograms:
  """Steps of a GPU for an engine on a CPU; implements engine.device.build.ExecutableSource.

  Attributes:
    has_draft_programs: see ExecutableSource.
    runners: of each step's program, and of those of drafts, by its name.
    num_steps: programs emulated so far.
    seconds: that they took.
    faults: what kernels did wrong. JAX raises an error of its own that only quotes it.
  """

  has_draft_programs = True

  def __init__(self, target: Target, seed: int = 0):
    """Args: target: one GPU. seed: of the kernels' schedules."""
    self._target, self._seed = target, seed
    self._programs: dict[str, Program] = {}
    self._device: Any = None
    self.runners: dict[str, ModuleRunner] = {}
    self.num_steps, self.seconds = 0, 0.0
    self.faults: list[Exception] = []

  def choose_pool(
    self,
    sizer: PoolSizer,
    spec: Callable[[int, int], ProgramSpec],
    rungs: tuple[StepShape, ...],
    cpu_bytes: int | None,
  ) -> PoolSize | None:
    """See ExecutableSource."""
    return None

  def begin(self, spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> None:
    """See ExecutableSource."""
    on_gpu = place_on_gpu(spec, self._target)
    self._device = on_gpu.mesh.devices.flat[0]
    steps = [device_programs.step_program(on_gpu, shape) for shape in rungs]
    self._programs = {program.name: program for program in steps}

  def executable(self, program: Program) -> jax.stages.Compiled:
    """Returns a program that calls the emulator if it is a step or of drafts, else the CPU's own."""
    on_gpu = self._programs.get(program.name)
    if program.name.startswith("draft-"):
      on_gpu = place_following_on_gpu(program, self._target)
    if on_gpu is None:
      return program.compile()
    with targets.tracing_for(self._target, self._device):
      module = compile_module(on_gpu)
    runner = self.runners[program.name] = ModuleRunner(module, self._seed)
    leaves, tree = jax.tree.flatten(program.results)
    results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def run(*arguments: Any) -> list[np.ndarray]:
      started = time.perf_counter()
      try:
        found = runner.run([np.asarray(argument) for argument in arguments])
      except Exception as error:
        self.faults.append(error)
        raise
      self.num_steps += 1
      self.seconds += time.perf_counter() - started
      return [data.view(leaf.dtype).reshape(leaf.shape) for data, leaf in zip(found, results, strict=True)]

    def emulate(*arguments: Any) -> Any:
      return jax.tree.unflatten(tree, jax.pure_callback(run, results, *jax.tree.leaves(arguments)))

    return dataclasses.replace(program, function=emulate).compile()

  def finish(self, num_blocks: int) -> str:
    """See ExecutableSource."""
    return ""


class EveryDraft(Speculation):
  """Verifies as many drafts as a step can hold, whether they pay or not. A draft model proposes after every step."""

  def knows_step(self, planned: PlannedStep) -> bool:
    """See Speculation."""
    return True

  def choose_counts(self, step: int, planned: PlannedStep, candidates: Sequence[DraftCandidate]) -> list[int]:
    """See Speculation. Beside prompts, drafts take padding alone, of which a GPU's steps have enough."""
    left = min(planned.most_drafts, planned.num_padding) if planned.num_others else planned.most_drafts
    counts = []
    for candidate in candidates:
      counts.append(min(left, len(candidate.tokens)))
      left -= counts[-1]
    return counts

  def choose_proposals(self, batch: Batch, in_flight: Container[int]) -> int:
    """See Speculation."""
    return self._num_proposals if self.model is not None and any(batch.samples) else 0

  def wants_fill(self, batch: Batch) -> bool:
    """See Speculation."""
    return self.model is not None


def verify_every_draft(engine: Engine) -> None:
  """Lets each step verify all drafts that it can hold. Before the first request."""
  scheduler = engine._scheduler
  scheduler._speculation = EveryDraft(scheduler.config)


def guess_answers(engine: Engine, answers: Sequence[GreedyAnswer]) -> None:
  """Gives each request of answer_requests drafts of its answer, some of them wrong. Before the first request."""
  oracle = OracleDrafter(_ACCEPTANCE)
  oracle.outputs = {str(number): answer.tokens for number, answer in enumerate(answers)}
  engine.replace_drafter(oracle)


class GreedyAnswer(NamedTuple):
  """What a request got.

  Attributes:
    tokens, logprobs: each token and its log probability.
    top: of each token's position, the log probabilities of the most likely tokens, by token.
  """

  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  top: tuple[Mapping[int, float], ...] = ()


class AnswerDifferences(NamedTuple):
  """How answers differ from those that are expected.

  Attributes:
    lines: one a difference that rounding does not explain.
    largest: difference of two log probabilities of chosen tokens.
    error: of the most likely tokens' log probabilities, relative in norm.
  """

  lines: list[str]
  largest: float
  error: float


def build_emulated(options: BuildOptions, source: EmulatedPrograms, target: Target, events: list[TokenEvent]) -> Built:
  """Builds an engine whose steps are emulated; each warms up by one step without a token."""
  # Otherwise the build refuses an implementation of another platform.
  names = (target.attention,)
  with mock.patch.object(engine_build, "attention_candidates", lambda requested, device: (names, "")):
    return build_engine(options, lambda *_: None, events.extend, source=source)


def answer_requests(
  built: Built, events: list[TokenEvent], prompts: Sequence[Sequence[int]], count: int
) -> list[GreedyAnswer]:
  """Serves all prompts at once, greedily. Args: events: that the engine emits. count: most tokens of an answer."""
  events.clear()
  for number, prompt in enumerate(prompts):
    built.engine.submit(
      Request(str(number), list(prompt), SamplingParams(temperature=0.0, max_tokens=count, logprobs=MAX_LOGPROBS))
    )
  while built.engine.num_live:
    built.engine.step()
  answers = []
  for number in range(len(prompts)):
    own = [event for event in events if event.request_id == str(number)]
    entries = [entry for event in own for entry in event.logprobs]
    answers.append(
      GreedyAnswer(
        tuple(token for event in own for token in event.token_ids),
        tuple(entry.logprob for entry in entries),
        tuple(dict(entry.top) for entry in entries),
      )
    )
  return answers


def compare_answers(found: Sequence[GreedyAnswer], expected: Sequence[GreedyAnswer]) -> AnswerDifferences:
  """Compares answers in order. What is most likely at a position counts where both sides report it."""
  lines, largest, pairs = [], 0.0, []
  for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
    if mine.tokens != other.tokens:
      lines.append(f"request {number}: tokens {list(mine.tokens)} instead of {list(other.tokens)}")
      continue
    off = float(np.max(np.abs(np.subtract(mine.logprobs, other.logprobs)), initial=0.0))  # NaN stays NaN
    largest = max(largest, off)
    if not off <= LOGPROB_LIMIT:
      lines.append(f"request {number}: a log probability is off by {off:.3f}; at most {LOGPROB_LIMIT} is rounding")
    for one, two in zip(mine.top, other.top, strict=True):
      pairs += [(one[token], two[token]) for token in one.keys() & two.keys()]
  ours, theirs = np.array(pairs or [(0.0, 0.0)]).T
  error = float(np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(theirs)), 1e-30))
  if not error <= NORM_LIMIT:
    lines.append(f"log probabilities of likely tokens: error {error:.1e} of the norm; at most {NORM_LIMIT} is rounding")
  return AnswerDifferences(lines, largest, error)


def _share(drafts: DraftCounts) -> float:
  return drafts.accepted / max(drafts.tokens, 1)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.ptx_emulator.serve", "Serve ten requests by emulated GPU steps; compare.")
  parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of a small bf16 model with a tokenizer")
  parser.add_argument("--target", choices=GPUS, default="h200", help="the GPU that steps are compiled for")
  parser.add_argument("--tokens", type=positive_int, default=4, help="most tokens of an answer")
  parser.add_argument("--seed", type=int, default=0, help="of the kernels' schedules")
  parser.add_argument("--drafts", action="store_true", help="the emulated steps verify drafts")
  parser.add_argument("--draft_model", default="", help="what proposes them, by emulated programs, as in the server")
  args = parser.parse_args(arguments)
  tokenizer = Tokenizer(args.model)
  prompts = [tokenizer.encode_chat([Message(role="user", content=text)]) for text in _TEXTS]
  options = BuildOptions(
    str(args.model),
    dtype="bfloat16",
    matmul="xla",
    token_budgets=(16, 64),
    max_num_seqs=16,
    prefill_chunk=64,
    num_blocks=32 if args.target == "h200" else 64,
    max_model_len=256 if args.target == "h200" else 512,  # from here on, the portable kernels have rows in parts
    overlap="false",
    speculation="none",
    request_timeout_s=0.0,  # a step takes a minute, and longer on a busy machine
    queue_timeout_s=0.0,
  )
  started = time.perf_counter()
  target = targets.TARGETS[args.target]
  source, events = EmulatedPrograms(target, args.seed), []
  drafting = dataclasses.replace(options, speculation="ngram") if args.drafts else options
  if args.draft_model:
    drafting = dataclasses.replace(options, speculation="draft", draft_model=args.draft_model)
  built = build_emulated(drafting, source, target, events)
  took = time.perf_counter() - started
  print(
    f"{args.target}, attention {target.attention}: {len(source.runners)} steps compiled and warmed up in {took:.0f} s"
  )
  of_cpu = drafting if args.draft_model else options
  reference = build_engine(dataclasses.replace(of_cpu, attention="reference"), lambda *_: None, events.extend)
  if args.drafts or args.draft_model:
    verify_every_draft(built.engine)
  if args.draft_model:
    verify_every_draft(reference.engine)
  expected = answer_requests(reference, events, prompts, args.tokens)
  if args.drafts:
    guess_answers(built.engine, expected)
  found = answer_requests(built, events, prompts, args.tokens)
  for text, answer in zip(_TEXTS, found, strict=True):
    print(f"  {text!r}: {tokenizer.decode(list(answer.tokens))!r}")
  lines, largest, error = compare_answers(found, expected)
  drafts, on_cpu = built.engine.stats().drafts, reference.engine.stats().drafts
  if args.draft_model and abs(_share(drafts) - _share(on_cpu)) > SHARE_LIMIT:
    lines.append(f"{_share(drafts):.2f} of the drafts are accepted, and {_share(on_cpu):.2f} on the CPU")
  print("\n".join(lines), end="\n" if lines else "")
  num_tokens = sum(len(answer.tokens) for answer in found)
  print(f"{len(found)} requests, {num_tokens} tokens by {source.num_steps} emulated steps in {source.seconds:.0f} s")
  print(f"{drafts.tokens} drafts, {drafts.accepted} accepted")
  if args.draft_model:
    print(f"on the CPU {on_cpu.tokens} drafts, {on_cpu.accepted} accepted")
  print(f"log probabilities: largest difference {largest:.3f}, error of the {MAX_LOGPROBS} most likely {error:.1e}")
  times = sorted(
    ((*each, name) for runner in source.runners.values() for name, each in runner.times.items()), reverse=True
  )
  for seconds, count, name in times[:5]:
    print(f"  {seconds:6.1f} s in {count} launches of {name}")
  print(f"{len(lines)} differences from the CPU's")
  return 1 if lines else 0


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  sys.exit(main())
