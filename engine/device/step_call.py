"""Calls executables that take a packed array, which on a CPU aliases device memory. May not know requests, or pack.

Right after a step a CPU's caches are cold, and JAX's work in each call took 0.14 of 0.34 ms: it checks type, sharding
and layout of every argument and transfers the packed array. So on a CPU a device array aliases the packed array's
memory, and the call skips these checks.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax import stages
import numpy as np

from engine.device.kv_cache import Buffers
from engine.device.sampler import SlotState

_ALIGNMENT = 64  # bytes; XLA:CPU copies arrays with smaller alignment

# The results of a step: see programs.step.
Results = tuple[Buffers, jax.Array, SlotState, tuple[jax.Array, ...]]


class PackedArray(NamedTuple):
  """The packed array of one step.

  Attributes:
    values: int32[layout.size]; written before the call, and not again until the step completes.
    argument: the executable's argument: a device array with the same memory, or `values` itself.
  """

  values: np.ndarray
  argument: jax.Array | np.ndarray


class PackedCall:
  """The packed arrays of an executable, which it reuses if they are aliases.

  Otherwise each call gets a new array: the result of one device does not show that others have read their argument.

  Attributes:
    by_alias: device memory and the host's are one.
  """

  def __init__(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding):
    """Args: shape: of the packed array; sharding: of the executable's last argument."""
    self._shape, self._sharding = shape, sharding
    devices = sharding.device_set
    self.by_alias = len(devices) == 1 and all(device.platform == "cpu" for device in devices)
    self._free: list[PackedArray] = []

  def take(self) -> PackedArray:
    """Returns an array that no call reads, with arbitrary values."""
    return self._free.pop() if self._free else self._new()

  def give_back(self, packed: PackedArray) -> None:
    """Returns an array for reuse after its step completes. Losing one does no harm."""
    if self.by_alias:
      self._free.append(packed)

  def _new(self) -> PackedArray:
    if not self.by_alias:
      values = np.empty(self._shape, np.int32)
      return PackedArray(values, values)
    size = math.prod(self._shape) * 4
    room = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    values = room[start : start + size].view(np.int32).reshape(self._shape)
    argument = jax.device_put(values, self._sharding, may_alias=True)
    assert argument.unsafe_buffer_pointer() == values.ctypes.data, "JAX copied memory that it should share"
    return PackedArray(values, argument)


class StepCall(PackedCall):
  """A rung's executable and its packed arrays.

  Attributes:
    execute: programs.step from params on; its last argument is that of a PackedArray. All arrays must already have the
      executable's shardings.
  """

  def __init__(self, compiled: stages.Compiled, size: int, sharding: jax.sharding.Sharding):
    """Args: size: size of the packed array; sharding: sharding of the executable's last argument."""
    super().__init__((size,), sharding)
    self.execute: Callable[..., Results] = compiled
    # Programs with effects (callbacks of Pallas' interpreters) take tokens, which only JAX's own call passes.
    private: Any = compiled
    if self.by_alias and not private._executable.unsafe_call.ordered_effects:
      self.execute = _unchecked(compiled)


class LinesCall(PackedCall):
  """A program that sets lines of a sampler's table, and its packed arrays: a line's number, then its values."""

  def __init__(self, compiled: stages.Compiled, shape: tuple[int, int], padding: int, sharding: jax.sharding.Sharding):
    """Args: shape: lines, and columns with the number; padding: the number of lines that are not set."""
    super().__init__(shape, sharding)
    self._padding = padding
    self._execute = call_unchecked(compiled) if self.by_alias else lambda *arguments: (compiled(*arguments),)

  def set_lines(self, table: jax.Array, lines: Sequence[tuple[int, bytes]]) -> tuple[jax.Array, PackedArray]:
    """Returns the table, whose old array is donated, and the packed array, to give back after the next step.

    Args: lines: numbers and values, at most as many as the program sets; the rest of a shorter line becomes arbitrary.
    """
    packed = self.take()
    num_lines, columns = self._shape
    # No numpy, because each kind of its calls costs microseconds right after a step.
    numbers, values = memoryview(packed.values.reshape(-1)), memoryview(packed.values.reshape(-1)).cast("B")
    for index in range(num_lines):
      numbers[index * columns] = lines[index][0] if index < len(lines) else self._padding
    for index, (_, line) in enumerate(lines):
      first = 4 * (index * columns + 1)
      values[first : first + len(line)] = line
    return self._execute(table, packed.argument)[0], packed


def call_unchecked(compiled: stages.Compiled) -> Callable[..., list[jax.Array]]:
  """Returns the executable from the leaves of its arguments to those of its results, without checks of the arguments.

  They must have the shardings of its Program. XLA itself rejects a donated array.
  """
  assert not compiled._params.const_args, "constants would have to be the first arguments"
  executable: Any = compiled._executable
  replicated: Any = executable.unsafe_call
  run, handlers = replicated.xla_executable.execute_sharded, replicated.out_handler.handlers
  return lambda *leaves: run(list(leaves)).consume_with_handlers(handlers)


def _unchecked(compiled: stages.Compiled) -> Callable[..., Results]:
  """Returns the executable of a step without checks of its arguments."""
  call = call_unchecked(compiled)

  def execute(
    params: tuple[jax.Array, ...],
    kv: Buffers,
    last_tokens: jax.Array,
    slot_state: SlotState,
    packed: Any,
    adapters: tuple[jax.Array, ...] = (),
  ) -> Results:
    state = slot_state.history, slot_state.bias, slot_state.mask
    results = call(*params, *kv, last_tokens, *state, packed, *adapters)
    layers = len(kv)
    last_tokens, history, bias, mask, *outputs = results[layers:]
    return tuple(results[:layers]), last_tokens, SlotState(history, bias, mask), tuple(outputs)

  return execute
