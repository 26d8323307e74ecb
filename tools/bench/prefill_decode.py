"""Measures the token gaps of running streams while long prompts arrive, with one server and with two roles.

  python -m tools.bench.prefill_decode
  python -m tools.bench.prefill_decode --streams=8 --prompt_tokens=1500 --interval=1.5 --rounds=3

Each setting is measured quiet, then with prompts, and the figure is the ratio of the 99th percentiles of the gaps:

  one server    chunked prefill, on all cores that this process may use
  two servers   the decode server on the first half of these cores, the prefill server on the second half

It also compares the transfer with a copy of as many bytes. A piece goes from the leased memory of another process into
memory of its own, with its digest. The result has the decode server's counters too.
"""

from collections.abc import Collection, Iterator, Sequence
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import httpx
import numpy as np
import xxhash

from engine.device.block_transfer import copy_bytes
from engine.errors import ConfigError
from extensions.prefill_decode.pieces import PeerMemory, PieceMemory
from server.client import Client
from tools.arguments import CommandParser, positive_float, positive_int
from tools.make_random_model import SHAPES, read_shape
from tools.measure import best_and_median, commit, machine
from tools.report.latency import percentile
from tools.server_process import RunningServer

_MIB = 1 << 20
_TAKEN = ("sluice_transfer_prompts_total", "sluice_transfer_bytes_total", "sluice_transfer_seconds_total")


def measure_gaps(address: str, args: Any, rng: random.Random, *, with_prompts: bool) -> dict[str, float]:
  """Runs the streams for `args.seconds`, and returns percentiles of their gaps in milliseconds.

  Args:
    address: the server's gRPC port.
    args: of the command line.
    rng: makes the prompts.
    with_prompts: whether a long prompt arrives every `args.interval` seconds.
  """
  ends_at = threading.Event()
  with Client(address) as client:
    info = client.model_info()
    num_tokens = info.max_model_len - 64

    def make_prompt(count: int) -> list[int]:
      return [rng.randrange(3, info.vocab_size) for _ in range(count)]

    prompts = [make_prompt(args.prompt_tokens) for _ in range(2 + round(args.seconds / args.interval))]
    streams = [make_prompt(32) for _ in range(args.streams)]

    def run_stream(prompt: list[int]) -> list[float]:
      times = []
      while not ends_at.is_set():  # a stream that has ended begins anew; that gap is none
        options = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, "return_text": False}
        with client.stream(prompt, **options) as stream:
          last = None
          for _ in stream:
            now = time.perf_counter()
            if last is not None and now > began:
              times.append(now - last)
            last = now
            if ends_at.is_set():
              break
      return times

    def send_prompts(pool: concurrent.futures.Executor) -> list[concurrent.futures.Future[float]]:
      sent = []
      while not ends_at.wait(args.interval):
        sent.append(pool.submit(first_token_s, prompts[len(sent)]))
      return sent

    def first_token_s(prompt: list[int]) -> float:
      return client.generate(prompt, max_tokens=2, ignore_eos=True, return_text=False).ending.time_to_first_token_s

    began = time.perf_counter() + 2.0  # all streams decode by then
    with concurrent.futures.ThreadPoolExecutor(2 * args.streams + 8) as pool:
      running = [pool.submit(run_stream, prompt) for prompt in streams]
      time.sleep(2.0)
      timer = threading.Timer(args.seconds, ends_at.set)
      timer.start()
      firsts = [each.result() for each in (send_prompts(pool) if with_prompts else [])]
      gaps = [gap for each in running for gap in each.result()]
  found = {f"gap ms p{share}": 1000 * (percentile(gaps, share) or 0.0) for share in (50, 99)}
  found |= {"gap ms longest": 1000 * max(gaps), "gaps": float(len(gaps))}
  if firsts:
    found |= {"prompts": float(len(firsts)), "first token ms p50": 1000 * statistics.median(firsts)}
  return found


@contextlib.contextmanager
def one_server(folder: pathlib.Path, flags: Sequence[str], cores: Collection[int]) -> Iterator[tuple[str, str]]:
  """Runs one server; gives the addresses of its gRPC port and of its metrics."""
  with _server(folder, "one", flags, cores) as addresses:
    yield addresses


@contextlib.contextmanager
def two_servers(folder: pathlib.Path, flags: Sequence[str], cores: Sequence[int]) -> Iterator[tuple[str, str]]:
  """Runs a prefill and a decode server; gives the decode server's addresses."""
  secret = folder / "secret"
  secret.touch(mode=0o600)
  secret.write_text(secrets.token_hex(24), "ascii")
  both = [*flags, f"--transfer_secret_file={secret}"]
  half = len(cores) // 2
  with _server(folder, "prefill", [*both, "--role=prefill"], cores[half:]) as (prefill, _):
    of_decode = [*both, "--role=decode", f"--prefill_servers={prefill}"]
    with _server(folder, "decode", of_decode, cores[:half]) as addresses:
      yield addresses


