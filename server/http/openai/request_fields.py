"""Declares every field of a body once: msgspec checks it, and /openapi.json shows it. Reads no body itself.

Three other kinds of fields exist. The server refuses fields that would change the output and are not supported: it
applies or refuses a parameter, and never drops it. It ignores fields that change nothing here. It also ignores unknown
fields and names them in the response's header `x-sluice-ignored-fields`, or refuses them under --strict_requests.

Limits come from the modules that enforce them for gRPC too. The document shows docstrings and descriptions.
"""

from collections.abc import Mapping, Sequence
import re
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from engine.sampling_params import MAX_BIAS, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, RANGES
from engine.settings import SPECULATION
from server.generation.request_validation import MAX_N, MAX_STOP_BYTES, MAX_STOP_STRINGS, REQUEST_ID
from server.text.chat_template import MAX_MESSAGES, ROLES
from server.text.constraint_compiler import MAX_CHOICES

PROMPT_REMEDY = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
_CHAT_REMEDIES = {"messages": "a list of messages with role and content"}
MAX_TOOLS = 128
TOOL_TYPES = ("function", "custom")
# Of a grammar of a custom tool's input.
SYNTAXES = ("lark", "regex")
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# OpenAI's roles, and those of some models.
REASONING_PLACES = ("none", "auto", "deepseek", "parsed")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
type Unsupported = Mapping[str, tuple[tuple[object, ...], str]]
# What changes no answer here: what only OpenAI's own service can act on, where and how fast something is computed, and
# what tunes a kind of sampling that is off, since the switch that turns it on is among UNSUPPORTED.
HARMLESS = (
  "user",
  "metadata",
  "store",
  "service_tier",
  "safety_identifier",
  "prompt_cache_key",
  "prompt_cache_retention",
  "prediction",
  "spaces_between_special_tokens",
  "guided_decoding_backend",
  "truncation_side",
  "cache_prompt",
  "id_slot",
  "n_keep",
  "dry_base",
  "dry_allowed_length",
  "dry_penalty_last_n",
  "dry_sequence_breakers",
  "xtc_threshold",
  "mirostat_tau",
  "mirostat_eta",
  "dynatemp_exponent",
  "adaptive_decay",
)
_NOTHING: tuple[object, ...] = (False, [], {}, "")
_OFF: tuple[object, ...] = (0,)
_ONE: tuple[object, ...] = (1,)
_SAMPLERS = "it is not built; use temperature, top_p, top_k and min_p"
_CHAT_BUDGET = "reasoning has a budget in chats alone; send messages to /v1/chat/completions"
# Names of one limit: those of vLLM, Qwen's and llama.cpp's servers.
BUDGET_FIELDS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget")
_CHAT_REASONING = "reasoning stays in a completion's text; send messages to /v1/chat/completions"
OTHER_CONSTRAINT = "send response_format, or one of json, regex, choice and grammar in structured_outputs"
# By name, the values besides null that change nothing, and what to say about the others. What would change the output
# is here, so that no request gets an output without its parameters: the fields of OpenAI, vLLM, SGLang and
# llama.cpp's server.
UNSUPPORTED: Unsupported = {
  "suffix": (("",), "there is no infilling; leave it out"),
  "use_beam_search": ((False,), "there is no beam search; leave it out"),
  "length_penalty": (_ONE, "there is no beam search; leave it out"),
  "include_stop_str_in_output": ((False,), "the text ends before the stop string; append it from stop_reason"),
  "no_stop_trim": ((False,), "the text ends before the stop string; append it from stop_reason"),
  "stop_regex": (_NOTHING, "send stop, with strings"),
  "bad_words": (([],), "send logit_bias of -100 for their tokens"),
  "truncate_prompt_tokens": ((), "prompts are never cut; shorten the prompt"),
  "prompt_logprobs": ((), "send echo with logprobs to /v1/completions"),
  "prompt_logprob_token_ids": (_NOTHING, "send echo with logprobs to /v1/completions"),
  "logprob_token_ids": (_NOTHING, "send logprobs, for the most likely tokens"),
  "n_probs": (_OFF, "send logprobs"),
  "logits_processors": (([],), "code from requests is not run; leave it out"),
  "custom_logit_processor": (_NOTHING, "code from requests is not run; leave it out"),
  "custom_params": (_NOTHING, "code from requests is not run; leave it out"),
  "vllm_xargs": (_NOTHING, "there are no plugins; leave it out"),
  "prompt_embeds": ((), "send text or token ids"),
  "input_ids": ((), "send the ids as prompt to /v1/completions"),
  "image_data": (_NOTHING, "the model reads text; leave it out"),
  "mm_processor_kwargs": (_NOTHING, "the model reads text; leave it out"),
  "media_io_kwargs": (_NOTHING, "the model reads text; leave it out"),
  "documents": (_NOTHING, "write the documents into the messages"),
  "web_search_options": ((), "the server searches nothing; write what was found into the prompt"),
  "kv_transfer_params": (({},), "leave it out"),
  "ec_transfer_params": (({},), "leave it out"),
  "session_params": (_NOTHING, "there are no sessions; send the whole prompt"),
  "lora": (_NOTHING, "send an adapter's name as model"),
  "lora_request": (_NOTHING, "send an adapter's name as model"),
  "lora_path": (_NOTHING, "send an adapter's name as model"),
  "guided_whitespace_pattern": ((), "put the whitespace into the grammar, or leave it out"),
  "guided_json_object": ((False,), 'send response_format {"type": "json_object"}'),
  "structural_tag": ((), OTHER_CONSTRAINT),
  "grammar_lazy": ((False,), "a grammar holds from the first token on; leave it out"),
  "grammar_triggers": (([],), "a grammar holds from the first token on; leave it out"),
  "preserved_tokens": (([],), "send skip_special_tokens=false for special tokens in the text"),
  "n_predict": ((), "send max_tokens"),
  "max_new_tokens": ((), "send max_tokens"),
  "t_max_predict_ms": ((0, -1), "send max_tokens, or end the request when its time is over"),
  "n_cmpl": (_ONE, "send n"),
  "n_indent": (_OFF, "send a grammar with the indentation"),
  "repeat_penalty": (_ONE, "send repetition_penalty"),
  "repeat_last_n": ((-1,), "penalties look at the whole text; leave it out"),
  "penalty_last_n": ((-1,), "penalties look at the whole text; leave it out"),
  "typical_p": (_ONE, _SAMPLERS),
  "typ_p": (_ONE, _SAMPLERS),
  "tfs_z": (_ONE, _SAMPLERS),
  "top_a": (_OFF, _SAMPLERS),
  "top_n_sigma": ((0, -1), _SAMPLERS),
  "mirostat": (_OFF, _SAMPLERS),
  "mirostat_mode": (_OFF, _SAMPLERS),
  "dynatemp_range": (_OFF, _SAMPLERS),
  "dry_multiplier": (_OFF, _SAMPLERS),
  "xtc_probability": (_OFF, _SAMPLERS),
  "adaptive_target": ((-1,), _SAMPLERS),
  "min_keep": ((0, 1), _SAMPLERS),
  "samplers": ((), _SAMPLERS),
  "watermarking": ((False,), "leave it out"),
  "repetition_detection": ((), "send repetition_penalty, or max_tokens"),
  **dict.fromkeys(BUDGET_FIELDS, ((-1,), _CHAT_BUDGET)),
  "verbosity": (("medium",), "say in the messages how long the answer should be"),
  "parse_tool_calls": ((True,), "serve with --tool_call_parser=none for calls that stay text"),
  "return_hidden_states": ((False,), "leave it out"),
}
# Fields of a chat's prompt.
PROMPT_UNSUPPORTED: Unsupported = {
  "chat_template": ((), "the template is the model's own; leave it out"),
  "continue_final_message": ((False,), "send the prompt to /v1/completions"),
  "add_special_tokens": ((False,), "the model's template writes them; leave it out"),
  "modalities": ((["text"],), 'the model writes text; leave it out, or send ["text"]'),
  "audio": ((), "the model writes text; leave it out"),
  "functions": ((), "send tools, which took their place"),
  "function_call": ((), "send tool_choice, which took its place"),
}
# Fields of the other endpoint, which this one refuses.
CHAT_UNSUPPORTED: Unsupported = {
  "echo": ((False,), "send the prompt to /v1/completions"),
  "best_of": (_ONE, "send n"),
}
COMPLETION_UNSUPPORTED: Unsupported = {
  "max_completion_tokens": ((), "send max_tokens, as /v1/completions calls it"),
  "top_logprobs": (_OFF, "send logprobs with a number, as /v1/completions calls it"),
  "tools": (([],), "send messages to /v1/chat/completions"),
  "tool_choice": (("none", "auto"), "send messages to /v1/chat/completions"),
  "chat_template_kwargs": (({},), "send messages to /v1/chat/completions"),
  "reasoning_effort": ((), "send messages to /v1/chat/completions"),
  "include_reasoning": ((True,), _CHAT_REASONING),
  "separate_reasoning": ((False,), _CHAT_REASONING),
  "reasoning_format": (("none",), _CHAT_REASONING),
}


