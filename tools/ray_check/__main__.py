"""Checks the Ray Serve application of deploy/ray with real Ray: answers, lost processes, autoscaling, several devices.

  make ray                                                # about 4 minutes on 2 cores
  make ray ARGS="--scenario=lost --rounds=3 --output=FILE"
  make ray ARGS=--scenario=links                          # alone needs unshare, ip and iptables, and no root

Serves the demo model. A plain server's outputs are the expected ones. The scenario links changes and delays what Ray's
workers exchange, with Ray's TLS, in a network namespace of its own. Prints a table; exit code 0 only if every check
held, 1 if one did not, 2 for a bad command line.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from rich.console import Console

from engine.errors import ConfigError
from server.client import Client, SluiceError
from tools.arguments import CommandParser, output_file, positive_int
from tools.chaos.report import Row, as_json, none_of, show
from tools.faulty_link import DELAY_S, HELD_S, LONGEST_BURST_S
from tools.fleet.checked_streams import KnownRequest, StreamLoad, Verdict, learn_outputs
from tools.measure import commit, machine, write_result
from tools.ray_check.worker_links import WorkerLinks, encrypt_ray, enter_own_network
from tools.server_process import RunningServer

if TYPE_CHECKING:
  from tools.ray_check.cluster import RayCluster

_FLAGS = ("--deterministic", "--max_num_seqs=8")
_TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
_CPU = {"JAX_PLATFORMS": "cpu"}
_WAIT_S = 120.0
_SERVER_TIMEOUT_S = 3.0
_TOLD_S = 5.0
_OUTPUT_TOKENS = (24, 160)
# Differ between two answers to one request.
_OWN_KEYS = ("id", "created", "request_id", "system_fingerprint")


@dataclasses.dataclass
class Check:
  """What every scenario needs.

  Attributes:
    cluster: Ray.
    folder: for logs.
    rounds: times that each fault happens.
    links: between Ray's processes; None: there are none.
    rows: results so far.
  """

  cluster: "RayCluster"
  folder: pathlib.Path
  rounds: int
  links: WorkerLinks | None = None
  rows: list[Row] = dataclasses.field(default_factory=list)

  def plain_server(self, *flags: str, environment: dict[str, str] | None = None) -> RunningServer:
    """Returns a server without Ray, not started yet."""
    return RunningServer((*_FLAGS, *flags), self.folder / "plain.log", {**_CPU, **(environment or {})})

  def deploy(self, *flags: str, environment: dict[str, str] | None = None, **arguments: Any) -> None:
    """Deploys the application with the check's own flags, and these."""
    self.cluster.deploy(
      server_flags=[*_FLAGS, *flags],
      environment={**_CPU, **(environment or {})},
      server_timeout_s=_SERVER_TIMEOUT_S,
      health_check_period_s=1.0,
      drain_timeout_s=60.0,
      **arguments,
    )

  def learn(self, count: int = 24, *flags: str, environment: dict[str, str] | None = None) -> list[KnownRequest]:
    """Returns requests with the outputs of a plain server."""
    with self.plain_server(*flags, environment=environment) as server:
      return learn_outputs(server.target, count=count, max_tokens=_OUTPUT_TOKENS)

  def load(self, known: Sequence[KnownRequest], **options: Any) -> StreamLoad:
    """Returns a load on the application without streams."""
    return StreamLoad(self.cluster.grpc_target, self.cluster.http_url, known, **options)

  def find_leaks(self, polls: int = 24) -> list[str]:
    """Returns a line for each replica that, idle, still holds requests or blocks, or has compiled after ready."""
    leaks = []
    with Client(self.cluster.grpc_target) as client:
      for _ in range(polls):
        load, until = client.load(), time.monotonic() + 10
        while load.running_requests + load.queued_requests + load.kv_blocks_in_use and time.monotonic() < until:
          time.sleep(0.1)
          load = client.load()
        if load.running_requests or load.queued_requests or load.kv_blocks_in_use or load.compiles_after_ready:
          leaks.append(
            f"{load.running_requests} running, {load.queued_requests} queued, {load.kv_blocks_in_use} blocks, "
            f"{load.compiles_after_ready} compiles"
          )
    return leaks


