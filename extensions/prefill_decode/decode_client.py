"""Sends long prompts to prefill servers before the engine of a decode server gets their requests.

The request itself always goes to the engine, which finds the prefix in its cache, or computes what is missing. So
nothing that a prefill server does, or fails to do, can change a token or end a request. Everything here runs on the
event loop; the engine's thread waits for nobody.
"""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import logging
import time

import grpc

from engine.engine import Engine
from engine.errors import Unavailable
from engine.request import FinishReason, Request
from engine.validation import validate_request
from extensions.prefill_decode.decode_engine import DecodeEngine
from extensions.prefill_decode.identity import add_transport
from extensions.prefill_decode.piece_pulls import PiecePuller, PullingEngine
from extensions.prefill_decode.prefill_peer import Offer, PeerFailed, PrefillPeer
from extensions.prefill_decode.prefix_holds import PrefixHold
from extensions.prefill_decode.transfer_counts import Recompute, TransferCounts
from server.generation.adapter_loader import AdapterLoader
from server.generation.engine_client import LocalEngine
from server.generation.prefill_hint import requested_prefill_server
from server.host_options import HostOptions

_log = logging.getLogger(__name__)
# Generations that wait for prefill servers at once; the engine gets further ones directly, and applies its own limits.
_MOST_WAITING = 256
# Of the time until a request's deadline, to leave the rest for computing the prompt here.
_SHARE_OF_DEADLINE = 0.5
_MOST_PEERS = 64
_LOG_PERIOD_S = 10.0


class _Fetch:
  """A generation whose prefix is on its way.

  Attributes:
    requests: those that nobody has aborted; they share their prompt.
    task: fetches the prefix, then submits them.
  """

  def __init__(self, requests: Sequence[Request]):
    self.requests = list(requests)
    self.task: asyncio.Task[None]


