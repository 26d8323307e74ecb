"""Displays the state of a DemoLoad as a screen or a line, and its summary. Sends nothing."""

from collections.abc import Sequence
import time

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from server.proto import sluice_pb2 as pb
from tools.demo.load import LATENCY_WINDOW_S, RATE_WINDOW_S, DemoLoad, DemoStream, measure_occupancy
from tools.report.latency import percentile, summary

COLORS = {
  "story": "magenta",
  "talk": "cyan",
  "copy": "green",
  "reverse": "yellow",
  "arithmetic": "blue",
  "json": "bright_cyan",
  "recall": "bright_red",
}
NAMES = {"arithmetic": "arith."}
STORY_SHARE = 0.5  # of the lines
# An ended stream stays on the screen for the first time, and for the second if no other stream needs its line.
VERDICT_S, LINGER_S = 0.7, 2.0
SPARKS = "▁▂▃▄▅▆▇█"


def _bar(share: float, width: int, pale: float = 0.0) -> Text:
  """Returns a bar of which `share` is full, and `pale` half full."""
  filled = round(min(max(share, 0.0), 1.0) * width)
  half = min(round(pale * width), width - filled)
  bar = Text().append("█" * filled, "green").append("▒" * half, "green")
  return bar.append("░" * (width - filled - half), "bright_black")


def _framed(title: str, content: RenderableType, height: int) -> Panel:
  return Panel(content, title=title, height=height, box=box.ROUNDED, border_style="dim")


def _spark(values: Sequence[float], width: int) -> str:
  values = values[-width:]
  top = max(values, default=0.0) or 1.0
  return "".join(SPARKS[min(7, int(8 * value / top))] for value in values)


def _milliseconds(values: Sequence[float], percent: float) -> str:
  value = percentile(values, percent)
  return "-" if value is None else f"{value * 1e3:.0f}"