def _no_faults(statement: str, target: str, faults: Sequence[str], ran: int) -> Row:
  return none_of(statement, target, faults, ran, asked=0)


async def check_answers(check: Check) -> None:
  """HTTP and gRPC answers and errors through Serve are those of a plain server; calls end with their clients."""
  cases: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"prompt": "Once upon", "max_tokens": 20, "temperature": 0}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1}),
    ("POST", "/v1/completions", {"prompt": "Once", "max_tokens": -3}),
    ("POST", "/v1/completions", {"prompt": "Once", "model": "another"}),
    ("POST", "/v1/completions", b"{"),
    ("POST", "/v1/completions", b'{"prompt": "' + b"x" * (5 << 20) + b'"}'),
    ("POST", "/v1/messages", {"max_tokens": 0}),
    ("GET", "/v1/completions", None),
    ("GET", "/v1/models/another", None),
    ("GET", "/nothing?a=b", None),
    ("POST", "/tokenize", {"prompt": "Once upon a time"}),
  ]
  http_file = check.folder / "plain_http"
  flags = (f"--served_model_name={check.cluster.mark}", "--http_port=0", f"--http_port_file={http_file}")
  check.deploy(min_replicas=2, max_replicas=2)
  with check.plain_server(*flags, "--max_stored_responses=0") as plain:
    plain_url = f"http://127.0.0.1:{http_file.read_text().strip()}"
    faults = []
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
      for method, path, body in cases:
        there = await _ask(client, method, plain_url + path, body)
        here = await _ask(client, method, check.cluster.http_url + path, body)
        if here != there:
          faults.append(f"{method} {path}: {here} instead of {there}"[:300])
    check.rows.append(_no_faults("HTTP statuses and bodies are a plain server's", "0 others", faults, len(cases)))
    calls: list[Callable[[Client], Any]] = [
      lambda client: client.generate("Once upon", max_tokens=30, temperature=0).token_ids,
      lambda client: [id for piece in client.stream([1, 491], max_tokens=9, temperature=0) for id in piece.token_ids],
      lambda client: client.generate("Once", max_tokens=-3),
      lambda client: list(client.stream("Once", max_tokens=-3)),
      lambda client: list(client.stream("Once", model="another")),
      lambda client: client.generate("Once", max_tokens=3000, ignore_eos=True, timeout_s=0.3),
      lambda client: client.tokenize("Once upon a time"),
      lambda client: client.model_info().model,
    ]
    told = []
    for target in (plain.target, check.cluster.grpc_target):
      with Client(target) as client:
        await asyncio.to_thread(client.wait_ready, 30)
        told.append([await asyncio.to_thread(_call, client, call) for call in calls])
    faults = [f"{here} instead of {there}"[:300] for there, here in zip(*told, strict=True) if here != there]
    check.rows.append(_no_faults("gRPC answers, statuses and reasons, too", "0 others", faults, len(calls)))
  known = [KnownRequest("Once upon a time", 3000, (), "")]  # each client leaves after the first token
  load = check.load(known, cancelled_share=1.0)
  load.set_streams(16)
  await _wait_for_ends(load, 100)
  await load.stop()
  leaks = await asyncio.to_thread(check.find_leaks)
  check.rows.append(
    _no_faults("100 clients that leave end their requests", "no row, no block held", leaks, len(load.ends))
  )


async def _ask(client: httpx.AsyncClient, method: str, url: str, body: Any) -> tuple[int, Any]:
  """Returns status and body without what is one answer's own."""
  content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}
  answer = await client.request(method, url, **content)
  said = answer.json()
  for key in _OWN_KEYS:
    said.pop(key, None)
  return answer.status_code, said


