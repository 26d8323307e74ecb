"""Defines where a program adds parts to a server, and when. Adds none itself."""

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from engine.engine import Engine
from server.generation.adapter_loader import AdapterLoader
from server.generation.engine_client import LocalEngine
from server.generation.generations import Generations
from server.generation.serving_state import ServingState
from server.host_options import HostOptions
from server.rpc.sluice_service import SluiceService
from server.telemetry.process_counts import Census
from server.text.tokenizer import Tokenizer


class Composition:
  """The hooks of a server; these add nothing. Called in this order, on the event loop except for `before_load`.

  Attributes:
    engine_class: the class of the engine to build.
  """

  engine_class: type[Engine] = Engine

  def front_end_module(self, options: HostOptions) -> str:
    """Returns the module to run as each front end process of a server with these options."""
    return "server.lifecycle.front_end_process"

  def open_methods(self, options: HostOptions) -> tuple[str, ...]:
    """Returns prefixes of methods on the public port that check their callers themselves and need no API key."""
    return ()

  def add_services(
    self,
    server: grpc.aio.Server,
    options: HostOptions,
    state: ServingState,
    service: SluiceService,
    census: Census,
  ) -> tuple[str, ...]:
    """Adds services to the public port and returns their names, for reflection and health.

    Args:
      server: not started yet.
      options: the server's.
      state, service: admit requests, and run them.
      census: counts of all the server's processes.
    """
    return ()

  def add_admin_services(self, server: grpc.aio.Server, census: Census) -> None:
    """Adds services to the admin port. `census` counts all of the server's processes."""

  def before_load(self) -> None:
    """Runs before the model is loaded, on the thread that loads it."""

  def make_client(
    self, engine: Engine, compiles_after_ready: Callable[[], int], adapter_loader: AdapterLoader
  ) -> LocalEngine:
    """Returns the engine for the front end. Arguments: see LocalEngine."""
    return LocalEngine(engine, compiles_after_ready, adapter_loader)

  def collect_metrics(self) -> Iterable[Any]:
    """Returns more metrics (prometheus_client.Metric) of this process, for each scrape."""
    return ()

  def begin_serving(
    self,
    engine: Engine | None,
    generations: Generations | None,
    tokenizer: Tokenizer | None,
    *,
    num_held: Callable[[], int],
    fail: Callable[[BaseException], None],
  ) -> None:
    """Runs before this process serves; the engine's loop does not run yet.

    Args:
      engine: None in a front end process.
      generations: None in the engine's process of a server with front end processes.
      tokenizer: the model's, or None.
      num_held: counts ids in use, including those of requests whose client has gone.
      fail: ends the server.
    """

  def end_serving(self) -> None:
    """Runs when the server drains or has failed."""
