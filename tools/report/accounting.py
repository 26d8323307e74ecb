"""Accounts for the steps and requests of a run: tokens by rung, FLOPs, KV, time. Sums records; runs nothing.

A step computes useful tokens and padding; the kernels skip the rest of its rung at no cost. A slot is idle if it has no
row while a request waits. In FLOPs, linear layers count by token (including padding), the output head by row of logits,
attention by pair of query and key (padding has none). An idle slot counts as one more decode token like those of the
step's decode rows. The FLOPs follow from the layers' inputs; additional work inside a kernel does not count.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.recorder import RequestRecord, StepRecord
from tools.report.latency import percentile


@dataclasses.dataclass(frozen=True)
class Flops:
  """A decoder's floating-point operations; a multiply-add is two.

  Attributes:
    token: the linear layers, for each computed token.
    row: the output head, for each computed row of logits.
    pair: attention, for each pair of query and key.
  """

  token: float
  row: float
  pair: float

  @classmethod
  def of_model(cls, folder: str) -> "Flops":
    """Returns the FLOPs of a model folder, whose config.json has the fields of Llama.

    Raises:
      ConfigError: the file is missing, or lacks a field.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
      config = json.loads(path.read_text("utf-8"))
      hidden, layers, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
      head_dim = config.get("head_dim") or hidden // heads
      kv_heads = config.get("num_key_value_heads") or heads
      layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
      return cls(2 * layers * layer, 2 * hidden * config["vocab_size"], 4 * layers * heads * head_dim)
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise ConfigError(
        f"{path} does not give a model's sizes ({type(error).__name__}: {error}); give a Llama-shaped model folder"
      ) from error

  def of(self, tokens: int, rows: int, pairs: float) -> float:
    """Returns the FLOPs of these together."""
    return tokens * self.token + rows * self.row + pairs * self.pair

  def useful(self, step: StepRecord) -> float:
    """Returns the FLOPs of requested tokens."""
    tokens, pairs = step.decode_tokens + step.prefill_tokens, step.decode_keys + step.prefill_pairs
    return self.of(tokens, step.num_rows, pairs)

  def padding(self, step: StepRecord, skips: bool) -> float:
    """Returns the FLOPs of padding.

    Args:
      skips: whether the device skips a rung's padding. It then computes rows of logits for requests alone; if a
        batching mode pads, it computes padding tokens up to the rung's rows.
    """
    rows = step.shape_rows
    if skips:
      computed = step.decode_tokens + step.prefill_tokens + step.padding
      rows = min(computed, rows) if step.padding else step.num_rows
    return step.padding * self.token + (rows - step.num_rows) * self.row

  def idle(self, step: StepRecord) -> float:
    """Returns the FLOPs of one more token in each idle slot, with the mean context of the step's decode rows."""
    context = step.decode_keys / step.decode_rows if step.decode_rows else 1.0
    return step.idle_slots * (self.token + self.row + context * self.pair)


def _share(part: float, whole: float) -> float | None:
  return round(part / whole, 5) if whole else None


def _sums(steps: Sequence[StepRecord], flops: Flops | None, skips: bool) -> dict[str, Any]:
  useful = sum(step.decode_tokens + step.prefill_tokens for step in steps)
  padding, idle = sum(step.padding for step in steps), sum(step.idle_slots for step in steps)
  device_s = sum(step.device_s for step in steps)
  sums = {
    "steps": len(steps),
    "useful_tokens": useful,
    "padding_tokens": padding,
    "skipped_tokens": sum(step.skipped for step in steps),
    "idle_slots": idle,
    "padding_share": _share(padding, useful + padding),
    "device_s": round(device_s, 6),
    "host_s": round(sum(step.host_s + step.commit_s for step in steps), 6),
  }
  if flops is not None:
    useful_flops = sum(map(flops.useful, steps))
    padding_flops = sum(flops.padding(step, skips) for step in steps)
    sums |= {
      "useful_flops": useful_flops,
      "padding_flops": padding_flops,
      "idle_flops": sum(map(flops.idle, steps)),
      "padding_flops_share": _share(padding_flops, useful_flops + padding_flops),
      "useful_flop_s": round(useful_flops / device_s) if device_s else None,
    }
  return sums


