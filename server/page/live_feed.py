"""Makes the live page's data: one JSON text for each tick, shared by all readers. Changes nothing; knows no HTTP.

Nothing runs without readers. A slow reader misses ticks, so no queue grows.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
import json
from typing import Any

from engine.errors import Overloaded, Unavailable
from server.generation.serving_state import ServingState
from server.telemetry.latency_histograms import NUM_RECENT, percentiles
from server.telemetry.process_counts import Census
from server.version import server_version

_TICK_S = 0.25
# The map of the KV pool reads every block, so only every fourth tick has it.
_MAP_TICKS = 4
_MAP_CELLS = 1024
_MAX_READERS = 16
_MAX_STEPS = 64
_SHARES = (0.5, 0.9, 0.99)
# Percentiles cover the values of these last seconds, or fewer seconds if more values came than are kept.
_FIRST_TOKEN_WINDOW_S = 60.0
_GAP_WINDOW_S = 10.0


class Feed:
  """Sends ticks to the readers of one server's page. Belongs to one event loop."""

  def __init__(self, state: ServingState, census: Census, *, tick_s: float = _TICK_S, max_readers: int = _MAX_READERS):
    """Args:
    state: the serving state.
    census: the counts of the server's processes.
    tick_s: seconds between two messages.
    max_readers: the limit of readers; the feed refuses more.
    """
    self._state = state
    self._census = census
    self._tick_s = tick_s
    self._max_readers = max_readers
    self._num_readers = 0
    self._message = b""
    self._news = asyncio.Event()
    self._ticker: asyncio.Task | None = None
    self._closed = False
    self._num_ticks = 0
    self._seen_until = 0.0

  async def messages(self) -> AsyncGenerator[bytes]:
    """Yields one server-sent event of JSON for each tick until close(); a slow reader misses events.

    Raises:
      Overloaded: the feed has `max_readers` readers.
    """
    if self._num_readers >= self._max_readers:
      raise Overloaded(f"{self._max_readers} pages are watching already, which is the limit", remedy=" or close one")
    self._num_readers += 1
    try:
      if self._ticker is None:
        self._num_ticks = 0
        self._message = b""
        self._ticker = asyncio.create_task(self._run())
      while not self._closed:
        news = self._news
        if self._message:
          yield self._message
        await news.wait()
    finally:
      self._num_readers -= 1
      if not self._num_readers and self._ticker is not None:
        self._ticker.cancel()
        self._ticker = None

  def close(self) -> None:
    """Ends every reader's stream, so that a shutdown need not wait for them."""
    self._closed = True
    self._news.set()

  async def _run(self) -> None:
    while not self._closed:
      await self._tick()
      await asyncio.sleep(self._tick_s)

  async def _tick(self) -> None:
    text = json.dumps(await self._snapshot(), separators=(",", ":"))
    self._message = f"data: {text}\n\n".encode()
    self._num_ticks += 1
    news, self._news = self._news, asyncio.Event()
    news.set()

  async def _snapshot(self) -> dict[str, Any]:
    serving = self._state
    try:
      backend = serving.require_backend()
    except Unavailable as error:
      return {"state": error.reason.lower(), "version": server_version()}
    with_map = self._num_ticks % _MAP_TICKS == 0
    report = await backend.engine.report(4 * _MAX_STEPS, with_blocks=with_map)
    config, stats, seen = backend.config, report.stats, (await self._census()).observations
    steps = [step for step in stats.steps if step.time > self._seen_until][-_MAX_STEPS:]
    if steps:
      self._seen_until = steps[-1].time
    empty = (0, 0, 0, 0, 0, 0.0, 0.0)
    now = backend.engine.now()
    first, first_window_s = _recent([(at, value, 1) for at, value in seen.recent_first], now, _FIRST_TOKEN_WINDOW_S)
    gaps, gap_window_s = _recent(seen.recent_gaps, now, _GAP_WINDOW_S)
    return {
      "state": "ready" if serving.ready else "draining" if serving.alive else "stuck",
      "version": server_version(),
      "now_s": report.now_s,
      "uptime_s": serving.uptime_s,
      "model": backend.model,
      "batching": config.batching,
      "text": backend.tokenizer is not None,
      "chat": backend.tokenizer is not None and backend.tokenizer.has_chat_template,
      "max_model_len": config.max_model_len,
      "running": stats.num_running,
      "running_limit": stats.max_num_seqs,
      "waiting": max(0, stats.num_live - stats.num_running),
      "waiting_tokens": stats.num_waiting_tokens,
      "finished": {reason.value: count for reason, count in stats.finished.items()},
      "output_tokens": stats.num_output_tokens,
      "prefill_tokens": stats.num_prefill_tokens,
      "cached_tokens": stats.num_cached_tokens,
      "preemptions": stats.num_preemptions,
      "draft_tokens": stats.drafts.tokens,
      "accepted_draft_tokens": stats.drafts.accepted,
      "forced_tokens": stats.drafts.forced,
      "compiles": report.compiles_after_ready,
      "first_token_s": percentiles(first, _SHARES),
      "first_token_window_s": round(first_window_s, 1),
      "gap_s": percentiles(gaps, _SHARES),
      "gap_window_s": round(gap_window_s, 1),
      "kv": {
        "block_size": config.block_size,
        "map": _cells(report.blocks) if with_map else None,
      },
      # tokens, rows; steps, decode, prefill, padding tokens, idle slots, host and device seconds so far
      "rungs": [
        [shape.tokens, shape.rows, *(stats.rungs.get(shape.tokens) or empty)] for shape in config.ladder.rungs()
      ],
      # rung, decode, prefill, padding tokens, device seconds
      "steps": [
        [step.shape_tokens, step.decode_tokens, step.prefill_tokens, step.padding, round(step.device_s, 6)]
        for step in steps
      ],
    }


def _recent(
  values: Sequence[tuple[float, float, int]], now: float, window_s: float
) -> tuple[list[tuple[float, int]], float]:
  """Returns the (value, count) of the (time, value, count) in the window, and the seconds that they cover."""
  if len(values) >= NUM_RECENT:  # older values may be dropped
    window_s = min(window_s, now - min(moment for moment, _, _ in values))
  return [(value, times) for moment, value, times in values if moment >= now - window_s], window_s


def _cells(states: bytes) -> list[list[int]]:
  """Returns (held, cached and not held, all) of each cell of the map; a cell is one block or several adjacent ones."""
  size = -(-len(states) // _MAP_CELLS) or 1
  cells = [states[start : start + size] for start in range(0, len(states), size)]
  return [[cell.count(2), cell.count(1), len(cell)] for cell in cells]
