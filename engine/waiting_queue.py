"""The queue of waiting requests in the policy's order, with totals by tenant. May not admit requests."""

import bisect
from collections.abc import Iterable, Iterator
import operator

from engine.request import Request

by_rank = operator.attrgetter("rank")


class WaitingQueue:
  """A sorted queue of ranked requests.

  Attributes:
    requests: sorted by rank; read only.
    num_tokens: prompt tokens of all requests.
  """

  def __init__(self, requests: Iterable[Request] = ()):
    self.requests: list[Request] = []
    self.num_tokens = 0
    self._of_tenant: dict[str, tuple[int, int]] = {}  # without tenants of 0 requests
    for request in requests:
      self.add(request)

  def __len__(self) -> int:
    return len(self.requests)

  def __iter__(self) -> Iterator[Request]:
    return iter(self.requests)

  def of_tenant(self, tenant: str) -> tuple[int, int]:
    """Returns the number of a tenant's requests and their prompt tokens."""
    return self._of_tenant.get(tenant, (0, 0))

  def add(self, request: Request) -> None:
    """Inserts a request by rank."""
    bisect.insort(self.requests, request, key=by_rank)
    self._count(request, 1)

  def sort(self) -> None:
    """Sorts the queue after ranks changed."""
    self.requests.sort(key=by_rank)

  def remove(self, request: Request) -> None:
    """Removes a request."""
    del self.requests[bisect.bisect_left(self.requests, request.rank, key=by_rank)]
    self._count(request, -1)

  def _count(self, request: Request, change: int) -> None:
    self.num_tokens += change * request.num_prompt_tokens
    requests, tokens = self.of_tenant(request.tenant)
    if requests + change:
      self._of_tenant[request.tenant] = requests + change, tokens + change * request.num_prompt_tokens
    else:
      del self._of_tenant[request.tenant]