# The schema's key for limits that the document shows instead of msgspec's.
SHOWN = "x-shown"


def _shown(**schema: Any) -> Meta:
  """Returns limits for the document that the field's owner checks, for gRPC too, so that msgspec must not."""
  return Meta(extra_json_schema={SHOWN: schema})


def _range(name: str) -> Meta:
  low, high, above = RANGES[name]
  return _shown(**{"exclusiveMinimum" if above else "minimum": low, "maximum": high})


Int32 = Annotated[int, Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
Count = Annotated[Int32, _shown(minimum=0)]
PositiveCount = Annotated[Int32, _shown(minimum=1)]
Text = Annotated[str, _shown(minLength=1)]
TokenId = Annotated[Int32, _shown(minimum=0)]
StopString = Annotated[str, _shown(minLength=1, maxLength=MAX_STOP_BYTES)]
_GRAMMAR = "A grammar in llguidance's Lark or in GBNF."
_BUDGET = "At most this many tokens of reasoning; then the answer begins. -1: no limit."
_NO_SPECIAL = "Leave special tokens out of the text. Default true."
_ADD_SPECIAL = "Add the tokenizer's own tokens, such as BOS. Default true."
Choices = Annotated[list[Text], _shown(minItems=1, maxItems=MAX_CHOICES)]
JsonSchema = Annotated[dict[str, Any] | str, Meta(description="A JSON schema, or its text.")]


class RequestFields(msgspec.Struct, kw_only=True):
  """Fields of a body. The server also knows the fields in `harmless` and `unsupported`.

  `remedies` says what to send if a field is missing or has a wrong type; otherwise its type says so.
  """

  remedies: ClassVar[Mapping[str, str]] = {}
  harmless: ClassVar[Sequence[str]] = ()
  unsupported: ClassVar[Unsupported] = {}
  model: Annotated[str, Meta(description="The served name or a LoRA adapter's; absent: the served one.")] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
  """Options of a stream; only with `stream`."""

  include_usage: Annotated[bool, Meta(description="A last chunk with usage and no choice.")] | None = None
  continuous_usage_stats: Annotated[bool, Meta(description="Usage in every chunk.")] | None = None
  include_obfuscation: Annotated[bool, Meta(description="Of no effect here.")] | None = None


class ResponseSchema(msgspec.Struct):
  """OpenAI's wrapper of a schema."""

  schema: JsonSchema | None = None
  strict: Annotated[bool, Meta(description="Refuse keywords that are not enforced, and close objects.")] | None = None


class ResponseFormat(msgspec.Struct):
  """The format of the output. The schema stands in json_schema or, as in llama.cpp, in schema."""

  type: Annotated[str, _shown(enum=["text", "json_object", "json_schema"])]
  json_schema: ResponseSchema | None = None
  schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
  """vLLM's constraint on the output; set exactly one field."""

  json: JsonSchema | None = None
  regex: str | None = None
  choice: Choices | None = None
  grammar: str | None = None
  json_object: bool | None = None


class SamplingFields(RequestFields, kw_only=True):
  """Fields that every endpoint with an output shares."""

  temperature: Annotated[float, _range("temperature")] | None = None
  top_p: Annotated[float, _range("top_p")] | None = None
  min_p: Annotated[float, _range("min_p")] | None = None
  presence_penalty: Annotated[float, _range("presence_penalty")] | None = None
  frequency_penalty: Annotated[float, _range("frequency_penalty")] | None = None
  repetition_penalty: Annotated[float, _range("repetition_penalty")] | None = None
  top_k: Annotated[Int32, _shown(minimum=-1, description="0 and -1 are all.")] | None = None
  seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX, description="-1 is none.")] | None = None
  logit_bias: (
    Annotated[
      dict[TokenId, Annotated[float, _shown(minimum=-MAX_BIAS, maximum=MAX_BIAS)]], _shown(maxProperties=MAX_LOGIT_BIAS)
    ]
    | None
  ) = None
  allowed_token_ids: Annotated[list[TokenId], _shown(minItems=1)] | None = None
  min_tokens: Count | None = None
  ignore_eos: bool | None = None
  stop: StopString | Annotated[list[StopString], _shown(maxItems=MAX_STOP_STRINGS)] | None = None
  stop_token_ids: Annotated[list[TokenId], _shown(maxItems=MAX_STOP_TOKEN_IDS)] | None = None
  skip_special_tokens: Annotated[bool, Meta(description=_NO_SPECIAL)] | None = None
  stream: Annotated[bool, Meta(description="Stream chunks as server-sent events.")] | None = None
  cache_salt: (
    Annotated[str, _shown(maxLength=128, description="Prefixes are shared with requests of the same one alone.")] | None
  ) = None
  priority: Annotated[Int32, Meta(description="Lower first.")] | None = None
  speculation: (
    Annotated[str, _shown(enum=list(SPECULATION), description="Which drafts; at most what --speculation allows.")]
    | None
  ) = None
  structured_outputs: StructuredOutputs | None = None


