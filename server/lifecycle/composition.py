"""Where the composition root, or another program, adds parts to a server, and when. Adds none itself."""

from collections.abc import Callable

import grpc

from engine.engine import Engine
from server.generation.generations import Generations
from server.generation.serving_state import ServingState
from server.host_options import HostOptions
from server.rpc.sluice_service import SluiceService
from server.telemetry.process_counts import Census
from server.text.tokenizer import Tokenizer


class Composition:
  """No method adds anything here. They are called in this order, on the event loop but for `before_load`.

  Attributes:
    engine_class: of the engine that is built.
  """

  engine_class: type[Engine] = Engine

  def front_end_module(self, options: HostOptions) -> str:
    """The module that is run as each front end process of a server with these options."""
    return "server.lifecycle.front_end_process"

  def add_services(
    self,
    server: grpc.aio.Server,
    options: HostOptions,
    state: ServingState,
    service: SluiceService,
    census: Census,
  ) -> tuple[str, ...]:
    """Adds services to those of the public port, and returns their names: reflection and health tell of them.

    Args:
      server: has not started.
      options: of the server.
      state, service: let work in, and do it.
      census: counts all of the server's processes.
    """
    return ()

  def add_admin_services(self, server: grpc.aio.Server, census: Census) -> None:
    """Adds services to those of the admin port. `census` counts all of the server's processes."""

  def before_load(self) -> None:
    """The model is about to be loaded; on the thread that loads it."""

  def begin_serving(
    self,
    engine: Engine | None,
    generations: Generations | None,
    tokenizer: Tokenizer | None,
    *,
    num_held: Callable[[], int],
    fail: Callable[[BaseException], None],
  ) -> None:
    """This process is about to serve; the engine's loop does not run yet.

    Args:
      engine: None in a front end process.
      generations: None in the engine's process of a server with front end processes.
      tokenizer: of the model, or None.
      num_held: ids of requests that nobody may still wait for.
      fail: ends the server.
    """

  def end_serving(self) -> None:
    """The server drains, or has failed."""
