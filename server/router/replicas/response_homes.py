"""Remembers which replica stores a response of /v1/responses, and searches the others. Keeps no response.

A response is in the memory of the replica that made it. The router learns ids from the answers that it passes on. It
does not know an id after a restart, or that of another router. Then it sends a GET to each replica, with the caller's
own credentials.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
import re
import urllib.parse

from server.router.replicas.replica_exchange import fetch_page
from server.router.replicas.replica_pool import ReplicaPool, RoutedReplica

# Another id at the beginning of an answer is the request's own previous_response_id, under another name.
_ID = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z]{1,64})"')
_MOST_READ = 64 << 10
_CREDENTIALS = (b"authorization", b"x-api-key")


class ResponseHomes:
  """The replicas of stored responses, of which the least recently used are forgotten first."""

  def __init__(self, pool: ReplicaPool, capacity: int, timeout_s: float):
    """Args:
    pool: the replicas.
    capacity: the most ids to remember.
    timeout_s: longest wait for a replica in a search.
    """
    self._pool = pool
    self._capacity = capacity
    self._timeout_s = timeout_s
    self._homes: OrderedDict[str, str] = OrderedDict()

  def learn_home(self, data: bytes, replica: RoutedReplica) -> None:
    """Remembers the replica of the response that begins with `data`."""
    if match := _ID.search(data[:_MOST_READ]):
      self._note_home(match[1].decode(), replica)

  async def find_home(self, response_id: str, headers: Sequence[tuple[bytes, bytes]]) -> RoutedReplica | None:
    """Returns the replica that stores a response; None if no replica in the rotation knows it.

    Args:
      response_id: the id, decoded.
      headers: the request's headers, for its credentials.
    """
    name = self._homes.get(response_id)
    if name is not None:
      self._homes.move_to_end(response_id)
      return self._pool.find_replica(name)
    sent = [(name, value) for name, value in headers if name in _CREDENTIALS]
    path = f"/v1/responses/{urllib.parse.quote(response_id, safe='')}"
    replicas = [replica for replica in self._pool.replicas if replica.is_ready]
    found = await asyncio.gather(*(self._has_response(replica, path, sent) for replica in replicas))
    home = next((replica for replica, has_it in zip(replicas, found, strict=True) if has_it), None)
    if home is not None:
      self._note_home(response_id, home)
    return home

  async def _has_response(self, replica: RoutedReplica, path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    assert replica.place is not None, "it is ready"
    host = (b"host", replica.authority.encode())
    try:
      status, _ = await fetch_page(replica.place, path, [host, *headers], self._timeout_s, 0)
    except ConnectionError:
      return False
    return status == 200

  def _note_home(self, response_id: str, replica: RoutedReplica) -> None:
    if self._capacity:
      self._homes[response_id] = replica.name
      self._homes.move_to_end(response_id)
      while len(self._homes) > self._capacity:
        self._homes.popitem(last=False)