class View:
  """The live screen, a rich renderable that fits its terminal."""

  def __init__(self, load: DemoLoad, title: str):
    """Args: load: the load, which other threads may change. title: model and address."""
    self._load = load
    self._title = title
    self._lines: list[DemoStream | None] = []  # a stream keeps its line, so the reader can follow it
    self._output_rates: list[float] = []
    self._seen_sample = 0.0

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    width, height = options.max_width, options.height or console.height
    side = 44 if width >= 120 else 34
    body = max(8, height - 2)
    grid = Table.grid(expand=True, padding=0)
    grid.add_column(ratio=1)
    grid.add_column(width=side)
    grid.add_row(
      _framed("streams", self._streams(width - side - 4, body - 2), body),
      _framed("engine", self._engine(side - 4, body - 2), body),
    )
    yield Group(self._header(width), grid, self._footer(width))

  def _header(self, width: int) -> Text:
    load = self._load
    if load.requests:
      clock = f"{min(load.requests, round(load.share * load.requests)):4} of {load.requests} requests "
    else:
      clock = f"{min(1.0, load.share) * load.seconds:4.0f} of {load.seconds:.0f} s "
    text = Text().append(" Sluice ", "bold reverse").append(f" {self._title}", "bold")
    text.truncate(max(0, width - len(clock) - 1), overflow="ellipsis", pad=True)
    return text.append(clock.rjust(width - len(text)), "dim")

  def _footer(self, width: int) -> Text:
    text = Text(" ")
    for kind, color in COLORS.items():
      text.append("■ ", color).append(f"{NAMES.get(kind, kind)}  ", "dim")
    text.append("Ctrl-C ends", "dim")
    text.truncate(width, overflow="ellipsis")
    return text

  # Streams.

  def _place(self, rows: int) -> None:
    """Gives new streams free lines, or those of ended streams."""
    now = time.monotonic()
    load = self._load
    lines = (self._lines + [None] * rows)[:rows]
    lines = [None if stream and stream.ended_s and now - stream.ended_s > LINGER_S else stream for stream in lines]
    shown = {id(stream) for stream in lines}
    newest = [stream for stream in tuple(load.live) if id(stream) not in shown]
    # Stories last long: without a limit they would fill every line and hide other requests.
    spare = int(STORY_SHARE * rows) - sum(stream is not None and stream.turn.kind == "story" for stream in lines)
    stories = [stream for stream in newest if stream.turn.kind == "story"][: max(0, spare)]
    newest = [stream for stream in newest if stream.turn.kind != "story" or stream in stories]
    free = sorted(
      (
        index
        for index, stream in enumerate(lines)
        if stream is None or (stream.ended_s and now - stream.ended_s > VERDICT_S)
      ),
      key=lambda index: (stream.ended_s or 0.0) if (stream := lines[index]) else 0.0,
    )
    for index, stream in zip(free, newest, strict=False):
      lines[index] = stream
    self._lines = lines

  def _streams(self, width: int, rows: int) -> RenderableType:
    self._place(rows)
    return Group(*(self._stream_line(stream, width) if stream else Text("") for stream in self._lines))

  def _stream_line(self, stream: DemoStream, width: int) -> Text:
    kind, ended = stream.turn.kind, stream.ended_s is not None
    mark, style = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("  ", "")}[stream.right]
    if stream.error:
      mark, style = "! ", "bold red"
    line = Text().append(f"{NAMES.get(kind, kind):8}", COLORS[kind]).append(mark, style)
    left = max(4, width - len(line))
    text = " ".join((stream.error or stream.text).split())
    if not text and not ended:
      question = " ".join(stream.turn.text.split())
      return line.append(f"· {question}"[:left], "dim italic")
    cursor = "" if ended else "▌"
    tail = text[-(left - len(cursor)) :]
    if len(tail) < len(text):
      tail = "…" + tail[1:]
    line.append(tail, "dim" if ended else "").append(cursor, COLORS[kind])
    line.no_wrap = True
    return line

  # Engine.

  def _engine(self, width: int, rows: int) -> RenderableType:
    load = self._load
    if not load.samples:
      return Text("waiting for the first figures", "dim")
    at, now = load.samples[-1]
    rates = load.rates()
    if rates and at != self._seen_sample:
      self._seen_sample = at
      self._output_rates.append(rates["output_s"])
    right = sum(number for number, _ in load.score().values())
    checked = sum(number for _, number in load.score().values())
    ttft, gaps = load.recent_latencies()
    cached, prompts = load.cached_tokens()
    meter = width - 19

    def fact(name: str, value: str | Text, style: str = "bold") -> Text:
      line = Text().append(f"{name:10}", "dim")
      return line.append_text(value) if isinstance(value, Text) else line.append(value, style)

    head = [
      fact(
        "tokens/s",
        Text()
        .append(f"{rates.get('output_s', 0):6,.0f} ", "bold")
        .append(_spark(self._output_rates, width - 18), "green"),
      ),
      fact("decode", f"{rates.get('decode_s', 0):6,.0f} /s"),
      fact("prefill", f"{rates.get('prefill_s', 0):6,.0f} /s"),
      fact("padding", f"{rates.get('padding_share', 0):6.0%} of computed"),
    ]
    rungs = [Text(f"steps by rung, last {RATE_WINDOW_S:.0f} s", "dim")] + [
      Text()
      .append(f"{tokens:5} ", "bold" if share else "dim")
      .append_text(_bar(share, width - 12))
      .append(f" {share:4.0%}")
      for tokens, share in load.recent_rungs()
    ]
    use = [
      fact(
        "slots",
        _bar(now.running_requests / max(1, now.max_num_seqs), meter).append(
          f" {now.running_requests}/{now.max_num_seqs}"
        ),
      ),
      fact("queue", f"{now.queued_requests}", "bold yellow" if now.queued_requests else "bold"),
      fact(
        "KV blocks",
        _bar(
          now.kv_blocks_in_use / max(1, now.kv_blocks_total),
          meter,
          now.kv_blocks_cached / max(1, now.kv_blocks_total),
        ).append(f" {now.kv_blocks_in_use}/{now.kv_blocks_total}"),
      ),
      fact("  cached", f"{now.kv_blocks_cached}, reclaimable"),
    ]
    latency = [
      Text(f"latency, last {LATENCY_WINDOW_S:.0f} s", "dim"),
      fact("TTFT", f"p50 {_milliseconds(ttft, 50)} p99 {_milliseconds(ttft, 99)} ms"),
      fact("ITL", f"p50 {_milliseconds(gaps, 50)} p99 {_milliseconds(gaps, 99)} ms"),
    ]
    totals = [
      fact("skills", f"{right} of {checked} right"),
      fact("prefixes", f"{cached / max(1, prompts):.0%} of prompt tokens hit"),
      fact("preempted", f"{now.preemptions_total}"),
      fact("compiles", f"{now.compiles_after_ready} since ready", "bold red" if now.compiles_after_ready else "bold"),
    ]
    groups = [head, rungs, use, latency, totals]
    spare = rows - sum(map(len, groups))
    lines: list[Text] = []
    for index, group in enumerate(groups):
      if index and spare > 0:
        lines.append(Text(""))
        spare -= 1
      lines += group
    for line in lines:
      line.no_wrap = True
      line.overflow = "crop"
    return Group(*lines[:rows])