class GenerationFields(SamplingFields, kw_only=True):
  """Fields that completions and chats share."""

  harmless = HARMLESS
  n: Annotated[Int32, _shown(minimum=1, maximum=MAX_N)] | None = None
  max_tokens: (
    Annotated[PositiveCount, Meta(description="Default: the model's own, else what its length leaves.")] | None
  ) = None
  stream_options: StreamOptions | None = None
  return_token_ids: Annotated[bool, Meta(description="Choices also have token_ids.")] | None = None
  return_tokens_as_token_ids: (
    Annotated[bool, Meta(description="Name tokens of logprobs as token_id:N instead of by text.")] | None
  ) = None
  request_id: Annotated[str, _shown(pattern=f"^{REQUEST_ID.pattern}$")] | None = None
  response_format: ResponseFormat | None = None
  # The same constraints at the top level, as in older vLLM, llama.cpp's server and SGLang.
  guided_json: JsonSchema | None = None
  guided_regex: Annotated[str, Meta(description="A regular expression.")] | None = None
  guided_choice: Annotated[Choices, Meta(description="One of these strings.")] | None = None
  guided_grammar: Annotated[str, Meta(description=_GRAMMAR)] | None = None
  json_schema: JsonSchema | None = None
  regex: Annotated[str, Meta(description="A regular expression.")] | None = None
  grammar: Annotated[str, Meta(description=_GRAMMAR)] | None = None
  ebnf: Annotated[str, Meta(description="The same as grammar.")] | None = None


