"""Keeps finished responses in memory, so that later requests can continue them. Knows no request and no socket.

Each response belongs to a tenant. Another tenant's response is as unknown as one that never was.
"""

from collections import OrderedDict
from collections.abc import Sequence
import dataclasses
from typing import Any, Final, Protocol

import msgspec

# Limit of the stored JSON, in bytes; the oldest responses leave first.
MAX_STORED_BYTES: Final = 256 << 20
# Limit of one response with the items that led to it; a larger one is not stored. Also of the items of one search.
MAX_RESPONSE_BYTES: Final = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
  """A finished response, as JSON.

  Attributes:
    response_id, item_ids: the ids of the response and of its output items.
    response: the response object.
    context: the list of items that led to it, also those of earlier responses.
  """

  response_id: str
  item_ids: tuple[str, ...]
  response: bytes
  context: bytes

  @classmethod
  def of_response(cls, response: dict[str, Any], context: Sequence[dict[str, Any]]) -> "StoredResponse":
    """Returns a response object with the items that led to it."""
    item_ids = tuple(item["id"] for item in response["output"])
    return cls(response["id"], item_ids, msgspec.json.encode(response), msgspec.json.encode(context))

  @property
  def num_bytes(self) -> int:
    return len(self.response) + len(self.context)

  def read_response(self) -> dict[str, Any]:
    """Returns the response object."""
    return msgspec.json.decode(self.response)

  def read_context(self) -> list[dict[str, Any]]:
    """Returns the items that led to the response."""
    return msgspec.json.decode(self.context)


class KeptResponses(Protocol):
  """The stored responses of a server, in this process or in the engine's."""

  async def put_response(self, owner: str, stored: StoredResponse) -> None:
    """See ResponseStore."""
    ...

  async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
    """See ResponseStore."""
    ...

  async def remove_response(self, owner: str, response_id: str) -> bool:
    """See ResponseStore."""
    ...

  async def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
    """See ResponseStore."""
    ...


class ResponseStore:
  """Stored responses, at most so many and of at most MAX_STORED_BYTES; belongs to one event loop."""

  def __init__(self, max_responses: int, max_bytes: int = MAX_STORED_BYTES):
    """Args: max_responses: limit of responses; 0 stores none. max_bytes: limit of their JSON."""
    self._max_responses = max_responses
    self._max_bytes = max_bytes
    self._num_bytes = 0
    self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
    # The response of each output item, by owner and id of the item.
    self._item_places: dict[tuple[str, str], str] = {}

  def __len__(self) -> int:
    return len(self._stored)

  def put_response(self, owner: str, stored: StoredResponse) -> None:
    """Stores a response with an id that is new; removes the oldest ones beyond the limits."""
    if not self._max_responses or stored.num_bytes > MAX_RESPONSE_BYTES:
      return
    self._stored[owner, stored.response_id] = stored
    self._num_bytes += stored.num_bytes
    for item_id in stored.item_ids:
      self._item_places[owner, item_id] = stored.response_id
    while self._stored and (len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes):
      oldest_owner, oldest_id = next(iter(self._stored))
      self.remove_response(oldest_owner, oldest_id)

  def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
    """Returns an owner's response, or None."""
    return self._stored.get((owner, response_id))

  def remove_response(self, owner: str, response_id: str) -> bool:
    """Removes an owner's response; returns whether there was one."""
    stored = self._stored.pop((owner, response_id), None)
    if stored is None:
      return False
    self._num_bytes -= stored.num_bytes
    for item_id in stored.item_ids:
      self._item_places.pop((owner, item_id), None)
    return True

  def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
    """Returns those of an owner's stored output items that have one of these ids, as JSON, up to MAX_RESPONSE_BYTES."""
    found: dict[str, bytes] = {}
    num_bytes = 0
    wanted = {(owner, item_id) for item_id in item_ids}
    for response_id in dict.fromkeys(self._item_places[key] for key in wanted if key in self._item_places):
      for item in self._stored[owner, response_id].read_response()["output"]:
        if (owner, item["id"]) in wanted:
          text = msgspec.json.encode(item)
          num_bytes += len(text)
          if num_bytes > MAX_RESPONSE_BYTES:
            return found
          found[item["id"]] = text
    return found


class LocalResponses:
  """Stored responses of this process; implements KeptResponses."""

  def __init__(self, store: ResponseStore):
    self._store = store

  async def put_response(self, owner: str, stored: StoredResponse) -> None:
    self._store.put_response(owner, stored)

  async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
    return self._store.find_response(owner, response_id)

  async def remove_response(self, owner: str, response_id: str) -> bool:
    return self._store.remove_response(owner, response_id)

  async def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
    return self._store.find_items(owner, item_ids)