@contextlib.contextmanager
def _server(folder: pathlib.Path, name: str, flags: Sequence[str], cores: Collection[int]) -> Iterator[tuple[str, str]]:
  http_file = folder / f"{name}.http"
  own = [*flags, "--http_port=0", f"--http_port_file={http_file}"]
  with RunningServer(own, folder / f"{name}.log", cores=cores) as server:
    yield server.target, f"127.0.0.1:{http_file.read_text('ascii').strip()}"


def measure_copies(piece_mib: float, num_pieces: int, seconds: float) -> dict[str, float]:
  """Returns rates in GB/s: of a copy between two arrays, of a piece into leased memory, and of one out of it."""
  num_bytes = round(piece_mib * _MIB)
  memory = PieceMemory(num_bytes, num_pieces * (num_bytes + 4096))
  peer = PeerMemory(os.getpid(), memory.fd, memory.nonce, memory.size)
  source = np.random.default_rng(0).integers(0, 256, (num_pieces, num_bytes), np.uint8)
  target = np.empty_like(source)
  digests = [0] * num_pieces

  def give() -> None:
    for slot in range(num_pieces):
      hasher = xxhash.xxh3_64()
      copy_bytes(memoryview(source[slot]), memory.slot(slot), hasher)
      digests[slot] = hasher.intdigest()

  def take() -> None:
    for slot in range(num_pieces):
      peer.read_piece(memory.offset(slot), digests[slot], num_bytes)

  milliseconds = {
    "memcpy": best_and_median(lambda: np.copyto(target, source), seconds)[1],
    "give": best_and_median(give, seconds)[1],
    "take": best_and_median(take, seconds)[1],
  }
  return {f"{name} GB/s": source.nbytes / 1e6 / value for name, value in milliseconds.items()}


def read_transfers(address: str) -> dict[str, float]:
  """Returns what a decode server counted: prompts, and the rate in GB/s from an offer to the last piece in the pool."""
  text = httpx.get(f"http://{address}/metrics", timeout=60).raise_for_status().text
  values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sluice_transfer_"))
  prompts, num_bytes, seconds = (float(values[name]) for name in _TAKEN)
  recomputed = sum(float(value) for name, value in values.items() if "recomputed" in name)
  rate = num_bytes / 1e9 / seconds if seconds else 0.0
  return {"prompts moved": prompts, "recomputed": recomputed, "transfer GB/s": rate}


def measure(args: Any) -> dict[str, Any]:
  """Runs all measurements and returns their medians over the rounds."""
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    raise ConfigError("two servers need a core each, and this process may use one; allow it two")
  read_shape(args.shape)
  flags = [f"--model={SHAPES / args.shape}", "--random_weights", "--kv_cache_mb=512", *args.flags]
  found: dict[str, Any] = {}
  rng = random.Random(1)
  with tempfile.TemporaryDirectory(prefix="sluice-roles-") as name:
    for setting, start in (("one server", one_server), ("two servers", two_servers)):
      with start(pathlib.Path(name), flags, cores) as (address, http):
        measure_gaps(address, args, rng, with_prompts=True)  # the first of everything
        rounds = [
          [measure_gaps(address, args, rng, with_prompts=with_prompts) for with_prompts in (False, True)]
          for _ in range(args.rounds)
        ]
        quiet, busy = (
          {key: statistics.median(each[i][key] for each in rounds) for key in rounds[0][i]} for i in (0, 1)
        )
        ratio = statistics.median(busy["gap ms p99"] / quiet["gap ms p99"] for quiet, busy in rounds)
        found[setting] = {"quiet": quiet, "with prompts": busy, "p99 with prompts over quiet": ratio}
        if setting == "two servers":
          found[setting] |= read_transfers(http)
  found["copies"] = measure_copies(args.piece_mib, 16, 2.0)
  return found


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench.prefill_decode", __doc__)
  parser.add_argument("--shape", default="llama-125m", help="a folder of models/shapes, with random weights")
  parser.add_argument("--streams", type=positive_int, default=4, help="streams that decode")
  parser.add_argument("--prompt_tokens", type=positive_int, default=1500, help="tokens of a long prompt")
  parser.add_argument("--interval", type=positive_float, default=2.0, help="seconds between two long prompts")
  parser.add_argument("--seconds", type=positive_float, default=20.0, help="seconds of a measurement")
  parser.add_argument("--rounds", type=positive_int, default=3, help="measurements of each kind")
  parser.add_argument("--piece_mib", type=positive_float, default=6.0, help="size of a piece in the copies")
  parser.add_argument("flags", nargs="*", help="flags of all servers, after --")
  args = parser.parse_args(arguments)
  try:
    found = measure(args)
  except ConfigError as error:
    return parser.failed(error)
  print(json.dumps({"commit": commit(), "machine": machine(), **found}, indent=2))
  return 0


if __name__ == "__main__":
  sys.exit(main())