def _call(client: Client, call: Callable[[Client], Any]) -> Any:
  try:
    return call(client)
  except SluiceError as error:
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:  # the client's own text
      return error.code
    return error.code, error.reason, str(error)


async def check_losses(check: Check) -> None:
  """A replica, or its server, is killed or stopped under load: every stream ends, and capacity comes back."""
  known = await asyncio.to_thread(check.learn)
  check.deploy(min_replicas=2, max_replicas=2)
  load = check.load(known, cancelled_share=0.1)
  load.set_streams(16)
  rng = random.Random(0)
  kinds = (
    ("a replica is killed", signal.SIGKILL, True),
    ("a replica is stopped", signal.SIGSTOP, True),
    ("its server is killed", signal.SIGKILL, False),
    ("its server is stopped", signal.SIGSTOP, False),
  )
  for what, number, hits_replica in kinds:
    told_s, back_s, errors, since = 0.0, 0.0, 0, len(load.ends)
    lost: list[str] = []
    for _ in range(check.rounds):
      await _wait_for_ends(load, 32)
      servers = check.cluster.find_servers()
      victim = rng.choice(sorted(servers))
      mark, began = len(load.ends), time.monotonic()
      os.kill(servers[victim] if hits_replica else victim, number)
      back = await asyncio.to_thread(check.cluster.wait_for_replicas, 2, _WAIT_S, frozenset((victim,)))
      if back is None:
        lost.append(f"after {_WAIT_S:g} s {check.cluster.count_replicas()} replicas run")
      failed = [end for end in load.ends[mark:] if end.verdict is Verdict.ERROR]
      told_s = max([told_s, *(min(end.waited_s, end.ended - began) for end in failed)])
      back_s, errors = max(back_s, back or 0.0), errors + len(failed)
    ended = len(load.ends) - since
    faults = load.find_faults(since)
    check.rows += [
      Row(f"{what}: clients learn of it", f"in {_TOLD_S:g} s", f"in {told_s:.1f} s", told_s <= _TOLD_S),
      dataclasses.replace(
        _no_faults(f"{what}: streams end with their tokens or an error", "0 wrong, cut or silent", faults, ended),
        measured=f"{ended} ended, {errors} with an error" if not faults else f"{len(faults)} faults: {faults[0]}",
      ),
      Row(f"{what}: 2 replicas serve again", "without a hand", lost[0] if lost else f"in {back_s:.1f} s", not lost),
    ]
  await _finish_idle(check, load)


async def check_links(check: Check) -> None:
  """Bits change, and everything is late, between Ray's workers: TLS finds the bits, and every stream ends."""
  known = await asyncio.to_thread(check.learn)
  check.deploy(min_replicas=2, max_replicas=2)
  load = check.load(known, cancelled_share=0.1)
  load.set_streams(16)
  rng = random.Random(0)
  for what, fault in (("bits change", _change_bits), ("everything is late", _delay_all)):
    heard_s, count, errors, since, before = 0.0, 0, 0, len(load.ends), time.monotonic()
    faults: list[str] = []
    for index in range(check.rounds):
      await _wait_for_ends(load, 4)
      # Ray may give up a replica whose connection broke; the next fault waits for another in its place.
      if await asyncio.to_thread(check.cluster.wait_for_replicas, 2, _WAIT_S) is None:
        raise ConfigError(f"{check.cluster.count_replicas()} of 2 replicas serve after {_WAIT_S:g} s")
      began = time.monotonic()
      passed = await asyncio.to_thread(fault, check, rng, index)
      await _wait_for_ends(load, 4)
      failed = [end for end in load.ends[since:] if end.verdict is Verdict.ERROR]
      silences = [min(end.waited_s, end.ended - (began if end.ended >= began else before)) for end in failed]
      heard_s, count, errors = max([heard_s, *silences]), count + passed, errors + len(failed)
      faults += load.find_faults(since, allow_errors=fault is _change_bits) + ([] if passed else ["nothing passed"])
      since, before = len(load.ends), began
    measured = f"{count:,} pieces had it, {errors} streams ended with an error"
    if faults:
      measured = f"{len(faults)} faults: {faults[0]}"
    target = "0 wrong, cut or silent" if fault is _change_bits else "0 errors"
    ends_by_rules = Row(f"{what} between Ray's workers: streams end", target, measured, not faults, 100, check.rounds)
    in_time = heard_s <= _TOLD_S
    check.rows += [
      ends_by_rules,
      Row(f"{what}: clients learn of it", f"in {_TOLD_S:g} s", f"in {heard_s:.1f} s", in_time),
    ]
  await _finish_idle(check, load)


