"""Who waits to be admitted, in the policy's order, and how much that is, in all and by tenant. Admits nobody."""

import bisect
from collections.abc import Iterable, Iterator
import operator

from engine.request import Request

by_rank = operator.attrgetter("rank")


class WaitingQueue:
  """Of requests whose rank is set.

  Attributes:
    requests: sorted by rank; for reading.
    num_tokens: prompt tokens of them all.
  """

  def __init__(self, requests: Iterable[Request] = ()):
    self.requests: list[Request] = []
    self.num_tokens = 0
    self._of_tenant: dict[str, tuple[int, int]] = {}  # those of 0 are absent
    for request in requests:
      self.add(request)

  def __len__(self) -> int:
    return len(self.requests)

  def __iter__(self) -> Iterator[Request]:
    return iter(self.requests)

  def of_tenant(self, tenant: str) -> tuple[int, int]:
    """Its requests and their prompt tokens."""
    return self._of_tenant.get(tenant, (0, 0))

  def add(self, request: Request) -> None:
    """Puts it in its place."""
    bisect.insort(self.requests, request, key=by_rank)
    self._count(request, 1)

  def remove(self, request: Request) -> None:
    """It waits no more."""
    del self.requests[bisect.bisect_left(self.requests, request.rank, key=by_rank)]
    self._count(request, -1)

  def _count(self, request: Request, change: int) -> None:
    self.num_tokens += change * request.num_prompt_tokens
    requests, tokens = self.of_tenant(request.tenant)
    if requests + change:
      self._of_tenant[request.tenant] = requests + change, tokens + change * request.num_prompt_tokens
    else:
      del self._of_tenant[request.tenant]
