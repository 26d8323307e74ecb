"""A server whose transfers go wrong in the way of the variable FAULT; run with -m.

FAULT=corrupt flips one bit of each leased piece after its digest, in shared memory; `remote` makes the server answer as
if it were on another machine; `remote-corrupt` does both; `unsteady` flips the bit in every second piece by chance, and
begins up to 0.4 s late; `remote-unsteady` is both; `short` sends half a piece; `slow` begins after 60 s;
`expired` ends each lease at once; `mismatch` has other weights. A decode server with `keep` never releases a lease.
With --kv_transport=jax, `flipped` flips one bit of each offered piece after its digest, `lost` never offers it, and
`jax-unsteady` flips the bit in every second piece by chance, and begins up to 0.4 s late.
"""

import asyncio
import os
import random

import jax
import numpy as np

from extensions.prefill_decode import piece_offers, prefill_engine, prefill_peer, prefill_service
from extensions.prefill_decode.pieces import PieceLayout
from server import main

FAULT = os.environ["FAULT"]


def corrupt_pieces() -> None:
  to_bytes = PieceLayout.to_bytes

  def flip(self, piece, target):
    digest = to_bytes(self, piece, target)
    target[len(target) // 2] ^= 1
    return digest

  PieceLayout.to_bytes = flip


def fault_offers(flips: float, losses: float) -> None:
  """Flips a bit of some offers, and leaves others out, by chance."""
  chance = random.Random(6)
  offer = piece_offers.PieceOffers._offer_piece

  def offer_some(self, uuid, piece):
    if chance.random() < losses:
      return
    if chance.random() < flips:
      leaf = np.array(piece[-1])
      leaf.reshape(-1).view(np.uint8)[chance.randrange(leaf.nbytes)] ^= 1 << chance.randrange(8)
      piece = (*piece[:-1], jax.device_put(leaf, piece[-1].sharding))
    offer(self, uuid, piece)

  piece_offers.PieceOffers._offer_piece = offer_some


def begin_late() -> None:
  chance = random.Random(7)
  prefill = prefill_service.TransferService.Prefill

  async def prefill_late(self, request, context):
    await asyncio.sleep(chance.uniform(0.0, 0.4))
    return await prefill(self, request, context)

  prefill_service.TransferService.Prefill = prefill_late


def be_unsteady() -> None:
  chance = random.Random(5)
  to_bytes = PieceLayout.to_bytes

  def flip_some(self, piece, target):
    digest = to_bytes(self, piece, target)
    if chance.random() < 0.5:
      target[chance.randrange(len(target))] ^= 1 << chance.randrange(8)
    return digest

  PieceLayout.to_bytes = flip_some


def be_elsewhere() -> None:
  prefill_service.machine_id = lambda: "another"


class Halved:
  """A call that sends half of each message."""

  def __init__(self, context):
    self._context = context

  async def write(self, message):
    await self._context.write(type(message)(data=message.data[: len(message.data) // 2]))


def send_half() -> None:
  be_elsewhere()
  read = prefill_service.TransferService.ReadPiece

  async def read_half(self, request, context):
    await read(self, request, Halved(context))

  prefill_service.TransferService.ReadPiece = read_half


def be_slow() -> None:
  prefill = prefill_service.TransferService.Prefill

  async def late(self, request, context):
    await asyncio.sleep(60)
    return await prefill(self, request, context)

  prefill_service.TransferService.Prefill = late


def end_leases() -> None:
  making = prefill_service.TransferService._make_offer

  def make_offer(self, *arguments):
    response = making(self, *arguments)
    self._expire_lease(response.lease_id)
    return response

  be_elsewhere()
  prefill_service.TransferService._make_offer = make_offer


def have_other_weights() -> None:
  describe = prefill_engine.describe_identity
  prefill_engine.describe_identity = lambda runner: describe(runner).replace("weights=", "weights=0")


def keep_leases() -> None:
  async def release(self, offer, num_taken):
    pass

  prefill_peer.PrefillPeer.release = release


FAULTS = {
  "keep": (keep_leases,),
  "corrupt": (corrupt_pieces,),
  "remote": (be_elsewhere,),
  "remote-corrupt": (be_elsewhere, corrupt_pieces),
  "unsteady": (be_unsteady, begin_late),
  "remote-unsteady": (be_elsewhere, be_unsteady, begin_late),
  "flipped": (lambda: fault_offers(flips=1.0, losses=0.0),),
  "lost": (lambda: fault_offers(flips=0.0, losses=1.0),),
  "jax-unsteady": (lambda: fault_offers(flips=0.5, losses=0.0), begin_late),
  "short": (send_half,),
  "slow": (be_slow,),
  "expired": (end_leases,),
  "mismatch": (have_other_weights,),
}

if __name__ == "__main__":
  for fault in FAULTS[FAULT]:
    fault()
  main.main()
