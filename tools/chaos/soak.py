"""Runs a mixture of everything for hours and measures memory, descriptors and threads; growth is a leak.

The mixture has weights, as in Triton's long-running stress test. A server with a planted leak runs first: if the soak
cannot find that leak, it proves nothing.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import random
import time

from server.client import Client
from server.text.grammar_cache import MAX_ENTRIES
from tools.chaos import disconnects, fuzz, http_clients, streams, wire
from tools.chaos.process import Server, Usage
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig, wait_for
from tools.chaos.streams import Answer, StreamRequest, random_asks, random_prompt

_MOST_RSS_SLOPE = 1e6  # bytes in 100,000 requests
_MOST_SLOPE = 1.0  # descriptors or threads in 100,000 requests
_SAMPLES = 30  # fewer samples do not determine a slope
_PAUSE_S = 20.0  # longest time between samples
_WINDOW = 5  # samples in a window, whose least memory counts: the C library keeps memory of a burst for a while
_SETTLED_FIRST = 0.25  # share of a run, and
_SETTLED_REQUESTS = 20_000  # requests, in which allocators, caches and thread pools fill up: 5 MB in the first 6,000


@dataclasses.dataclass(frozen=True)
class Sample:
  """An idle server's resources after `requests`."""

  requests: int
  usage: Usage


@dataclasses.dataclass
class SoakOutcome:
  """The result: rounds by kind, checked streams, and faults."""

  rounds: dict[str, int] = dataclasses.field(default_factory=dict)
  checked: int = 0
  faults: list[str] = dataclasses.field(default_factory=list)
  samples: list[Sample] = dataclasses.field(default_factory=list)


def slope(points: Sequence[tuple[float, float]]) -> float:
  """Returns the slope of the least-squares line; 0 for fewer than two different abscissas."""
  count = len(points)
  mean_x, mean_y = (sum(point[axis] for point in points) / max(1, count) for axis in range(2))
  spread = sum((x - mean_x) ** 2 for x, _ in points)
  return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class _Mixture:
  """Kinds of rounds. Each method sends about 200 requests, and returns once they have ended."""

  def __init__(self, rig: Rig, server: Server, soaked: SoakOutcome, seed: int):
    self._rig, self._server, self._soaked = rig, server, soaked
    self._rng = random.Random(seed)
    # Weights of 860: Triton has 295 valid sequences, 300 of load, 80 of another model, 60 that time out, 60 that crash,
    # 62 without an end. Sluice adds HTTP and fuzz.
    self.kinds: dict[str, tuple[int, Callable[[], None]]] = {
      "streams": (295, self.streams),
      "load": (300, self.load),
      "http": (100, self.http),
      "prefixes": (80, self.prefixes),
      "deadlines": (60, self.deadlines),
      "vanish": (60, self.vanish),
      "cancel": (62, self.cancel),
      "fuzz": (20, self.fuzz),
    }

  def round(self) -> str:
    """Runs one round, chosen by the weights; returns its kind."""
    kinds = list(self.kinds)
    (kind,) = self._rng.choices(kinds, [self.kinds[name][0] for name in kinds])
    self.kinds[kind][1]()
    return kind

  def _check(self, asks: Sequence[StreamRequest], at_once: int) -> None:
    self._count(self._rig.ask(self._server.target, asks, at_once))

  def _count(self, answers: Sequence[Answer]) -> None:
    self._soaked.checked += len(answers)
    self._soaked.faults += [answer.fault() for answer in answers if not answer.exact]

  def _asks(self, prompts: tuple[int, int], outputs: tuple[int, int], count: int = 200) -> list[StreamRequest]:
    return random_asks(self._rng, count, prompts, outputs, f"soak-{self._rng.getrandbits(32)}")

  def streams(self) -> None:
    """Streams answers of all lengths."""
    self._check(self._asks((1, 200), (1, 100)), 64)

  def load(self) -> None:
    """Sends as many short requests as fit."""
    self._check([dataclasses.replace(ask, unary=True) for ask in self._asks((1, 40), (1, 20))], 128)

  def http(self) -> None:
    """Sends completions, whole and streamed, and leaves some of them."""
    asks, seed = self._asks((1, 100), (1, 60)), self._rng.getrandbits(32)
    self._count(self._rig.submit(http_clients.complete_all, self._server.http_port, asks, 32, seed).result())

  def prefixes(self) -> None:
    """Sends prompts that share prefixes, with priorities and salts."""
    shared = random_prompt(self._rng, 150)
    rng = self._rng
    self._check(
      [
        dataclasses.replace(
          ask,
          prompt=shared[: rng.randint(0, 150)] + ask.prompt,
          cache_salt=rng.choice("ab"),
          priority=rng.randint(-2, 2),
        )
        for ask in self._asks((1, 30), (1, 30))
      ],
      64,
    )

  def deadlines(self) -> None:
    """Sends requests with too short deadlines."""
    job = self._rig.submit(streams.run_out_of_time, self._server.target, self._asks((1, 100), (100, 300)), 64)
    self._soaked.faults += job.result()

  def vanish(self) -> None:
    """Sends requests and disconnects."""
    requests = disconnects.requests_of(self._server, self._rng)
    self._rig.submit(wire.vanish, requests, 200, 24, 0.001, self._rng.getrandbits(32)).result()

  def cancel(self) -> None:
    """Sends requests and cancels them."""
    self._rig.submit(disconnects.cancel_many, self._server.target, 200, 16, self._rng.getrandbits(32)).result()

  def fuzz(self) -> None:
    """Sends mutated messages."""
    self._soaked.faults += (
      self._rig.submit(fuzz.wire_many, self._server.target, 200, 8, self._rng.getrandbits(32)).result().faults
    )


