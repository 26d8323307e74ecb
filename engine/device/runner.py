"""The device behind the engine's Runner protocol. Calls only executables compiled before; plans nothing.

The arrays that steps hand to each other (KV, last tokens, sampler state) are donated from one call to the next and live
nowhere else. Steps run in launch order, so a slot written for a new request cannot disturb the launched step of its
former owner.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
import dataclasses
import itertools
import os
from typing import Any

import jax
import numpy as np

from engine.batch import Admission, Batch, StepResult, TokenLogprobs
from engine.device import kv_cache, programs, sampler
from engine.device import mesh as mesh_lib
from engine.device.model_input import Flag, LogitRows, Packer, flags_of
from engine.device.programs import Program, ProgramSpec
from engine.device.sampler import SlotState
from engine.device.step_call import StepCall
from engine.errors import ShapeNotOnLadder
from engine.shapes import ShapeLadder, StepShape

# (what is being done, how many are done, of how many)
Progress = Callable[[str, int, int], None]
# from the KV buffers (donated), the blocks to fill and an Admission's `imported` to the KV buffers
ImportBlocks = Callable[[kv_cache.Buffers, Sequence[int], Any], kv_cache.Buffers]
# from a program to its executable
Make = Callable[[Program], jax.stages.Compiled]

# Tracing holds the interpreter, compiling does not; one compilation uses more than a core for a part of its time.
_COMPILE_THREADS = max(2, min(8, (os.cpu_count() or 1) // 4))


class Making:
  """Executables in the making, in threads of their own, while something else goes on, as the loading of weights."""

  def __init__(self, wanted: Mapping[StepShape | str, Program], make: Make = Program.compile):
    """Begins; those in front first.

    Args:
      wanted: as of `programs.all_programs`.
      make: compiles a program, or finds it compiled; called from several threads.
    """
    self._threads = ThreadPoolExecutor(_COMPILE_THREADS, "compile")
    self._made = {key: self._threads.submit(make, program) for key, program in wanted.items()}

  def wait(self, progress: Progress) -> dict[StepShape | str, jax.stages.Compiled]:
    """All of them, when they are made; raises what one of them raised."""
    progress("compile", 0, len(self._made))
    for done, future in enumerate(as_completed(self._made.values()), 1):
      future.result()
      progress("compile", done, len(self._made))
    return {key: future.result() for key, future in self._made.items()}

  def __enter__(self) -> "Making":
    return self

  def __exit__(self, *error: object) -> None:
    self._threads.shutdown(cancel_futures=True)


_compile_times: list[float] = []  # seconds of each XLA compilation in this process, whoever asked for it


def _note_compile(event: str, duration_secs: float, **kwargs: str | int) -> None:
  if event == "/jax/core/compile/backend_compile_duration":
    _compile_times.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_note_compile)


class LaunchedStep:
  """A step the device is working on; implements engine.batch.Launched."""

  def __init__(self, output: jax.Array, top: jax.Array, rows: LogitRows, away: bool, done: Callable[[], None]):
    """Args:
    away: the values are not in the host's memory; they are sent there as soon as they exist.
    done: called once, when the step is, and then forgotten with all that it holds.
    """
    self._output, self._top, self._rows = output, top, rows
    self._done: Callable[[], None] | None = done
    if away:
      output.copy_to_host_async()
      if rows.wants_top:
        top.copy_to_host_async()

  def wait(self) -> None:
    """Waits for the step, reading nothing; for measurements."""
    self._output.block_until_ready()

  def result(self) -> StepResult:
    """Waits for the step and reads its values."""
    output = np.asarray(self._output)
    done, self._done = self._done, None
    if done:
      done()
    rows = self._rows
    num_logits = len(rows.targets)
    # One call for both, and lists from here on: right after a step of the device, each kind of numpy call costs 20 us.
    drawn, bad = output[:2, :num_logits].tolist()
    bad_rows: frozenset[int] = frozenset()
    if any(bad):
      bad_rows = frozenset(np.searchsorted(rows.last, np.flatnonzero(bad)).tolist())
    tokens = drawn if rows.plain else output[0, rows.last].tolist()
    if not rows.wants:
      return StepResult(tokens, bad_rows)
    return StepResult(tokens, bad_rows, self._read_logprobs(output[0], output[2].view(np.float32)))

  def _read_logprobs(self, tokens: np.ndarray, logprobs: np.ndarray) -> dict[int, tuple[TokenLogprobs, ...]]:
    rows = self._rows
    if rows.wants_top:
      ids, bits = np.asarray(self._top)
      top_logprobs = bits.view(np.float32)
    found = {}
    for row, (first, numbers) in rows.wants.items():
      entries = []
      for line, number in enumerate(numbers, first):
        token = int(rows.targets[line])
        top = ()
        if number:
          top = tuple(zip(ids[line, :number].tolist(), top_logprobs[line, :number].tolist(), strict=True))
        entries.append(TokenLogprobs(token if token >= 0 else int(tokens[line]), float(logprobs[line]), top))
      found[row] = tuple(entries)
    return found


class ModelRunner:
  """Owns the arrays on the device and the executables; implements engine.batch.Runner."""

  def __init__(
    self,
    spec: ProgramSpec,
    params: tuple[jax.Array, ...],
    ladder: ShapeLadder,
    eos_token_ids: tuple[int, ...],
    made: Mapping[StepShape | str, jax.stages.Compiled],
  ):
    """Allocates the KV buffers.

    `spec`, `steps` (the executables by shape), `calls` (how they are called), `kv` and `slot_state` may be looked at
    from outside. `import_blocks` is for who lets admissions bring KV from another runner.

    Args:
      spec: of the programs.
      params: the model's leaves, as spec.params says.
      ladder: whose rungs the steps are.
      eos_token_ids: as many as spec.num_eos; what min_tokens holds back.
      made: the executables of `programs.all_programs`.
    """
    self.spec, self._params = spec, params
    self.import_blocks: ImportBlocks | None = None
    # On a CPU the values are in the host's memory anyway, and asking for a copy takes 0.1 ms and may wait for a core.
    self._away = spec.mesh.devices.flat[0].platform != "cpu"
    self._packer = Packer(spec.num_slots, spec.table_width, spec.block_size, eos_token_ids)
    self._compiles_at_seal: int | None = None
    self.steps = {shape: made[shape] for shape in ladder.rungs()}
    self._write_lines = {table: made[table] for table in programs.NUM_LINES}
    self._layouts = {shape: spec.layout(shape) for shape in ladder.rungs()}
    self.calls = {
      shape: StepCall(compiled, self._layouts[shape].size, mesh_lib.replicated(spec.mesh))
      for shape, compiled in self.steps.items()
    }
    self.kv: kv_cache.Buffers = tuple(made[programs.layer_key(buffer)]() for buffer in spec.kv)
    self._last_tokens: jax.Array = jax.device_put(np.zeros(spec.last_tokens.shape, np.int32), spec.last_tokens.sharding)
    self.slot_state: SlotState = made["slots"]()

  def warm_up(self, progress: Progress) -> None:
    """Runs every program once on padding, so that what a first call costs is paid before the server is ready."""
    for index, shape in enumerate(self.steps):
      self.launch(Batch(-1, shape, (), (), (), (), (), (), ())).result()
      progress("warm up", index + 1, len(self.steps))
    for table in programs.NUM_LINES:
      self._set_lines(table, [])

  def seal(self) -> None:
    """From here on a compilation is a mistake, and is counted."""
    self._compiles_at_seal = len(_compile_times)

  @property
  def compiles_after_ready(self) -> int:
    """Compilations since `seal`, by anything in the process; 0 before."""
    return 0 if self._compiles_at_seal is None else len(_compile_times) - self._compiles_at_seal

  def launch(self, batch: Batch) -> LaunchedStep:
    """Starts a step and returns at once; never compiles."""
    assert not batch.num_drafts, "no program verifies guesses"
    call = self.calls.get(batch.shape)
    if call is None:
      raise ShapeNotOnLadder(f"{batch.shape} was never compiled; there are {tuple(self.steps)}")
    for admission in batch.admissions:
      self._admit(admission)
    for masks in itertools.batched(batch.masks, programs.NUM_LINES["mask"]):
      self._set_lines("mask", [(batch.slots[row], np.frombuffer(mask, "<i4")) for row, mask in masks])
    packed = call.take()
    _, rows = self._packer.pack(batch, self._layouts[batch.shape], packed.values)
    donated = self.kv, self._last_tokens, self.slot_state
    self.kv, self._last_tokens, self.slot_state, (output, top) = call.execute(self._params, *donated, packed.argument)
    # What is left of the donated arrays goes when the step is done: it takes 15 us, and the device may be waiting now.
    return LaunchedStep(output, top, rows, self._away, lambda donated=donated: call.give_back(packed))

  def _admit(self, admission: Admission) -> None:
    self._packer.admit(admission)
    if admission.imported is not None:
      assert self.import_blocks is not None, "blocks arrive from a runner that is not connected"
      self.kv = self.import_blocks(self.kv, admission.block_ids, admission.imported)
    flags, vocab = flags_of(admission.params), self.spec.model.vocab_size
    if Flag.PENALTY in flags:
      history = sampler.history_row(admission.token_ids, admission.num_prompt_tokens, vocab)
      self._set_lines("history", [(admission.slot, history)])
    if Flag.BIAS in flags:
      self._set_lines("bias", [(admission.slot, sampler.bias_row(admission.params, vocab))])

  def _set_lines(self, table: str, lines: Sequence[tuple[int, np.ndarray]]) -> None:
    """Of a table of the sampler's state, by slot; at most programs.NUM_LINES[table]."""
    before = getattr(self.slot_state, table)
    packed = programs.pack_lines(table, lines, before.shape[1], self.spec.num_slots)
    self.slot_state = dataclasses.replace(self.slot_state, **{table: self._write_lines[table](before, packed)})
