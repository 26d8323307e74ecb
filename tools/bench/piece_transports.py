"""Measures three ways of a KV piece from one process to another, and what faults of a peer do to JAX's way.

  python -m tools.bench.piece_transports
  python -m tools.bench.piece_transports --parts=rates --piece_mib=24 --pieces=16

Parts (--parts):

  rates    GB/s from a lease to verified arrays on the device: through shared memory, over gRPC, and by
           `jax.experimental.transfer` (--kv_transport=jax; docs/decisions/host-and-overlap.md)
  faults   what JAX's transfer server does when a puller stops, when the other side stops within a pull, when a pull
           names nothing, and when four zero bytes arrive; run it again with a new JAX

The other process holds the pieces. Each way checks a digest of each piece and fills arrays of the default device: XXH3
of its bytes, or, by JAX, the digest that devices compute. Both processes share the cores that this process may use.
"""

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import grpc
import jax
from jax.experimental import transfer
import numpy as np
import xxhash

from engine.device import mesh as mesh_lib
from engine.device.block_transfer import Piece, copy_bytes
from extensions.prefill_decode.jax_transport import SenderAddress, TransferEnd
from extensions.prefill_decode.piece_offers import PieceOffers
from extensions.prefill_decode.piece_pulls import PiecePuller
from extensions.prefill_decode.pieces import PeerMemory, PieceLayout, PieceMemory, check_digest
from extensions.prefill_decode.proto import transfer_pb2 as pb
from extensions.prefill_decode.proto import transfer_pb2_grpc as pb_grpc
from extensions.prefill_decode.transfer_counts import TransferCounts
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import ROOT, commit, machine

_PARTS = ("rates", "faults")
_MIB = 1 << 20
_CHUNK_BYTES = 1 << 20  # of a gRPC message, as in the transfer service
_GIVE_UP_S = 5.0
_STOP_DELAYS_S = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)


def make_layout(args: argparse.Namespace) -> tuple[list[jax.ShapeDtypeStruct], PieceLayout]:
  """Returns an abstract piece, bfloat16[16, values] a layer on the default device, and its layout."""
  one = mesh_lib.replicated(mesh_lib.make_mesh(jax.devices()[:1]))
  values = max(1, round(args.piece_mib * _MIB / args.layers / 32))
  leaves = [jax.ShapeDtypeStruct((16, values), jax.numpy.bfloat16, sharding=one)] * args.layers
  return leaves, PieceLayout(leaves)


def start_jax_server(args: argparse.Namespace) -> Any:
  """Returns JAX's transfer server of this process."""
  device = jax.devices()[0]
  return transfer.start_transfer_server(
    device.client, "127.0.0.1:0", ["127.0.0.1:0"], args.copies, args.copy_mib * _MIB
  )


class _Pieces(pb_grpc.TransferServiceServicer):
  """The part of the transfer service that sends pieces."""

  def __init__(self, memory: PieceMemory):
    self._memory = memory

  async def ReadPiece(self, request: pb.ReadPieceRequest, context: grpc.aio.ServicerContext) -> None:
    data = bytes(self._memory.slot(request.number))
    for start in range(0, len(data), _CHUNK_BYTES):
      await context.write(pb.ReadPieceResponse(data=data[start : start + _CHUNK_BYTES]))


async def hold_pieces(args: argparse.Namespace) -> None:
  """Is the other process: holds the pieces in all three ways, and obeys lines on its standard input."""
  _, layout = make_layout(args)
  memory = PieceMemory(layout.num_bytes, args.pieces * (layout.num_bytes + 4096))
  rng, digests = np.random.default_rng(0), []
  for slot in range(args.pieces):
    memory.slot(slot)[:] = rng.integers(0, 256, layout.num_bytes, np.uint8).tobytes()
    digests.append(xxhash.xxh3_64_intdigest(memory.slot(slot)))
  pieces = [layout.from_bytes(np.array(memory.slot(slot))) for slot in range(args.pieces)]
  server = grpc.aio.server()
  pb_grpc.add_TransferServiceServicer_to_server(_Pieces(memory), server)
  port = server.add_insecure_port("127.0.0.1:0")
  await server.start()
  jax_server, offers = start_jax_server(args), PieceOffers(TransferEnd(make_layout(args)[0]), "127.0.0.1:0", 3600.0)
  shared = {"pid": os.getpid(), "fd": memory.fd, "nonce": memory.nonce.hex(), "size": memory.size}
  offsets = [memory.offset(slot) for slot in range(args.pieces)]
  print(
    json.dumps(
      {
        "grpc": port,
        "jax": jax_server.address(),
        "sender": offers.address,
        "shared": shared,
        "offsets": offsets,
        "digests": digests,
      }
    ),
    flush=True,
  )
  loop, connections = asyncio.get_running_loop(), {}
  while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
    if words[0] == "lease":
      print(json.dumps([[each.uuid, each.digest] for each in offers.offer_pieces(pieces)]), flush=True)
      continue
    if words[0] == "offer":
      jax_server.await_pull(int(words[1]), list(pieces[int(words[2])]))
    else:  # pull, and never look at the result
      connection = connections.setdefault(words[1], jax_server.connect(words[1]))
      connections[words[2]] = connection.pull(int(words[2]), make_layout(args)[0])
    print("done", flush=True)