def _fill_grammars(server: Server) -> None:
  """Compiles as many grammars as the server keeps, 180 kB each; fuzz alone would need 150,000 requests for that."""
  with Client(server.target) as client:
    for number in range(MAX_ENTRIES):
      schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}}
      client.generate("Answer:", json_schema=json.dumps(schema), max_tokens=6)


def watch(rig: Rig, server: Server, seconds: float, seed: int, tell: Callable[[str], None]) -> SoakOutcome:
  """Runs the mixture for this long; takes samples at rest in between and reports each."""
  soaked = SoakOutcome()
  _fill_grammars(server)
  mixture = _Mixture(rig, server, soaked, seed)
  began = time.monotonic()
  fds = server.usage().fds
  next_sample = 0.0
  while time.monotonic() < began + seconds and len(soaked.faults) < 100:
    kind = mixture.round()
    soaked.rounds[kind] = soaked.rounds.get(kind, 0) + 1
    if time.monotonic() - began >= next_sample:
      soaked.faults += server.settle() + server.imbalance()
      wait_for(lambda: server.usage().fds <= fds, 5.0, 0.2)
      sample = Sample(server.books().requests_accepted_total, server.usage())
      soaked.samples.append(sample)
      tell(
        f"{time.monotonic() - began:,.0f} s, {sample.requests:,} requests: {sample.usage.rss / 1e6:.1f} MB, "
        f"{sample.usage.fds} descriptors, {sample.usage.threads} threads, {len(soaked.faults)} faults"
      )
      next_sample = time.monotonic() - began + min(_PAUSE_S, seconds / (2 * _SAMPLES))
  return soaked


def settled(samples: Sequence[Sample]) -> list[Sample]:
  """Returns the samples after the beginning of a run."""
  late = samples[int(_SETTLED_FIRST * len(samples)) :]
  return [sample for sample in late if sample.requests >= _SETTLED_REQUESTS]


def slopes(samples: Sequence[Sample]) -> tuple[float, float, float]:
  """Returns the growth in 100,000 requests of resident bytes (each window's least), descriptors and threads."""
  windows = [samples[first : first + _WINDOW] for first in range(0, len(samples) - _WINDOW + 1, _WINDOW)]
  least = [min(window, key=lambda sample: sample.usage.rss) for window in windows]

  def growth(of: Callable[[Usage], int], among: Sequence[Sample]) -> float:
    return 1e5 * slope([(float(sample.requests), float(of(sample.usage))) for sample in among])

  return (
    growth(lambda usage: usage.rss, least),
    growth(lambda usage: usage.fds, samples),
    growth(lambda usage: usage.threads, samples),
  )


def soak(rig: Rig, seconds: float, tell: Callable[[str], None], control_s: float | None = None) -> list[Row]:
  """Runs the planted leak, then the server.

  Args:
    rig: starts servers and clients.
    seconds: duration of the soak.
    `tell`: receives a line for each sample.
    control_s: duration of the planted leak; None: a tenth of `seconds`, between one and ten minutes.
  """
  flags = ("--max_queued_requests=1024", "--max_num_seqs=64", "--num_blocks=1024", "--keepalive_time_s=5")
  control_s = min(max(60.0, seconds / 10), 600.0) if control_s is None else control_s
  with rig.server(*flags, module="tools.chaos.leaky_server") as server:
    tell(f"a planted leak, {control_s:,.0f} s")
    leaky = watch(rig, server, control_s, 1, tell)
  with rig.server(*flags) as server:
    tell(f"the server, {seconds:,.0f} s")
    soaked = watch(rig, server, seconds, 2, tell)
  kept = settled(soaked.samples)
  planted, (rss, fds, threads) = slopes(leaky.samples)[0], slopes(kept)
  requests = soaked.samples[-1].requests if soaked.samples else 0
  enough = len(kept) >= _SAMPLES
  few = "" if enough else f"; {len(kept)} samples after {_SETTLED_REQUESTS:,} requests are too few: more --hours"
  mixture = ", ".join(f"{kind} {count}" for kind, count in sorted(soaked.rounds.items()))
  return [
    none_of(
      f"streams checked in {seconds / 3600:.2g} hours", "all exact, all released", soaked.faults, soaked.checked, 0
    ),
    Row(
      f"resident memory over {requests:,} requests",
      "< 1 MB in 100,000 requests",
      f"{rss / 1e6:+.2f} MB in 100,000 ({len(kept)} samples, the least of each {_WINDOW}; rounds: {mixture}){few}",
      rss < _MOST_RSS_SLOPE and enough,
      1_000_000,
      requests,
    ),
    Row(
      "descriptors and threads",
      "< 1 in 100,000 requests",
      f"{fds:+.2f} and {threads:+.2f}",
      max(fds, threads) < _MOST_SLOPE and enough,
    ),
    Row(
      "a planted leak of 20 kB a request is found",
      "> 1 MB in 100,000 requests",
      f"{planted / 1e6:+.0f} MB in 100,000 ({len(leaky.samples)} samples)",
      planted > _MOST_RSS_SLOPE,
    ),
  ]
