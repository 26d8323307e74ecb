"""Reads traces for the fleet's planner: arrival times and lengths in columns, and keys of shared prefixes.

The file's first line decides between three forms:

  CSV as tools.workload reads it: Azure's, and lists of lengths
  JSON lines in Mooncake's form: timestamp in milliseconds, input_length, output_length, hash_ids
  request files of tools.workload, whose token ids give the keys

A hash id stands for a piece of the prompt and all pieces before it.
"""

from array import array
from collections.abc import Sequence
import json
import math
from typing import Any

from engine.block_pool import block_key, root_key
from engine.errors import ConfigError
from tools import workload

MOONCAKE_KEY_TOKENS = 512


class FleetTrace:
  """Requests in order of arrival.

  Attributes:
    arrivals: seconds, increasing.
    prompts, outputs: lengths in tokens.
    key_tokens: tokens that one key covers; 0 if no request has keys.
  """

  def __init__(
    self,
    arrivals: array,
    prompts: array,
    outputs: array,
    keys: Sequence[tuple[int, ...]] = (),
    key_tokens: int = 0,
    period: int = 0,
  ):
    """Args:
    keys: for each request, or for the first `period` ones, after which they repeat under other values.
    """
    self.arrivals, self.prompts, self.outputs = arrivals, prompts, outputs
    self.key_tokens = key_tokens if keys else 0
    self._keys, self._period = keys, period or len(keys)
    self._next_pass = 1 + max((max(each) for each in keys if each), default=0)

  def __len__(self) -> int:
    return len(self.arrivals)

  def keys_of(self, index: int) -> tuple[int, ...]:
    """Returns the keys of a request's prompt; passes over a repeated trace share none."""
    if not self._keys:
      return ()
    turn, row = divmod(index, self._period)
    keys = self._keys[row]
    return tuple([key + turn * self._next_pass for key in keys]) if turn else keys

  def with_columns(self, arrivals: array, prompts: array, outputs: array) -> "FleetTrace":
    """Returns a trace of other columns, whose requests have this one's keys; beyond its end these repeat."""
    return FleetTrace(arrivals, prompts, outputs, self._keys, self.key_tokens, self._period)


def read_fleet_trace(path: str, block_size: int, key_tokens: int = MOONCAKE_KEY_TOKENS) -> FleetTrace:
  """Reads a trace of any of the forms.

  Args:
    block_size: tokens of a KV block, for request files.
    key_tokens: tokens of a piece in Mooncake's form.

  Raises:
    ConfigError: the file is missing, has another form, or a bad line.
  """
  try:
    with open(path, encoding="utf-8") as file:
      first = next((line for line in file if line.strip() and not line.startswith("#")), "")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"trace {path} cannot be read ({error}); check --trace") from error
  if not first.startswith("{"):
    return _from_rows(workload.read_trace(path))
  if '"hash_ids"' in first or '"input_length"' in first:
    return _read_mooncake(path, key_tokens)
  requests = sorted(workload.read_requests(path), key=lambda request: request.arrival_s)
  numbers: dict[bytes, int] = {}
  keys = [_number_blocks(request.prompt, block_size, numbers) for request in requests]
  return FleetTrace(
    array("d", (request.arrival_s for request in requests)),
    array("q", (len(request.prompt) for request in requests)),
    array("q", (request.output_len for request in requests)),
    keys,
    block_size,
  )


def _from_rows(rows: Sequence[tuple[float, int, int]]) -> FleetTrace:
  columns = zip(*rows, strict=True)
  return FleetTrace(array("d", next(columns)), array("q", next(columns)), array("q", next(columns)))


def _number_blocks(prompt: Sequence[int], block_size: int, numbers: dict[bytes, int]) -> tuple[int, ...]:
  """Returns a number for each full block of a prompt and what precedes it."""
  parent, found = root_key(b""), []
  for start in range(0, len(prompt) - block_size + 1, block_size):
    parent = block_key(parent, prompt[start : start + block_size])
    found.append(numbers.setdefault(parent, len(numbers)))
  return tuple(found)