def account(
  steps: Sequence[StepRecord], block_size: int, num_blocks: int, flops: Flops | None = None
) -> dict[str, Any]:
  """Returns the account of a run as plain JSON values.

  Args:
    steps: the run's step records, at least one.
    block_size, num_blocks: the dimensions of the KV pool, or of the decode side's if there are two.
    flops: the model's FLOPs; None leaves out the weighted figures.

  Returns:
    The totals, and four more entries:

    - `by_rung`: the totals by token budget
    - `composition`: the shares of useful tokens, and of steps with only decodes, only prefills, or both
    - `kv`: the mean and the maximum over steps of the occupancy (share of blocks in use) and of the fragmentation
      (share of empty slots in running requests' blocks)
    - `host_share`: the host's share of a step's time without overlap
  """
  rungs = sorted({step.shape_tokens for step in steps})
  skips = any(step.skipped for step in steps)  # a device skips padding in all steps or in none
  totals = _sums(steps, flops, skips)
  decode_rows = sum(step.decode_rows for step in steps)
  decodes, prefills = (sum(getattr(step, name) for step in steps) for name in ("decode_tokens", "prefill_tokens"))
  useful = decodes + prefills
  kinds = [(step.decode_tokens > 0, step.prefill_tokens > 0) for step in steps]
  kv_steps = [step for step in steps if step.side != "prefill"] or steps
  occupied = [step.blocks_used / num_blocks for step in kv_steps]
  wasted = [1 - step.kv_tokens / step.kv_slots for step in kv_steps if step.kv_slots]
  return totals | {
    "host_share": _share(totals["host_s"], totals["host_s"] + totals["device_s"]),
    "composition": {
      "decode_tokens": _share(decode_rows, useful),
      "speculative_tokens": _share(decodes - decode_rows, useful),
      "prefill_tokens": _share(prefills, useful),
      "decode_steps": _share(kinds.count((True, False)), len(steps)),
      "prefill_steps": _share(kinds.count((False, True)), len(steps)),
      "mixed_steps": _share(kinds.count((True, True)), len(steps)),
      "mean_rows": round(sum(step.num_rows for step in steps) / len(steps), 3),
    },
    "kv": {
      "block_size": block_size,
      "num_blocks": num_blocks,
      "occupancy_mean": round(sum(occupied) / len(occupied), 5),
      "occupancy_max": round(max(occupied), 5),
      "fragmentation_mean": round(sum(wasted) / len(wasted), 5) if wasted else None,
      "fragmentation_max": round(max(wasted), 5) if wasted else None,
    },
    "by_rung": {
      str(rung): _sums([step for step in steps if step.shape_tokens == rung], flops, skips) for rung in rungs
    },
  }


def table(accounted: dict[str, Any]) -> str:
  """Formats the result of account() for a terminal."""
  weighted = "useful_flops" in accounted
  head = f"{'rung':>8}{'steps':>9}{'useful':>11}{'padding':>11}{'share':>8}{'skipped':>11}{'idle':>9}"
  head += f"{'device s':>10}{'host s':>9}"
  lines = [head + (f"{'padding of FLOPs':>18}" if weighted else "")]
  for name, row in (*accounted["by_rung"].items(), ("all", accounted)):
    lines.append(
      f"{name:>8}{row['steps']:9,}{row['useful_tokens']:11,}{row['padding_tokens']:11,}{_percent(row['padding_share']):>8}"
      f"{row['skipped_tokens']:11,}{row['idle_slots']:9,}{row['device_s']:10.2f}{row['host_s']:9.2f}"
      + (f"{_percent(row['padding_flops_share']):>18}" if weighted else "")
    )
  mix, kv = accounted["composition"], accounted["kv"]
  lines.append(
    f"tokens: decode {_percent(mix['decode_tokens'])}, prefill {_percent(mix['prefill_tokens'])}, speculative "
    f"{_percent(mix['speculative_tokens'])}; steps with both {_percent(mix['mixed_steps'])}; {mix['mean_rows']} "
    "rows a step"
  )
  lines.append(
    f"KV blocks in use: mean {_percent(kv['occupancy_mean'])}, most {_percent(kv['occupancy_max'])}; unfilled slots in "
    f"them: mean {_percent(kv['fragmentation_mean'])}; host {_percent(accounted['host_share'])} of host and device time"
  )
  return "\n".join(lines)


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{share:.1%}"


