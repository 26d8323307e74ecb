"""Declares the fields of Anthropic's Messages API. Reads no body itself; see server.http.openai.request_fields."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.sampling_params import RANGES
from server.generation.request_validation import MAX_STOP_BYTES, MAX_STOP_STRINGS
from server.http.openai.request_fields import MAX_TOOLS, SHOWN, TOOL_NAME, Int32, RequestFields, Unsupported
from server.text.chat_template import MAX_MESSAGES

# What changes no answer here: billing, placement and caching, which the server does by itself.
HARMLESS = (
  "cache_control",
  "diagnostics",
  "inference_geo",
  "metadata",
  "service_tier",
  "user_profile_id",
  "workspace_id",
)
# By name, the values besides null that change nothing, and what to say about the others.
UNSUPPORTED: Unsupported = {
  "container": ((), "the server runs no code; leave it out"),
  "context_management": (
    ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "messages are never edited here; remove from them what the model need not read",
  ),
  "mcp_servers": (([],), "the server calls no tools; send tools, and call them yourself"),
  "speed": (("standard",), "there is one speed; leave it out"),
}
# Of MessageRequest; they change no count.
_OF_THE_OUTPUT = ("max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p")
MESSAGE_ROLES = ("user", "assistant", "system")
# Of blocks, tools and other parts: what Anthropic's clients send along, and what changes no answer here.
HARMLESS_OF_PARTS = ("cache_control", "caller", "citations", "eager_input_streaming")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def _shown(**schema: Any) -> Meta:
  """Returns limits for the document that another check enforces."""
  return Meta(extra_json_schema={SHOWN: schema})


def _range(name: str) -> Meta:
  low, high, above = RANGES[name]
  return _shown(**{"exclusiveMinimum" if above else "minimum": low, "maximum": high})


class Block(msgspec.Struct, kw_only=True):
  """A content block: text, tool_use, tool_result, thinking or redacted_thinking; the type says which fields count."""

  type: Annotated[str, _shown(enum=["text", "tool_use", "tool_result", "thinking", "redacted_thinking"])]
  text: str | None = None
  id: str | None = None
  name: str | None = None
  input: dict[str, Any] | None = None
  tool_use_id: str | None = None
  content: "str | list[Block] | None" = None
  is_error: Annotated[bool, Meta(description='Puts "Error: " before the content.')] | None = None
  thinking: str | None = None
  signature: Annotated[str, Meta(description="Not checked.")] | None = None


class MessageTurn(msgspec.Struct, kw_only=True):
  """One message. Consecutive messages of one role are one turn; the last one is the user's."""

  role: Annotated[str, _shown(enum=list(MESSAGE_ROLES))]
  content: str | list[Block]


class ClientTool(msgspec.Struct, kw_only=True):
  """A tool that the client runs. Tools that Anthropic's servers run, with other types, are refused."""

  name: Annotated[str, _shown(pattern=f"^{TOOL_NAME.pattern}$")]
  type: Annotated[str, _shown(const="custom")] | None = None
  description: str | None = None
  input_schema: Annotated[dict[str, Any], Meta(description="A JSON schema.")] | None = None
  strict: Annotated[bool, Meta(description="Of effect where a call is forced.")] | None = None


class ToolPreference(msgspec.Struct, kw_only=True):
  """Whether the model calls tools: auto, none, or any and tool, which force a valid call."""

  type: Annotated[str, _shown(enum=["auto", "any", "tool", "none"])]
  name: Annotated[str, Meta(description="With tool: the tool.")] | None = None
  disable_parallel_tool_use: (
    Annotated[bool, Meta(description="true: at most one call. A forced call may be several with false alone.")] | None
  ) = None


class Thinking(msgspec.Struct, kw_only=True):
  """Sets the chat template's variable enable_thinking. The default is disabled."""

  type: Annotated[str, _shown(enum=["enabled", "adaptive", "disabled"])]
  budget_tokens: (
    Annotated[
      Int32,
      _shown(
        minimum=0,
        description="With enabled: at most so many tokens of reasoning, then the answer begins. Ignored, and named in "
        "x-sluice-ignored-fields, if the chat template has no known form of reasoning.",
      ),
    ]
    | None
  ) = None
  display: Annotated[str, _shown(enum=["summarized", "omitted"], description="omitted: without the text.")] | None = (
    None
  )


class OutputFormat(msgspec.Struct, kw_only=True):
  """A JSON schema of the text."""

  type: Annotated[str, _shown(const="json_schema")]
  schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
  """Options of the output."""

  effort: (
    Annotated[str, _shown(enum=list(EFFORTS), description="For chat templates that read reasoning_effort.")] | None
  ) = None
  format: OutputFormat | None = None


ClientTools = Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS, description="What the model may call.")]


class CountTokensRequest(RequestFields, kw_only=True):
  """The prompt of a message: the same fields as there."""

  remedies = {"messages": "a list of messages with role and content"}
  harmless = (*HARMLESS, *_OF_THE_OUTPUT)
  unsupported = UNSUPPORTED
  messages: Annotated[list[MessageTurn], _shown(minItems=1, maxItems=MAX_MESSAGES)]
  system: Annotated[str | list[Block], Meta(description="Text, or blocks of text.")] | None = None
  tools: ClientTools | None = None
  tool_choice: ToolPreference | None = None
  thinking: Thinking | None = None
  output_config: OutputConfig | None = None
  output_format: Annotated[OutputFormat, Meta(description="The same as output_config.format.")] | None = None


class MessageRequest(CountTokensRequest, kw_only=True):
  """Fields that are not listed are ignored and named in x-sluice-ignored-fields, or refused under --strict_requests."""

  harmless = HARMLESS
  max_tokens: Annotated[Int32, _shown(minimum=1)]
  temperature: Annotated[float, _range("temperature")] | None = None
  top_p: Annotated[float, _range("top_p")] | None = None
  top_k: Annotated[Int32, _shown(minimum=0, description="0 is all.")] | None = None
  stop_sequences: (
    Annotated[list[Annotated[str, _shown(minLength=1, maxLength=MAX_STOP_BYTES)]], _shown(maxItems=MAX_STOP_STRINGS)]
    | None
  ) = None
  stream: Annotated[bool, Meta(description="Stream events as server-sent events.")] | None = None
