"""Declares the fields of OpenAI's Responses API. Reads no body itself; see server.http.openai.request_fields."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.sampling_params import MAX_LOGPROBS
from server.http.openai.request_fields import (
  BUDGET_FIELDS,
  INT32_MAX,
  MAX_TOOLS,
  REASONING_EFFORTS,
  SHOWN,
  SYNTAXES,
  TOOL_NAME,
  TOOL_TYPES,
  UNSUPPORTED,
  Int32,
  SamplingFields,
  TemplateVariables,
  Unsupported,
)
from server.text.chat_template import MAX_MESSAGES

MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_CHARS = 16, 64, 512
MESSAGE_ROLES = ("user", "assistant", "system", "developer")
ITEM_TYPES = (
  "message",
  "function_call",
  "function_call_output",
  "custom_tool_call",
  "custom_tool_call_output",
  "reasoning",
  "item_reference",
)
# The values of `include`. Only the log probabilities exist here; the second has a remedy of its own, and the others
# name outputs of tools that OpenAI runs.
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = (
  LOGPROBS,
  ENCRYPTED,
  "file_search_call.results",
  "web_search_call.results",
  "web_search_call.action.sources",
  "message.input_image.image_url",
  "computer_call_output.output.image_url",
  "code_interpreter_call.outputs",
)
# What changes no output here: what only OpenAI's own service can act on, and the limit of tools that it runs.
RESPONSE_HARMLESS = (
  "service_tier",
  "prompt_cache_retention",
  "prompt_cache_options",
  "client_metadata",
  "stream_options",
  "max_tool_calls",
)
_NO_CONVERSATIONS = "there are no conversations; send previous_response_id, or all items in input"
RESPONSE_UNSUPPORTED: Unsupported = {
  "background": ((False,), "a response ends with its request; send stream=true, or leave it out"),
  "truncation": (("disabled",), "input is never cut; send fewer items, or leave it out"),
  "conversation": ((), _NO_CONVERSATIONS),
  "prompt": ((), "there are no stored prompts; write the text into instructions and input"),
  "context_management": (([],), "input is never compacted; send fewer items, or leave it out"),
  "moderation": ((), "nothing is moderated; leave it out"),
  "personality": ((), "write it into instructions"),
  "messages": ((), "send input, as /v1/responses calls it"),
  "n": ((1,), "a response has one output; send several requests"),
  "max_tokens": ((), "send max_output_tokens, as /v1/responses calls it"),
  "max_completion_tokens": ((), "send max_output_tokens, as /v1/responses calls it"),
  "response_format": ((), "send text.format, as /v1/responses calls it"),
  "reasoning_effort": ((), "send reasoning.effort, as /v1/responses calls it"),
  **dict.fromkeys(BUDGET_FIELDS, ((-1,), "send reasoning.max_tokens, as /v1/responses calls it")),
  "logprobs": ((False,), f"send {LOGPROBS} in include"),
  "functions": ((), "send tools, which took their place"),
  "function_call": ((), "send tool_choice, which took its place"),
  "chat_template": ((), "the template is the model's own; leave it out"),
}


def _shown(**schema: Any) -> Meta:
  """Returns limits for the document that another check enforces."""
  return Meta(extra_json_schema={SHOWN: schema})


class InputPart(msgspec.Struct, kw_only=True):
  """A part of a text: input_text, output_text, refusal, or reasoning_text of a reasoning item."""

  type: Annotated[str, _shown(enum=["input_text", "output_text", "refusal", "reasoning_text"])]
  text: str | None = None
  refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
  """One item: what was said, called, returned or thought, or a reference to an item of a stored response.

  Without a type it is a message, or a reference if it has an id alone.
  """

  type: Annotated[str, _shown(enum=list(ITEM_TYPES))] | None = None
  id: str | None = None
  role: Annotated[str, _shown(enum=list(MESSAGE_ROLES), description="Of a message.")] | None = None
  content: Annotated[str | list[InputPart], Meta(description="Of a message, or of a reasoning item.")] | None = None
  call_id: Annotated[str, Meta(description="Of a call and of its output.")] | None = None
  name: Annotated[str, Meta(description="Of a call.")] | None = None
  namespace: Annotated[str, Meta(description="Of a call of a tool in a namespace.")] | None = None
  arguments: Annotated[str, Meta(description="Of a call: a JSON object's text.")] | None = None
  input: Annotated[str, Meta(description="Of a custom_tool_call: the text.")] | None = None
  output: Annotated[str | list[InputPart], Meta(description="Of a call's output.")] | None = None


class FlatInputFormat(msgspec.Struct, kw_only=True):
  """The form of a custom tool's input. A grammar is enforced where the tool is forced, and nowhere else."""

  type: Annotated[str, _shown(enum=["text", "grammar"])]
  syntax: Annotated[str, _shown(enum=list(SYNTAXES), description="With grammar.")] | None = None
  definition: Annotated[str, Meta(description="With grammar: its text.")] | None = None


