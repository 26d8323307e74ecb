"""What a caller can be told: typed errors whose message holds the value, the limit and the remedy. Pure Python."""

import math


class EngineError(Exception):
  """Base of every error that may reach a client; `reason` is a stable machine-readable word.

  Attributes:
    field: what the error is about, by its name in sluice.v1; empty where that is no one field.
    problem: the rest of the message.
  """

  reason = "ENGINE_ERROR"

  def __init__(self, problem: str = "", *, field: str = ""):
    super().__init__(_with_name(field, problem))
    self.field = field
    self.problem = problem

  def message_about(self, name: str) -> str:
    """The message for callers who know the field as `name`."""
    return _with_name(name, self.problem)


def _with_name(name: str, problem: str) -> str:
  return f"{name}{problem}" if not name or problem[:1] in ("=", ":", " ", "") else f"{name} {problem}"


class InvalidRequest(EngineError):
  """A field is outside what the model or the server accepts. Never worth a retry."""

  reason = "INVALID_REQUEST"


class RequestTooLong(InvalidRequest):
  """Prompt plus max_tokens can never fit the model's length or the KV pool."""

  reason = "REQUEST_TOO_LONG"


class DuplicateRequest(EngineError):
  """A live request already has this id."""

  reason = "DUPLICATE_REQUEST"


class Overloaded(EngineError):
  """A queue bound is reached; the same request may succeed later.

  Attributes:
    retry_after_s: a guess of when to try again, in whole seconds, at least 1: HTTP's Retry-After knows no others, and
      the message, the headers and gRPC's RetryInfo say the same time.
  """

  reason = "OVERLOADED"

  def __init__(self, message: str, retry_after_s: float = 1.0, remedy: str = ""):
    """Args: message: what is full, and its limit. retry_after_s: is rounded up. remedy: another one, after the time."""
    self.retry_after_s = float(max(1, math.ceil(retry_after_s)))
    super().__init__(f"{message}; try again in {self.retry_after_s:g} s{remedy}")


class PrefillBacklog(Overloaded):
  """The prompt tokens that may wait do."""

  reason = "PREFILL_BACKLOG"


class TenantQuota(Overloaded):
  """One tenant holds its share of the queue; others may come."""

  reason = "TENANT_QUOTA"


class Unavailable(EngineError):
  """The engine is starting, draining or dead."""

  reason = "UNAVAILABLE"


class ShapeNotOnLadder(EngineError):
  """A step would need a shape that was never compiled: a mistake of ours, never of a client's."""

  reason = "SHAPE_NOT_ON_LADDER"


class ConfigError(EngineError):
  """Settings that contradict each other or the machine; told before anything is allocated."""

  reason = "CONFIG"


class CheckpointError(ConfigError):
  """A model folder that cannot be served: names the file, the tensor where there is one, and the remedy."""

  reason = "CHECKPOINT"
