"""A prefill server's side of `--kv_transport=jax`: pieces that peers may pull from its device. Decides nothing."""

from collections.abc import Sequence
import datetime
import secrets

from engine.batch import Runner
from engine.device.block_transfer import Piece, piece_of
from engine.engine import Clock, Emit
from engine.scheduler import Scheduler
from extensions.prefill_decode.jax_transport import TransferEnd
from extensions.prefill_decode.prefill_engine import PrefillEngine
from extensions.prefill_decode.proto import transfer_pb2 as pb

# JAX drops the fraction of the second at which an offer ends. It takes a time of the wall clock: whoever sets that ends
# an offer early or late, and a pull may fail.
ROUNDING_S = 1.0


class OfferingEngine(PrefillEngine):
  """A PrefillEngine with an end of JAX's transfers. Attributes: transfers: that end."""

  def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit):
    super().__init__(scheduler, runner, clock, emit)
    self.transfers = TransferEnd(piece_of(self._model_runner.spec))


class PieceOffers:
  """Offers pieces for a time. An offer ends when it has been pulled, or by itself; nothing else withdraws it.

  Attributes:
    address: where peers pull.
  """

  def __init__(self, transfers: TransferEnd, address: str, lease_s: float):
    """Starts the transfer server. Raises ConfigError: the address cannot be used.

    Args:
      transfers: has no server yet.
      address: --kv_transport_address.
      lease_s: seconds for which a piece can be pulled; its arrays are gone at most ROUNDING_S later.
    """
    self._transfers, self._lease_s = transfers, lease_s
    self.address = transfers.start_sender(address)

  def offer_pieces(self, pieces: Sequence[Piece]) -> list[pb.Piece]:
    """Offers pieces, and returns their digests and numbers. Waits for the device."""
    offered = []
    for piece in pieces:
      digest, uuid = self._transfers.digest_piece(piece), secrets.randbits(63)
      self._offer_piece(uuid, piece)
      offered.append(pb.Piece(digest=digest, uuid=uuid))
    return offered

  def _offer_piece(self, uuid: int, piece: Piece) -> None:
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self._lease_s + ROUNDING_S)
    self._transfers.server.await_pull(uuid, list(piece), timeout=ends)
