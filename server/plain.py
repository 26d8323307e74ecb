"""Requests, events and reports as plain values, for the wire: lists, texts, bytes and numbers. Decides nothing.

What comes back from the wire is checked by type here; its meaning is judged where a request in the same process is
judged, too, by `Engine.submit_all`. A decoder raises TypeError, ValueError, KeyError or AttributeError for what its
encoder never made, which ends the link.
"""

import array
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
from typing import Any

from engine.batch import TokenLogprobs
from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.recorder import EngineStats, RequestRecord, RungTotals, StepRecord
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from server.host_options import HostOptions
from server.observations import Observations
from server.port import Report

_NUMBER = (int, float)
_IDS = "I"  # four bytes

_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_TYPES: dict[str, tuple[type, ...]] = {
  **dict.fromkeys(("max_tokens", "top_k", "min_tokens"), (int,)),
  **dict.fromkeys(
    ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), _NUMBER
  ),
  "ignore_eos": (bool,),
  **dict.fromkeys(("logit_bias", "stop_token_ids"), (tuple,)),
  "allowed_token_ids": (tuple, type(None)),
  **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), (int, type(None))),
}


def _check(name: str, value: Any, *types: type) -> Any:
  if type(value) not in types:
    raise TypeError(f"{name} is {type(value).__name__}")
  return value


def _ids(name: str, values: Any) -> tuple[int, ...]:
  return tuple(_check(name, value, int) for value in _check(name, values, tuple))


def pack_ids(token_ids: Sequence[int]) -> bytes:
  """Four bytes each, little-endian; raises OverflowError for what is no token id of any model."""
  ids = array.array(_IDS, token_ids)
  if sys.byteorder == "big":
    ids.byteswap()
  return ids.tobytes()


def unpack_ids(raw: Any) -> tuple[int, ...]:
  """The inverse."""
  ids = array.array(_IDS)
  ids.frombytes(_check("prompt", raw, bytes))
  if sys.byteorder == "big":
    ids.byteswap()
  return tuple(ids)


