"""Displays a fleet under load: its processes, the latest endings of streams, and what is lost. Changes nothing."""

from collections import deque
from collections.abc import Iterator
import time

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.fleet.checked_streams import StreamEnd, StreamLoad, Verdict
from tools.fleet.fleet_check import FleetCheck
from tools.fleet.fleet_members import NUM_REPLICAS, MemberState, RunningFleet

_STATE_STYLES = {
  MemberState.STARTING: "yellow",
  MemberState.SERVING: "green",
  MemberState.LOST: "bold red",
  MemberState.STOPPED: "bold red",
}
_VERDICT_STYLES = {Verdict.FINISHED: "green", Verdict.ERROR: "yellow", Verdict.CANCELLED: "cyan"}
_LINES = 6


class FleetView:
  """The live screen, a rich renderable that fits its terminal.

  Attributes:
    lines: the latest events, oldest first.
  """

  def __init__(self, fleet: RunningFleet, load: StreamLoad, check: FleetCheck):
    """Args: fleet, load, check: what it displays; other threads may change them."""
    self._fleet, self._load, self._check = fleet, load, check
    self._began = time.monotonic()
    self.lines: deque[str] = deque(maxlen=_LINES)

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    height = options.height or console.height
    body = max(6, height - _LINES - 4)
    grid = Table.grid(expand=True)
    grid.add_column(width=min(58, options.max_width // 2))
    grid.add_column(ratio=1)
    grid.add_row(
      _framed("fleet", Group(self._list_members(), Text(), self._count_ends()), body),
      _framed("streams that ended", self._list_ends(body - 2), body),
    )
    header = Text(f" {self._check.doing}", "bold", no_wrap=True, overflow="ellipsis")
    header.append(f"   {time.monotonic() - self._began:.0f} s, {self._load.num_open} streams open", "dim")
    events = Text("\n".join(self.lines), no_wrap=True, overflow="ellipsis")
    yield Group(header, grid, _framed("events", events, _LINES + 2))

  def _list_members(self) -> Table:
    fleet, table = self._fleet, Table.grid(padding=(0, 2))
    table.add_row(f"{NUM_REPLICAS} replicas, Ray Serve", fleet.cluster.grpc_target, _state(fleet.ray_state))
    for member in fleet.members:
      table.add_row(member.name, member.address, _state(member.state))
    return table

  def _count_ends(self) -> Table:
    table, counts = Table.grid(padding=(0, 2)), self._load.count_verdicts()
    for verdict in Verdict:
      table.add_row(Text(verdict.value, _VERDICT_STYLES.get(verdict, "bold red")), f"{counts[verdict]:,}")
    passed = sum(row.passed for row in self._check.rows)
    table.add_row("checks that hold", f"{passed} of {len(self._check.rows)}")
    return table

  def _list_ends(self, count: int) -> RenderableType:
    return Group(*map(describe_end, self._load.ends[-count:]))


def describe_end(end: StreamEnd) -> Text:
  """Returns a line for a stream's end."""
  line = Text(f"{end.protocol:5}", no_wrap=True, overflow="ellipsis")
  line.append(f"{end.verdict.value:10}", _VERDICT_STYLES.get(end.verdict, "bold red"))
  return line.append(f"{end.size:4} {'tokens' if end.protocol == 'grpc' else 'bytes':8}").append(
    " ".join(end.said.split()), "dim"
  )


def list_new_ends(load: StreamLoad, seen: int) -> Iterator[str]:
  """Yields a line for each end from the one numbered `seen` on that is no success, for output without a terminal."""
  for end in load.ends[seen:]:
    if end.verdict not in (Verdict.FINISHED, Verdict.CANCELLED):
      yield f"  {describe_end(end).plain}"


def _framed(title: str, content: RenderableType, height: int) -> Panel:
  return Panel(content, title=title, height=height, box=box.ROUNDED, border_style="dim")


def _state(state: MemberState) -> Text:
  return Text(state.value, _STATE_STYLES[state])
