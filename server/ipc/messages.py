"""Declares the messages between the engine's process and its front ends. Holds values and types; decides nothing.

msgspec encodes messages. The receiver refuses unknown messages and fields of a wrong type. `Engine.submit_all` checks
their requests, as it checks requests of its own process.
"""

from collections.abc import Sequence
import dataclasses
from typing import Annotated

import msgspec

from engine.adapters import AdapterInfo
from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from server.generation.reasoning_budget import ReasoningLimit
from server.generation.response_store import StoredResponse
from server.generation.sampling_defaults import SamplingDefaults
from server.host_options import HostOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
  """The settings that front ends need besides HostOptions.

  Attributes:
    model_dir: has the tokenizer, if there is one.
    max_prompt_bytes: longest text that is tokenized.
    chat_template: as in Tokenizer.
    otlp_endpoint: as in tracing.Tracer; empty is none.
    log_format: one of log_lines.FORMATS.
    defaults: see Backend.
  """

  model_dir: str
  max_prompt_bytes: int = 1 << 20
  chat_template: str = ""
  otlp_endpoint: str = ""
  log_format: str = "text"
  defaults: SamplingDefaults = dataclasses.field(default_factory=dict)


class LinkMessage(msgspec.Struct, array_like=True, tag=True):
  """Base of all messages; on the wire, an array of the class's name and its fields."""


# Messages of the engine's process.


class FrontEndSettings(LinkMessage):
  """The first message; the front end answers it when it listens."""

  options: HostOptions
  texts: TextOptions


class ServedModel(LinkMessage):
  """Says that the engine runs; the front end answers when it serves.

  Attributes:
    model, config, load_s, warmup_s: see Backend.
    adapters: as in ServedAdapters.
    others: ids of the server's other processes.
  """

  model: str
  config: EngineConfig
  load_s: float
  warmup_s: float
  adapters: list[AdapterInfo]
  others: list[int]


class ServedAdapters(LinkMessage):
  """The LoRA adapters that take requests from now on; the front end answers when it knows them."""

  adapters: list[AdapterInfo]


class StepEvents(LinkMessage):
  """The events of one step, by the front end's ids of its requests.

  Attributes:
    request_ids, token_ids: events that only bring one token, hundreds a step.
    others: all other events.
  """

  request_ids: list[str]
  token_ids: list[int]
  others: list[TokenEvent]


class NamedAborts(LinkMessage):
  """Aborts live generations of an owner."""

  owner: str
  names: list[str]


class CountsQuestion(LinkMessage):
  """Requests the ProcessCounts of this front end."""


class DrainOrder(LinkMessage):
  """Begins a drain; a second one ends the drain early."""


class EngineDeath(LinkMessage):
  """Says that the engine has failed; ends the front end."""

  reason: str


# Messages of a front end.


class Submission(LinkMessage):
  """The requests of one generation, which differ only in id and parameters. The engine answers when it accepts them.

  Attributes:
    owner, name: unique among live generations.
    prompt, priority, queue_deadline, deadline, cache_salt, tenant, adapter, speculation: as in Request.
    grammar: of all outputs; None for no constraint.
    reasoning: the limit of the reasoning before each answer, or None.
    outputs: the front end's id and the parameters of each output.
  """

  owner: str
  name: str
  prompt: tuple[int, ...]
  priority: int
  queue_deadline: float | None
  deadline: float | None
  cache_salt: bytes
  tenant: str
  adapter: str
  speculation: str
  grammar: str | None
  reasoning: ReasoningLimit | None
  outputs: Annotated[list[tuple[str, SamplingParams]], msgspec.Meta(min_length=1)]

  @classmethod
  def of_requests(
    cls,
    owner: str,
    name: str,
    requests: Sequence[Request],
    grammar: str | None,
    reasoning: ReasoningLimit | None = None,
  ) -> "Submission":
    first = requests[0]
    return cls(
      *(owner, name, tuple(first.prompt_token_ids), first.priority, first.queue_deadline, first.deadline),
      *(first.cache_salt, first.tenant, first.adapter, first.speculation, grammar, reasoning),
      [(request.id, request.params) for request in requests],
    )

  def make_requests(self, ids: Sequence[str], constraints: Sequence[Constraint | None]) -> list[Request]:
    """Returns the requests under the engine's ids."""
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
        adapter=self.adapter,
        speculation=self.speculation,
        leader_id=None if request_id == ids[0] else ids[0],
        constraint=constraint,
      )
      for request_id, (_, params), constraint in zip(ids, self.outputs, constraints, strict=True)
    ]


class RequestAbort(LinkMessage):
  """Aborts one request."""

  request_id: str
  reason: FinishReason


class AbortElsewhere(LinkMessage):
  """Requests EngineClient.abort_elsewhere."""

  owner: str
  names: list[str]


class ResponseToKeep(LinkMessage):
  """Requests ResponseStore.put_response."""

  owner: str
  stored: StoredResponse


class ResponseQuestion(LinkMessage):
  """Requests ResponseStore.find_response."""

  owner: str
  response_id: str


class ResponseRemoval(LinkMessage):
  """Requests ResponseStore.remove_response."""

  owner: str
  response_id: str


class ItemsQuestion(LinkMessage):
  """Requests ResponseStore.find_items."""

  owner: str
  item_ids: list[str]


class AdapterLoad(LinkMessage):
  """Requests EngineClient.load_adapter; the answer comes when every front end serves the adapter."""

  name: str
  path: str
  replaces: bool


class AdapterUnload(LinkMessage):
  """Requests EngineClient.unload_adapter."""

  name: str


class ReportQuestion(LinkMessage):
  """Requests an engine Report."""

  num_records: int
  with_blocks: bool


class CensusQuestion(LinkMessage):
  """Requests the ProcessCounts of all processes."""