class PieceHolder:
  """The other process.

  Attributes:
    process: its handle.
    places: what it has said of its ports and pieces.
  """

  def __init__(self, args: argparse.Namespace):
    flags = [f"--{name}={getattr(args, name)}" for name in ("piece_mib", "layers", "pieces", "copies", "copy_mib")]
    self.process = subprocess.Popen(
      [sys.executable, "-m", "tools.bench.piece_transports", "--parts=holder", *flags],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    self.places = json.loads(self._read())

  def _read(self) -> str:
    assert self.process.stdout is not None
    return self.process.stdout.readline()

  def say(self, *words: object) -> str:
    """Sends a command, waits until it has been done, and returns the answer."""
    assert self.process.stdin is not None
    self.process.stdin.write(" ".join(map(str, words)) + "\n")
    self.process.stdin.flush()
    return self._read()

  def end(self) -> None:
    """Kills it."""
    self.process.kill()
    self.process.wait()


@contextlib.contextmanager
def running_holders(args: argparse.Namespace, count: int) -> Iterator[list[PieceHolder]]:
  """Runs other processes until the block ends."""
  holders: list[PieceHolder] = []
  try:
    for _ in range(count):
      holders.append(PieceHolder(args))
    yield holders
  finally:
    for holder in holders:
      holder.end()


def is_there(piece: Sequence[Any], limit_s: float = _GIVE_UP_S) -> bool:
  """Returns whether a pull has ended within a time, well or not."""
  give_up_at = time.monotonic() + limit_s
  while not all(leaf.is_ready() for leaf in piece):
    if time.monotonic() > give_up_at:
      return False
    time.sleep(0.0005)
  return True


def measure_rates(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the median rate of each way in GB/s, over rounds in turns."""
  leaves, layout = make_layout(args)
  with running_holders(args, 1) as [holder]:
    places = holder.places
    shared = places["shared"]
    memory = PeerMemory(shared["pid"], shared["fd"], bytes.fromhex(shared["nonce"]), shared["size"])
    end, sender, leased = TransferEnd(leaves), SenderAddress(*places["sender"]), []
    end.start_receiver("127.0.0.1:0")

    async def take_shared(number: int, digest: int) -> Piece:
      return layout.from_bytes(memory.read_piece(places["offsets"][number], digest, layout.num_bytes))

    async def take_remote(number: int, digest: int) -> Piece:
      data, start, hasher = np.empty(layout.num_bytes, np.uint8), 0, xxhash.xxh3_64()
      async for part in stub.ReadPiece(pb.ReadPieceRequest(number=number)):
        copy_bytes(memoryview(part.data), memoryview(data)[start : start + len(part.data)], hasher)
        start += len(part.data)
      check_digest(hasher.intdigest(), digest)
      return layout.from_bytes(data)

    async def take_jax(number: int, digest: int) -> Piece:
      return await puller.pull_piece(sender, *leased[number])

    async def time_pieces(take: Callable[[int, int], Any]) -> float:
      began = time.perf_counter()
      for number, digest in enumerate(places["digests"]):
        jax.block_until_ready(await take(number, digest))
      return args.pieces * layout.num_bytes / 1e9 / (time.perf_counter() - began)

    async def run() -> dict[str, list[float]]:
      nonlocal stub, puller
      puller = PiecePuller(end, "the holder", thread, TransferCounts())
      async with grpc.aio.insecure_channel(f"127.0.0.1:{places['grpc']}") as channel:
        stub = pb_grpc.TransferServiceStub(channel)
        ways = {"shared memory": take_shared, "gRPC": take_remote, "jax.experimental.transfer": take_jax}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds + 1):
          for name, take in ways.items():
            if take is take_jax:
              leased[:] = json.loads(holder.say("lease"))  # outside of the time, as leases are
            rates[name].append(await time_pieces(take))
        return rates

    stub: Any = None
    puller: Any = None
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      rates = asyncio.run(run())
  found = {f"{name} GB/s": statistics.median(each[1:]) for name, each in rates.items()}  # the first opens connections
  return {"piece bytes": layout.num_bytes, **found}


def try_faults(args: argparse.Namespace) -> dict[str, Any]:
  """Returns, for each fault, whether JAX's transfer server does what a server in production needs."""
  leaves, _ = make_layout(args)
  own = start_jax_server(args)
  found: dict[str, Any] = {}
  with running_holders(args, 2) as [holder, stopped]:
    connection = own.connect(holder.places["jax"])
    found["a pull of nothing ends by itself"] = is_there(tuple(connection.pull(1, leaves)))
    holder.say("offer", 2, 0)
    found["others on its connection go on"] = is_there(tuple(connection.pull(2, leaves)))
    for uuid in range(10, 10 + args.pieces):
      holder.say("offer", uuid, uuid - 10)
      stopped.say("pull", holder.places["jax"], uuid)
    stopped.process.send_signal(signal.SIGSTOP)
    holder.say("offer", 3, 0)
    beside = tuple(own.connect(holder.places["jax"]).pull(3, leaves))
    found["a puller that stops leaves others alone"] = is_there(beside)
    stopped.end()
    # Bytes that are no frame.
    host, _, port = holder.places["jax"].rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
      raw.sendall(bytes(4))
      with contextlib.suppress(subprocess.TimeoutExpired):
        holder.process.wait(_GIVE_UP_S)
    found["four zero bytes leave the process alive"] = holder.process.poll() is None
  given_up = [give_up_pulls(args, own, delay_s) for delay_s in _STOP_DELAYS_S]
  found["pulls that could be given up when the other side stopped"] = f"{sum(given_up)} of {len(given_up)}"
  return found


def give_up_pulls(args: argparse.Namespace, own: Any, delay_s: float) -> bool:
  """Returns whether all pulls from a process that stops after `delay_s` end when their connection is given up."""
  leaves, _ = make_layout(args)
  with running_holders(args, 1) as [holder]:
    connection = own.connect(holder.places["jax"])
    for uuid in range(args.pieces):
      holder.say("offer", uuid, uuid)
    pulls = [tuple(connection.pull(uuid, leaves)) for uuid in range(args.pieces)]
    time.sleep(delay_s)
    holder.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    connection._poison_connection()
    endings = [is_there(pull) for pull in pulls]
    return all(endings)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench.piece_transports", __doc__)
  parser.add_argument("--parts", default=",".join(_PARTS), help="which parts to run, separated by commas")
  parser.add_argument("--piece_mib", type=positive_float, default=6.0, help="size of a piece")
  parser.add_argument("--layers", type=positive_int, default=12, help="arrays of a piece")
  parser.add_argument("--pieces", type=positive_int, default=8, help="pieces of a prompt")
  parser.add_argument("--rounds", type=positive_int, default=7, help="rates: rounds, in turns")
  parser.add_argument("--copies", type=positive_int, default=8, help="faults: JAX's copies at once")
  parser.add_argument("--copy_mib", type=positive_int, default=16, help="faults: JAX's host memory for each of them")
  args = parser.parse_args(arguments)
  if args.parts == "holder":  # the other process
    asyncio.run(hold_pieces(args))
    return 0
  parts = args.parts.split(",")
  if unknown := set(parts) - set(_PARTS):
    parser.error(f"--parts={args.parts}: {', '.join(sorted(unknown))} is none of {', '.join(_PARTS)}")
  found = {part: {"rates": measure_rates, "faults": try_faults}[part](args) for part in parts}
  print(json.dumps({"commit": commit(), "machine": machine(), "jax": jax.__version__, **found}, indent=2))
  return 0


if __name__ == "__main__":
  sys.exit(main())
