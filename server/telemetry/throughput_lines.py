"""Writes a throughput line from the engine's counters every few seconds. Writes nothing while the engine is idle.

Runs on the server's event loop, and costs the engine's thread nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from engine.recorder import EngineStats


class SayLine(Protocol):
  """The signature of server.telemetry.log_lines.Lines.say."""

  def __call__(self, line: str, **fields: Any) -> None: ...


class ThroughputLines:
  """Writes the counters' changes between two readings as a line.

  Args of the constructor:
    read_stats, clock: the engine's counters, and its clock in seconds.
    say: writes a line.
  """

  def __init__(self, read_stats: Callable[[], EngineStats], clock: Callable[[], float], say: SayLine):
    self._read_stats, self._clock, self._say = read_stats, clock, say
    self._before, self._time = read_stats(), clock()

  async def run(self, period_s: float) -> None:
    """Writes a line every `period_s` seconds, until it is cancelled."""
    while True:
      await asyncio.sleep(period_s)
      self.say_line()

  def say_line(self) -> None:
    """Writes the changes since the last reading; nothing if the engine was idle."""
    now, stats, before = self._clock(), self._read_stats(), self._before
    seconds, self._before, self._time = max(now - self._time, 1e-9), stats, now
    prompt = stats.num_prefill_tokens - before.num_prefill_tokens
    useful = prompt + stats.num_decode_tokens - before.num_decode_tokens
    output = stats.num_output_tokens - before.num_output_tokens
    if not (stats.num_live or useful or output):
      return
    padding = stats.num_padding_tokens - before.num_padding_tokens
    queried = stats.num_queried_tokens - before.num_queried_tokens
    hits = stats.num_cached_tokens - before.num_cached_tokens
    waiting = max(stats.num_waiting, stats.num_live - stats.num_running)  # requests in the inbox wait too
    fields = {
      "running": stats.num_running,
      "waiting": waiting,
      "prompt_tokens_per_s": round(prompt / seconds, 1),
      "output_tokens_per_s": round(output / seconds, 1),
      "kv_used_percent": _percent(stats.blocks_used, stats.num_blocks),
      "prefix_hit_percent": _percent(hits, queried),
      "preemptions": stats.num_preemptions - before.num_preemptions,
      "padding_percent": _percent(padding, padding + useful),
    }
    self._say(
      "running {running}, waiting {waiting}, prompt {prompt_tokens_per_s:,.0f} tokens/s, output "
      "{output_tokens_per_s:,.0f} tokens/s, KV used {kv_used_percent:.0f} %, prefix hits {prefix_hit_percent:.0f} %, "
      "preemptions {preemptions}, padding {padding_percent:.0f} %".format(**fields),
      event="throughput",
      **fields,
    )


def _percent(part: int, whole: int) -> float:
  return min(100.0, round(100 * part / whole, 1)) if whole else 0.0
