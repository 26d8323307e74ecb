"""Reports a start to the operator: six lines, and progress in between. Decides and starts nothing.

The lines give the device, the model, its KV pool, its programs, the start's duration, and the addresses. A terminal
shows long work as one status line, rewritten in place. Other outputs get a line every two seconds.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
import pathlib
import threading
import time
from typing import Any, Self

from engine.build_facts import BuildFact, DeviceFact, KVFact, ModelFact, ProgramsFact, ProgramsMadeFact
from server.host_options import HostOptions
from server.telemetry.log_lines import Lines

SILENCE_S = 2.0  # the longest time without a line while work goes on
_REDRAW_S = 0.2
_LOOK_S = 0.1
# The least progress before an estimate of the time left: seconds, and a share, since the first programs take longest.
_LEAST_SECONDS = 1.0
_LEAST_SHARE = 0.3
_UNITS = {"load": " MiB", "downloading": " MiB", "checking": " MiB"}  # by the first word of the work's name
_BETWEEN = "filling the KV pool"  # the stage between two works with progress
_WILDCARDS = ("0.0.0.0", "::", "")


@dataclasses.dataclass
class _Work:
  """Work with progress. `began` and `changed`, the time of its latest progress, are in time.monotonic() seconds."""

  began: float
  changed: float
  done: int
  total: int


class StartReport:
  """Writes the lines of one start. Any thread may call it. Its context writes progress until it exits.

  Args of the constructor:
    lines: where the lines go.
    verbose: also writes details that few operators need.
  """

  def __init__(self, lines: Lines, verbose: bool):
    self.verbose = verbose
    self._lines = lines
    self._lock = threading.Lock()
    self._stage = ("", 0.0)
    self._works: dict[str, _Work] = {}
    self._reported: set[str] = set()  # reasons that a line has given
    self._programs: ProgramsFact | None = None
    self._made: list[ProgramsMadeFact] = []
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None

  def __enter__(self) -> Self:
    self._thread = threading.Thread(target=self._break_silence, name="start report", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *error: object) -> None:
    self.end_report()

  def end_report(self) -> None:
    """Removes the status line and ends the progress lines."""
    self._ended.set()
    if self._thread is not None:
      self._thread.join()
    self._lines.show_status("")

  # Progress.

  def enter_stage(self, what: str) -> None:
    """Begins a stage without progress. `what`: a gerund, for example "importing JAX"; "" ends the stage."""
    with self._lock:
      self._stage = what, time.monotonic()
    if self._lines.is_terminal and self._thread is not None:
      self._show_status()  # at once, since the stage may block other threads

  def tell_progress(self, what: str, done: int, total: int) -> None:
    """Records progress; see engine.device.build. Cheap, so it may be called often."""
    with self._lock:
      now, work = time.monotonic(), self._works.get(what)
      if work is None or work.done == work.total:
        work = self._works[what] = _Work(now, now, done, total)
      work.changed, work.done, work.total = now, done, total
      self._stage = _BETWEEN, now
    if done in (0, total) and not self._lines.is_terminal:
      self._say_progress(what, work)

  def _say_progress(self, what: str, work: _Work) -> None:
    seconds = time.monotonic() - work.began
    self._lines.say(_progress_text(what, work), stage=what, done=work.done, total=work.total, seconds=round(seconds, 1))

  def _unfinished(self) -> list[tuple[str, _Work]]:
    with self._lock:
      return [(what, work) for what, work in self._works.items() if work.done < work.total]

  def _show_status(self) -> None:
    parts = [_progress_text(what, work) for what, work in self._unfinished()]
    what, began = self._stage
    if what and not parts:
      parts = [f"{what}, {time.monotonic() - began:.0f} s"]
    self._lines.show_status(" | ".join(parts))

  def _break_silence(self) -> None:
    is_terminal = self._lines.is_terminal
    while not self._ended.wait(_REDRAW_S if is_terminal else _LOOK_S):
      if is_terminal:
        self._show_status()
      elif time.monotonic() - self._lines.said_at >= SILENCE_S - 2 * _LOOK_S:
        works = self._unfinished()
        for what, work in works:
          self._say_progress(what, work)
        what, began = self._stage
        if what and not works:
          seconds = time.monotonic() - began
          self._lines.say(f"{what}, {seconds:.0f} s", stage=what, seconds=round(seconds, 1))

  # Facts.

  def tell_fact(self, fact: BuildFact) -> None:
    """Writes the line of a build's fact."""
    match fact:
      case DeviceFact():
        self._reported.update(fact.fallbacks)
        self._say_line("device", _device_text(fact), fact)
      case ModelFact():
        self._say_line("model", _model_text(fact), fact)
      case KVFact():
        self._say_line("KV", _kv_text(fact), fact)
      case ProgramsFact():
        self._programs = fact
        self._say_line("programs", _programs_text(fact), fact)
      case ProgramsMadeFact():
        self._made.append(fact)

  def tell_detail(self, line: str) -> None:
    """Writes a line that only --verbose shows."""
    if self.verbose and line:
      self._lines.say(line)

  def tell_notes(self, notes: Sequence[str], warnings: Sequence[str]) -> None:
    """Writes one line for each, except notes that another line contains."""
    for note in notes:
      if note and note not in self._reported:
        self._lines.say(f"note: {note}")
    for warning in warnings:
      self._lines.say(f"warning: {warning}")

  def tell_ready(self, load_s: float, warmup_s: float, addresses: "ServedAddresses") -> None:
    """Writes the last lines: the start's duration, the addresses, and `ready on HOST:PORT` for programs."""
    self.end_report()
    seconds = process_age_s()
    compiled = sum(made.num_compiled for made in self._made)
    text = f"after {seconds:.1f} s: weights {load_s:.1f} s, programs and KV pool {warmup_s:.1f} s{self._origin()}"
    self._say_line("ready", text, seconds=round(seconds, 2), load_s=load_s, warmup_s=warmup_s, num_compiled=compiled)
    self._say_line("open", addresses.describe(), **dataclasses.asdict(addresses))
    self._lines.say(f"ready on {addresses.grpc}")

  def _origin(self) -> str:
    count, compiled = (sum(getattr(made, name) for made in self._made) for name in ("count", "num_compiled"))
    if not count:
      return ""
    if compiled:
      return f" ({compiled} of {count} compiled)"
    stored = "executable bundle" if self._programs is not None and self._programs.has_bundle else "compile cache"
    return f" (all from the {stored})"

  def _say_line(self, label: str, text: str, fact: Any = None, **fields: Any) -> None:
    values = dataclasses.asdict(fact) if fact is not None else fields
    self._lines.say(f"{label:8}  {text}", event=label, **values)


