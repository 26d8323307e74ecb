"""Serves /v1/completions and /v1/chat/completions: a body becomes generations, and these one response or a stream.

`server.generation.request_validation` and the engine check requests, as for gRPC. A request may have several prompts,
each a generation of its own. They start together or not at all, and end together when the client disconnects.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
import contextlib
import functools
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from server.errors import SlowConsumer
from server.generation import request_validation
from server.generation.generations import Generation, Generations
from server.generation.serving_state import Backend, ServingState
from server.http.error_responses import UnsupportedField
from server.http.http_options import HttpOptions
from server.http.json_exchange import (
  DONE,
  EventStream,
  encode_sse_event,
  read_json_object,
  unless_gone,
)
from server.http.openai.chat_messages import Chat, read_chat
from server.http.openai.completion_replies import Calls, ChatChoice, Choice, Prompt, TextChoice, TokenNames, usage
from server.http.openai.generate_request import RequestedGeneration, judge_ignored, read_generation
from server.http.openai.request_fields import PROMPT_REMEDY, ChatCompletionRequest, CompletionRequest
from server.http.openai.tool_calls import find_format, forced_format
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer

MAX_PROMPTS = 256
# Prefix of the response's id, and the response's "object".
_KINDS = {
  CompletionRequest: ("cmpl", "text_completion"),
  ChatCompletionRequest: ("chatcmpl", "chat.completion"),
}
# OpenAI's default for completions; a model's own default can only lower it, as in vLLM. A chat's default is the
# model's, or all that is left of the model's length.
_DEFAULT_COMPLETION_TOKENS = 16
# Above this number, prompts are tokenized and responses encoded away from the loop.
_INLINE_CHARS = 2048
_INLINE_LOGPROBS = 256


class _Running:
  """The generations of one request; closes each exactly once."""

  def __init__(self, generations: Generations, owner: str):
    self._generations = generations
    self._owner = owner
    self.live: list[Generation] = []

  async def start_generation(self, call: request_validation.GenerationCall) -> None:
    self.live.append(await self._generations.start_generation(call, None, self._owner))

  def close(self) -> None:
    while self.live:
      self._generations.close_generation(self.live.pop())

  def fail_slow(self, timeout_s: float) -> None:
    error = SlowConsumer(f"the client took nothing for {timeout_s:g} s; read the stream faster, or do not stream")
    for generation in self.live:
      self._generations.fail_generation(generation, error)

  async def messages(self) -> AsyncGenerator[tuple[int, pb.GenerateResponse]]:
    """Yields (index of the prompt, message) as messages arrive.

    Reads at most one message a prompt ahead of the reader; later ones wait, merged, in the generation.
    """
    if len(self.live) == 1:
      async for message in self.live[0].messages():
        yield 0, message
      return
    sources = [generation.messages() for generation in self.live]
    pulls = {asyncio.ensure_future(anext(source, None)): place for place, source in enumerate(sources)}
    try:
      while pulls:
        done, _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        for pull in done:
          place, message = pulls.pop(pull), pull.result()
          if message is None:
            continue
          yield place, message
          pulls[asyncio.ensure_future(anext(sources[place], None))] = place
    finally:
      for pull in pulls:
        pull.cancel()
      await asyncio.gather(*pulls, return_exceptions=True)
      for source in sources:
        await source.aclose()  # pyright: ignore[reportAttributeAccessIssue]  (an async generator)


class CompletionEndpoints:
  """Both endpoints, which differ in their fields and in the form of choices."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options

  async def completions(self, request: Request) -> Response:
    """POST /v1/completions."""
    with self._state.admit() as backend:
      values = await read_json_object(request, self._state, self._options)
      requested = read_generation(values, CompletionRequest, request.state.tenant)
      request.state.field_names |= requested.field_names | {"prompt.text": "prompt"}
      fields, stopping, output = requested.fields, requested.request.stopping, requested.request.output
      if fields.best_of is not None and fields.best_of != requested.n:
        raise UnsupportedField(
          f"={fields.best_of} is not supported: send the same as n={requested.n}, or leave it out", field="best_of"
        )
      if fields.only_echo:
        # Scoring: prompt log probabilities come with a first token, which the response leaves out.
        stopping.max_tokens = 1
      if fields.logprobs is not None:
        output.logprobs = fields.logprobs
        if fields.echo:
          output.prompt_logprobs = fields.logprobs
      prompts = await self._prompts(backend, fields)
      if fields.max_tokens is None:
        num_left = _tokens_left(backend.config, max(len(each.token_ids) for each in prompts))
        num_left = min(num_left, _DEFAULT_COMPLETION_TOKENS)
        stopping.max_tokens = request_validation.default_max_tokens(backend.defaults, num_left, num_left)
      tokenizer, skip = backend.tokenizer, output.skip_special_tokens
      names = TokenNames(tokenizer, as_ids=bool(fields.return_tokens_as_token_ids))
      choices = [
        TextChoice(
          place * requested.n + index,
          fields,
          names,
          prompt,
          None if tokenizer is None else tokenizer.token_places(skip_special_tokens=skip),
        )
        for place, prompt in enumerate(prompts)
        for index in range(requested.n)
      ]
      return await self._answer(request, backend, requested, prompts, choices)

  async def chat(self, request: Request) -> Response:
    """POST /v1/chat/completions."""
    with self._state.admit() as backend:
      values = await read_json_object(request, self._state, self._options)
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
      request_validation.check_model_name(fields.model or "", backend.model)
      tokenizer = request_validation.need_tokenizer(backend.tokenizer, "messages")
      requested.ignored += chat.ignored(tokenizer)
      if chat.forced:  # the schema of their calls is made of them
        request.state.field_names["constraint.json_schema"] = "tools"
      calls = await self._calls(chat, tokenizer, requested)
      prompt = Prompt(await self._state.run_in_text_pool(lambda: chat.token_ids(tokenizer)))
      if not stopping.HasField("max_tokens"):
        num_left = _tokens_left(backend.config, len(prompt.token_ids))
        stopping.max_tokens = request_validation.default_max_tokens(backend.defaults, num_left, num_left)
      names = TokenNames(tokenizer, as_ids=bool(fields.return_tokens_as_token_ids))
      choices = [ChatChoice(index, fields, names, calls) for index in range(requested.n)]
      return await self._answer(request, backend, requested, [prompt], choices)

  async def _calls(self, chat: Chat, tokenizer: Tokenizer, requested: RequestedGeneration[Any]) -> Calls | None:
    """Returns how to find tool calls in the output, and sets the request's output and constraint accordingly."""
    form = find_format(self._options.tool_call_parser, tokenizer.chat_template)
    tools = chat.forced or chat.tools
    if chat.forced:
      if requested.request.HasField("constraint"):
        raise InvalidRequest(
          "is not allowed to force calls beside another constraint: send one of them", field="tool_choice"
        )
      form = forced_format(form)
      requested.request.constraint.json_schema = await self._state.run_in_text_pool(
        functools.partial(chat.call_schema, form)
      )
    if form is None or not tools:
      return None
    if form.marker and tokenizer.is_special(form.marker):
      requested.request.output.skip_special_tokens = False
    return Calls(form, [tool["function"]["name"] for tool in tools], chat.parallel)

  async def _prompts(self, backend: Backend, fields: CompletionRequest) -> list[Prompt]:
    """Returns the prompts as texts and ids, with the tokens' places in the texts if the response needs them."""
    request_validation.check_model_name(fields.model or "", backend.model)
    given = _given_prompts(fields.prompt)
    tokenizer, skip = backend.tokenizer, fields.skip_special_tokens is not False
    places = fields.echo and fields.logprobs is not None

    def tokenize() -> list[Prompt]:
      prompts = []
      for each in given:
        if isinstance(each, str):
          wanted = pb.TokenizeRequest(text=each, add_special_tokens=fields.add_special_tokens)
          token_ids = request_validation.prompt_token_ids(wanted, tokenizer)
          at = ()
          if places and tokenizer is not None:
            at = tokenizer.places(each, add_special_tokens=fields.add_special_tokens is not False)
          prompts.append(Prompt(token_ids, each, at))
          continue
        text, at = "", [0] * len(each) if places else ()
        if fields.echo and tokenizer is not None:
          request_validation.check_token_ids("prompt", each, backend.config.vocab_size)
          text = tokenizer.decode(each, skip_special_tokens=skip)
          if places:
            at = tokenizer.decoded_places(each, text, skip_special_tokens=skip)
        prompts.append(Prompt(each, text, at))
      return prompts

    if sum(map(len, given)) > _INLINE_CHARS:
      return await self._state.run_in_text_pool(tokenize)
    return tokenize()

  async def _answer(
    self,
    request: Request,
    backend: Backend,
    requested: RequestedGeneration[Any],
    prompts: Sequence[Prompt],
    choices: Sequence[Choice[Any]],
  ) -> Response:
    """Starts the generations and responds from them.

    Args:
      request: a request whose body has been read.
      backend: the backend that serves.
      requested: the checked request.
      prompts: its prompts, one generation each.
      choices: requested.n for each prompt, in order.
    """
    headers = judge_ignored(requested.ignored, strict=self._options.strict_requests)
    limit = backend.config.max_queued_requests
    if len(choices) > limit:
      raise InvalidRequest(
        f"has {len(prompts)} entries of n={requested.n} outputs, but at most {limit} requests may wait here: send "
        "several requests, or raise --max_queued_requests",
        field="prompt",
      )
    prefix, kind = _KINDS[type(requested.fields)]
    answer_id = f"{prefix}-{requested.request.request_id or secrets.token_hex(16)}"
    calls = []
    for place, prompt in enumerate(prompts):
      requested.request.request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{place}"
      token_ids = list(prompt.token_ids)
      calls.append(
        request_validation.make_generation_call(
          requested.request, backend.config, backend.tokenizer, token_ids, backend.defaults
        )
      )
    calls = await self._state.add_constraints(requested.request, calls)
    frame = {"id": answer_id, "object": kind, "created": int(time.time()), "model": backend.model}
    notes = request.state.notes
    reply = _Reply(requested, prompts, choices, frame, notes)
    running = _Running(backend.generations, request.state.tenant)
    with contextlib.ExitStack() as cleanup:
      cleanup.callback(running.close)
      for call in calls:
        await running.start_generation(call)
      notes.update(generation_id=answer_id, prompt_tokens=reply.num_prompt_tokens)
      if not requested.fields.stream:
        await unless_gone(request.receive, _wait_ended(running.live))
        generations = list(running.live)
        if _num_logprobs(generations) <= _INLINE_LOGPROBS:
          body = reply.whole(generations)
        else:
          body = await self._state.run_in_text_pool(lambda: reply.whole(generations))
        return Response(body, media_type="application/json", headers=headers)
      # Nothing awaits between here and the response's own call, which closes the generations.
      cleanup.pop_all()
    stall_s = self._options.stream_stall_timeout_s
    return EventStream(
      reply.events(running),
      stall_timeout_s=stall_s,
      stalled=lambda: running.fail_slow(stall_s),
      close=running.close,
      headers=headers,
    )


