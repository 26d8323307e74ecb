"""Keeps finished responses in memory, so that later requests can continue them. Knows no request and no socket.

Each response belongs to a tenant. Another tenant's response is as unknown as one that never was.
"""

from collections import OrderedDict
from collections.abc import Sequence
import dataclasses
from typing import Any

import msgspec

# Limit of the stored JSON, in bytes; the oldest responses leave first.
MAX_STORED_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
  """A finished response, as JSON.

  Attributes:
    response: the response object.
    context: the list of items that led to it, also those of earlier responses.
  """

  response: bytes
  context: bytes

  @property
  def num_bytes(self) -> int:
    return len(self.response) + len(self.context)

  def read_response(self) -> dict[str, Any]:
    """Returns the response object."""
    return msgspec.json.decode(self.response)

  def read_context(self) -> list[dict[str, Any]]:
    """Returns the items that led to the response."""
    return msgspec.json.decode(self.context)


class ResponseStore:
  """Stored responses, at most so many and of at most MAX_STORED_BYTES; belongs to one event loop.

  Attributes:
    max_responses: limit of responses; 0 stores none.
  """

  def __init__(self, max_responses: int, max_bytes: int = MAX_STORED_BYTES):
    self.max_responses = max_responses
    self._max_bytes = max_bytes
    self._num_bytes = 0
    self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
    # The response of each output item, by owner and id of the item.
    self._item_places: dict[tuple[str, str], str] = {}

  def __len__(self) -> int:
    return len(self._stored)

  def put_response(self, owner: str, response: dict[str, Any], context: Sequence[dict[str, Any]]) -> None:
    """Stores a response with an id that is new; removes the oldest ones beyond the limits."""
    if not self.max_responses:
      return
    stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(context))
    self._stored[owner, response["id"]] = stored
    self._num_bytes += stored.num_bytes
    for item in response["output"]:
      self._item_places[owner, item["id"]] = response["id"]
    while self._stored and (len(self._stored) > self.max_responses or self._num_bytes > self._max_bytes):
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
    for item in stored.read_response()["output"]:
      self._item_places.pop((owner, item["id"]), None)
    return True

  def find_item(self, owner: str, item_id: str) -> dict[str, Any] | None:
    """Returns an output item of an owner's stored response, or None."""
    place = self._item_places.get((owner, item_id))
    if place is None:
      return None
    return next(item for item in self._stored[owner, place].read_response()["output"] if item["id"] == item_id)