def _progress_text(what: str, work: _Work) -> str:
  now = time.monotonic()
  text = f"{what}: {work.done} of {work.total}{_UNITS.get(what.partition(' ')[0], '')}"
  if now - work.began >= _LEAST_SECONDS:
    text += f", {now - work.began:.0f} s"
    if _LEAST_SHARE * work.total <= work.done < work.total:
      left = (work.changed - work.began) / work.done * (work.total - work.done) - (now - work.changed)
      text += f", about {max(1.0, left):.0f} s left"
  return text


def _device_text(fact: DeviceFact) -> str:
  cores = f", {len(os.sched_getaffinity(0))} cores" if fact.kind == "cpu" and hasattr(os, "sched_getaffinity") else ""
  count = f"{fact.count} x " if fact.count > 1 else ""
  quantized = f", {fact.quantization} weights" if fact.quantization != "none" else ""
  slower = f" (slower than it could be: {'; '.join(fact.fallbacks)})" if fact.fallbacks else ""
  kernels = f"attention {fact.attention}, matmul {fact.matmul}{slower}"
  return f"{count}{fact.kind}{cores}, {fact.dtype}{quantized}; {kernels}"


def _model_text(fact: ModelFact) -> str:
  where = f" in {shorten_path(fact.folder)}" if fact.folder else ""
  text = f"{fact.name}{where}"
  if fact.num_parameters:
    random = " random" if fact.is_random else ""
    text += f", {_count(fact.num_parameters)}{random} parameters ({_bytes(fact.num_bytes)})"
  if fact.draft_name:
    text += f"; draft model {fact.draft_name}, {_count(fact.num_draft_parameters)} parameters"
  text += f"; length {fact.max_model_len:,}"
  if fact.lowered:
    return f"{text} of the model's {fact.own_length:,}: {fact.lowered} (--max_model_len, --kv_cache_mb)"
  if fact.is_chosen:
    return f"{text} by --max_model_len (the model's: {fact.own_length:,})"
  return f"{text}, the model's own"


