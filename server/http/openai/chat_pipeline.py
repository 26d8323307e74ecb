"""Turns the body of a chat completion into a request, its prompt's tokens, and the parser of its output.

Other chat APIs translate their bodies into such a body, and so share every check, limit and default.
"""

import dataclasses
import functools
from typing import Any

from starlette.requests import Request

from engine.errors import InvalidRequest
from server.generation import request_validation
from server.generation.reasoning_budget import ReasoningLimit
from server.generation.serving_state import Backend, ServingState
from server.http.error_responses import UnsupportedField
from server.http.http_options import HttpOptions
from server.http.model_output.call_formats import find_format, forced_format
from server.http.model_output.channel_reader import CHANNEL_MARKERS
from server.http.model_output.output_parser import Calls, OutputParser
from server.http.model_output.reasoning import Reasoning, ReasoningFormat, find_reasoning_format
from server.http.openai.chat_messages import Chat, read_chat
from server.http.openai.completion_replies import Prompt
from server.http.openai.generate_request import RequestedGeneration, read_generation
from server.http.openai.request_fields import BUDGET_FIELDS, REASONING_PLACES, ChatCompletionRequest
from server.text.tokenizer import Tokenizer

# Tokens at the prompt's end that may spell an opened marker of reasoning.
_TAIL_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class PreparedChat:
  """A checked chat.

  Attributes:
    requested: the request, complete but for its id.
    prompt: the prompt's token ids.
    tokenizer: the model's tokenizer.
    calls: the tool calls that the output may have; None leaves calls in the text.
    reasoning: the reasoning that the output may have; None leaves reasoning in the text.
  """

  requested: RequestedGeneration[ChatCompletionRequest]
  prompt: Prompt
  tokenizer: Tokenizer
  calls: Calls | None
  reasoning: Reasoning | None

  def make_parser(self) -> OutputParser:
    """Returns the parser of one output."""
    return OutputParser(self.calls, self.reasoning)