def padding_by_request(steps: Iterable[StepRecord], spans: Sequence[tuple[float, float]]) -> list[float]:
  """Returns each request's padding tokens, if the rows of a step share its padding evenly.

  Args:
    steps: the step records of one engine.
    spans: when each request was in the batch: (first planned, ended), on the clock of the steps.

  Returns:
    One number for each span: the sum over the steps planned within it.
  """
  ordered = sorted(steps, key=lambda step: step.time)
  times, sums = [step.time for step in ordered], [0.0]
  for step in ordered:
    sums.append(sums[-1] + step.padding / step.num_rows)
  return [sums[bisect.bisect_left(times, end)] - sums[bisect.bisect_left(times, begin)] for begin, end in spans]


# --- Requests ---------------------------------------------------------------------------------------------------------


def whole_requests(records: Iterable[RequestRecord]) -> list[RequestRecord]:
  """Returns one record for each request, in order of finish: the later of two sides, with the preemptions of both."""
  found: dict[str, RequestRecord] = {}
  for record in sorted(records, key=lambda record: record.end):
    before = found.pop(record.id, None)
    if before is not None:
      record = record._replace(
        lost_tokens=before.lost_tokens + record.lost_tokens,
        num_preemptions=before.num_preemptions + record.num_preemptions,
      )
    found[record.id] = record
  return list(found.values())


class Phases(NamedTuple):
  """A request's seconds in the engine; None for a phase that it did not reach.

  Attributes:
    queue: from arrival to its first step.
    prefill: from its first step to its first token.
    decode: from its first token to its end.
  """

  queue: float | None
  prefill: float | None
  decode: float | None


def phases(record: RequestRecord) -> Phases:
  """Returns a request's phases. After a preemption, queue time counts to the phase that it interrupts."""
  scheduled, first = record.first_scheduled, record.first_token
  return Phases(
    None if scheduled is None else scheduled - record.arrival,
    None if scheduled is None or first is None else first - scheduled,
    None if first is None else record.end - first,
  )


def account_requests(records: Sequence[RequestRecord]) -> dict[str, Any]:
  """Summarizes whole_requests() as plain JSON values: phases in milliseconds, tokens, preemptions."""
  spent = [phases(record) for record in records]
  figures: dict[str, Any] = {"requests": len(records)}
  for name in Phases._fields:
    values = [value for phase in spent if (value := getattr(phase, name)) is not None]
    for percent in (50, 99):
      value = percentile(values, percent)
      figures[f"{name}_p{percent}_ms"] = None if value is None else round(value * 1e3, 3)
  cached, prompts = (sum(getattr(record, name) for record in records) for name in ("cached_tokens", "prompt_tokens"))
  return figures | {
    "cached_tokens": cached,
    "cached_share": _share(cached, prompts),
    "preempted_requests": sum(record.num_preemptions > 0 for record in records),
    "preemptions": sum(record.num_preemptions for record in records),
    "lost_tokens": sum(record.lost_tokens for record in records),
    "reasons": dict(sorted(Counter(record.reason for record in records).items())),
  }


def request_table(accounted: dict[str, Any]) -> str:
  """Formats the result of account_requests() for a terminal."""

  def spread(name: str) -> str:
    p50, p99 = (accounted[f"{name}_p{percent}_ms"] for percent in (50, 99))
    return "-" if p50 is None else f"{p50:,.1f} and {p99:,.1f} ms"

  return (
    f"{accounted['requests']:,} requests in the engine, p50 and p99: queue {spread('queue')}, prefill "
    f"{spread('prefill')}, decode {spread('decode')}; prompt tokens from the cache "
    f"{_percent(accounted['cached_share'])}; {accounted['preempted_requests']} preempted, "
    f"{accounted['lost_tokens']:,} tokens lost by it"
  )
