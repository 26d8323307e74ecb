"""Typed errors whose messages hold the value, the limit and the remedy. Pure Python; may not log."""

import math


class EngineError(Exception):
  """Base of every error that may reach a client; `reason` is a stable machine-readable word.

  Attributes:
    field: name of the invalid field in sluice.v1; "" if no single field is invalid.
    problem: the rest of the message.
  """

  reason = "ENGINE_ERROR"

  def __init__(self, problem: str = "", *, field: str = ""):
    super().__init__(_with_name(field, problem))
    self.field = field
    self.problem = problem

  def message_about(self, name: str) -> str:
    """Returns the message for callers that know the field as `name`."""
    return _with_name(name, self.problem)


def _with_name(name: str, problem: str) -> str:
  return f"{name}{problem}" if not name or problem[:1] in ("=", ":", " ", "") else f"{name} {problem}"


class InvalidRequest(EngineError):
  """A field has a value that model or server do not accept. A retry cannot help."""

  reason = "INVALID_REQUEST"


class RequestTooLong(InvalidRequest):
  """Prompt plus max_tokens exceed the model's length or the KV pool."""

  reason = "REQUEST_TOO_LONG"


class AdapterNotLoaded(InvalidRequest):
  """A request or a call names an adapter that is not loaded, or not yet, or no longer."""

  reason = "ADAPTER_NOT_LOADED"

  def __init__(self, problem: str = "", *, field: str = "model"):
    super().__init__(problem, field=field)


class DuplicateRequest(EngineError):
  """A live request already has this id."""

  reason = "DUPLICATE_REQUEST"


class Overloaded(EngineError):
  """A queue bound is reached; the same request may succeed later.

  Attributes:
    retry_after_s: estimated time until a retry, in whole seconds, at least 1, as HTTP's Retry-After requires. Message,
      headers and gRPC's RetryInfo have the same value.
  """

  reason = "OVERLOADED"

  def __init__(self, message: str, retry_after_s: float = 1.0, remedy: str = ""):
    """Args: message: the full queue and its limit. retry_after_s: rounded up. remedy: text after the time."""
    self.retry_after_s = float(max(1, math.ceil(retry_after_s)))
    super().__init__(f"{message}; try again in {self.retry_after_s:g} s{remedy}")


class PrefillBacklog(Overloaded):
  """The queue holds its limit of prompt tokens."""

  reason = "PREFILL_BACKLOG"


class TenantQuota(Overloaded):
  """One tenant uses its whole share of the queue; requests of others may enter."""

  reason = "TENANT_QUOTA"


class Unavailable(EngineError):
  """The engine is starting, draining or dead."""

  reason = "UNAVAILABLE"


class ShapeNotOnLadder(EngineError):
  """A step needs a shape without a compiled program: an internal error, never a client's."""

  reason = "SHAPE_NOT_ON_LADDER"


class ConfigError(EngineError):
  """Settings contradict each other or the machine. Raised before any allocation."""

  reason = "CONFIG"


class CheckpointError(ConfigError):
  """A model folder is unusable. The message has the file, the tensor if any, and the remedy."""

  reason = "CHECKPOINT"
