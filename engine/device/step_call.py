"""How a step is called: its packed array is written where the device reads it, if that is the host's own memory.

Right after a step of a CPU nothing is in its caches, and what JAX does in each call (the type, sharding and layout of
every argument, a transfer of the packed array) took 0.14 of 0.34 ms. So there the packed array is memory of which a
device array is an alias, and the executable is called without those looks. Knows no request and packs nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import stages
import numpy as np

from engine.device.kv_cache import Buffers
from engine.device.sampler import SlotState

_ALIGNMENT = 64  # bytes; XLA:CPU copies what is aligned to less

# What a step gives: see programs.step.
Results = tuple[Buffers, jax.Array, SlotState, tuple[jax.Array, jax.Array]]


class PackedArray(NamedTuple):
  """The packed array of one step.

  Attributes:
    values: int32[layout.size], to be written before the call and by nobody until the step is done.
    argument: what the executable is given: an array on the device with this very memory, or `values` itself.
  """

  values: np.ndarray
  argument: jax.Array | np.ndarray


class StepCall:
  """A rung's executable and the packed arrays it takes, which are used again where they are aliases.

  Elsewhere each is new: what one device of several has given says nothing of whether the others have read theirs.

  Attributes:
    execute: as programs.step, from params on; the last argument is a PackedArray's. Each array lies where the
      executable wants it.
  """

  def __init__(self, compiled: stages.Compiled, size: int, sharding: jax.sharding.Sharding):
    """Args: size: of the packed array; sharding: of the executable's last argument."""
    self._size, self._sharding = size, sharding
    devices = sharding.device_set
    self._by_alias = len(devices) == 1 and all(device.platform == "cpu" for device in devices)
    self._free: list[PackedArray] = []
    self.execute: Callable[..., Results] = compiled
    # Programs with effects (Pallas' interpreters call back) take tokens too, which only JAX's own call hands over.
    private: Any = compiled
    if self._by_alias and not private._executable.unsafe_call.ordered_effects:
      self.execute = _unchecked(compiled)

  def take(self) -> PackedArray:
    """One that no step reads, with any values in it."""
    return self._free.pop() if self._free else self._new()

  def give_back(self, packed: PackedArray) -> None:
    """The step that read it is done. One that never comes back is only missed."""
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
    assert argument.unsafe_buffer_pointer() == values.ctypes.data, "JAX copied memory that it was to share"
    return PackedArray(values, argument)


def _unchecked(compiled: stages.Compiled) -> Callable[..., Results]:
  """A step, called without looking at its arguments: arrays on the shardings that its Program says.

  XLA itself refuses one that was donated before.
  """
  assert not compiled._params.const_args, "constants as arguments would have to go first"
  executable: Any = compiled._executable
  replicated: Any = executable.unsafe_call
  run, handlers = replicated.xla_executable.execute_sharded, replicated.out_handler.handlers

  def execute(
    params: tuple[jax.Array, ...], kv: Buffers, last_tokens: jax.Array, slot_state: SlotState, packed: Any
  ) -> Results:
    state = slot_state.history, slot_state.bias, slot_state.mask
    results = run([*params, *kv, last_tokens, *state, packed]).consume_with_handlers(handlers)
    layers = len(kv)
    last_tokens, history, bias, mask, output, top = results[layers:]
    return tuple(results[:layers]), last_tokens, SlotState(history, bias, mask), (output, top)

  return execute
