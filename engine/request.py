"""The state of one generation request. Pure Python; only the Scheduler may change it."""

from collections.abc import Callable, Sequence
import dataclasses
import enum
import random
from typing import Any, NamedTuple
import zlib

from engine.batch import TokenLogprobs
from engine.constraint import Constraint, Recorded
from engine.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
  """The scheduler's list that holds a request."""

  WAITING = "waiting"
  RUNNING = "running"
  FINISHED = "finished"


class FinishReason(enum.Enum):
  """Why a request finished; each request has exactly one reason."""

  STOP = "stop"  # end-of-sequence or a stop id was sampled, or a constrained output is complete
  LENGTH = "length"  # max_tokens reached
  ABORT = "abort"  # the client disconnected or canceled
  TIMEOUT = "timeout"  # a queue or total deadline passed
  ERROR = "error"  # NaN or Inf logits, a failed constraint, or a failed engine


def fold_seed(seed: int) -> int:
  """Returns the 32 bits of a seed for the device: the seed itself if it fits, else a checksum of its 64 bits."""
  return seed if 0 <= seed < 2**32 else zlib.crc32((seed % 2**64).to_bytes(8, "little"))


@dataclasses.dataclass(eq=False, slots=True)
class Request:
  """A request and its counters.

  Who owns which token positions (counts lead, values follow):
    [0, num_cached_tokens)                      served from the prefix cache at the last admission
    [num_cached_tokens, num_computed_tokens)    computed, or in a launched step
    [num_computed_tokens, num_tokens)           still to compute
    [0, len(prompt) + len(output_token_ids))    values known to the host (one step behind num_tokens)

  Attributes:
    id: unique among live requests.
    prompt_token_ids: at least one, all inside the vocabulary; validate_request() checks them.
    params: sampling parameters.
    priority: lower is served first (vLLM's convention).
    arrival_time: engine clock, seconds.
    queue_deadline, deadline: engine clock; None: no deadline. The first schedule must come before queue_deadline, and
      the finish before deadline.
    cache_salt: requests share prefix blocks only within one salt.
    tenant: the tenant whose share it uses, under policy fair.
    leader_id: for n > 1, the sibling whose prompt blocks this request shares; it waits until the leader computes them.
      Submit the leader first: an id that is not live at arrival has no effect.
    constraint: the constraint of its output; None: no constraint. Its state follows output_token_ids.
    adapter: name of its LoRA adapter; "": the base model.
    speculation: which drafts it may get, at most those of EngineConfig.speculation; "": those.
    adapter_slot, adapter_serial: slot and load of the adapter, which the engine sets at arrival; 0 without one.
    seed: the 32-bit seed of all its samples: from its parameters, or as given, or else random.
    rank: place in the policy's order, lower first; fixed on arrival, unless the policy is dynamic.
    leader: the live request with leader_id.
    root_key: parent of its first block's key, which decides with whom it shares blocks; fixed on arrival.
    stop_ids: tokens that end the request.
    takes_forced: tokens that its constraint forces join its output at once, and the next step computes them together.
    num_sent_tokens: tokens whose ids go to the device in rows of several: those known at the last admission, and up to
      the last forced one. Later inputs are on the device.
    max_computed_tokens: positions that the device ever computes: all but the very last token.
    num_published_blocks: leading blocks of the table that are in the prefix cache, or came from it.
    num_prompt_logprobs: prompt tokens with reported log probabilities.
    num_prompt_cached_tokens: num_cached_tokens of the first admission.
    num_transferred_tokens: leading positions whose KV another engine computed and `transfer` holds; 0 after import.
    transfer: source of their KV for the runner.
    final_blocks: the block table at the finish; valid until the scheduler plans the next step.
  """

  id: str
  prompt_token_ids: Sequence[int]
  params: SamplingParams
  priority: int = 0
  arrival_time: float = 0.0
  queue_deadline: float | None = None
  deadline: float | None = None
  cache_salt: bytes = b""
  tenant: str = ""
  leader_id: str | None = None
  constraint: Constraint | None = None
  adapter: str = ""
  adapter_slot: int = 0
  adapter_serial: int = 0
  speculation: str = ""

  status: RequestStatus = RequestStatus.WAITING
  finish_reason: FinishReason | None = None
  seed: int = -1
  slot: int = -1
  block_table: list[int] = dataclasses.field(default_factory=list)
  block_keys: list[bytes] = dataclasses.field(default_factory=list)
  output_token_ids: list[int] = dataclasses.field(default_factory=list)
  num_computed_tokens: int = 0
  num_cached_tokens: int = 0
  num_in_flight: int = 0  # rows that sample in launched steps whose values are not known yet
  num_drafts: int = 0  # of its rows in flight
  num_preemptions: int = 0
  num_lost_tokens: int = 0  # computed tokens lost to preemptions
  first_scheduled_time: float | None = None
  first_token_time: float | None = None
  rank: tuple[float, ...] = ()
  leader: "Request | None" = None
  root_key: bytes = b""
  stop_ids: frozenset[int] = frozenset()
  takes_forced: bool = False
  num_sent_tokens: int = 0
  max_computed_tokens: int = 0
  num_published_blocks: int = 0
  num_prompt_logprobs: int = 0
  num_prompt_cached_tokens: int = 0
  num_transferred_tokens: int = 0
  transfer: Any = None
  final_blocks: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    seed = self.params.seed
    if isinstance(seed, int):  # validate() rejects other types later
      self.seed = fold_seed(seed)
    elif self.seed < 0:
      self.seed = random.getrandbits(32)

  @property
  def num_prompt_tokens(self) -> int:
    return len(self.prompt_token_ids)

  @property
  def num_tokens(self) -> int:
    """Tokens of prompt and output, including those in flight."""
    return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

  def known_tokens(self, start: int, end: int) -> tuple[int, ...]:
    """Returns tokens [start, end) of prompt and output; none may be in flight."""
    num_prompt = len(self.prompt_token_ids)
    if end <= num_prompt:
      return tuple(self.prompt_token_ids[start:end])
    outputs = self.output_token_ids
    if start >= num_prompt:
      return tuple(outputs[start - num_prompt : end - num_prompt])
    return (*self.prompt_token_ids[start:], *outputs[: end - num_prompt])

  def state(self) -> dict:
    """Returns the state as plain JSON values; from_state() is the inverse, except for `leader`, stored by id."""
    state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return state | {
      "prompt_token_ids": list(self.prompt_token_ids),
      "output_token_ids": list(self.output_token_ids),
      "block_table": list(self.block_table),
      "params": dataclasses.asdict(self.params),
      "cache_salt": self.cache_salt.hex(),
      "root_key": self.root_key.hex(),
      "status": self.status.value,
      "finish_reason": self.finish_reason and self.finish_reason.value,
      "block_keys": [key.hex() for key in self.block_keys],
      "leader": self.leader and self.leader.id,
      "constraint": self.constraint is not None,
      "transfer": None,
      "final_blocks": list(self.final_blocks),
      "stop_ids": sorted(self.stop_ids),
    }

  @classmethod
  def from_state(cls, state: dict) -> "Request":
    """Makes a request with that state; the caller resolves `leader`."""
    params: dict[str, Any] = {name: _tuples(value) for name, value in state["params"].items()}
    return cls(
      **state
      | {
        "params": SamplingParams(**params),
        "cache_salt": bytes.fromhex(state["cache_salt"]),
        "root_key": bytes.fromhex(state["root_key"]),
        "status": RequestStatus(state["status"]),
        "finish_reason": state["finish_reason"] and FinishReason(state["finish_reason"]),
        "block_keys": [bytes.fromhex(key) for key in state["block_keys"]],
        "rank": tuple(state["rank"]),
        "leader": None,
        "constraint": Recorded() if state.get("constraint") else None,
        "final_blocks": tuple(state["final_blocks"]),
        "stop_ids": frozenset(state["stop_ids"]),
      }
    )