def _change_bits(check: Check, rng: random.Random, index: int) -> int:
  """Changes one bit, or in every second round one in each piece for a while; returns their number."""
  assert check.links is not None, "main starts them for this scenario"
  burst_s = rng.uniform(0, LONGEST_BURST_S) if index % 2 else 0.0
  return check.links.corrupt(rng, burst_s, _WAIT_S)


def _delay_all(check: Check, rng: random.Random, index: int) -> int:
  assert check.links is not None, "main starts them for this scenario"
  return check.links.delay(rng.uniform(*HELD_S), DELAY_S)


async def _finish_idle(check: Check, load: StreamLoad) -> None:
  """Checks that streams finish without errors again, and that no process is left, or holds anything."""
  since = len(load.ends)
  await _wait_for_ends(load, 100)
  await load.stop()
  faults = load.find_faults(since, allow_errors=False)
  check.rows.append(_no_faults("afterwards all streams finish", "0 errors", faults, len(load.ends) - since))
  servers = check.cluster.find_servers()
  orphans = [f"server {server} of {parent}" for server, parent in servers.items() if parent == 1]
  check.rows.append(
    _no_faults("no server outlives its replica", "2 servers", orphans + ["?"] * abs(len(servers) - 2), 1)
  )
  leaks = await asyncio.to_thread(check.find_leaks)
  check.rows.append(_no_faults("idle replicas hold nothing", "no row, block or compile", leaks, 24))


async def check_scaling(check: Check) -> None:
  """From 1 to 3 replicas and back under a changing load; a replica that leaves finishes its streams first."""
  known = await asyncio.to_thread(check.learn)
  # Few rows, so that 40 streams need 3 replicas also on a busy machine, where many streams are between two requests.
  check.deploy(
    "--max_num_seqs=4",
    min_replicas=1,
    max_replicas=3,
    upscale_delay_s=1.0,
    downscale_delay_s=8.0,
    metrics_interval_s=0.5,
    look_back_period_s=2.0,
  )
  load = check.load(known)
  for streams, replicas in ((2, 1), (40, 3), (2, 1)):
    load.set_streams(streams)
    took = await asyncio.to_thread(check.cluster.wait_for_replicas, replicas, _WAIT_S)
    measured = f"{await asyncio.to_thread(check.cluster.count_replicas)}" if took is None else f"after {took:.1f} s"
    check.rows.append(Row(f"{streams} streams: {replicas} replicas", "by itself", measured, took is not None))
    await _wait_for_ends(load, 30)
  await load.stop()
  faults = load.find_faults(allow_errors=False)
  check.rows.append(
    _no_faults("all streams finish exactly, also on leaving replicas", "0 errors", faults, len(load.ends))
  )


async def check_devices(check: Check) -> None:
  """One replica over two devices, reserved as one placement group."""
  known = await asyncio.to_thread(check.learn, 8, "--num_devices=2", environment=_TWO_DEVICES)
  check.deploy(num_devices=2, resources={"device": 2.0}, environment=_TWO_DEVICES)
  bundles = [bundle.get("device", 0) for bundle in check.cluster.find_bundles()]
  check.rows.append(Row("one placement group holds both devices", "[2.0]", f"{bundles}", bundles == [2.0]))
  load = check.load(known)
  load.set_streams(8)
  await _wait_for_ends(load, 40)
  await load.stop()
  faults = load.find_faults(allow_errors=False)
  check.rows.append(_no_faults("outputs are a plain server's with two devices", "0 others", faults, len(load.ends)))


