"""Serves sluice.transfer.v1 on a prefill server: runs prompts, and leases copies of their KV blocks.

A lease ends when the caller releases it, or by itself. Its pieces are in memory of a fixed size, apart from the pool:
so a caller that is gone costs neither blocks nor memory for longer than the lease.
"""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import hmac
import os
import secrets

import grpc

from engine.adapters import AdapterInfo
from engine.device.block_transfer import PIECE_BLOCKS, Piece
from engine.engine import Engine
from engine.errors import InvalidRequest, Overloaded
from engine.request import Request
from engine.sampling_params import SamplingParams
from extensions.prefill_decode.identity import add_transport, describe_difference
from extensions.prefill_decode.piece_offers import ROUNDING_S, OfferingEngine, PieceOffers
from extensions.prefill_decode.pieces import PieceMemory, machine_id
from extensions.prefill_decode.prefill_engine import PrefillEngine
from extensions.prefill_decode.proto import transfer_pb2 as pb
from extensions.prefill_decode.proto import transfer_pb2_grpc as pb_grpc
from extensions.prefill_decode.transfer_counts import TransferCounts
from server.errors import NotConfigured, Unauthenticated
from server.generation.adapter_loader import AdapterLoader
from server.generation.engine_client import LocalEngine
from server.generation.request_validation import GenerationCall
from server.generation.serving_state import ServingState
from server.host_options import HostOptions
from server.rpc.call_interceptor import current_call

TRANSFER_SERVICE = "sluice.transfer.v1.TransferService"
SECRET_KEY = "x-sluice-transfer-secret"
_CHUNK_BYTES = 1 << 20


class PrefillClient(LocalEngine):
  """The engine of a prefill server for its front end, which takes no requests but the transfer service's.

  Attributes:
    offers: pieces that peers may pull, with --kv_transport=jax.
  """

  def __init__(
    self,
    engine: Engine,
    compiles_after_ready: Callable[[], int],
    adapter_loader: AdapterLoader | None,
    options: HostOptions,
  ):
    """Starts JAX's transfer server, if it is wanted. Raises ConfigError if that is impossible."""
    super().__init__(engine, compiles_after_ready, adapter_loader)
    assert isinstance(engine, PrefillEngine), "the composition chooses both"
    self.engine = engine
    self.offers: PieceOffers | None = None
    if isinstance(engine, OfferingEngine):
      self.offers = PieceOffers(engine.transfers, options.kv_transport_address, options.lease_timeout_s)

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    if not self.engine.is_export(name):
      raise NotConfigured(
        "role=prefill: this server only computes prompts for decode servers; send the request to a server with "
        "--role=decode, or without --role"
      )
    await super().submit(owner, name, requests)

  def adapters(self) -> Sequence[AdapterInfo]:
    return ()


@dataclasses.dataclass
class _Lease:
  """Slots of memory, and the timer that frees them. Released offers last until then all the same."""

  slots: list[int]
  expiry: asyncio.TimerHandle
  is_offered: bool
  is_released: bool = False