def columns_from(request_ids: Any, token_ids: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
  """Events that are one token and nothing else, hundreds a step: checked as a whole."""
  ids, tokens = _check("request_ids", request_ids, tuple), _check("token_ids", token_ids, tuple)
  if len(ids) != len(tokens) or not (set(map(type, ids)) <= {str} and set(map(type, tokens)) <= {int}):
    raise TypeError("columns of other lengths or types")
  return ids, tokens


# Requests.


def plain_generation(requests: Sequence[Request], grammar: str | None) -> list[Any]:
  """The requests of one generation, which differ in id and parameters alone. `grammar` is that of all, as a text."""
  first = requests[0]
  return [
    pack_ids(first.prompt_token_ids),
    *(first.priority, first.queue_deadline, first.deadline, first.cache_salt, first.tenant, grammar),
    [[request.id, [getattr(request.params, name) for name in _PARAMS]] for request in requests],
  ]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
  """A generation as it came.

  Attributes:
    prompt, priority, queue_deadline, deadline, cache_salt, tenant: as in Request.
    grammar: of its outputs; None is anything.
    outputs: the front end's id and the parameters of each.
  """

  prompt: tuple[int, ...]
  priority: int
  queue_deadline: float | None
  deadline: float | None
  cache_salt: bytes
  tenant: str
  grammar: str | None
  outputs: tuple[tuple[str, SamplingParams], ...]

  def requests(self, ids: Sequence[str], constraints: Sequence[Constraint | None]) -> list[Request]:
    """For an engine that knows them by these ids."""
    return [
      Request(
        id=request_id,
        prompt_token_ids=self.prompt,
        params=params,
        priority=self.priority,
        queue_deadline=self.queue_deadline,
        deadline=self.deadline,
        cache_salt=self.cache_salt,
        tenant=self.tenant,
        leader_id=None if request_id == ids[0] else ids[0],
        constraint=constraint,
      )
      for request_id, (_, params), constraint in zip(ids, self.outputs, constraints, strict=True)
    ]


def generation_from(
  prompt: Any,
  priority: Any,
  queue_deadline: Any,
  deadline: Any,
  cache_salt: Any,
  tenant: Any,
  grammar: Any,
  outputs: Any,
) -> Asked:
  """The inverse of plain_generation."""
  if not _check("outputs", outputs, tuple):
    raise ValueError("a generation without outputs")
  return Asked(
    prompt=unpack_ids(prompt),
    priority=_check("priority", priority, int),
    queue_deadline=_check("queue_deadline", queue_deadline, *_NUMBER, type(None)),
    deadline=_check("deadline", deadline, *_NUMBER, type(None)),
    cache_salt=_check("cache_salt", cache_salt, bytes),
    tenant=_check("tenant", tenant, str),
    grammar=_check("grammar", grammar, str, type(None)),
    outputs=tuple((_check("id", request_id, str), _params_from(params)) for request_id, params in outputs),
  )


def _params_from(values: Any) -> SamplingParams:
  params: dict[str, Any] = dict(zip(_PARAMS, _check("params", values, tuple), strict=True))
  for name, value in params.items():
    if type(value) not in _TYPES[name]:
      raise TypeError(f"{name} is {type(value).__name__}")
  for name in ("stop_token_ids", "allowed_token_ids"):
    if params[name] is not None:
      _ids(name, params[name])
  for token_id, bias in params["logit_bias"]:
    _check("logit_bias", token_id, int)
    _check("logit_bias", bias, *_NUMBER)
  return SamplingParams(**params)


# Events.


def plain_event(event: TokenEvent, request_id: str) -> list[Any]:
  """An event of any kind, for the front end that knows its request by `request_id`."""
  _, token_ids, logprobs, prompt_logprobs, reason, message, num_cached_tokens, stop_token_id, error = event
  return [
    request_id,
    token_ids,
    [_plain_logprobs(entry) for entry in logprobs],
    [_plain_logprobs(entry) for entry in prompt_logprobs],
    None if reason is None else reason.value,
    *(message, num_cached_tokens, stop_token_id, error),
  ]


def event_from(fields: Any) -> TokenEvent:
  """The inverse."""
  request_id, token_ids, logprobs, prompt_logprobs, reason, message, num_cached_tokens, stop_token_id, error = fields
  return TokenEvent(
    _check("id", request_id, str),
    _ids("token_ids", token_ids),
    tuple(map(_logprobs_from, logprobs)),
    tuple(map(_logprobs_from, prompt_logprobs)),
    None if reason is None else FinishReason(reason),
    _check("message", message, str),
    _check("num_cached_tokens", num_cached_tokens, int),
    _check("stop_token_id", stop_token_id, int, type(None)),
    _check("error", error, str),
  )


def _plain_logprobs(entry: TokenLogprobs) -> list[Any]:
  return [entry.token_id, entry.logprob, entry.top]


def _logprobs_from(fields: Any) -> TokenLogprobs:
  token_id, logprob, top = fields
  return TokenLogprobs(
    _check("token_id", token_id, int),
    _check("logprob", logprob, *_NUMBER),
    tuple((_check("top", token, int), _check("top", value, *_NUMBER)) for token, value in top),
  )


# What an engine says of itself.

_STATS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
  "rungs": (
    lambda rungs: [[tokens, *totals] for tokens, totals in rungs.items()],
    lambda rungs: {int(tokens): RungTotals(*totals) for tokens, *totals in rungs},
  ),
  "finished": (
    lambda finished: [[reason.value, count] for reason, count in finished.items()],
    lambda finished: {FinishReason(reason): int(count) for reason, count in finished},
  ),
  "steps": (list, lambda steps: tuple(StepRecord(*step) for step in steps)),
  "requests": (list, lambda requests: tuple(RequestRecord(*request) for request in requests)),
}


def plain_report(report: Report) -> list[Any]:
  """A report."""
  stats = [
    _STATS[field.name][0](getattr(report.stats, field.name))
    if field.name in _STATS
    else getattr(report.stats, field.name)
    for field in dataclasses.fields(EngineStats)
  ]
  queue = [report.queue.counts, report.queue.total]
  return [
    stats,
    *(report.now_s, report.heartbeat_s, report.compiles_after_ready, report.peak_rss_bytes, queue, report.blocks),
  ]


def report_from(fields: Any) -> Report:
  """The inverse."""
  plain_stats, now_s, heartbeat_s, compiles, peak_rss_bytes, (counts, total), blocks = fields
  stats: dict[str, Any] = {
    field.name: _STATS[field.name][1](value) if field.name in _STATS else _check(field.name, value, int)
    for field, value in zip(dataclasses.fields(EngineStats), plain_stats, strict=True)
  }
  queue = Observations().queue
  if len(counts) != len(queue.counts):
    raise ValueError(f"a histogram has {len(counts)} buckets instead of {len(queue.counts)}")
  queue.counts, queue.total = list(_ids("queue", counts)), float(total)
  return Report(
    stats=EngineStats(**stats),
    now_s=_check("now_s", now_s, *_NUMBER),
    heartbeat_s=_check("heartbeat_s", heartbeat_s, *_NUMBER),
    compiles_after_ready=_check("compiles", compiles, int),
    peak_rss_bytes=_check("peak_rss_bytes", peak_rss_bytes, int),
    queue=queue,
    blocks=_check("blocks", blocks, bytes),
  )


# Settings.


def config_from(values: Mapping[str, Any]) -> EngineConfig:
  """From dataclasses.asdict of one."""
  return EngineConfig(**values)


def options_from(values: Mapping[str, Any]) -> HostOptions:
  """From dataclasses.asdict of one."""
  return HostOptions(**values)
