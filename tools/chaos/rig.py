"""Shared tools of the scenarios: a folder for logs, client processes, control streams. Knows no scenario."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
import contextlib
import itertools
import multiprocessing
import pathlib
import tempfile
import time
from typing import Any, Self

from tools.chaos import streams
from tools.chaos.process import Server

CLIENT_PROCESSES = 3
_JOB_S = 600.0


class Rig:
  """The resources of a whole run. Client processes stay between scenarios, since starting one is slow."""

  def __init__(self) -> None:
    self._temporary = tempfile.TemporaryDirectory(prefix="sluice-chaos-")
    self.folder = pathlib.Path(self._temporary.name)
    self._pool = _new_pool()
    self._serials = itertools.count()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._pool.shutdown(cancel_futures=True)
    self._temporary.cleanup()

  def server(self, *flags: str, module: str = "") -> Server:
    """Returns a server that is not started yet."""
    return Server(self.folder, flags, name=f"server-{next(self._serials)}", module=module)

  def end_clients(self) -> None:
    """Ends the client processes and with them gRPC's connections; new processes replace them."""
    self._pool.shutdown()
    self._pool = _new_pool()

  def submit[**P, T](self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Runs a job in a client process."""
    return self._pool.submit(job, *args, **kwargs)

  def ask(
    self, target: str, asks: Sequence[streams.StreamRequest], at_once: int, processes: int = 2
  ) -> list[streams.Answer]:
    """Sends all in a closed loop from several processes; answers come in any order."""
    jobs = [
      self.submit(streams.run_all, target, asks[index::processes], max(1, at_once // processes))
      for index in range(processes)
    ]
    return [answer for job in jobs for answer in job.result(_JOB_S)]

  @contextlib.contextmanager
  def controls(
    self, server: Server, num_streams: int, max_tokens: int, **options: Any
  ) -> Iterator[Callable[[], streams.Control]]:
    """Runs control streams, at least one, during the block; afterwards the yielded function returns their results."""
    serial = next(self._serials)
    stop_file = self.folder / f"stop-{serial}"
    job = self.submit(streams.control, server.target, stop_file, num_streams, max_tokens, serial, **options)
    try:
      wait_for(lambda: streams.begun_file(stop_file).exists() or job.done())
      yield lambda: job.result(_JOB_S)
    finally:
      stop_file.touch()


def _new_pool() -> ProcessPoolExecutor:
  # gRPC does not survive a fork.
  return ProcessPoolExecutor(CLIENT_PROCESSES, mp_context=multiprocessing.get_context("spawn"))


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0, pause_s: float = 0.02) -> bool:
  """Whether the condition became true in time."""
  deadline = time.monotonic() + timeout_s
  while not condition():
    if time.monotonic() > deadline:
      return False
    time.sleep(pause_s)
  return True
