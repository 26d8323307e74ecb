"""What `python -m tools.chaos.server` adds to server.main: faults at named points, and books that are checked."""

from collections.abc import Callable
import logging

import grpc

from engine.engine import Engine
from engine.errors import ConfigError
from extensions.vllm_api.composition import VllmComposition
from server.generation.generations import Generations
from server.host_options import HostOptions
from server.telemetry.process_counts import Census
from server.text.tokenizer import Tokenizer
from tools.chaos.server.chaos_service import ChaosService
from tools.chaos.server.checked_engine import CheckedEngine
from tools.chaos.server.faults import Injector, inject_engine
from tools.chaos.server.front_end_faults import inject_front_end
from tools.chaos.server.invariants import Invariants

_log = logging.getLogger(__name__)


class ChaosComposition(VllmComposition):
  """Of one process of a server.

  Attributes:
    invariants: the process's books, once it serves.
  """

  def __init__(self, *, injector: Injector | None = None, checks: bool = False):
    """Args:
    injector: acts at the points; None: there are none.
    checks: whether the books are checked, and the first that is wrong ends the server.
    """
    self._injector = injector
    self._checks = checks
    self.invariants: Invariants | None = None
    if checks:
      self.engine_class: type[Engine] = CheckedEngine

  def open_methods(self, options: HostOptions) -> tuple[str, ...]:
    if options.role != "both":
      raise ConfigError(
        f"role={options.role} is not served by tools.chaos.server; run server.main, or leave out --role"
      )
    return super().open_methods(options)

  def front_end_module(self, options: HostOptions) -> str:
    return "tools.chaos.server.front_end_process" if self._checks else super().front_end_module(options)

  def add_admin_services(self, server: grpc.aio.Server, census: Census) -> None:
    ChaosService(self._injector, lambda: self.invariants, census).register(server)

  def before_load(self) -> None:
    if self._injector is not None:
      self._injector.hit_point("load")

  def begin_serving(
    self,
    engine: Engine | None,
    generations: Generations | None,
    tokenizer: Tokenizer | None,
    *,
    num_held: Callable[[], int],
    fail: Callable[[BaseException], None],
  ) -> None:
    if self._injector is not None:
      _log.warning("faults are injected (--fault_plan)")
      if engine is not None:
        inject_engine(engine, self._injector)
      if generations is not None:
        inject_front_end(generations, tokenizer, self._injector)
    self.invariants = Invariants(engine, generations, num_held, fail)
    if self._checks:
      self.invariants.start_checking()

  def end_serving(self) -> None:
    if self.invariants is not None:
      self.invariants.stop_checking()
