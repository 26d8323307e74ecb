"""The life of a follower's process: health checks on its HTTP port, signals, and its exit code. Serves no API.

After a first SIGTERM or SIGINT the leader drains the whole cluster, and then this process ends with 0. A second one
ends it at once. Whatever else ends it is exit code 1, so that a supervisor restarts it.
"""

import asyncio
from collections.abc import Callable
import concurrent.futures
import pathlib
import signal
import threading
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import EngineError
from extensions.multi_host.cluster_place import ClusterPlace, read_secret
from extensions.multi_host.follower import Follower
from extensions.multi_host.frame_channel import HostLost
from extensions.multi_host.host_facts import collect_facts
from server import flags
from server.flags import ProgramSettings
from server.generation.serving_state import ServingState
from server.host_options import ClusterSettings, HostOptions
from server.http.error_responses import Refused
from server.http.http_listener import Listener
from server.http.http_options import HttpOptions
from server.http.openai.app import make_probe_app
from server.lifecycle import systemd_notify, watchdog
from server.lifecycle.start_report import StartReport
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
  from engine.device.build import EngineSide

_HTTP_CONNECTIONS = 64
_MISDIRECTED = 421


async def follow(
  program: ProgramSettings,
  options: HostOptions,
  cluster: ClusterSettings,
  place: ClusterPlace,
  tokenizer: Tokenizer | None,
  report: StartReport,
  say: Callable[[str], None],
) -> int:
  """Runs a follower's process from its flags; returns the exit code, with which the process should end at once.

  Args:
    program, options, cluster, place: what the flags say, with the model's folder.
    tokenizer: the model's, or None.
    report: of the start.
    say: writes a line on standard error.

  Raises:
    ConfigError: the secret cannot be read, or the HTTP port is taken.
  """
  settings = flags.engine_setting_values()
  secret = read_secret(cluster.cluster_secret_file)

  def build(process: FollowerProcess) -> "EngineSide":
    facts = collect_facts(pathlib.Path(program.model), place.num_hosts, settings)
    process.follower.join_cluster(facts)
    # Imported here because JAX takes seconds to import, and a host that is refused should fail at once.
    report.enter_stage("importing JAX")
    from engine.device.options import BuildOptions
    from extensions.multi_host.build import build_follower, join_devices

    report.enter_stage("connecting the hosts' devices")
    join_devices(place, cluster.host_start_timeout_s)
    num_token_ids = tokenizer.num_token_ids if tokenizer is not None else 0
    built = BuildOptions(program.model, num_token_ids=num_token_ids, **settings)
    return build_follower(built, process.follower, report.tell_progress, report.tell_fact)

  def write_port(port: int) -> None:
    if program.http_port_file and port >= 0:
      pathlib.Path(program.http_port_file).write_text(f"{port}\n")

  return await FollowerProcess(options, cluster, place, secret, build, write_port, report, say).run()


class FollowerProcess:
  """Runs one follower until the cluster ends. Belongs to the event loop it was made on.

  Attributes:
    follower: the follower.
  """

  def __init__(
    self,
    options: HostOptions,
    cluster: ClusterSettings,
    place: ClusterPlace,
    secret: bytes,
    build: "Callable[[FollowerProcess], EngineSide]",
    on_ready: Callable[[int], None],
    report: StartReport,
    say: Callable[[str], None],
  ):
    """Args:
    options: address and port of the health checks.
    cluster, place, secret: this host's.
    build: joins the cluster and builds this host's part, on a thread.
    on_ready: called with the HTTP port (-1: none) when the cluster serves.
    report, say: see `follow`.
    """
    self._options, self._place, self._build, self._on_ready = options, place, build, on_ready
    self._report, self._say = report, say
    self._loop = asyncio.get_running_loop()
    self._state = ServingState()
    self.follower = Follower(place, cluster, secret, self._lose_leader, self._stop_starting)
    self._port = -1
    self._num_signals = 0
    self._num_compiles = 0

  async def run(self) -> int:
    """Serves health checks and follows the leader; returns the exit code, with which the process should end at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
      self._loop.add_signal_handler(number, self._take_signal)
    await self._listen()
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    threading.Thread(target=self._work, args=(done,), name="follow", daemon=True).start()
    try:
      await asyncio.wrap_future(done)
    except (EngineError, HostLost) as error:
      return self._end_with(error)
    except Exception as error:  # a device's own
      return self._end_with(HostLost(f"a step failed here: {type(error).__name__}: {error}"))
    compiles = f"{self._num_compiles} compilations after ready"
    self._say(f"stopped, exit code 0, {self.follower.num_steps} steps, {compiles}")
    return 0

  def _work(self, done: concurrent.futures.Future[None]) -> None:
    try:
      self._follow()
    except BaseException as error:
      done.set_exception(error)
    else:
      done.set_result(None)

  def _follow(self) -> None:
    self._report.enter_stage(f"joining host 0 at {self._place.host}:{self._place.leader_port}")
    side = self._build(self)
    self._report.end_report()
    self._loop.call_soon_threadsafe(self._become_ready)
    try:
      self.follower.follow_leader(side.runner, side.scheduler.config.overlap)
    finally:
      self._num_compiles = side.runner.compiles_after_ready

  async def _listen(self) -> None:
    options, place = self._options, self._place
    if options.http_port < 0:
      return

    async def refuse(request: Request) -> Response:
      raise Refused(
        _MISDIRECTED,
        f"this is host {place.host_id} of {place.num_hosts}, which serves no API; send requests to host 0",
      )

    http = HttpOptions(
      host=options.http_host or options.host,
      port=options.http_port,
      max_connections=_HTTP_CONNECTIONS,
      allowed_hosts=tuple(options.http_allowed_hosts),
    )
    methods = ["GET", "POST", "PUT", "DELETE"]
    app = make_probe_app(self._state, http, extra_routes=[Route("/{path:path}", refuse, methods=methods)])
    self._port = await Listener(app, http).start_listening()

  def _become_ready(self) -> None:
    self._state.ready = True
    place = self._place
    self._on_ready(self._port)
    systemd_notify.notify_systemd("READY=1\nSTATUS=following")
    where = f", health checks at port {self._port}" if self._port >= 0 else ""
    self._say(f"ready as host {place.host_id} of {place.num_hosts}{where}")

  def _take_signal(self) -> None:
    self._num_signals += 1
    if self._num_signals == 1 and self._state.ready:
      self._say("stopping: host 0 drains the cluster")
      self._state.ready = False
      self.follower.request_stop()
      return
    self.follower.report_fault("it was stopped" + (" a second time" if self._num_signals > 1 else " while starting"))
    self._report.end_report()
    self._say("stopped at once")
    watchdog.exit_now(0 if self._num_signals == 1 else watchdog.EXIT_CODE)

  def _end_with(self, error: Exception) -> int:
    line = " ".join(str(error).split())
    self.follower.report_fault(line)
    self._report.end_report()
    self._say(f"error: {line}")
    return watchdog.EXIT_CODE

  # On the pulse's thread. The other threads may wait for a collective operation that never ends.

  def _lose_leader(self, reason: str) -> None:
    self._say(f"error: host 0, the leader, is lost, so this host ends: {reason}")
    watchdog.exit_now(watchdog.EXIT_CODE)

  def _stop_starting(self) -> None:
    self._say("stopped while starting")
    watchdog.exit_now(0)
