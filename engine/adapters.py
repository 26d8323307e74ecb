"""Tracks LoRA adapters by name: slots, loads and live requests. Pure Python; may not know arrays, threads or files.

A slot is a row of the device's adapter arrays. Slot 0 is no adapter. A load reserves a slot, an unload frees it when
the last request of the adapter has finished. The serial of a load is never used again, so two loads of one name share
no cached prefix.
"""

from collections.abc import Iterator
import dataclasses
import enum
from typing import Protocol

from engine.errors import AdapterNotLoaded, InvalidRequest

MAX_NAME_LENGTH = 256  # characters


class AdapterWeights(Protocol):
  """The weights of an adapter, as AdapterWriter takes them."""

  @property
  def rank(self) -> int:
    """The largest rank of its matrices."""
    ...

  @property
  def path(self) -> str:
    """The folder that holds it."""
    ...


class AdapterState(enum.Enum):
  """Whether requests may use an adapter."""

  LOADING = "loading"  # the engine has not written its slot yet
  LOADED = "loaded"
  DRAINING = "draining"  # live requests finish, new ones are refused


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterInfo:
  """A snapshot of one adapter; `num_live` counts its accepted requests that have not finished."""

  name: str
  rank: int
  path: str
  num_live: int
  state: str


@dataclasses.dataclass(eq=False, slots=True)
class Adapter:
  """One load of an adapter; only its AdapterTable may change it."""

  name: str
  slot: int
  serial: int
  rank: int
  path: str
  state: AdapterState = AdapterState.LOADING
  num_live: int = 0
  replaced: "Adapter | None" = None  # while it loads, the one whose slot it takes


class AdapterTable:
  """The adapters of an engine. The engine holds its lock during each call."""

  def __init__(self, max_loras: int):
    """Args: max_loras: slots for adapters; 0: the engine serves none."""
    self._max_loras = max_loras
    self._by_name: dict[str, Adapter] = {}
    self._slots = list(range(max_loras, 0, -1))  # free slots; the lowest is taken first
    self._num_loads = 0

  def __len__(self) -> int:
    """Adapters that hold a slot."""
    return len(self._by_name)

  def infos(self) -> list[AdapterInfo]:
    """Returns a snapshot of every adapter, in order of load."""
    return [
      AdapterInfo(each.name, each.rank, each.path, each.num_live, each.state.value) for each in self._by_name.values()
    ]

  def find_adapter(self, name: str) -> Adapter:
    """Returns the adapter for a new request. Raises AdapterNotLoaded, also while it loads or drains."""
    adapter = self._by_name.get(name)
    if adapter is not None and adapter.state is AdapterState.LOADED:
      return adapter
    if not self._max_loras:
      raise AdapterNotLoaded(f"={name!r:.80} names an adapter, and this server has none; serve with --enable_lora")
    if adapter is not None:
      raise AdapterNotLoaded(f"={name!r:.80} is {adapter.state.value}; send the request when it is loaded")
    names = ", ".join(sorted(self._loaded_names())) or "none"
    raise AdapterNotLoaded(f"={name!r:.80} is no loaded adapter (loaded: {names:.400}); load it first")

  def _loaded_names(self) -> Iterator[str]:
    return (each.name for each in self._by_name.values() if each.state is AdapterState.LOADED)

  def check_load(self, name: str, replaces: bool = False) -> None:
    """Refuses a load that `begin_load` would refuse now, before anybody reads its weights.

    Args:
      replaces: as in `begin_load`.

    Raises:
      InvalidRequest: the name is invalid or in use, no slot is free, or the engine serves no adapters.
    """
    if not self._max_loras:
      raise InvalidRequest(f"={name!r:.80} cannot be loaded; serve with --enable_lora", field="lora_name")
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
      raise InvalidRequest(
        f"={name!r:.80} must have 1 to {MAX_NAME_LENGTH} printable characters; choose another name", field="lora_name"
      )
    old = self._by_name.get(name)
    if old is not None and not (replaces and old.state is AdapterState.LOADED):
      raise InvalidRequest(
        f"={name!r:.80} is {old.state.value} already; unload it first, or set load_inplace", field="lora_name"
      )
    if old is not None and old.num_live:
      raise InvalidRequest(
        f"={name!r:.80} has {old.num_live} live requests, so it cannot be replaced; try again when they have finished, "
        "or load under another name",
        field="lora_name",
      )
    if old is None and not self._slots:
      raise InvalidRequest(
        f"={name!r:.80} finds no free slot: {len(self)} adapters are loaded, the limit is max_loras={self._max_loras}; "
        "unload one first, or serve with a larger --max_loras",
        field="lora_name",
      )

  def begin_load(self, name: str, weights: AdapterWeights, replaces: bool = False) -> Adapter:
    """Reserves a slot for a new load of `name`, until `finish_load` or `cancel_load`.

    Args:
      replaces: an adapter of this name without live requests gives its slot to the new load.

    Raises:
      InvalidRequest: see `check_load`.
    """
    self.check_load(name, replaces)
    old = self._by_name.get(name)
    slot = old.slot if old is not None else self._slots.pop()
    self._num_loads += 1
    adapter = Adapter(name, slot, self._num_loads, weights.rank, weights.path, replaced=old)
    self._by_name[name] = adapter
    return adapter

  def finish_load(self, adapter: Adapter) -> None:
    """Opens an adapter for requests: its slot is written."""
    adapter.state, adapter.replaced = AdapterState.LOADED, None

  def cancel_load(self, adapter: Adapter) -> None:
    """Takes a load back: nothing was written to its slot, so an adapter that it replaced serves again."""
    if adapter.replaced is None:
      self._remove(adapter)
    else:
      self._by_name[adapter.name] = adapter.replaced

  def add_request(self, adapter: Adapter) -> None:
    """Counts a new live request."""
    adapter.num_live += 1

  def end_request(self, adapter: Adapter) -> bool:
    """Counts a finished request; returns whether it was the last one of a draining adapter, which is now gone."""
    adapter.num_live -= 1
    if adapter.num_live or adapter.state is not AdapterState.DRAINING:
      return False
    self._remove(adapter)
    return True

  def begin_unload(self, name: str) -> Adapter:
    """Refuses new requests of an adapter from now on; it is gone when `num_live` is 0.

    Raises:
      AdapterNotLoaded: no such adapter is loaded, or it loads.
    """
    adapter = self._by_name.get(name)
    if adapter is None or adapter.state is AdapterState.LOADING:
      state = "is no loaded adapter" if adapter is None else "is loading"
      names = ", ".join(sorted(self._loaded_names())) or "none"
      raise AdapterNotLoaded(f"={name!r:.80} {state} (loaded: {names:.400}); name a loaded one", field="lora_name")
    adapter.state = AdapterState.DRAINING
    if not adapter.num_live:
      self._remove(adapter)
    return adapter

  def is_present(self, adapter: Adapter) -> bool:
    """Whether this load still holds its slot."""
    return self._by_name.get(adapter.name) is adapter

  def _remove(self, adapter: Adapter) -> None:
    del self._by_name[adapter.name]
    self._slots.append(adapter.slot)
    self._slots.sort(reverse=True)