def plain_line(load: DemoLoad) -> str:
  """Returns one line of progress, for use without a terminal."""
  now, rates = load.samples[-1][1] if load.samples else pb.GetLoadResponse(), load.rates()
  gone = 0.0 if load.started_s is None else time.monotonic() - load.started_s
  ttft, gaps = load.recent_latencies()
  cached, prompts = load.cached_tokens()
  right, checked = (sum(column) for column in zip(*load.score().values(), strict=True))
  return (
    f"{gone:5.1f} s: {now.running_requests} of {now.max_num_seqs} slots, {now.queued_requests} queued, "
    f"{rates.get('output_s', 0):.0f} tokens/s, KV {now.kv_blocks_in_use} in use and {now.kv_blocks_cached} cached of "
    f"{now.kv_blocks_total}, {now.preemptions_total} preempted, {cached / max(1, prompts):.0%} of prompts cached, "
    f"TTFT p50 {_milliseconds(ttft, 50)} ms, ITL p50 {_milliseconds(gaps, 50)} ms, "
    f"{len(load.ended)} done, {right} of {checked} right"
  )


def closing(load: DemoLoad, first_token_s: float, compile_s: float, width: int) -> RenderableType:
  """Returns the summary.

  Args:
    load: the load after its run.
    first_token_s: seconds from the start of the demo's process to the first streamed token.
    compile_s: the part that the server spent on compilation and warm-up.
    width: the terminal's width.
  """
  now = load.samples[-1][1]
  figures = summary(load.outcomes(), 0)
  computed = now.decode_tokens_total + now.prefill_tokens_total + now.padding_tokens_total
  failed = [stream for stream in load.ended if stream.error]
  score = load.score()
  right, checked = (sum(column) for column in zip(*score.values(), strict=True))
  table = Table.grid(padding=(0, 2))
  table.add_column(style="dim", no_wrap=True)
  table.add_column()
  rungs = "  ".join(f"{rung.tokens}: {rung.steps_total:,}" for rung in now.rungs)

  def row(name: str, value: str, style: str = "") -> None:
    table.add_row(name, Text(value, style))

  row("first token", f"{first_token_s:.1f} s after the start ({now.load_s:.1f} s loading, {compile_s:.1f} s compiling)")
  row("requests", f"{len(load.ended) - len(failed)} answered, {len(failed)} failed", "bold red" if failed else "")
  occupancy = measure_occupancy(load.steps, now.max_num_seqs)
  row(
    "slots",
    f"{occupancy.slots:.1f} of {now.max_num_seqs} in use on average, all for {occupancy.full_share:.0%} of the time",
  )
  row(
    "queue",
    f"{occupancy.queue:.1f} requests on average, {occupancy.longest_queue} at most; "
    f"not empty for {occupancy.queue_share:.0%} of the time",
  )
  cached, prompts = load.cached_tokens()
  row("prefixes", f"{cached / max(1, prompts):.0%} of {prompts:,} prompt tokens came from the prefix cache")
  row("preemptions", f"{now.preemptions_total}, for want of KV blocks ({now.kv_blocks_total} in all)")
  by_kind = ", ".join(f"{kind} {good}/{of}" for kind, (good, of) in score.items())
  row("skills", f"{right} of {checked} right: {by_kind}")
  row(
    "throughput",
    f"{figures['output_tok_s'] or 0:,.0f} output tokens/s over {figures['wall_s'] or 0:.0f} s "
    f"({now.decode_tokens_total:,} decoded, {now.prefill_tokens_total:,} prefilled)",
  )
  for name, key in (("TTFT", "ttft"), ("ITL", "itl")):
    values = [figures[f"{key}_{at}_ms"] for at in ("p50", "p90", "p99")]
    if None not in values:
      row(name, "p50 {:.0f}, p90 {:.0f}, p99 {:.0f} ms".format(*values))
  row("steps", f"{now.steps_total:,} by rung  {rungs}")
  shapes = computed + now.skipped_tokens_total
  row(
    "padding",
    f"{now.padding_tokens_total / max(1, computed):.1%} of computed tokens; kernels skipped "
    f"{now.skipped_tokens_total / max(1, shapes):.1%} of what rungs hold",
  )
  row("compiles", f"{now.compiles_after_ready} since ready", "bold red" if now.compiles_after_ready else "bold green")
  row("memory", f"{now.peak_rss_bytes / 2**20:,.0f} MiB at most")
  return Panel(table, title="Sluice demo", box=box.ROUNDED, width=min(width, 110))