class _Reply:
  """A response in the making.

  Attributes:
    num_prompt_tokens: tokens of all prompts.
  """

  def __init__(
    self,
    requested: RequestedGeneration[Any],
    prompts: Sequence[Prompt],
    choices: Sequence[Choice[Any]],
    frame: dict[str, Any],
    notes: dict[str, Any],
  ):
    """Args:
    requested: the checked request.
    prompts, choices: as for `_answer`.
    frame: the fields of each chunk, and of a whole response.
    notes: the access log's fields; receives the tokens of finished outputs.
    """
    self._asked = requested
    self._prompts = prompts
    self._choices = choices
    self._frame = frame
    self._notes = notes
    self._is_chat = isinstance(requested.fields, ChatCompletionRequest)
    self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    self._num_tokens = 0
    self._num_cached_tokens = 0

  def whole(self, generations: Sequence[Generation]) -> bytes:
    """Returns the JSON of finished generations. Slow with many log probabilities."""
    n = self._asked.n
    written = []
    for place, generation in enumerate(generations):
      self._prompts[place].logprobs.extend(generation.outputs[0].delta.prompt_logprobs)
      for index, output in enumerate(generation.outputs):
        assert output.finished is not None, "the generation has ended"
        self._count(output.finished)
        choice = self._choices[place * n + index].whole(output.delta, output.finished)
        if self._asked.fields.return_token_ids and not self._is_chat:
          choice["prompt_token_ids"] = list(self._prompts[place].token_ids)
        # One choice at a time: the encoder holds the interpreter's lock until it has finished.
        written.append(msgspec.Raw(msgspec.json.encode(choice)))
    answer = {**self._frame, "choices": written, "usage": self._usage()}
    if self._asked.fields.return_token_ids and self._is_chat:
      answer["prompt_token_ids"] = list(self._prompts[0].token_ids)
    return msgspec.json.encode(answer)

  async def events(self, running: _Running) -> AsyncGenerator[bytes]:
    """Yields chunks: one event for each choice with something new, all events of a step in one item."""
    fields, options = self._asked.fields, self._asked.stream_options
    frame = self._frame | ({"object": "chat.completion.chunk"} if self._is_chat else {})
    if options.include_usage:
      frame["usage"] = None
    told_prompt: set[int] = set()
    async with contextlib.aclosing(running.messages()) as messages:
      async for place, message in messages:
        parts = []
        for index, delta, finished in _by_index(message):
          if delta is not None:
            self._prompts[place].logprobs.extend(delta.prompt_logprobs)
          at = place * self._asked.n + index
          choice = self._choices[at].chunk(delta, finished)
          if finished is not None:
            self._count(finished)
          if choice is None:
            continue
          chunk = {**frame, "choices": [choice]}
          if fields.return_token_ids and at not in told_prompt:
            told_prompt.add(at)
            (chunk if self._is_chat else choice)["prompt_token_ids"] = list(self._prompts[place].token_ids)
          if options.continuous_usage_stats:
            chunk["usage"] = usage(len(self._prompts[place].token_ids), self._choices[at].num_tokens, 0)
          parts.append(encode_sse_event(chunk))
        if parts:
          yield b"".join(parts)
    if options.include_usage:
      yield encode_sse_event({**frame, "choices": [], "usage": self._usage()})
    yield DONE

  def _count(self, finished: pb.Finished) -> None:
    if self._is_chat or not self._asked.fields.only_echo:
      self._num_tokens += finished.usage.completion_tokens
      self._notes["output_tokens"] = self._num_tokens
    if finished.index == 0:
      self._num_cached_tokens += finished.usage.cached_tokens

  def _usage(self) -> dict[str, Any]:
    return usage(self.num_prompt_tokens, self._num_tokens, self._num_cached_tokens)


