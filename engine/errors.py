"""What a caller can be told: typed errors whose message holds the value, the limit and the remedy. Pure Python."""


class EngineError(Exception):
  """Base of every error that may reach a client; `reason` is a stable machine-readable word."""

  reason = "ENGINE_ERROR"


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
    retry_after_s: a guess, in seconds, of when to try again.
  """

  reason = "OVERLOADED"

  def __init__(self, message: str, retry_after_s: float = 1.0):
    super().__init__(message)
    self.retry_after_s = retry_after_s


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


class InvariantBroken(EngineError):
  """What must always hold did not: a mistake of ours, looked for with --debug_invariants. The engine ends."""

  reason = "INVARIANT_BROKEN"


class ConfigError(EngineError):
  """Settings that contradict each other or the machine; told before anything is allocated."""

  reason = "CONFIG"


class CheckpointError(ConfigError):
  """A model folder that cannot be served: names the file, the tensor where there is one, and the remedy."""

  reason = "CHECKPOINT"
