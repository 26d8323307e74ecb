"""Checks the replicas: whether each takes requests, and its load. Takes them out of the rotation and puts them back."""

import asyncio
from collections.abc import Callable
import contextlib
import logging
import pathlib
import socket
import time

from engine.errors import ConfigError
from server.router.replicas.replica_exchange import ReplicaBroken, ReplicaPlace, ReplicaUnreachable, fetch_page
from server.router.replicas.replica_pool import ReplicaPool, RoutedReplica
from server.router.router_settings import RouterSettings

_MAX_READY_BYTES = 4 << 10
_MAX_METRICS_BYTES = 4 << 20
_RUNNING, _WAITING, _KV = b"sluice_requests_running", b"sluice_requests_waiting", b"sluice_kv_cache_usage_ratio"

_log = logging.getLogger(__name__)


def read_probe_key(path: str) -> str:
  """Returns the key of --probe_api_key_file; "" without one. Raises ConfigError."""
  if not path:
    return ""
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else "it is no text"
    raise ConfigError(f"probe_api_key_file={path}: {reason}; name a file with one key") from None
  words = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
  if not words or not words[0].isascii() or not words[0].isprintable():
    raise ConfigError(f"probe_api_key_file={path} has no key; write one of the replicas' keys in its first line")
  return words[0]


class ReplicaProbes:
  """The checks of all replicas."""

  def __init__(self, pool: ReplicaPool, settings: RouterSettings, count_probe: Callable[[str, bool], None]):
    """Args:
    pool: the replicas.
    settings: periods and limits.
    count_probe: called with the replica's name and whether its check succeeded.

    Raises:
      ConfigError: --probe_api_key_file cannot be read, or has no key.
    """
    self._pool = pool
    self._settings = settings
    self._count_probe = count_probe
    self._key = read_probe_key(settings.probe_api_key_file)
    self._tasks: list[asyncio.Task] = []
    self._wanted = {replica.name: asyncio.Event() for replica in pool.replicas}

  def start_probes(self) -> None:
    """Begins to check."""
    self._tasks = [asyncio.create_task(self._watch_replica(replica)) for replica in self._pool.replicas]

  async def stop_probes(self) -> None:
    """Ends the checks."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  def report_failure(self, replica: RoutedReplica, trouble: str) -> None:
    """Takes a replica out of the rotation because a request failed there, and has it checked at once."""
    self._leave(replica, trouble)
    self._wanted[replica.name].set()

  async def _watch_replica(self, replica: RoutedReplica) -> None:
    settings, wanted = self._settings, self._wanted[replica.name]
    answered_at = time.monotonic()
    while True:
      try:
        has_answered = await self._check_replica(replica)
      except Exception as error:  # the checks must go on
        _log.error("the check of %s failed", replica.name, exc_info=error)
        has_answered = False
      self._count_probe(replica.name, has_answered)
      if has_answered:
        answered_at = time.monotonic()
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.probe_period_s):
          await wanted.wait()
          # At most twice as often as otherwise, whatever requests report.
          await asyncio.sleep(settings.probe_period_s / 2)
      wanted.clear()
      if not has_answered and time.monotonic() - answered_at >= settings.replica_timeout_s:
        replica.break_exchanges()

  async def _check_replica(self, replica: RoutedReplica) -> bool:
    """Checks once. Returns whether the replica answered, ready or not."""
    timeout_s = self._settings.probe_timeout_s
    headers = [(b"host", replica.authority.encode()), (b"accept", b"*/*")]
    try:
      place = await self._resolve(replica)
      status, _ = await fetch_page(place, "/ready", headers, timeout_s, _MAX_READY_BYTES)
    except ReplicaUnreachable as error:
      self._leave(replica, str(error))
      self._pool.policy.forget(replica.name)  # a process that has ended has lost its cache
      return False
    except ReplicaBroken as error:
      hint = "" if replica.has_answered or replica.tls else f"; if it has TLS, list it as https://{replica.name}"
      self._leave(replica, f"{error}{hint}")
      return False
    replica.has_answered = True
    if status != 200:
      self._leave(replica, f"/ready returned {status}")
      return True
    await self._read_load(replica, place, headers)
    if not replica.is_ready:
      replica.is_ready, replica.trouble = True, ""
      _log.info("%s takes requests", replica.name)
    return True

  async def _read_load(self, replica: RoutedReplica, place: ReplicaPlace, headers: list[tuple[bytes, bytes]]) -> None:
    if self._key:
      headers = [*headers, (b"authorization", f"Bearer {self._key}".encode())]
    num_sent = replica.num_in_flight
    try:
      status, page = await fetch_page(place, "/metrics", headers, self._settings.probe_timeout_s, _MAX_METRICS_BYTES)
    except ConnectionError:
      return  # the next check of /ready decides
    found = read_gauges(page) if status == 200 else {}
    replica.note_report(found.get(_RUNNING), found.get(_WAITING), found.get(_KV), num_sent=num_sent)

  async def _resolve(self, replica: RoutedReplica) -> ReplicaPlace:
    """Looks the address up each time, since a replica that was replaced may have another. Raises ReplicaUnreachable."""
    try:
      async with asyncio.timeout(self._settings.probe_timeout_s):
        found = await asyncio.get_running_loop().getaddrinfo(replica.host, replica.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
      raise ReplicaUnreachable("the name has no address") from None
    family, _, _, _, address = found[0]
    replica.place = ReplicaPlace(family, address, replica.host, replica.tls)
    return replica.place

  def _leave(self, replica: RoutedReplica, trouble: str) -> None:
    if replica.note_trouble(trouble):
      _log.warning("%s takes no requests: %s", replica.name, trouble)


def read_gauges(page: bytes) -> dict[bytes, float]:
  """Returns the load's gauges in a page of Prometheus metrics, by name; without those that it lacks."""
  found = {}
  for name in (_RUNNING, _WAITING, _KV):
    start = page.find(b"\n" + name + b" ")
    if start >= 0:
      text = page[start + len(name) + 2 :].partition(b"\n")[0]
      with contextlib.suppress(ValueError):
        found[name] = float(text)
  return found
