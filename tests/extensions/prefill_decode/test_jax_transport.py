"""KV by JAX's transfer server: digests, offers and pulls in one process, then servers as processes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
import itertools
import random
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device import mesh as mesh_lib
from extensions.prefill_decode import piece_pulls
from extensions.prefill_decode.jax_transport import TransferEnd, digest_leaf
from extensions.prefill_decode.piece_offers import PieceOffers
from extensions.prefill_decode.piece_pulls import PiecePuller, PullFailed
from extensions.prefill_decode.pieces import CorruptPiece
from extensions.prefill_decode.transfer_counts import TransferCounts
from server.client import Client
from tests.extensions.prefill_decode.conftest import Server
from tests.extensions.prefill_decode.test_two_servers import _SHARED, answers, prefill_server
from tests.server.router.router_harness import wait_until

JAX = "--kv_transport=jax"
_WHOLE = mesh_lib.replicated(mesh_lib.make_mesh(jax.devices()[:1]))


def make_leaves(seed: int) -> list[np.ndarray]:
  """A piece of four types, with -0.0 and a NaN."""
  values = np.random.default_rng(seed).standard_normal((16, 2, 50)).astype(np.float32)
  values[0, 0, :2] = (-0.0, np.nan)
  integers = np.random.default_rng(seed).integers(-128, 128, (16, 7), np.int8)
  return [values, values.astype(jnp.bfloat16), integers, values.astype(jnp.float8_e4m3fn)]


def put(leaves: list[np.ndarray]) -> tuple[jax.Array, ...]:
  return tuple(jax.device_put(leaf, _WHOLE) for leaf in leaves)


def make_end() -> TransferEnd:
  return TransferEnd([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_WHOLE) for leaf in put(make_leaves(0))])


def test_a_digest_finds_flipped_and_moved_values():
  """Two flips of one bit in two words cancel in a plain sum; here they do not, and neither do values that swap."""
  digest = jax.jit(digest_leaf)
  chance, seen = random.Random(3), {}
  for number, good in enumerate(make_leaves(0)):
    seen[tuple(np.asarray(digest(good)).tolist())] = good.tobytes()
    for trial in range(60):
      leaf = make_leaves(0)[number]
      data, flat, size = leaf.reshape(-1).view(np.uint8), leaf.reshape(-1), leaf.itemsize
      first, second = sorted(chance.sample(range(leaf.size), 2))
      match trial % 3:
        case 0:
          data[chance.randrange(data.size)] ^= 1 << chance.randrange(8)
        case 1:  # the top bit of two values
          data[[size * first + size - 1, size * second + size - 1]] ^= 128
        case 2:
          if flat[first] == flat[second]:
            continue
          flat[[first, second]] = flat[[second, first]]
      assert leaf.tobytes() != good.tobytes()
      found = tuple(np.asarray(digest(leaf)).tolist())
      assert seen.setdefault(found, leaf.tobytes()) == leaf.tobytes()  # chance may do the same twice
  assert len({first for first, _ in seen}) == len({second for _, second in seen}) == len(seen)  # each sum by itself


def test_a_digest_of_a_piece_depends_on_the_order_of_its_layers():
  leaves = [np.full((4, 3), number, np.float32) for number in range(3)]
  end = TransferEnd([jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=_WHOLE)] * 3)
  orders = itertools.permutations(put(leaves))
  assert len({end.digest_piece(tuple(order)) for order in orders}) == 6


def test_pieces_come_intact_or_not_at_all(monkeypatch, free_port):
  """Good, flipped, lost and expired offers; pulls that hang cost a connection, and the third the transport."""
  monkeypatch.setattr(piece_pulls, "_LONGEST_PULL_S", 1.0)
  sender, receiver, counts = make_end(), make_end(), TransferCounts()
  receiver.start_receiver("127.0.0.1:0")
  offers = PieceOffers(sender, "127.0.0.1:0", 60.0)

  async def run() -> None:
    with ThreadPoolExecutor(1) as thread:
      puller = PiecePuller(receiver, "peer", thread, counts)

      async def pull(offered, digest: int | None = None) -> tuple[jax.Array, ...]:
        return await puller.pull_piece(offers.address, offered.uuid, offered.digest if digest is None else digest)

      pieces = [put(make_leaves(seed)) for seed in range(5)]
      offered = offers.offer_pieces(pieces)
      assert len({each.uuid for each in offered}) == len({each.digest for each in offered}) == 5
      for arrived, piece in zip(await asyncio.gather(*map(pull, offered[:3])), pieces, strict=False):
        for found, sent in zip(arrived, piece, strict=True):
          assert found.dtype == sent.dtype and np.asarray(found).tobytes() == np.asarray(sent).tobytes()
      with pytest.raises(CorruptPiece, match="arrived with the digest"):
        await pull(offered[3], offered[3].digest ^ 1)
      with pytest.raises(PullFailed, match="a pull did not end within 1 s") as failed:
        await pull(offered[3])  # it has been pulled, so it is gone
      assert failed.value.is_late and counts.num_hung == 1
      await pull(offered[4])  # over another connection
      monkeypatch.setattr(offers, "_lease_s", 0.0)
      [expired] = offers.offer_pieces(pieces[:1])
      await asyncio.sleep(1.5)
      with pytest.raises(PullFailed):
        await pull(expired)
      # A data port that is closed, or not for this address, would abort the process.
      for data in (f"127.0.0.1:{free_port}", "192.0.2.1:9"):
        with pytest.raises(PullFailed, match=f"{data} cannot be reached from 127.0.0.1: ") as failed:
          await puller.pull_piece(offers.address._replace(data=data), 1, 1)
        assert not failed.value.is_late
      # The request is gone before its pull ends.
      waiting = asyncio.create_task(pull(expired))
      await asyncio.sleep(0.1)
      waiting.cancel()
      while not puller.is_given_up:
        await asyncio.sleep(0.05)
      assert counts.num_hung == 3
      with pytest.raises(PullFailed, match="earlier pulls did not end"):
        await pull(expired)

  asyncio.run(run())


def decode_server(folder, port: int, *flags: str, name: str = "decode-jax") -> Server:
  peer = f"--prefill_servers=127.0.0.1:{port}"
  return Server(folder, name, "--role=decode", peer, "--min_remote_prefill_tokens=32", *flags)


@pytest.mark.long
def test_tokens_are_those_of_one_server(folder, free_port):
  """And blocks that the decode server has are left out."""
  decode = decode_server(folder, free_port, JAX)
  prefill = prefill_server(folder, free_port, flags=(JAX,))
  decode.wait_ready()
  with Client(decode.address) as client:
    prefill.wait_ready()
    together = answers(client, "together")
    counts = decode.counts()
    assert counts["prompts"] >= 4 and counts["jax"] >= 4
    assert not counts.keys() & {"shared_memory", "grpc", "hung_pulls", "late", "corrupt", "error"}
    client.generate(_SHARED, max_tokens=2, cache_salt="held")
    before = decode.counts()["jax"]
    longer = [*_SHARED, *range(3, 255)]
    client.generate(longer, max_tokens=2, cache_salt="held")
    # The prompt has 25 whole blocks, of which 9 are here; a piece has 16.
    assert decode.counts()["jax"] == before + 1
    wait_until(lambda: "leased_pieces" not in prefill.counts())
    assert prefill.counts()["leases"] == decode.counts()["prompts"]
    prefill.kill()
    assert answers(client, "alone") == together
    load = client.load()
    assert (load.kv_blocks_in_use, load.compiles_after_ready) == (0, 0)
  assert "0 KV blocks in use" in decode.stop()


@pytest.mark.long
def test_lost_offers_end_the_transport_and_no_request(folder, free_port):
  """Each is late by a deadline; after the third, pieces come through shared memory, and the log says so."""
  decode = decode_server(folder, free_port, JAX)
  prefill = prefill_server(folder, free_port, flags=(JAX, "--lease_timeout_s=6"), fault="lost")
  decode.wait_ready()
  prefill.wait_ready()
  with Client(decode.address) as client:
    found = set()
    for number in range(4):
      found.add(tuple(client.generate(_SHARED, max_tokens=8, temperature=0.0, cache_salt=str(number)).token_ids))
      time.sleep(1.1)  # after a failure the prefill server rests
    assert len(found) == 1
    counts = decode.counts()
    assert (counts["hung_pulls"], counts["late"], counts["prompts"], counts["shared_memory"]) == (3, 3, 1, 1)
    assert decode.log.count("3 pulls over JAX's transfer server did not end; until a restart") == 1
    # Offers cannot be withdrawn, so their memory comes back with their lease; released ones have not expired.
    wait_until(lambda: "leased_pieces" not in prefill.counts())
    assert "leases_expired" not in prefill.counts()
    assert client.load().kv_blocks_in_use == 0
  assert "0 KV blocks in use" in decode.stop()


@pytest.mark.long
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "unreachable"), (signal.SIGSTOP, "late")])
def test_a_prefill_server_that_dies_or_stops_within_a_pull_ends_no_request(folder, free_port, number, reason):
  decode = decode_server(folder, free_port, JAX)
  prefill = prefill_server(folder, free_port, flags=(JAX,), fault="lost")
  decode.wait_ready()
  prefill.wait_ready()
  with Client(decode.address) as client, ThreadPoolExecutor(1) as pool:
    running = pool.submit(client.generate, _SHARED, max_tokens=8, temperature=0.0, cache_salt="a")
    prefill.wait_for("leases", 1)  # and the pull of its only piece never ends
    prefill.process.send_signal(number)
    found = running.result(60)
    assert decode.counts().get(reason) == 1 and "prompts" not in decode.counts()
    prefill.kill()
    prefill = prefill_server(folder, free_port, flags=(JAX,)).wait_ready()
    time.sleep(1.1)
    assert client.generate(_SHARED, max_tokens=8, temperature=0.0, cache_salt="b").token_ids == found.token_ids
    assert decode.counts()["jax"] == 1  # over a new connection
    assert client.load().kv_blocks_in_use == 0
  prefill.stop()
  assert "0 KV blocks in use" in decode.stop()


@pytest.mark.long
def test_deaths_and_stops_at_any_time_end_no_request(folder, free_port):
  """SIGSTOP and SIGKILL at random instants of running prompts, ten times each; every answer is the same."""
  chance = random.Random(12)
  decode = decode_server(folder, free_port, JAX, "--remote_prefill_timeout_s=20").wait_ready()
  with Client(decode.address) as client, ThreadPoolExecutor(1) as pool:
    alone = answers(client, "alone")
    for number in range(20):
      prefill = prefill_server(folder, free_port, flags=(JAX,)).wait_ready()
      time.sleep(1.1)
      running = pool.submit(answers, client, f"faults-{number}")
      time.sleep(chance.uniform(0.0, 0.2))
      prefill.process.send_signal((signal.SIGSTOP, signal.SIGKILL)[number % 2])
      assert running.result(60) == alone
      prefill.kill()
      assert client.load().kv_blocks_in_use == 0
    counts = decode.counts()
    assert counts["prompts"] > 0 and counts.keys() & {"unreachable", "late"} and "error" not in counts
  assert "0 KV blocks in use" in decode.stop()


@pytest.mark.long
def test_servers_of_two_transports_do_not_exchange_kv(folder, free_port):
  decode = decode_server(folder, free_port, JAX)
  prefill = prefill_server(folder, free_port)
  decode.wait_ready()
  prefill.wait_ready()
  with Client(decode.address) as client:
    assert len(client.generate(_SHARED, max_tokens=2).token_ids) == 2
  assert decode.counts()["mismatch"] == 1 and "prompts" not in decode.counts()
  assert (
    "the servers cannot exchange KV: jax_transport=yes here jax_transport=no" in decode.log
  )  # says the prefill server
  prefill.stop()
  decode.stop()