def _read_mooncake(path: str, key_tokens: int) -> FleetTrace:
  arrivals, prompts, outputs = array("d"), array("q"), array("q")
  keys: list[tuple[int, ...]] = []
  form = '{"timestamp": 0, "input_length": 600, "output_length": 40, "hash_ids": [0, 1]}'
  with open(path, encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      where = f"trace {path}, line {number}"
      try:
        value = json.loads(line)
        when, prompt, output = value["timestamp"], value["input_length"], value["output_length"]
        ids = tuple(value.get("hash_ids", ()))
      except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read ({type(error).__name__}: {error}); a line is {form}") from error
      if type(when) not in (int, float) or not 0 <= when < math.inf:
        raise ConfigError(f"{where}: timestamp={when!r:.40} must be milliseconds of 0 or more; a line is {form}")
      for name, length in (("input_length", prompt), ("output_length", output)):
        if type(length) is not int or length < 0:
          raise ConfigError(f"{where}: {name}={length!r:.40} must be a whole number of 0 or more; a line is {form}")
      if any(type(each) is not int or each < 0 for each in ids) or len(ids) < prompt // key_tokens * bool(ids):
        raise ConfigError(
          f"{where}: hash_ids has {len(ids)} entries; it must have a whole number of 0 or more for each "
          f"{key_tokens} of the {prompt} tokens, or set --key_tokens to the trace's own"
        )
      if arrivals and when / 1e3 < arrivals[-1]:
        raise ConfigError(
          f"{where}: it arrives {arrivals[-1] - when / 1e3:.3f} s before the line above it; sort by time"
        )
      arrivals.append(when / 1e3)
      prompts.append(max(1, prompt))
      outputs.append(max(1, output))
      keys.append(ids[: prompt // key_tokens])
  if not arrivals:
    raise ConfigError(f"trace {path} has no requests; give one with at least one line {form}")
  return FleetTrace(arrivals, prompts, outputs, keys if any(keys) else (), key_tokens)


def shape_trace(
  trace: FleetTrace,
  *,
  num_requests: int | None = None,
  length_scale: float = 1.0,
  rate_scale: float = 1.0,
  max_len: int | None = None,
  hours: float | None = None,
  swing: float = 0.0,
) -> FleetTrace:
  """Scales a trace, repeats it end to end, and lets its rate follow a day.

  Args:
    num_requests: the length; longer than the trace repeats it.
    length_scale: factor of lengths; only without keys.
    rate_scale: factor of the arrival rate.
    max_len: limit for prompt and output together; the prompt is cut first.
    hours: repeats the trace for so long, instead of num_requests.
    swing: with hours: the rate is 1 - swing times the mean at the beginning and the end, and 1 + swing in the middle.

  Raises:
    ConfigError: values that contradict each other.
  """
  if length_scale != 1.0 and trace.key_tokens:
    raise ConfigError(f"scale={length_scale:g} would break the trace's shared prefixes; leave out --scale")
  if not 0 <= swing < 1:
    raise ConfigError(f"swing={swing:g} must be at least 0 and below 1; set --swing")
  if hours is not None and num_requests is not None:
    raise ConfigError(f"hours={hours:g} and num_requests={num_requests} both set the trace's length; set one of them")
  if swing and hours is None:
    raise ConfigError(f"swing={swing:g} needs the length of the day; set --hours")
  rows, last_s = len(trace), trace.arrivals[-1]
  period_s = (last_s + (last_s / (rows - 1) if rows > 1 else 0.0)) / rate_scale
  count = rows if num_requests is None else num_requests
  if hours is not None:
    if period_s <= 0:
      raise ConfigError(f"hours={hours:g} needs a trace with times; give it some with tools.make_trace --rate")
    count = max(1, math.floor(hours * 3600 / period_s * rows))
  times = array("d", (trace.arrivals[index % rows] / rate_scale + index // rows * period_s for index in range(count)))
  if hours is not None and swing:
    _follow_day(times, hours * 3600, swing)
  prompts, outputs = array("q"), array("q")
  for index in range(count):
    prompt, output = trace.prompts[index % rows], trace.outputs[index % rows]
    if length_scale != 1.0:
      prompt, output = round(prompt * length_scale), round(output * length_scale)
    prompt, output = max(1, prompt), max(1, output)
    if max_len is not None:
      output = min(output, max_len - 1)
      prompt = min(prompt, max_len - output)
    prompts.append(prompt)
    outputs.append(output)
  return trace.with_columns(times, prompts, outputs)


def _follow_day(times: array, length_s: float, swing: float) -> None:
  """Moves uniform times so that their density is 1 - swing * cos(2 pi t / length)."""

  def share_before(now: float) -> float:
    angle = 2 * math.pi * now / length_s
    return (now - swing * math.sin(angle) * length_s / (2 * math.pi)) / length_s

  edges = [length_s * index / 10_000 for index in range(10_001)]
  shares = [share_before(edge) for edge in edges]
  at = 0
  for index, now in enumerate(times):
    wanted = now / length_s
    while at < len(edges) - 2 and shares[at + 1] < wanted:
      at += 1
    width = shares[at + 1] - shares[at]
    times[index] = edges[at] + (edges[at + 1] - edges[at]) * (wanted - shares[at]) / width


def describe_trace(trace: FleetTrace) -> dict[str, Any]:
  """Returns a trace's figures as plain JSON values."""
  count = len(trace)
  return {
    "requests": count,
    "hours": round(trace.arrivals[-1] / 3600, 4),
    "mean_prompt": round(sum(trace.prompts) / count, 1),
    "mean_output": round(sum(trace.outputs) / count, 1),
    "key_tokens": trace.key_tokens,
  }
