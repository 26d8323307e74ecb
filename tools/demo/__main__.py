"""Runs the demo: a real server on the demo model, a mixed load over gRPC, a live view, a summary. Only composes.

  make demo    or    python -m tools.demo [--seconds=35 | --requests=N] [--model=DIR]

The clients outnumber the server's slots and share prefixes, and its KV pool is small. Slots, queue, preemptions and
prefix hits therefore show on a machine of any speed.

Without a terminal it prints plain lines instead of the view. Ctrl-C ends it early, with the summary.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
import contextlib
import io
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from tools.arguments import CommandParser, positive_float, positive_int

if TYPE_CHECKING:
  from rich.console import Console, RenderableType

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = {"load": "loading the weights", "compile": "compiling step programs", "warm up": "warming up"}
PLAIN_LINE_S = 2.0
# Few step sizes, since each is a program to compile before the first token; so few KV blocks that some requests are
# preempted while others fill the slots.
SERVER_FLAGS = ("--token_budgets=8,32,64,256", "--prefill_chunk=256", "--num_blocks=320", "--max_model_len=2048")
SCREENSHOT_AT = 0.6  # share of the load; the queue is longest then
SCREENSHOT_SIZE = (120, 34)


class StartFailed(Exception):
  """The server did not start, or has ended; the message is its own last line."""


class ServerProcess:
  """A server in its own process, and its standard error."""

  def __init__(self, arguments: Sequence[str]):
    """Starts the server at once: its imports take longer than the demo's."""
    self._folder = tempfile.TemporaryDirectory(prefix="sluice-demo-")
    self._log = deque[str](maxlen=40)
    self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # Its own process group, so Ctrl-C reaches only the demo, which then drains the server.
    self._process = subprocess.Popen(
      [sys.executable, "-m", "server.main", "--port=0", f"--port_file={self._folder.name}/port", *arguments],
      cwd=ROOT,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      process_group=0,
    )
    threading.Thread(target=self._read, name="server-log", daemon=True).start()

  def _read(self) -> None:
    assert self._process.stderr is not None
    for line in self._process.stderr:
      self._log.append(line.rstrip())
      self._lines.put(line.rstrip())
    self._lines.put(None)

  def wait_ready(self, progress: Callable[[str, int, int], None]) -> str:
    """Passes progress on until the server is ready; returns HOST:PORT.

    Raises:
      StartFailed: the server ended instead.
    """
    while (line := self._lines.get()) is not None:
      if ready := re.fullmatch(r"ready on (\S+)", line):
        return ready[1]
      if step := re.match(r"(load|compile|warm up): (\d+) of (\d+)", line):
        progress(step[1], int(step[2]), int(step[3]))
    raise StartFailed(self.last_words())

  def last_words(self) -> str:
    """Returns the log line that best explains the server's end."""
    errors = [line for line in self._log if line.startswith("error")]
    return errors[-1] if errors else " | ".join(list(self._log)[-3:]) or "it said nothing"

  def stop(self) -> None:
    """Drains the server; kills it if it does not end."""
    if self._process.poll() is None:
      self._process.send_signal(signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(5)
    if self._process.poll() is None:
      self._process.kill()
    self._process.wait()
    self._folder.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 0 if the server answered every request and compiled nothing after ready."""
  parser = CommandParser("tools.demo", __doc__)
  parser.add_argument("--seconds", type=positive_float, default=35.0, help="seconds of new requests")
  parser.add_argument("--requests", type=positive_int, default=0, help="number of requests, instead of --seconds")
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="a model folder with a chat template")
  parser.add_argument("--max_num_seqs", type=positive_int, default=32, help="slots of the server")
  parser.add_argument("--compile_cache_dir", help="as the server's flag; give an empty folder for a cold start")
  parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
  parser.add_argument("--screenshot", default="", help="write the view at its busiest to this SVG file")
  args = parser.parse_args(argv)
  arguments = [f"--model={args.model}", f"--max_num_seqs={args.max_num_seqs}", *SERVER_FLAGS]
  if args.compile_cache_dir is not None:
    arguments.append(f"--compile_cache_dir={args.compile_cache_dir}")
  for number in (signal.SIGTERM, signal.SIGHUP):  # ends as Ctrl-C does: the server must not outlive the demo
    signal.signal(number, signal.default_int_handler)
  server = ServerProcess(arguments)
  try:
    return _show(server, args)
  except StartFailed as error:
    print(f"tools.demo: the server failed: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("tools.demo: stopped before the server was ready", file=sys.stderr)
    return 130
  finally:
    server.stop()


def _show(server: ServerProcess, args: argparse.Namespace) -> int:
  # Imported here, while the server starts.
  import asyncio

  import grpc
  from rich.console import Console
  from rich.live import Live

  from server.client import Client, SluiceError
  from server.lifecycle.start_report import process_age_s
  from tools.demo.load import DemoLoad
  from tools.demo.view import View, closing, plain_line

  started_s = time.monotonic() - process_age_s()
  console = Console(highlight=False)
  target = _wait_with_progress(server, console)
  ready_s = time.monotonic() - started_s
  with Client(target) as client:
    info = client.model_info()
  if not info.has_chat_template:
    raise StartFailed(f"model {info.model} has no chat template, and the demo chats; choose another --model")
  load = DemoLoad(target, args.seconds, args.seed, args.requests)
  view = View(load, f"{info.model} · {target} · ready after {ready_s:.1f} s")
  first: list[float] = []

  async def run_with_lines() -> None:
    work = asyncio.create_task(load.run(lambda: first.append(time.monotonic() - started_s)))
    wants_screenshot, line_s = bool(args.screenshot), time.monotonic() + PLAIN_LINE_S
    while not work.done():
      await asyncio.wait((work,), timeout=0.2)
      if wants_screenshot:
        picture = _draw_view(view)  # in every iteration: the view keeps a history, and streams keep their lines
        if load.share >= SCREENSHOT_AT or work.done():
          wants_screenshot = False
          picture.save_svg(args.screenshot, title="make demo")
      if not console.is_terminal and (time.monotonic() >= line_s or work.done()):
        line_s += PLAIN_LINE_S
        console.print(plain_line(load), soft_wrap=True)
    await work

  screen = (
    Live(get_renderable=lambda: view, console=console, screen=True, refresh_per_second=6)
    if console.is_terminal
    else contextlib.nullcontext()
  )
  try:
    with screen:
      asyncio.run(run_with_lines())
  except KeyboardInterrupt:
    pass  # the summary shows the results so far
  except (SluiceError, grpc.RpcError) as error:
    raise StartFailed(f"it no longer answers: {server.last_words()}") from error
  if not load.ended or not load.samples or not first:
    raise StartFailed(f"no request was answered: {server.last_words()}")
  console.print(closing(load, first[0], load.samples[-1][1].warmup_s, console.width))
  python = pathlib.Path(sys.executable)
  python = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
  console.print(
    f"\nKeep a server running (or: make server):\n  {python} -m server.main --port=50051\n"
    f"Talk to it:\n  {python} -m tools.client --target=127.0.0.1:50051 --chat",
    soft_wrap=True,
  )
  failed = sum(stream.error is not None for stream in load.ended)
  return 0 if not failed and not load.samples[-1][1].compiles_after_ready else 1


def _draw_view(view: RenderableType) -> Console:
  """Returns a console that has recorded only the view."""
  from rich.console import Console

  width, height = SCREENSHOT_SIZE
  console = Console(record=True, file=io.StringIO(), width=width, height=height, force_terminal=True)
  console.print(view)
  return console


def _wait_with_progress(server: ServerProcess, console: Console) -> str:
  """Waits for the server under a progress bar, or with a line for each stage without a terminal."""
  from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

  if not console.is_terminal:
    told: set[tuple[str, int]] = set()

    def tell(what: str, done: int, total: int) -> None:
      if done in (0, total) and (what, done) not in told:
        told.add((what, done))
        console.print(f"{STAGES[what]}: {done} of {total}")

    return server.wait_ready(tell)
  columns = (TextColumn("{task.description:26}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
  with Progress(*columns, console=console) as bars:
    tasks = {"start": bars.add_task("starting the server", total=1)}

    def show_progress(what: str, done: int, total: int) -> None:
      bars.update(tasks["start"], completed=1)
      if what not in tasks:
        tasks[what] = bars.add_task(STAGES[what], total=total)
      bars.update(tasks[what], completed=done, total=total)

    return server.wait_ready(show_progress)


if __name__ == "__main__":
  sys.exit(main())