class DecodeClient(LocalEngine):
  """The engine of a decode server for its front end."""

  def __init__(
    self,
    engine: Engine,
    compiles_after_ready: Callable[[], int],
    adapter_loader: AdapterLoader | None,
    options: HostOptions,
    secret: str,
    credentials: grpc.ChannelCredentials | None,
    counts: TransferCounts,
  ):
    """Args:
    engine, compiles_after_ready, adapter_loader: see LocalEngine.
    options: the prefill servers and the limits.
    secret: of all servers.
    credentials: for TLS to prefill servers; None: plain text.
    counts: counts transfers.

    Raises:
      ConfigError: JAX's transfer server is wanted and cannot start.
    """
    super().__init__(engine, compiles_after_ready, adapter_loader)
    assert isinstance(engine, DecodeEngine), "the composition chooses both"
    self.engine = engine
    if isinstance(engine, PullingEngine):
      engine.transfers.start_receiver(options.kv_transport_address)
    self._options, self._secret, self._credentials, self._counts = options, secret, credentials, counts
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pull")
    self._peers = {address: self._make_peer(address) for address in options.prefill_servers}
    self._fetches: dict[str, _Fetch] = {}  # by request id
    self._releases: set[asyncio.Future[object]] = set()
    self._least_blocks = max(1, options.min_remote_prefill_tokens // self.config.block_size)
    self._logged_at = 0.0

  def _make_peer(self, address: str) -> PrefillPeer:
    engine, puller = self.engine, None
    if isinstance(engine, PullingEngine):
      puller = PiecePuller(engine.transfers, address, self._thread, self._counts)
    return PrefillPeer(
      address,
      self._secret,
      add_transport(engine.identity, self._options.kv_transport),
      engine.layout,
      self._credentials,
      self._thread,
      puller,
      may_share_memory=self._options.kv_transport != "grpc",
    )

  # The interface of LocalEngine.

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """Submits requests now, or when their prefix has arrived."""
    peer = self._choose_peer() if self._may_fetch(requests[0]) else None
    if peer is None:
      await super().submit(owner, name, requests)
      return
    for request in requests:
      validate_request(self.config, request)
      request.arrival_time = self.now()
    if self.engine.dead is not None:
      raise Unavailable("the engine has failed; send the request to another server")
    fetch = _Fetch(requests)
    fetch.task = asyncio.create_task(self._run_fetch(fetch, peer))
    self._fetches.update((request.id, fetch) for request in requests)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    fetch = self._fetches.pop(request_id, None)
    if fetch is None:
      super().abort(request_id, reason)
      return
    fetch.requests = [request for request in fetch.requests if request.id != request_id]
    if not fetch.requests:
      fetch.task.cancel()
    self.ended(request_id)  # the engine will not say so

  # Fetches.

  def _may_fetch(self, request: Request) -> bool:
    """Returns whether a request can use prefix blocks of others, and its prompt is long enough."""
    params = request.params
    return (
      request.num_prompt_tokens > self._options.min_remote_prefill_tokens
      and params.prompt_logprobs is None
      and not params.embed
      and not request.adapter
      and len(self._fetches) < _MOST_WAITING
    )

  def _choose_peer(self) -> PrefillPeer | None:
    """Returns the server that the request names, if it may; else the one with the fewest prompts. None: none answers.

    Without --trust_prefill_header, a request may name only servers of --prefill_servers: others would learn the
    secret and the prompt.
    """
    named = requested_prefill_server()
    if named:
      peer = self._peers.get(named)
      if peer is None and self._options.trust_prefill_header and len(self._peers) < _MOST_PEERS and _is_address(named):
        peer = self._peers[named] = self._make_peer(named)
      if peer is not None:
        return self._unless_paused(peer)
    listed = [self._peers[address] for address in self._options.prefill_servers]
    if not listed:
      return None
    return self._unless_paused(min(listed, key=lambda peer: (peer.is_paused, peer.num_waiting)))

  def _unless_paused(self, peer: PrefillPeer) -> PrefillPeer | None:
    if not peer.is_paused:
      return peer
    self._counts.recomputed[Recompute.UNREACHABLE] += 1
    return None

  async def _run_fetch(self, fetch: _Fetch, peer: PrefillPeer) -> None:
    """Fetches the prefix within the time limit, then hands the requests to the engine, whatever came of it."""
    first = fetch.requests[0]
    reserved = self.engine.hold_prefix(first, self._least_blocks)
    num_cached_tokens = 0
    try:
      try:
        async with asyncio.timeout(self._time_limit(first)):
          num_cached_tokens = await self._fetch_prefix(first, peer, reserved)
      except TimeoutError:
        self._note_failure(peer, PeerFailed(Recompute.LATE, "the time limit has passed"))
      except PeerFailed as error:
        self._note_failure(peer, error)
      except Exception as error:
        _log.exception("a prefix from %s failed; the prompt is computed here", peer.address)
        self._note_failure(peer, PeerFailed(Recompute.ERROR, type(error).__name__))
    except BaseException:  # every request was aborted
      reserved.add_done_callback(lambda done: self._release(done, None, 0))
      raise
    reserved.add_done_callback(lambda done: self._release(done, fetch.requests[0], num_cached_tokens))
    for request in fetch.requests:
      del self._fetches[request.id]
      with contextlib.suppress(Unavailable):  # the engine has failed, which ends every generation
        self.engine.take_over(request)

  def _time_limit(self, request: Request) -> float:
    ends = [end - self.now() for end in (request.deadline, request.queue_deadline) if end is not None]
    if self.config.queue_timeout_s:
      ends.append(self.config.queue_timeout_s)
    return max(0.0, min([self._options.remote_prefill_timeout_s, *(_SHARE_OF_DEADLINE * end for end in ends)]))

  def _release(
    self, reserved: concurrent.futures.Future[PrefixHold | int], waiting: Request | None, num_cached_tokens: int
  ) -> None:
    """Releases what `hold_prefix` reserved: now, or when `waiting` has been admitted. The engine's thread may call."""
    hold = None if reserved.exception() is not None else reserved.result()
    if isinstance(hold, PrefixHold):
      if waiting is None:
        self.engine.release_hold(hold)
      else:
        self.engine.release_with(waiting, hold, max(num_cached_tokens, hold.num_cached * self.config.block_size))

  async def _fetch_prefix(
    self, request: Request, peer: PrefillPeer, reserved: concurrent.futures.Future[PrefixHold | int]
  ) -> int:
    """Fills the prefix cache from a peer.

    Args:
      request: waits for the prefix.
      peer: computes it.
      reserved: from `hold_prefix`.

    Returns:
      The tokens of the prompt that one of the two prefix caches had.

    Raises:
      PeerFailed: less than the whole prefix has arrived.
    """
    hold = await asyncio.wrap_future(reserved)
    block_size = self.config.block_size
    if isinstance(hold, int):
      if hold >= self._least_blocks:
        raise PeerFailed(Recompute.NO_CAPACITY, f"{hold} blocks are not free")
      return request.num_prompt_tokens  # all but a few tokens are cached here
    offer = await peer.request_prefix(request, len(hold.blocks), hold.num_cached, block_size)
    number = 0
    try:
      started = time.monotonic()
      async for piece in peer.pull_pieces(offer):
        if not await asyncio.wrap_future(self.engine.write_piece(hold, number, piece)):
          raise PeerFailed(Recompute.NO_CAPACITY, "running requests needed the blocks")
        number += 1
        self._counts.num_pieces[offer.transport] += 1
        self._counts.num_bytes += self.engine.layout.num_bytes
      self._counts.num_fetched += 1
      self._counts.seconds += time.monotonic() - started
    finally:
      self._end_lease(peer, offer, number)
    return max(hold.num_cached * block_size, offer.num_cached_tokens)

  def _end_lease(self, peer: PrefillPeer, offer: Offer, num_taken: int) -> None:
    task = asyncio.ensure_future(peer.release(offer, num_taken))
    self._releases.add(task)
    task.add_done_callback(self._releases.discard)

  def _note_failure(self, peer: PrefillPeer, error: PeerFailed) -> None:
    self._counts.recomputed[error.reason] += 1
    if error.reason is not Recompute.NO_CAPACITY:
      peer.pause(error.reason)
    now = time.monotonic()
    if now - self._logged_at > _LOG_PERIOD_S:
      self._logged_at = now
      _log.warning("prefill server %s: %s (%s); prompts are computed here", peer.address, error, error.reason.value)


def _is_address(text: str) -> bool:
  host, _, port = text.rpartition(":")
  return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
