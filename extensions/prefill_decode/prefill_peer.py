"""A decode server's connection to one prefill server: requests, pieces, releases. Decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
import concurrent.futures
import contextlib
import dataclasses
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import numpy as np
import xxhash

from engine.device.block_transfer import Piece, copy_bytes
from engine.request import Request
from extensions.prefill_decode.jax_transport import SenderAddress
from extensions.prefill_decode.piece_pulls import PiecePuller, PullFailed
from extensions.prefill_decode.pieces import CorruptPiece, PeerMemory, PieceLayout, check_digest, machine_id
from extensions.prefill_decode.prefill_service import SECRET_KEY
from extensions.prefill_decode.proto import transfer_pb2 as pb
from extensions.prefill_decode.proto import transfer_pb2_grpc as pb_grpc
from extensions.prefill_decode.transfer_counts import Recompute, Transport

# A peer that does not answer a health check for this long is left, although its connection stands: it may be stopped.
_SILENCE_S = 2.0
_CHECK_PERIOD_S = 0.5
_PAUSES_S = {Recompute.UNREACHABLE: 1.0, Recompute.LATE: 1.0, Recompute.REFUSED: 0.2, Recompute.MISMATCH: 30.0}
_REASONS = {
  grpc.StatusCode.UNAVAILABLE: Recompute.UNREACHABLE,
  grpc.StatusCode.DEADLINE_EXCEEDED: Recompute.LATE,
  grpc.StatusCode.RESOURCE_EXHAUSTED: Recompute.REFUSED,
  grpc.StatusCode.UNAUTHENTICATED: Recompute.MISMATCH,
  grpc.StatusCode.FAILED_PRECONDITION: Recompute.MISMATCH,
  grpc.StatusCode.UNIMPLEMENTED: Recompute.MISMATCH,
  grpc.StatusCode.INVALID_ARGUMENT: Recompute.CORRUPT,
}


class PeerFailed(Exception):
  """The prefix does not come from this peer. The text is for the log."""

  def __init__(self, reason: Recompute, text: str):
    super().__init__(text)
    self.reason = reason


@dataclasses.dataclass(frozen=True)
class Offer:
  """A peer's lease of a prefix.

  Attributes:
    lease_id, pieces, num_cached_tokens: see PrefillResponse.
    ends_at: when the lease ends, in time.monotonic().
    memory: None for a peer on another machine.
    sender: where the pieces are offered, if they are.
  """

  lease_id: str
  pieces: Sequence[pb.Piece]
  num_cached_tokens: int
  ends_at: float
  memory: PeerMemory | None
  sender: SenderAddress | None

  @property
  def transport(self) -> Transport:
    """How its pieces come."""
    if self.sender is not None:
      return Transport.JAX
    return Transport.GRPC if self.memory is None else Transport.SHARED_MEMORY


class PrefillPeer:
  """One prefill server. Belongs to the event loop; copies and checks pieces on a thread.

  Attributes:
    address: HOST:PORT.
    num_waiting: prompts that it computes for this server.
  """

  def __init__(
    self,
    address: str,
    secret: str,
    identity: str,
    layout: PieceLayout,
    credentials: grpc.ChannelCredentials | None,
    thread: concurrent.futures.Executor,
    puller: PiecePuller | None,
    may_share_memory: bool,
  ):
    """Args:
    address: HOST:PORT.
    secret: of both servers.
    identity: of this server; see `describe_identity`.
    layout: of a piece.
    credentials: for TLS; None: plain text.
    thread: copies and checks pieces.
    puller: of this peer, with --kv_transport=jax.
    may_share_memory: whether pieces may come through shared memory.
    """
    self.address = address
    self.num_waiting = 0
    self._metadata = ((SECRET_KEY, secret),)
    self._identity, self._layout, self._thread = identity, layout, thread
    self._puller = puller
    self._machine = machine_id() if may_share_memory else ""
    options = (
      ("grpc.max_send_message_length", 16 << 20),
      ("grpc.initial_reconnect_backoff_ms", 200),
      ("grpc.min_reconnect_backoff_ms", 200),
      ("grpc.max_reconnect_backoff_ms", 2000),
    )
    self._channel = (
      grpc.aio.insecure_channel(address, options)
      if credentials is None
      else grpc.aio.secure_channel(address, credentials, options)
    )
    self._stub = pb_grpc.TransferServiceStub(self._channel)
    self._health: Any = health_pb2_grpc.HealthStub(self._channel)  # its methods have no stubs
    self._memory: PeerMemory | None = None
    self._resumes_at = 0.0  # time.monotonic(); before it nothing is sent

  @property
  def is_paused(self) -> bool:
    """Whether it failed a moment ago."""
    return time.monotonic() < self._resumes_at

  def pause(self, reason: Recompute) -> None:
    """Lets it rest after a failure."""
    self._resumes_at = time.monotonic() + _PAUSES_S.get(reason, 0.0)

  async def request_prefix(self, request: Request, num_blocks: int, num_held: int, block_size: int) -> Offer:
    """Has a prompt's first `num_blocks` blocks computed, and blocks from `num_held` on leased.

    Raises:
      PeerFailed: the peer is gone, silent, or refuses.
    """
    message = pb.PrefillRequest(
      identity=self._identity,
      token_ids=request.prompt_token_ids[: num_blocks * block_size],
      num_held_blocks=num_held,
      tenant=request.tenant,
      cache_salt=request.cache_salt,
      priority=request.priority,
      machine=self._machine,
      offers=self._puller is not None and not self._puller.is_given_up,
    )
    self.num_waiting += 1
    try:
      response = await self._watched(self._stub.Prefill(message, metadata=self._metadata))
    finally:
      self.num_waiting -= 1
    memory = self._open_memory(response.shared_memory) if response.HasField("shared_memory") else None
    return Offer(
      response.lease_id,
      response.pieces,
      response.num_cached_tokens,
      time.monotonic() + response.lease_s,
      memory,
      SenderAddress(response.transfer_address, response.data_address) if response.transfer_address else None,
    )

  async def pull_pieces(self, offer: Offer) -> AsyncIterator[Piece]:
    """Yields the pieces of an offer in order, each on the device and with the right digest.

    Raises:
      PeerFailed: a piece does not come, or is corrupt.
    """
    loop = asyncio.get_running_loop()
    for number, piece in enumerate(offer.pieces):
      try:
        if self._puller is not None and offer.sender is not None:
          if time.monotonic() > offer.ends_at:
            raise PeerFailed(Recompute.LATE, "the lease ended before its pieces were taken")
          yield await self._watched(self._puller.pull_piece(offer.sender, piece.uuid, piece.digest))
        elif offer.memory is not None:
          yield await loop.run_in_executor(self._thread, self._read_shared, offer.memory, piece)
        else:
          data = await self._watched(self._read_remote(offer, number))
          yield await loop.run_in_executor(self._thread, self._check_remote, data, piece)
      except CorruptPiece as error:
        raise PeerFailed(Recompute.CORRUPT, str(error)) from None
      except PullFailed as error:
        raise PeerFailed(Recompute.LATE if error.is_late else Recompute.UNREACHABLE, str(error)) from None

  def release(self, offer: Offer, num_taken: int) -> Awaitable[object]:
    """Ends a lease, of which `num_taken` pieces came. The peer would end it by itself, so errors do not matter."""

    async def call() -> None:
      with contextlib.suppress(grpc.aio.AioRpcError):
        await self._stub.Release(
          pb.ReleaseRequest(lease_id=offer.lease_id, num_taken=num_taken),
          metadata=self._metadata,
          timeout=_SILENCE_S,
        )

    return call()

  def _open_memory(self, offered: pb.SharedMemory) -> PeerMemory:
    if self._memory is None or self._memory.nonce != offered.nonce:
      try:
        self._memory = PeerMemory(offered.pid, offered.fd, offered.nonce, offered.size)
      except CorruptPiece as error:
        raise PeerFailed(Recompute.CORRUPT, str(error)) from None
    return self._memory

  def _read_shared(self, memory: PeerMemory, piece: pb.Piece) -> Piece:
    return self._layout.from_bytes(memory.read_piece(piece.offset, piece.digest, self._layout.num_bytes))

  async def _read_remote(self, offer: Offer, number: int) -> list[bytes]:
    call = self._stub.ReadPiece(pb.ReadPieceRequest(lease_id=offer.lease_id, number=number), metadata=self._metadata)
    return [part.data async for part in call]

  def _check_remote(self, parts: list[bytes], piece: pb.Piece) -> Piece:
    data = np.empty(self._layout.num_bytes, np.uint8)
    if sum(map(len, parts)) != len(data):
      raise CorruptPiece(f"a piece of KV has {sum(map(len, parts))} bytes instead of {len(data)}")
    start, hasher = 0, xxhash.xxh3_64()
    for part in parts:
      copy_bytes(memoryview(part), memoryview(data)[start : start + len(part)], hasher)
      start += len(part)
    check_digest(hasher.intdigest(), piece.digest)
    return self._layout.from_bytes(data)

  async def _watched[T](self, call: Awaitable[T]) -> T:
    """Returns the result of a call, which ends early if the peer is silent. Raises PeerFailed."""
    work = asyncio.ensure_future(call)
    try:
      while not (await asyncio.wait((work,), timeout=_CHECK_PERIOD_S))[0]:
        await self._health.Check(health_pb2.HealthCheckRequest(), timeout=_SILENCE_S)
      return work.result()
    except grpc.aio.AioRpcError as error:
      details = " ".join((error.details() or "").split())
      raise PeerFailed(_REASONS.get(error.code(), Recompute.ERROR), f"{error.code().name}: {details}") from None
    finally:
      work.cancel()