class CompletionRequest(GenerationFields, kw_only=True):
  """Fields that are not listed are ignored and named in x-sluice-ignored-fields, or refused under --strict_requests."""

  remedies = {"prompt": PROMPT_REMEDY}
  unsupported = {**UNSUPPORTED, **COMPLETION_UNSUPPORTED}
  prompt: Text | Annotated[list[Text | TokenId | Annotated[list[TokenId], _shown(minItems=1)]], _shown(minItems=1)]
  max_tokens: (
    Annotated[
      Count,
      Meta(description="Default 16, or the model's own if lower. 0 with echo alone: no output."),
    ]
    | None
  ) = None
  add_special_tokens: Annotated[bool, Meta(description=_ADD_SPECIAL)] | None = None
  echo: Annotated[bool, Meta(description="Put the prompt before the output, and its logprobs.")] | None = None
  logprobs: (
    Annotated[Int32, _shown(minimum=0, maximum=MAX_LOGPROBS, description="Log probabilities of this many tokens.")]
    | None
  ) = None
  best_of: Annotated[Int32, _shown(minimum=1, maximum=MAX_N, description="The same as n.")] | None = None

  @property
  def only_echo(self) -> bool:
    """Whether the request wants no output."""
    return bool(self.echo) and self.max_tokens == 0