class ChatPipeline:
  """Prepares chats."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options

  def may_reason(self, backend: Backend) -> bool:
    """Returns whether the model may reason: its chat template has a known form of it, or --reasoning_parser is set."""
    template = backend.tokenizer.chat_template if backend.tokenizer is not None else None
    parser = self._options.reasoning_parser
    return parser != "auto" or find_reasoning_format(parser, template) is not None

  async def prepare_chat(self, request: Request, backend: Backend, values: dict[str, Any]) -> PreparedChat:
    """Checks a chat and tokenizes its prompt.

    Args:
      request: the HTTP request; its state receives the body's names of sluice.v1 fields.
      backend: the backend that serves.
      values: the body, in the form of /v1/chat/completions.

    Raises:
      InvalidRequest, UnsupportedField: a field is wrong, or the request excludes reasoning that the server leaves in
        the text.
      ModelNotFound, NoTokenizer, NoChatTemplate: the model cannot serve this chat.
    """
    requested = read_generation(values, ChatCompletionRequest, request.state.tenant)
    request.state.field_names |= requested.field_names
    fields, stopping = requested.fields, requested.request.stopping
    if fields.max_completion_tokens is not None:
      # OpenAI's newer name wins over the older one.
      stopping.max_tokens = fields.max_completion_tokens
      request.state.field_names["max_tokens"] = "max_completion_tokens"
    if fields.logprobs:
      requested.request.output.logprobs = fields.top_logprobs or 0
      request.state.field_names["logprobs"] = "top_logprobs"
    elif fields.top_logprobs:
      raise InvalidRequest(
        f"={fields.top_logprobs} is allowed with logprobs=true alone: send both", field="top_logprobs"
      )
    chat = read_chat(values, fields)
    requested.adapter = backend.find_generator(fields.model)
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "messages")
    requested.ignored += chat.ignored(tokenizer)
    if chat.forced:  # the schema of their calls is made of them
      request.state.field_names["constraint.json_schema"] = "tools"
    calls = await self._find_calls(chat, tokenizer, requested)
    request.state.field_names |= requested.field_names
    prompt = Prompt(await self._state.run_in_text_pool(lambda: chat.token_ids(tokenizer)))
    if not stopping.HasField("max_tokens"):
      num_left = request_validation.count_tokens_left(backend.config, len(prompt.token_ids))
      stopping.max_tokens = request_validation.default_max_tokens(backend.defaults, num_left, num_left)
    form = find_reasoning_format(self._options.reasoning_parser, tokenizer.chat_template)
    # A template may have opened the reasoning, or closed an empty one.
    tail = "" if form is None or form.has_channels else _tail_of(prompt, tokenizer)
    is_open = form is not None and tail.endswith(form.opener)
    requested.reasoning = self._limit_reasoning(form, tokenizer, requested, is_open=is_open)
    if form is not None and tail.endswith(form.closer) and requested.request.HasField("constraint"):
      requested.reasoning = None
    reasoning = self._find_reasoning(chat, form, requested, is_open=is_open)
    requested.shown_token_ids = _shown_token_ids(calls, reasoning, tokenizer)
    return PreparedChat(requested, prompt, tokenizer, calls, reasoning)

  async def _find_calls(self, chat: Chat, tokenizer: Tokenizer, requested: RequestedGeneration[Any]) -> Calls | None:
    """Returns how to find tool calls in the output, and sets the request's constraint accordingly."""
    form = find_format(self._options.tool_call_parser, tokenizer.chat_template)
    tools = chat.forced or chat.tools
    if chat.forced:
      if requested.request.HasField("constraint"):
        raise InvalidRequest(
          "is not allowed to force calls beside another constraint: send one of them", field="tool_choice"
        )
      form = forced_format(form)
      if chat.forced_input is not None:
        name, grammar = chat.forced_input
        kind = "grammar" if grammar.syntax == "lark" else "regex"
        setattr(requested.request.constraint, kind, grammar.definition)
        requested.field_names[f"constraint.{kind}"] = f"{chat.name_of_tool(name)}.format.grammar.definition"
        return Calls(form, {}, parallel=False, whole=name)
      requested.request.constraint.json_schema, ignored = await self._state.run_in_text_pool(
        functools.partial(
          chat.call_schema, form, closes=self._state.closes_objects, strict=self._options.strict_requests
        )
      )
      requested.ignored += ignored
    if form is None or not tools:
      return None
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return Calls(form, parameters, chat.parallel, frozenset(chat.custom))

  def _find_reasoning(
    self,
    chat: Chat,
    form: ReasoningFormat | None,
    requested: RequestedGeneration[ChatCompletionRequest],
    *,
    is_open: bool,
  ) -> Reasoning | None:
    """Returns how to find reasoning, in the model's form, in the output.

    Raises:
      InvalidRequest: reasoning_format is unknown.
      UnsupportedField: the request excludes reasoning from the response, but the server does not find it.
    """
    fields = requested.fields
    if fields.reasoning_format is not None and fields.reasoning_format not in REASONING_PLACES:
      raise InvalidRequest(
        f"is not one that exists: send one of {', '.join(REASONING_PLACES)}", field="reasoning_format"
      )
    is_shown = fields.include_reasoning is not False
    if fields.separate_reasoning is False or fields.reasoning_format == "none":
      return None
    if form is None:
      if self._options.reasoning_parser == "none" and not is_shown:
        raise UnsupportedField(
          "=false is not supported: reasoning stays in the text; serve with --reasoning_parser=auto, or leave it out",
          field="include_reasoning",
        )
      return None
    if requested.reasoning is not None:
      return Reasoning(form, is_open, is_shown)
    if chat.forced:  # the output is calls from its first token on
      return None
    # A constraint holds from the first token on, so that the output begins with the answer.
    return Reasoning(form, is_open and not requested.request.HasField("constraint"), is_shown)

  def _limit_reasoning(
    self,
    form: ReasoningFormat | None,
    tokenizer: Tokenizer,
    requested: RequestedGeneration[ChatCompletionRequest],
    *,
    is_open: bool,
  ) -> ReasoningLimit | None:
    """Returns the limit of the reasoning that the request sets.

    Raises:
      InvalidRequest: the limit is not allowed, or given twice.
      UnsupportedField: the server does not know how the model ends its reasoning.
    """
    fields = requested.fields
    given = {name: value for name in BUDGET_FIELDS if (value := getattr(fields, name)) is not None}
    if not given:
      return None
    name, num_tokens = next(iter(given.items()))
    if len(given) > 1:
      raise InvalidRequest(f"is not allowed beside {name}: send one of them", field=list(given)[1])
    if num_tokens < -1:
      raise InvalidRequest(f"={num_tokens} is not allowed: send 0 or more, or -1 for no limit", field=name)
    if num_tokens == -1:
      return None
    if form is None:
      finds_none = self._options.reasoning_parser == "none"
      why = "the server does not look for it" if finds_none else "the model's chat template has no form that it knows"
      raise UnsupportedField(
        f"={num_tokens} is not supported: the server finds no reasoning, since {why}; serve with another "
        "--reasoning_parser, or leave it out",
        field=name,
      )
    if fields.allowed_token_ids is not None:
      raise InvalidRequest(f"is not allowed beside {name}: send one of them", field="allowed_token_ids")
    opener_ids, closer_ids, answer_ids = (
      tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (form.opener, form.closer, form.answer)
    )
    return ReasoningLimit(num_tokens, form.opener, form.closer, opener_ids, closer_ids, answer_ids, is_open)


def _tail_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
  """Returns the end of the prompt's text, without space behind it."""
  return tokenizer.decode(prompt.token_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()


def _shown_token_ids(calls: Calls | None, reasoning: Reasoning | None, tokenizer: Tokenizer) -> frozenset[int]:
  """Returns the special tokens that the parser must see, although the text omits special tokens."""
  names: list[str] = []
  if calls is not None:
    names += (*calls.form.markers, *calls.form.special)
  if reasoning is not None:
    names += (reasoning.form.opener, reasoning.form.closer)
  if (calls is not None and calls.form.has_channels) or (reasoning is not None and reasoning.form.has_channels):
    names += CHANNEL_MARKERS
  return tokenizer.find_special_tokens(names)
