"""Implements the engine's Runner protocol on a device. May call only compiled executables, and may not plan.

Each call donates the arrays that steps share (KV, last tokens, sampler state) to the next; no other copy exists. Steps
run in launch order, so writing a slot for a new request cannot disturb a launched step of its former owner.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
import dataclasses
import itertools
import os
import threading
import time
from typing import Any

import jax
import numpy as np

from engine.batch import Admission, Batch, BlockCopy, FinishedCopies, StepResult, TokenLogprobs
from engine.device import kv_cache, programs, sampler
from engine.device import mesh as mesh_lib
from engine.device.draft_model import DraftModel, LaunchedDraft
from engine.device.host_blocks import HostBlocks
from engine.device.model_input import Flag
from engine.device.programs import Program, ProgramSpec
from engine.device.sampler import SlotState
from engine.device.step_call import LinesCall, PackedArray, StepCall
from engine.device.step_packer import EmbeddingRow, LogitRows, Packer, flags_of
from engine.errors import ShapeNotOnLadder
from engine.shapes import ShapeLadder, StepShape

_FEW_LOGITS = 64  # logit rows of a rung whose output becomes lists whole
# (activity, done, total)
Progress = Callable[[str, int, int], None]
# from the KV buffers (donated), the blocks to fill and an Admission's `imported` to the KV buffers
ImportBlocks = Callable[[kv_cache.Buffers, Sequence[int], Any], kv_cache.Buffers]
# compiles a program
Make = Callable[[Program], jax.stages.Compiled]

# Tracing holds the interpreter lock, compiling does not; one compilation uses more than a core part of the time.
_COMPILE_THREADS = max(2, min(8, (os.cpu_count() or 1) // 4))


class Making:
  """Compiles programs on threads, while the caller does other work such as loading weights."""

  def __init__(self, wanted: Mapping[StepShape | str, Program], make: Make = Program.compile):
    """Starts compiling, in order.

    Args:
      wanted: result of `programs.all_programs`.
      make: compiles a program or finds its executable; called from several threads.
    """
    self._threads = ThreadPoolExecutor(_COMPILE_THREADS, "compile")
    self._compiled: list[str] = []
    self._made = {key: self._threads.submit(self._make_noting, make, program) for key, program in wanted.items()}

  @property
  def num_compiled(self) -> int:
    """The number of programs compiled so far, without those that the cache or `make` found."""
    return len(self._compiled)

  def _make_noting(self, make: Make, program: Program) -> jax.stages.Compiled:
    before = _of_thread.num_compiled
    made = make(program)
    if _of_thread.num_compiled > before:
      self._compiled.append(program.name)
    return made

  def wait(self, progress: Progress) -> dict[StepShape | str, jax.stages.Compiled]:
    """Waits for all executables and returns them; raises the first error of a compilation."""
    progress("compile", 0, len(self._made))
    for done, future in enumerate(as_completed(self._made.values()), 1):
      future.result()
      progress("compile", done, len(self._made))
    return {key: future.result() for key, future in self._made.items()}

  def __enter__(self) -> "Making":
    return self

  def __exit__(self, *error: object) -> None:
    self._threads.shutdown(cancel_futures=True)


class _ThreadCount(threading.local):
  """XLA compilations that this thread started, minus those that the compile cache served."""

  num_compiled = 0


_of_thread = _ThreadCount()
_compile_times: list[float] = []  # seconds of each XLA compilation in this process


def _note_compile(event: str, duration_secs: float, **kwargs: str | int) -> None:
  if event == "/jax/core/compile/backend_compile_duration":
    _compile_times.append(duration_secs)
    _of_thread.num_compiled += 1


def _note_cache_hit(event: str, **kwargs: str | int) -> None:
  if event == "/jax/compilation_cache/cache_hits":
    _of_thread.num_compiled -= 1


jax.monitoring.register_event_duration_secs_listener(_note_compile)
jax.monitoring.register_event_listener(_note_cache_hit)


def _accept_drafts(
  drafts: Sequence[tuple[int, int, tuple[int, ...]]], sampled: Sequence[int], bad: list[int]
) -> dict[int, tuple[int, int]]:
  """Returns row -> (first, end) of the logit rows whose tokens count, as `sampler.accept_drafts` does on the device.

  Args:
    drafts: see LogitRows.
    sampled, bad: by logit row. Sets `bad` to 0 after the accepted ones, whose values come from rejected drafts.
  """
  accepted = {}
  for row, first, ids in drafts:
    count = 0
    while count < len(ids) and not bad[first + count] and sampled[first + count] == ids[count]:
      count += 1
    end, last = first + count + 1, first + len(ids) + 1
    bad[end:last] = [0] * (last - end)
    accepted[row] = first, end
  return accepted


class LaunchedStep:
  """A step that the device is running; implements engine.batch.Launched."""

  def __init__(
    self,
    outputs: Sequence[jax.Array],
    rows: LogitRows,
    embedding_rows: Sequence[EmbeddingRow],
    away: bool,
    done: Callable[[], None],
    draft: LaunchedDraft | None = None,
    samples: Sequence[bool] = (),
  ):
    """Args:
    outputs: the output of programs.step.
    rows: the meaning of its logit rows.
    embedding_rows: rows whose hidden states are read.
    away: the values are in device memory; the device sends them to the host as soon as they exist.
    done: called once, when the step is complete, and then released.
    draft: what a draft model does after the step.
    samples: of the batch.
    """
    self._output, self._top, *self._states = outputs
    self._draft, self._samples = draft, samples
    self._rows, self._embedding_rows = rows, embedding_rows
    self._done: Callable[[], None] | None = done
    if away:
      self._output.copy_to_host_async()
      if rows.wants_top:
        self._top.copy_to_host_async()
      if embedding_rows:
        self._states[0].copy_to_host_async()

  def wait(self) -> None:
    """Waits for the step without reading it; for measurements."""
    self._output.block_until_ready()
    if self._draft is not None:
      self._draft.found.block_until_ready()

  def result(self) -> StepResult:
    """Waits for the step and what follows it, and reads its values."""
    output = np.asarray(self._output)
    draft = self._draft
    if draft is None:
      return self._read(output)
    begin = time.perf_counter()
    draft.found.block_until_ready()  # before `done`: it reads the packed array too
    seconds = time.perf_counter() - begin
    result = self._read(output)
    if not draft.has_proposals:
      return dataclasses.replace(result, fill_seconds=seconds)
    proposals = draft.wait_for_proposals(self._samples, result.bad_rows)
    return dataclasses.replace(result, proposals=proposals) if proposals else result

  def _read(self, output: np.ndarray) -> StepResult:
    done, self._done = self._done, None
    if done:
      done()
    rows = self._rows
    num_logits = len(rows.targets)
    # As few calls as possible, then lists, because each kind of numpy call costs 20 us right after a step.
    if output.shape[1] <= _FEW_LOGITS:
      sampled, bad = (line[:num_logits] for line in output.tolist()[:2])
    else:
      sampled, bad = output[:2, :num_logits].tolist()
    accepted = _accept_drafts(rows.drafts, sampled, bad) if rows.drafts else {}
    bad_rows: frozenset[int] = frozenset()
    if any(bad):
      bad_rows = frozenset(np.searchsorted(rows.last, np.flatnonzero(bad)).tolist())
    logprobs = self._read_logprobs(output[0], output[2].view(np.float32), accepted) if rows.wants else {}
    embeddings = self._read_embeddings()
    if accepted:
      tokens, row_ends = [], []
      for row, last in enumerate(rows.last):
        first, end = accepted.get(row, (0, 0))
        tokens += sampled[first:end] or [sampled[last]]
        row_ends.append(len(tokens))
      return StepResult(tokens, bad_rows, logprobs, tuple(row_ends), embeddings)
    tokens = sampled if rows.plain else output[0, rows.last].tolist()
    return StepResult(tokens, bad_rows, logprobs, embeddings=embeddings)

  def _read_embeddings(self) -> dict[int, bytes]:
    if not self._embedding_rows:
      return {}
    states = np.asarray(self._states[0])
    found = {}
    for row, num_states, pooled, is_last in self._embedding_rows:
      end = self._rows.last[row] + 1
      pooled.add_states(states[end - num_states : end])
      if is_last:
        found[row] = pooled.make_embedding()
    return found

  def _read_logprobs(
    self, tokens: np.ndarray, logprobs: np.ndarray, accepted: Mapping[int, tuple[int, int]]
  ) -> dict[int, tuple[TokenLogprobs, ...]]:
    rows = self._rows
    if rows.wants_top:
      ids, bits = np.asarray(self._top)
      top_logprobs = bits.view(np.float32)
    found = {}
    for row, (first, numbers) in rows.wants.items():
      entries = []
      if row in accepted:
        numbers = numbers[: accepted[row][1] - first]
      for line, number in enumerate(numbers, first):
        token = rows.targets[line]
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
    pooling: str = "last",
    class_weights: np.ndarray | None = None,
    num_host_blocks: int = 0,
    host_kv_dir: str = "",
  ):
    """Allocates the KV buffers, and memory of the host for blocks.

    Other code may read `spec`, `steps` (executables by shape), `calls` (their StepCalls), `adapted_calls` (those of
    steps with adapters), `kv` and `slot_state`. An owner that lets admissions bring KV from another runner sets
    `import_blocks`, and one with a draft model `draft`.

    Args:
      spec: of the programs.
      params: the model's leaves, as in spec.params.
      ladder: the ladder of the steps.
      eos_token_ids: the spec.num_eos ids that min_tokens suppresses.
      made: the executables of `programs.all_programs`.
      pooling: of embeddings; see engine.device.pooling.
      class_weights: f64[C, D] of a head of classes, whose outputs take the place of embeddings; None: there is none.
      num_host_blocks: KV blocks that the host keeps; 0: none.
      host_kv_dir: folder of the file that has them; "": they are in memory.
    """
    self.spec, self._params = spec, params
    self.import_blocks: ImportBlocks | None = None
    self.draft: DraftModel | None = None
    self._returns_states = int(bool(spec.feature_layers))  # arrays of a step that only the draft model reads
    # On a CPU the values are in host memory already; starting a copy takes 0.1 ms and may wait for a core.
    self._away = spec.mesh.devices.flat[0].platform != "cpu"
    self._finished: list[Any] = []  # arrays of completed steps, to be released while the device computes the next one
    self._packer = Packer(spec.num_slots, spec.table_width, spec.block_size, eos_token_ids, pooling, class_weights)
    self._compiles_at_seal: int | None = None
    self.steps = {shape: made[shape] for shape in ladder.rungs()}
    self.adapted_calls: dict[StepShape, StepCall] = {}  # steps with adapters
    self._adapters: tuple[jax.Array, ...] = ()
    self._write_lines = {name: made[name] for name in programs.NUM_LINES}
    width = spec.slot_state.mask.shape[1]
    self._mask_calls = {
      name: LinesCall(made[name], (programs.NUM_LINES[name], 1 + width), spec.num_slots, mesh_lib.replicated(spec.mesh))
      for name, table in programs.LINE_TABLES.items()
      if table == "mask" and spec.mesh.size == 1
    }
    self._layouts = {shape: spec.layout(shape) for shape in ladder.rungs()}
    self.calls = {
      shape: StepCall(compiled, self._layouts[shape].size, mesh_lib.replicated(spec.mesh))
      for shape, compiled in self.steps.items()
    }
    if spec.max_loras:
      self._adapters, self._write_adapter = made["adapters"](), made["write-adapter"]
      self.adapted_calls = {
        shape: StepCall(made[programs.adapted_key(shape)], layout.size, mesh_lib.replicated(spec.mesh))
        for shape, layout in self._layouts.items()
      }
    self.kv: kv_cache.Buffers = tuple(made[programs.layer_key(buffer)]() for buffer in spec.kv)
    self._last_tokens: jax.Array = mesh_lib.place_array(
      np.zeros(spec.last_tokens.shape, np.int32), mesh_lib.replicated(spec.mesh)
    )
    self.slot_state: SlotState = made["slots"]()
    self.host_blocks = HostBlocks(spec, num_host_blocks, host_kv_dir) if num_host_blocks else None

  def warm_up(self, progress: Progress) -> None:
    """Runs every program once on padding, so that no request pays the cost of a first call."""
    for index, shape in enumerate(self.steps):
      empty = Batch(-1, shape, (), (), (), (), (), (), ())
      self.launch(empty).result()
      if self.draft is not None:
        self.launch(dataclasses.replace(empty, fills_draft=True)).result()
        self.launch(dataclasses.replace(empty, num_proposals=1)).result()
      if self.adapted_calls:
        self._launch(empty, self.adapted_calls[shape], self._adapters).result()
      progress("warm up", index + 1, len(self.steps))
    if self._adapters:
      self.write_leaves(0, [np.zeros(leaf.shape[1:], leaf.dtype) for leaf in self.spec.adapters])
    for name in programs.NUM_LINES:
      self._set_lines(name, [])
    if self.host_blocks is not None:
      self.kv = self.host_blocks.warm_up(self.kv)

  def seal(self) -> None:
    """Starts counting compilations, each of which is an error from now on."""
    self._compiles_at_seal = len(_compile_times)

  @property
  def params(self) -> tuple[jax.Array, ...]:
    """The model's leaves, as in spec.params."""
    return self._params

  @property
  def compiles_after_ready(self) -> int:
    """All compilations of the process since `seal`; 0 before it."""
    return 0 if self._compiles_at_seal is None else len(_compile_times) - self._compiles_at_seal

  def launch(self, batch: Batch) -> LaunchedStep:
    """Starts a step and returns at once; never compiles."""
    call = self.calls.get(batch.shape)
    if call is None:
      raise ShapeNotOnLadder(f"{batch.shape} is not compiled; compiled are {tuple(self.steps)}")
    for admission in batch.admissions:
      self._admit(admission)
    if self.adapted_calls and self._packer.has_adapters(batch):
      return self._launch(batch, self.adapted_calls[batch.shape], self._adapters)
    return self._launch(batch, call)

  def _launch(self, batch: Batch, call: StepCall, *adapters: tuple[jax.Array, ...]) -> LaunchedStep:
    """Starts an admitted step by `call`, which takes `adapters` last."""
    masks = self._set_masks([*self._packer.mask_lines(batch)]) if batch.masks else ()
    packed = call.take()
    _, rows = self._packer.pack(batch, self._layouts[batch.shape], packed.values)
    donated = self.kv, self._last_tokens, self.slot_state
    results = call.execute(self._params, *donated, packed.argument, *adapters)
    self.kv, self._last_tokens, self.slot_state, outputs = results
    draft = None
    if self.draft is not None:
      states, outputs = outputs[len(outputs) - self._returns_states :], outputs[: len(outputs) - self._returns_states]
      draft = self.draft.launch(batch, self._last_tokens, outputs[0], packed.argument, states)
    embeds = self._packer.embedding_rows(batch)
    self._finished.clear()  # the device has work now

    def give_back(held: Any = (donated, outputs)) -> None:
      """Returns the packed arrays. It keeps other arrays of the step, whose release takes 30 us, until the next one."""
      self._finished.append(held)
      call.give_back(packed)
      for of_lines, lines in masks:
        of_lines.give_back(lines)

    return LaunchedStep(outputs, rows, embeds, self._away, give_back, draft, batch.samples)

  def write_adapter(self, slot: int, weights: Any) -> None:
    """Implements engine.batch.AdapterWriter for `weights` of engine.device.adapter_folder; never compiles."""
    leaves = weights.leaves
    wanted = [(leaf.shape[1:], leaf.dtype) for leaf in self.spec.adapters]
    if [(leaf.shape, leaf.dtype) for leaf in leaves] != wanted:
      raise ValueError(
        f"adapter {weights.path}: the shapes of its arrays are not the shapes of this engine's slots; read it again"
      )
    self.write_leaves(slot, leaves)

  def write_leaves(self, slot: int, leaves: Sequence[Any]) -> None:
    """Writes arrays of the shapes in spec.adapters, without the axis of slots, into a slot."""
    self._adapters = self._write_adapter(self._adapters, np.int32(slot), tuple(leaves))

  # engine.batch.BlockStore, for a runner with `host_blocks`.

  def _require_host_blocks(self) -> HostBlocks:
    assert self.host_blocks is not None, "this runner keeps no blocks on the host"
    return self.host_blocks

  def notify_copies(self, callback: Callable[[], None]) -> None:
    """See engine.batch.BlockStore."""
    self._require_host_blocks().on_finish = callback

  def save_blocks(self, copies: list[BlockCopy]) -> None:
    """See engine.batch.BlockStore."""
    self._require_host_blocks().save_blocks(self.kv, copies)

  def fetch_blocks(self, copies: list[BlockCopy]) -> None:
    """See engine.batch.BlockStore."""
    self._require_host_blocks().fetch_blocks(copies)

  def finished_copies(self) -> list[FinishedCopies]:
    """See engine.batch.BlockStore."""
    return self._require_host_blocks().finished_copies()

  def write_blocks(self, fetched: FinishedCopies, blocks: Sequence[int]) -> None:
    """See engine.batch.BlockStore."""
    self.kv = self._require_host_blocks().write_blocks(self.kv, fetched, blocks)

  def _admit(self, admission: Admission) -> None:
    self._packer.admit(admission)
    if admission.imported is not None:
      assert self.import_blocks is not None, "an admission brings blocks, but no other runner is connected"
      self.kv = self.import_blocks(self.kv, admission.block_ids, admission.imported)
    flags, vocab = flags_of(admission.params), self.spec.model.vocab_size
    if Flag.PENALTY in flags:
      history = sampler.history_row(admission.token_ids, admission.num_prompt_tokens, vocab)
      self._set_lines("history", [(admission.slot, history)])
    if Flag.BIAS in flags:
      self._set_lines("bias", [(admission.slot, sampler.bias_row(admission.params, vocab))])

  def _set_masks(self, lines: Sequence[tuple[int, bytes]]) -> list[tuple[LinesCall, PackedArray]]:
    """Sets any number of rows of the table of masks; returns arrays to give back after the next step."""
    few, many = programs.NUM_LINES["mask"], programs.NUM_LINES["masks"]
    taken = []
    for part in itertools.batched(lines, many):
      name = "mask" if len(part) <= few else "masks"
      call = self._mask_calls.get(name)
      if call is None:
        self._set_lines(name, [(line, np.frombuffer(mask, "<i4")) for line, mask in part])
        continue
      mask, packed = call.set_lines(self.slot_state.mask, part)
      self.slot_state = dataclasses.replace(self.slot_state, mask=mask)
      taken.append((call, packed))
    return taken

  def _set_lines(self, name: str, lines: Sequence[tuple[int, np.ndarray]]) -> None:
    """Sets rows of a sampler table by the program `name`, by slot; at most programs.NUM_LINES[name]."""
    table = programs.LINE_TABLES[name]
    before = getattr(self.slot_state, table)
    packed: Any = programs.pack_lines(
      name, lines, before.shape[1], self.spec.num_slots, mesh_lib.num_shares(self.spec.mesh)
    )
    if self.spec.mesh.size > 1:
      packed = mesh_lib.place_array(packed, mesh_lib.rows_by_share(self.spec.mesh))
    self.slot_state = dataclasses.replace(self.slot_state, **{table: self._write_lines[name](before, packed)})