class ContentPart(msgspec.Struct):
  """A text part of a message."""

  type: Annotated[str, _shown(const="text")] | None = None
  text: str | None = None


class CalledFunction(msgspec.Struct):
  """A function that the model has called, with its arguments as JSON text, or as an object."""

  name: str
  arguments: str | dict[str, Any] | None = None


class CalledCustomTool(msgspec.Struct):
  """A custom tool that the model has called, with its input."""

  name: str
  input: str


class EarlierCall(msgspec.Struct, kw_only=True, omit_defaults=True):
  """A tool call in an earlier message: of a function or of a custom tool."""

  id: str | None = None
  type: Annotated[str, _shown(enum=list(TOOL_TYPES))] | None = None
  function: CalledFunction | None = None
  custom: CalledCustomTool | None = None


class ChatTurn(msgspec.Struct, kw_only=True):
  """One message. Only the assistant's messages may lack content; templates of models with tools read the rest."""

  role: Annotated[str, _shown(enum=list(ROLES))]
  content: str | list[ContentPart] | None = None
  name: str | None = None
  tool_calls: list[EarlierCall] | None = None
  tool_call_id: str | None = None
  reasoning_content: str | None = None
  reasoning: str | None = None


class ToolFunction(msgspec.Struct):
  """A function's description for the model; parameters are a JSON schema."""

  name: Annotated[str, _shown(pattern=f"^{TOOL_NAME.pattern}$")]
  description: str | None = None
  parameters: dict[str, Any] | None = None
  strict: bool | None = None


class InputGrammar(msgspec.Struct):
  """The grammar of a custom tool's input."""

  syntax: Annotated[str, _shown(enum=list(SYNTAXES))]
  definition: Text


class InputFormat(msgspec.Struct):
  """The form of a custom tool's input. A grammar is enforced where the tool is forced, and nowhere else."""

  type: Annotated[str, _shown(enum=["text", "grammar"])]
  grammar: Annotated[InputGrammar, Meta(description="With grammar.")] | None = None


class CustomTool(msgspec.Struct):
  """A tool whose input is free text. The model reads it as a function with one string."""

  name: Annotated[str, _shown(pattern=f"^{TOOL_NAME.pattern}$")]
  description: str | None = None
  format: InputFormat | None = None


class Tool(msgspec.Struct):
  """A function, or a custom tool, that the model may call."""

  type: Annotated[str, _shown(enum=list(TOOL_TYPES))]
  function: ToolFunction | None = None
  custom: CustomTool | None = None


class SelectedFunction(msgspec.Struct):
  """The name of a tool."""

  name: str


class SelectedTool(msgspec.Struct):
  """A tool of the request by its name, in function or, as in the Responses API, beside the type."""

  type: Annotated[str, _shown(enum=list(TOOL_TYPES))]
  function: SelectedFunction | None = None
  custom: SelectedFunction | None = None
  name: str | None = None


class AllowedTools(msgspec.Struct):
  """The tools that the model may call, and whether it must call one."""

  mode: Annotated[str, _shown(enum=["auto", "required"])]
  tools: Annotated[list[SelectedTool], Meta(max_length=MAX_TOOLS)]


class ChosenTools(msgspec.Struct):
  """A tool that must be called, or the tools that may be called.

  The tools stand in allowed_tools or, as in the Responses API, in mode and tools beside the type.
  """

  type: Annotated[str, _shown(enum=[*TOOL_TYPES, "allowed_tools"])]
  function: SelectedFunction | None = None
  custom: SelectedFunction | None = None
  allowed_tools: AllowedTools | None = None
  mode: Annotated[str, _shown(enum=["auto", "required"])] | None = None
  tools: Annotated[list[SelectedTool], Meta(max_length=MAX_TOOLS)] | None = None