def _by_index(message: pb.GenerateResponse) -> list[tuple[int, pb.Delta | None, pb.Finished | None]]:
  """Returns a message's delta and ending for each index."""
  deltas = {delta.index: delta for delta in message.deltas}
  endings = {finished.index: finished for finished in message.finished}
  return [(index, deltas.get(index), endings.get(index)) for index in sorted(deltas.keys() | endings.keys())]


def _num_logprobs(generations: Sequence[Generation]) -> int:
  deltas = [output.delta for generation in generations for output in generation.outputs]
  return sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)


async def _wait_ended(generations: Sequence[Generation]) -> None:
  """Returns when all have ended; raises the first error among them in the order of prompts."""
  for generation in generations:
    await generation.wait_ended()


def _tokens_left(config: EngineConfig, num_prompt_tokens: int) -> int:
  """Returns the number of tokens that a prompt leaves of the model's length."""
  return max(1, min(config.max_model_len, config.pool_tokens) - num_prompt_tokens)


def _given_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
  """Returns the prompts as a list of texts or of lists of token ids.

  Raises:
    InvalidRequest: there are none, several kinds, or too many.
  """
  if isinstance(prompt, str):
    return [prompt]
  kinds = set(map(type, prompt))
  if len(kinds) != 1:
    what = "a list of several kinds" if kinds else "an empty list"
    raise InvalidRequest(f"is {what}: send {PROMPT_REMEDY}", field="prompt")
  if int in kinds:
    return [prompt]
  if len(prompt) > MAX_PROMPTS:
    raise InvalidRequest(
      f"has {len(prompt)} entries, the limit is {MAX_PROMPTS}: send several requests", field="prompt"
    )
  return prompt