def _kv_text(fact: KVFact) -> str:
  dtype = f" of {fact.dtype}" if fact.dtype else ""
  size = f" in {_bytes(fact.num_bytes)}{dtype}" if fact.num_bytes else ""
  full = fact.num_full_sequences
  text = (
    f"{fact.num_blocks:,} blocks of {fact.block_size} = {fact.num_blocks * fact.block_size:,} tokens{size}; "
    f"{full:,} sequence{'' if full == 1 else 's'} of full length"
  )
  if fact.num_host_blocks:
    where = f" of a file in {shorten_path(fact.host_dir)}" if fact.host_dir else ""
    text += f"; {fact.num_host_blocks:,} evicted blocks on the host in {_bytes(fact.num_host_bytes)}{where}"
  return text


def _programs_text(fact: ProgramsFact) -> str:
  if fact.has_bundle:
    origin = "from the executable bundle, in seconds"
  elif not fact.cache_dir:
    origin = "all compiled at every start (--compile_cache_dir keeps them)"
  elif fact.is_cache_empty:
    origin = f"all compiled now, and kept in {shorten_path(fact.cache_dir)} for the next start"
  else:
    origin = f"compiled unless they are in {shorten_path(fact.cache_dir)}"
  return f"{fact.count}, for steps of {', '.join(map(str, fact.token_budgets))} tokens; {origin}"


def _count(number: int) -> str:
  """Formats a count, for example 125M."""
  for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
    if number >= size:
      return f"{number / size:.3g}{unit}"
  return str(number)


def _bytes(number: int) -> str:
  size, unit = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
  return f"{number / size:.3g} {unit}" if number < 100 * size else f"{number / size:,.0f} {unit}"


def shorten_path(path: str) -> str:
  """Returns a path relative to the working folder, or with "~", if it lies below one of them."""
  given = pathlib.Path(path)
  if not given.is_absolute():
    return path
  for folder, name in ((pathlib.Path.cwd(), ""), (pathlib.Path.home(), "~/")):
    if given.is_relative_to(folder) and given != folder:
      return f"{name}{given.relative_to(folder)}"
  return path


@dataclasses.dataclass(frozen=True)
class ServedAddresses:
  """The addresses of a server.

  Attributes:
    grpc: HOST:PORT of the listening socket.
    page, api, metrics: URLs; "" if the server has none.
    note: a remark for the operator, or "".
  """

  grpc: str
  page: str = ""
  api: str = ""
  metrics: str = ""
  note: str = ""

  def describe(self) -> str:
    """Returns all addresses in one line, the page first."""
    parts = [f"{self.page} (page), {self.api} (API)"] if self.page else []
    parts.append(f"gRPC {self.grpc}")
    parts += [f"metrics {self.metrics}"] if self.metrics else []
    return ", ".join(parts) + (f"; {self.note}" if self.note else "")


def served_addresses(options: HostOptions, port: int, http_port: int, metrics_port: int) -> ServedAddresses:
  """Returns the addresses of a listening server. A port of -1 means none."""
  host = options.http_host or options.host
  shown = "localhost" if host in _WILDCARDS else f"[{host}]" if ":" in host else host
  base = f"http{'s' if options.tls_cert_file else ''}://{shown}:{http_port}" if http_port >= 0 else ""
  metrics = f"http://{shown}:{metrics_port}/metrics" if metrics_port >= 0 else f"{base}/metrics" if base else ""
  return ServedAddresses(
    grpc=f"{options.host}:{port}",
    page=f"{base}/" if base else "",
    api=f"{base}/v1" if base else "",
    metrics=metrics,
    note="on every address of this machine" if host in _WILDCARDS else "",
  )


def process_age_s(clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> float:
  """Returns the seconds since this process began, with the interpreter's start; 0 if the system has no value."""
  try:
    ticks = int(pathlib.Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
    return clock() - ticks / os.sysconf("SC_CLK_TCK")
  except (OSError, ValueError, IndexError, AttributeError):
    return 0.0