class TransferService(pb_grpc.TransferServiceServicer):
  """Implements sluice.transfer.v1. Belongs to the event loop."""

  def __init__(self, state: ServingState, options: HostOptions, secret: str, counts: TransferCounts):
    """Args:
    state: admits requests.
    options: limits of leases.
    secret: what callers must send.
    counts: counts leases.
    """
    self._state = state
    self._options = options
    self._secret = secret.encode()
    self._counts = counts
    self._machine = machine_id()
    self._memory: PieceMemory | None = None
    self._leases: dict[str, _Lease] = {}
    # Copies of one prompt at a time: more would take the cores of the prefill.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lease")

  def register(self, server: grpc.aio.Server) -> None:
    """Adds the service to a server that has not started."""
    pb_grpc.add_TransferServiceServicer_to_server(self, server)

  async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> pb.PrefillResponse:
    self._check_secret()
    with self._state.admit() as backend:
      client = backend.engine
      assert isinstance(client, PrefillClient), "the composition registers this service for it alone"
      engine = client.engine
      own = add_transport(engine.identity, self._options.kv_transport)
      difference = describe_difference(own, request.identity)
      if difference:
        raise NotConfigured(
          f"the servers cannot exchange KV: {difference}; start both with the same model and settings"
        )
      first, stop = _check_blocks(request, engine.config.block_size)
      memory = self._require_memory(engine)
      try:
        slots = memory.take_slots(-(-(stop - first) // PIECE_BLOCKS))
      except Overloaded:
        self._counts.num_refused += 1
        raise
      offers = client.offers if request.offers else None
      loop = asyncio.get_running_loop()
      name = f"kv-{secrets.token_hex(16)}"
      pieces = engine.expect_export(name, first, stop)
      copy: asyncio.Future[list[pb.Piece]] | None = None
      try:
        call = GenerationCall(
          request_id=name,
          prompt_token_ids=tuple(request.token_ids),
          params=(SamplingParams(max_tokens=1, temperature=0.0),),
          stop_strings=(),
          return_text=False,
          return_token_ids=False,
          skip_special_tokens=True,
          priority=request.priority,
          queue_timeout_s=None,
          cache_salt=request.cache_salt,
          tenant=request.tenant,
        )
        generation = await backend.generations.start_generation(call, context.time_remaining())
        try:
          await generation.wait_ended()
        finally:
          backend.generations.close_generation(generation)
        if offers is not None:  # the slots only count the device's memory
          copy = loop.run_in_executor(self._thread, offers.offer_pieces, pieces.result())
        else:
          copy = loop.run_in_executor(self._thread, self._copy_pieces, engine, memory, pieces.result(), slots)
        leased = await asyncio.shield(copy)
      except BaseException:
        if copy is None:
          memory.give_back(slots)
        else:  # the thread may still write to them, and offers stay
          held_s = 0.0 if offers is None else self._options.lease_timeout_s + ROUNDING_S
          copy.add_done_callback(lambda _: loop.call_later(held_s, memory.give_back, slots))
        raise
      finally:
        engine.forget_export(name)
    response = self._make_offer(request, memory, slots, leased, offers)
    response.num_cached_tokens = generation.outputs[0].num_cached_tokens
    return response

  async def ReadPiece(self, request: pb.ReadPieceRequest, context: grpc.aio.ServicerContext) -> None:
    self._check_secret()
    lease, memory = self._leases.get(request.lease_id), self._memory
    if lease is None or memory is None or not 0 <= request.number < len(lease.slots):
      raise InvalidRequest("names no piece of a live lease; compute the prompt yourself", field="lease_id")
    data = bytes(memory.slot(lease.slots[request.number]))  # of this lease, even if it ends meanwhile
    for start in range(0, len(data), _CHUNK_BYTES):
      await context.write(pb.ReadPieceResponse(data=data[start : start + _CHUNK_BYTES]))

  async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseResponse:
    self._check_secret()
    lease = self._leases.get(request.lease_id)
    if lease is None or not lease.is_offered or request.num_taken >= len(lease.slots):
      self._end_lease(request.lease_id)
    else:  # nothing withdraws the other offers
      lease.is_released = True
      self._free_slots(lease, max(0, request.num_taken))
    return pb.ReleaseResponse()

  def _check_secret(self) -> None:
    given = current_call().metadata.get(SECRET_KEY, "")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), self._secret):
      raise Unauthenticated(
        "the transfer secret is missing or another; give decode and prefill servers the same --transfer_secret_file"
      )

  def _require_memory(self, engine: PrefillEngine) -> PieceMemory:
    if self._memory is None:
      self._memory = PieceMemory(engine.layout.num_bytes, self._options.max_lease_mb << 20)
    return self._memory

  def _copy_pieces(
    self, engine: PrefillEngine, memory: PieceMemory, pieces: list[Piece], slots: Sequence[int]
  ) -> list[pb.Piece]:
    """Copies pieces into slots, and returns their digests and places. Runs on the thread."""
    return [
      pb.Piece(digest=engine.layout.to_bytes(piece, memory.slot(slot)), offset=memory.offset(slot))
      for piece, slot in zip(pieces, slots, strict=True)
    ]

  def _make_offer(
    self,
    request: pb.PrefillRequest,
    memory: PieceMemory,
    slots: list[int],
    pieces: list[pb.Piece],
    offers: PieceOffers | None,
  ) -> pb.PrefillResponse:
    lease_id, lease_s = secrets.token_hex(16), self._options.lease_timeout_s
    held_s = lease_s if offers is None else lease_s + ROUNDING_S
    expiry = asyncio.get_running_loop().call_later(held_s, self._expire_lease, lease_id)
    self._leases[lease_id] = _Lease(slots, expiry, offers is not None)
    self._counts.num_leases += 1
    self._counts.num_leased_pieces += len(slots)
    response = pb.PrefillResponse(lease_id=lease_id, lease_s=lease_s, pieces=pieces)
    if offers is not None:
      response.transfer_address, response.data_address = offers.address
    elif request.machine == self._machine and self._options.kv_transport != "grpc":
      response.shared_memory.CopyFrom(
        pb.SharedMemory(pid=os.getpid(), fd=memory.fd, nonce=memory.nonce, size=memory.size)
      )
    return response

  def _expire_lease(self, lease_id: str) -> None:
    self._counts.num_expired += not self._leases[lease_id].is_released
    self._end_lease(lease_id)

  def _end_lease(self, lease_id: str) -> None:
    lease = self._leases.pop(lease_id, None)
    if lease is not None:
      lease.expiry.cancel()
      self._free_slots(lease, len(lease.slots))

  def _free_slots(self, lease: _Lease, count: int) -> None:
    """Frees the first `count` slots of a lease."""
    assert self._memory is not None, "a lease has slots of it"
    self._counts.num_leased_pieces -= count
    self._memory.give_back(lease.slots[:count])
    del lease.slots[:count]


def _check_blocks(request: pb.PrefillRequest, block_size: int) -> tuple[int, int]:
  """Returns the blocks to lease, [first, stop). Raises InvalidRequest."""
  stop, rest = divmod(len(request.token_ids), block_size)
  if rest or not stop:
    raise InvalidRequest(
      f"has {len(request.token_ids)} entries; send whole blocks of {block_size} tokens", field="token_ids"
    )
  if not 0 <= request.num_held_blocks < stop:
    raise InvalidRequest(
      f"={request.num_held_blocks} of {stop} blocks leaves none to send; send 0 to {stop - 1}", field="num_held_blocks"
    )
  return request.num_held_blocks, stop