def _tuples(value: Any) -> Any:
  """Turns JSON's lists into the tuples of frozen values."""
  return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


NUMERICAL_ERROR = "NUMERICAL_ERROR"  # NaN or Inf in the logits
ENGINE_FAILURE = "ENGINE_FAILURE"  # the engine failed and ended all requests
GRAMMAR_LIMIT = "GRAMMAR_LIMIT"  # an output constraint allows no more token, or exceeds a limit of its work


class TokenEvent(NamedTuple):
  """The outcome of a step, or of a finish, for one request. The last event of a request has a finish_reason.

  A tuple, because a step of 256 sequences makes 256 of them and a frozen dataclass costs four times as much.

  Attributes:
    request_id: id of the request.
    token_ids: new tokens, usually one, including the stop token that ended the request, which the front end drops.
    logprobs: one entry a token, if requested.
    prompt_logprobs: entries for consecutive prompt tokens from the second on, if requested.
    finish_reason: set on the last event only.
    message: for ERROR and TIMEOUT, an explanation for the client.
    num_cached_tokens: cached prompt tokens at the first admission; set on the last event.
    stop_token_id: the token that ended the request, for STOP; None if a constrained output completed without one.
    error: for ERROR, its kind if known: NUMERICAL_ERROR, ENGINE_FAILURE or GRAMMAR_LIMIT.
    embedding: little-endian float32 values of the prompt's embedding, if requested.
  """

  request_id: str
  token_ids: tuple[int, ...] = ()
  logprobs: tuple[TokenLogprobs, ...] = ()
  prompt_logprobs: tuple[TokenLogprobs, ...] = ()
  finish_reason: FinishReason | None = None
  message: str = ""
  num_cached_tokens: int = 0
  stop_token_id: int | None = None
  error: str = ""
  embedding: bytes = b""


# make_event(TokenEvent, values) makes an event from a tuple of all fields in 0.14 us. The class's own constructor is a
# Python function and takes 0.30 us, and a step makes hundreds of events.
make_event: Callable[[type[TokenEvent], tuple], TokenEvent] = tuple.__new__
