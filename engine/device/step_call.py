"""Calls a step's executable; on a CPU the packed array aliases device memory. May not know requests, or pack.

Right after a step a CPU's caches are cold, and JAX's work in each call took 0.14 of 0.34 ms: it checks type, sharding
and layout of every argument and transfers the packed array. So on a CPU a device array aliases the packed array's
memory, and the call skips these checks.
"""

from collections.abc import Callable
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


class StepCall:
  """A rung's executable and its packed arrays, which it reuses if they are aliases.

  Otherwise each step gets a new array: the result of one device does not show that others have read their argument.

  Attributes:
    execute: programs.step from params on; its last argument is that of a PackedArray. All arrays must already have the
      executable's shardings.
  """

  def __init__(self, compiled: stages.Compiled, size: int, sharding: jax.sharding.Sharding):
    """Args: size: size of the packed array; sharding: sharding of the executable's last argument."""
    self._size, self._sharding = size, sharding
    devices = sharding.device_set
    self._by_alias = len(devices) == 1 and all(device.platform == "cpu" for device in devices)
    self._free: list[PackedArray] = []
    self.execute: Callable[..., Results] = compiled
    # Programs with effects (callbacks of Pallas' interpreters) take tokens, which only JAX's own call passes.
    private: Any = compiled
    if self._by_alias and not private._executable.unsafe_call.ordered_effects:
      self.execute = _unchecked(compiled)

  def take(self) -> PackedArray:
    """Returns an array that no step reads, with arbitrary values."""
    return self._free.pop() if self._free else self._new()

  def give_back(self, packed: PackedArray) -> None:
    """Returns an array for reuse after its step completes. Losing one does no harm."""
    if self._by_alias:
      self._free.append(packed)

  def _new(self) -> PackedArray:
    if not self._by_alias:
      values = np.empty(self._size, np.int32)
      return PackedArray(values, values)
    room = np.empty(self._size * 4 + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    values = room[start : start + self._size * 4].view(np.int32)
    argument = jax.device_put(values, self._sharding, may_alias=True)
    assert argument.unsafe_buffer_pointer() == values.ctypes.data, "JAX copied memory that it should share"
    return PackedArray(values, argument)


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
