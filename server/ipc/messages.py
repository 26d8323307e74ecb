"""What the engine's process and its front ends send each other. Values and types alone; decides nothing.

msgspec encodes messages, and refuses one of another type, or with a field of another type, where it arrives.
`Engine.submit_all` checks the requests in them, as it checks those of its own process.
"""

from collections.abc import Sequence
import dataclasses
from typing import Annotated

import msgspec

from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from server.generation.sampling_defaults import SamplingDefaults
from server.host_options import HostOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
  """What front ends need besides HostOptions.

  Attributes:
    model_dir: has the tokenizer, if there is one.
    max_prompt_bytes: longest text that is tokenized.
    otlp_endpoint: as in tracing.Tracer; empty is none.
    log_format: one of log_lines.FORMATS.
    defaults: see Backend.
  """

  model_dir: str
  max_prompt_bytes: int = 1 << 20
  otlp_endpoint: str = ""
  log_format: str = "text"
  defaults: SamplingDefaults = dataclasses.field(default_factory=dict)


class LinkMessage(msgspec.Struct, array_like=True, tag=True):
  """Base of all; on the wire, an array of the class's name and its fields."""


# From the engine's process.


class FrontEndSettings(LinkMessage):
  """The first message. Answered when the front end listens."""

  options: HostOptions
  texts: TextOptions


class ServedModel(LinkMessage):
  """The engine runs. Answered when the front end serves. `others` are the ids of the server's other processes."""

  model: str
  config: EngineConfig
  load_s: float
  warmup_s: float
  others: list[int]


class StepEvents(LinkMessage):
  """Of one step, by the front end's ids of its requests.

  Attributes:
    request_ids, token_ids: events that are one token and nothing else, hundreds a step.
    others: all other events.
  """

  request_ids: list[str]
  token_ids: list[int]
  others: list[TokenEvent]


class NamedAborts(LinkMessage):
  """Ends an owner's live generations."""

  owner: str
  names: list[str]


class CountsQuestion(LinkMessage):
  """Answered with the ProcessCounts of this front end."""


class DrainOrder(LinkMessage):
  """The second one hurries it."""


class EngineDeath(LinkMessage):
  """Ends the front end."""

  reason: str


# From a front end.


class Submission(LinkMessage):
  """The requests of one generation, which differ in id and parameters alone. Answered when they are accepted.

  Attributes:
    owner, name: no two live generations of one owner have one name.
    prompt, priority, queue_deadline, deadline, cache_salt, tenant: as in Request.
    grammar: of all outputs; None is anything.
    outputs: the front end's id and the parameters of each.
  """

  owner: str
  name: str
  prompt: tuple[int, ...]
  priority: int
  queue_deadline: float | None
  deadline: float | None
  cache_salt: bytes
  tenant: str
  grammar: str | None
  outputs: Annotated[list[tuple[str, SamplingParams]], msgspec.Meta(min_length=1)]

  @classmethod
  def of_requests(cls, owner: str, name: str, requests: Sequence[Request], grammar: str | None) -> "Submission":
    first = requests[0]
    return cls(
      *(owner, name, tuple(first.prompt_token_ids), first.priority, first.queue_deadline, first.deadline),
      *(first.cache_salt, first.tenant, grammar, [(request.id, request.params) for request in requests]),
    )

  def make_requests(self, ids: Sequence[str], constraints: Sequence[Constraint | None]) -> list[Request]:
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


class RequestAbort(LinkMessage):
  """The front end wants no more of a request."""

  request_id: str
  reason: FinishReason


class AbortElsewhere(LinkMessage):
  """Answered as EngineClient.abort_elsewhere."""

  owner: str
  names: list[str]


class ReportQuestion(LinkMessage):
  """Answered with a Report."""

  num_records: int
  with_blocks: bool


class CensusQuestion(LinkMessage):
  """Answered with the ProcessCounts of all processes."""