Messages = Annotated[list[ChatTurn], _shown(minItems=1, maxItems=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS, description="What the model may call.")]
ToolChoice = Annotated[
  Annotated[str, _shown(enum=["none", "auto", "required"])] | ChosenTools,
  Meta(description="required, or a tool, forces a call. allowed_tools: a part of tools. Default auto with tools."),
]
TemplateVariables = Annotated[
  dict[str, bool | int | float | str | None], Meta(description="Variables for the chat template.")
]
ReasoningEffort = Annotated[
  str, _shown(enum=list(REASONING_EFFORTS), description="For chat templates that read it; else ignored.")
]
ParallelCalls = Annotated[
  bool, Meta(description="false: at most one call. Default true, and false where tool_choice forces a call.")
]
SameBudget = Annotated[Int32, _shown(minimum=-1, description="The same as thinking_token_budget.")]
OpensTurn = Annotated[bool, Meta(description="The template opens the assistant's turn. Default true.")]


class ChatCompletionRequest(GenerationFields, kw_only=True):
  """Fields that are not listed are ignored and named in x-sluice-ignored-fields, or refused under --strict_requests."""

  remedies = _CHAT_REMEDIES
  unsupported = {**UNSUPPORTED, **PROMPT_UNSUPPORTED, **CHAT_UNSUPPORTED}
  messages: Messages
  tools: Tools | None = None
  tool_choice: ToolChoice | None = None
  parallel_tool_calls: ParallelCalls | None = None
  add_generation_prompt: OpensTurn | None = None
  chat_template_kwargs: TemplateVariables | None = None
  reasoning_effort: ReasoningEffort | None = None
  include_reasoning: Annotated[bool, Meta(description="false: the response lacks the reasoning.")] | None = None
  separate_reasoning: Annotated[bool, Meta(description="false: the reasoning stays in the content.")] | None = None
  reasoning_format: (
    Annotated[str, _shown(enum=list(REASONING_PLACES), description="none: the reasoning stays in the content.")] | None
  ) = None
  thinking_token_budget: Annotated[Int32, _shown(minimum=-1, description=_BUDGET)] | None = None
  thinking_budget: SameBudget | None = None
  thinking_budget_tokens: SameBudget | None = None
  reasoning_budget: SameBudget | None = None
  max_completion_tokens: Annotated[PositiveCount, Meta(description="Wins over max_tokens.")] | None = None
  logprobs: Annotated[bool, Meta(description="Log probabilities of the output's tokens.")] | None = None
  top_logprobs: Annotated[Int32, _shown(minimum=0, maximum=MAX_LOGPROBS, description="With logprobs alone.")] | None = (
    None
  )


class LoadAdapterRequest(RequestFields, kw_only=True):
  """A LoRA adapter to load, in vLLM's form."""

  unsupported = {"is_3d_lora_weight": ((False,), "adapters of experts are not served; leave it out")}
  lora_name: Annotated[str, Meta(description="The name that requests send as `model`.")]
  lora_path: Annotated[str, Meta(description="A folder in PEFT's format, below `--lora_dir`.")]
  load_inplace: Annotated[bool, Meta(description="Replace the adapter of this name, if it has no requests.")] | None = (
    None
  )


class UnloadAdapterRequest(RequestFields, kw_only=True):
  """A LoRA adapter to unload, in vLLM's form."""

  harmless = ("lora_int_id",)
  lora_name: Annotated[str, Meta(description="Its name.")]


class TokenizeText(RequestFields, kw_only=True):
  """A text."""

  prompt: Text
  add_special_tokens: Annotated[bool, Meta(description=_ADD_SPECIAL)] | None = None
  return_token_strs: Annotated[bool, Meta(description="The answer also has token_strs.")] | None = None


class TokenizeChat(RequestFields, kw_only=True):
  """A chat, as for ChatCompletionRequest."""

  remedies = _CHAT_REMEDIES
  unsupported = PROMPT_UNSUPPORTED
  messages: Messages
  tools: Tools | None = None
  tool_choice: ToolChoice | None = None
  parallel_tool_calls: ParallelCalls | None = None
  add_generation_prompt: OpensTurn | None = None
  chat_template_kwargs: TemplateVariables | None = None
  reasoning_effort: ReasoningEffort | None = None
  return_token_strs: Annotated[bool, Meta(description="The answer also has token_strs.")] | None = None


class DetokenizeRequest(RequestFields, kw_only=True):
  """Token ids."""

  tokens: list[TokenId]
  skip_special_tokens: Annotated[bool, Meta(description=_NO_SPECIAL)] | None = None