SCENARIOS: dict[str, Callable[[Check], Awaitable[None]]] = {
  "answers": check_answers,
  "lost": check_losses,
  "scaling": check_scaling,
  "devices": check_devices,
  "links": check_links,
}
# Without those that need more than this machine's usual rights and programs.
_USUAL = tuple(name for name in SCENARIOS if name != "links")


async def _wait_for_ends(load: StreamLoad, count: int) -> None:
  """Returns when `count` more streams have ended. Raises ConfigError when they have not in time."""
  wanted, deadline = len(load.ends) + count, time.monotonic() + _WAIT_S
  while len(load.ends) < wanted:
    if time.monotonic() > deadline:
      raise ConfigError(f"{len(load.ends) - wanted + count} of {count} streams ended in {_WAIT_S:g} s; see Ray's logs")
    await asyncio.sleep(0.05)


async def run_scenarios(check: Check, chosen: Sequence[str], console: Console) -> None:
  """Runs scenarios one after the other; one that cannot go on is a failed check."""
  for name in chosen:
    console.print(f"{name} ...", style="dim")
    began, since = time.monotonic(), len(check.rows)
    try:
      await SCENARIOS[name](check)
    except (ConfigError, RuntimeError, OSError) as error:
      check.rows.append(Row("the scenario runs to its end", "it does", " ".join(str(error).split())[:300], False))
    seconds = time.monotonic() - began
    check.rows[since:] = [dataclasses.replace(row, scenario=name, seconds=seconds) for row in check.rows[since:]]
    for row in check.rows[since:]:
      console.print(f"  {row.check}: {row.measured}: {row.verdict}", style="dim", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.ray_check", "Check the Ray Serve application with real Ray on this machine.")
  parser.add_argument("--scenario", default="", help=f"names separated by commas: {', '.join(SCENARIOS)}")
  parser.add_argument("--rounds", type=positive_int, default=2, help="times that each fault happens")
  parser.add_argument("--output", type=output_file, default="", help="file for the table as JSON")
  args = parser.parse_args(arguments)
  chosen = [name for name in args.scenario.split(",") if name] or list(_USUAL)
  unknown = [name for name in chosen if name not in SCENARIOS]
  if unknown:
    parser.error(f"--scenario={unknown[0]} is unknown; use one of {', '.join(SCENARIOS)}")
  if "links" in chosen:
    try:
      enter_own_network("tools.ray_check", sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
      return parser.failed(error)
  console, links = Console(stderr=True), None
  began = time.monotonic()
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-ray-")))
    try:
      if "links" in chosen:
        encrypt_ray(folder)
        links = stack.enter_context(WorkerLinks())
      from tools.ray_check.cluster import RayCluster  # here, since --help needs no Ray
    except ConfigError as error:
      return parser.failed(error)
    except ModuleNotFoundError as error:
      return parser.failed(ConfigError(f"{error}; run it as `make ray`, which sets up Ray's environment"))
    console.print("starting Ray ...", style="dim")
    check = Check(stack.enter_context(RayCluster()), folder, args.rounds, links)
    asyncio.run(run_scenarios(check, chosen, console))
  seconds = time.monotonic() - began
  show(check.rows, seconds, Console(width=None if sys.stdout.isatty() else 160), "Ray Serve")
  write_result(args.output, as_json(check.rows, seconds, {"machine": machine(), "commit": commit()}))
  return 0 if check.rows and all(row.passed for row in check.rows) else 1


if __name__ == "__main__":
  sys.exit(main())