class FlatTool(msgspec.Struct, kw_only=True):
  """A function or a custom tool, whose input is free text, that the model may call, or a namespace of them."""

  type: Annotated[str, _shown(enum=[*TOOL_TYPES, "namespace"])]
  name: Annotated[str, _shown(pattern=f"^{TOOL_NAME.pattern}$")] | None = None
  description: str | None = None
  parameters: Annotated[dict[str, Any], Meta(description="A JSON schema.")] | None = None
  strict: Annotated[bool, Meta(description="Of effect where a call is forced.")] | None = None
  format: Annotated[FlatInputFormat, Meta(description="Of a custom tool. Default text.")] | None = None
  tools: "Annotated[list[FlatTool], Meta(description='Of a namespace: its tools.')] | None" = None


class FunctionSelection(msgspec.Struct, kw_only=True):
  """A tool that must be called, or with allowed_tools the tools that may or must be."""

  type: Annotated[str, _shown(enum=[*TOOL_TYPES, "allowed_tools"])]
  name: Annotated[str, Meta(description="Of the tool.")] | None = None
  namespace: Annotated[str, Meta(description="Of a tool in a namespace.")] | None = None
  mode: Annotated[str, _shown(enum=["auto", "required"], description="With allowed_tools.")] | None = None
  tools: "Annotated[list[FunctionSelection], Meta(description='With allowed_tools.')] | None" = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
  """How the model reasons."""

  effort: (
    Annotated[
      str, _shown(enum=list(REASONING_EFFORTS), description="For chat templates that read it; otherwise ignored.")
    ]
    | None
  ) = None
  max_tokens: (
    Annotated[Int32, _shown(minimum=-1, description="At most this many tokens of reasoning. -1: no limit.")] | None
  ) = None
  summary: Annotated[str, Meta(description="Ignored: reasoning is returned whole.")] | None = None
  generate_summary: Annotated[str, Meta(description="The older name of summary.")] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
  """The format of the text."""

  type: Annotated[str, _shown(enum=["text", "json_object", "json_schema"])]
  name: Annotated[str, Meta(description="Of no effect.")] | None = None
  description: Annotated[str, Meta(description="Of no effect.")] | None = None
  schema: Annotated[dict[str, Any], Meta(description="With json_schema: the schema.")] | None = None
  strict: Annotated[bool, Meta(description="Refuse keywords that are not enforced, and close objects.")] | None = None


class TextSettings(msgspec.Struct, kw_only=True):
  """Options of the text."""

  format: TextFormat | None = None
  verbosity: Annotated[str, _shown(enum=["medium"])] | None = None


Input = Annotated[
  str | Annotated[list[InputItem], _shown(maxItems=MAX_MESSAGES)], Meta(description="A user's text, or items.")
]
Instructions = Annotated[
  str, Meta(description="A system message before the input. previous_response_id does not continue it.")
]
PreviousId = Annotated[str, Meta(description="A stored response, whose items come before the input.")]
FlatTools = Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS, description="What the model may call.")]
FlatToolChoice = Annotated[
  Annotated[str, _shown(enum=["none", "auto", "required"])] | FunctionSelection,
  Meta(description="required, or a function, forces a call. Default auto."),
]
OneCall = Annotated[bool, Meta(description="false: at most one call. Default true.")]
EchoedText = Annotated[str, Meta(description="Of no effect but in the response.")]


class ResponseRequest(SamplingFields, kw_only=True):
  """Fields that are not listed are ignored and named in x-sluice-ignored-fields, or refused under --strict_requests."""

  remedies = {"input": "a string or a list of items"}
  harmless = RESPONSE_HARMLESS
  unsupported = {**UNSUPPORTED, **RESPONSE_UNSUPPORTED}
  input: Input | None = None
  instructions: Instructions | None = None
  previous_response_id: PreviousId | None = None
  tools: FlatTools | None = None
  tool_choice: FlatToolChoice | None = None
  parallel_tool_calls: OneCall | None = None
  reasoning: ReasoningOptions | None = None
  text: TextSettings | None = None
  chat_template_kwargs: TemplateVariables | None = None
  max_output_tokens: (
    Annotated[
      Int32, _shown(minimum=1, maximum=INT32_MAX, description="Default: the model's own, else what its length leaves.")
    ]
    | None
  ) = None
  include: Annotated[list[Annotated[str, _shown(enum=list(INCLUDABLE))]], Meta(max_length=len(INCLUDABLE))] | None = (
    None
  )
  top_logprobs: (
    Annotated[Int32, _shown(minimum=0, maximum=MAX_LOGPROBS, description=f"With {LOGPROBS} in include.")] | None
  ) = None
  store: Annotated[bool, Meta(description="Keep the response for later requests. Default true.")] | None = None
  metadata: (
    Annotated[
      dict[str, Annotated[str, _shown(maxLength=MAX_METADATA_CHARS)]],
      Meta(max_length=MAX_METADATA, description="Of no effect but in the response. Names have at most 64 characters."),
    ]
    | None
  ) = None
  user: EchoedText | None = None
  safety_identifier: EchoedText | None = None
  prompt_cache_key: EchoedText | None = None
