"""Serves /v1/completions and /v1/chat/completions: reads their bodies and gives the responses their form.

`server.generation.request_validation` and the engine check requests, as for gRPC.
"""

from collections.abc import AsyncGenerator, Sequence
import contextlib
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.generation import request_validation
from server.generation.generations import Generation
from server.generation.serving_state import Backend, ServingState
from server.http.error_responses import UnsupportedField
from server.http.http_options import HttpOptions
from server.http.json_exchange import (
  DONE,
  encode_sse_event,
  read_json_object,
)
from server.http.openai.chat_pipeline import ChatPipeline
from server.http.openai.completion_replies import ChatChoice, Choice, Prompt, TextChoice, TokenNames, usage
from server.http.openai.generate_request import RequestedGeneration, list_prompts, read_generation
from server.http.openai.generation_responder import GenerationResponder, RunningGenerations
from server.http.openai.request_fields import ChatCompletionRequest, CompletionRequest
from server.proto import sluice_pb2 as pb

MAX_PROMPTS = 256
# Prefix of the response's id, and the response's "object".
_KINDS = {
  CompletionRequest: ("cmpl", "text_completion"),
  ChatCompletionRequest: ("chatcmpl", "chat.completion"),
}
# OpenAI's default for completions; a model's own default can only lower it, as in vLLM. A chat's default is the
# model's, or all that is left of the model's length.
_DEFAULT_COMPLETION_TOKENS = 16
# Above this number of characters, prompts are tokenized away from the loop.
_INLINE_CHARS = 2048


class CompletionEndpoints:
  """Both endpoints, which differ in their fields and in the form of choices."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options
    self._pipeline = ChatPipeline(state, options)
    self._responder = GenerationResponder(state, options)

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
      requested.adapter = backend.find_generator(fields.model)
      prompts = await self._prompts(backend, fields)
      if fields.max_tokens is None:
        num_left = request_validation.count_tokens_left(backend.config, max(len(each.token_ids) for each in prompts))
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
      return await self._respond(request, backend, requested, prompts, choices)

  async def chat(self, request: Request) -> Response:
    """POST /v1/chat/completions."""
    with self._state.admit() as backend:
      values = await read_json_object(request, self._state, self._options)
      chat = await self._pipeline.prepare_chat(request, backend, values)
      requested, fields = chat.requested, chat.requested.fields
      names = TokenNames(chat.tokenizer, as_ids=bool(fields.return_tokens_as_token_ids))
      choices = [ChatChoice(index, fields, names, chat.make_parser()) for index in range(requested.n)]
      return await self._respond(request, backend, requested, [chat.prompt], choices)

  async def _prompts(self, backend: Backend, fields: CompletionRequest) -> list[Prompt]:
    """Returns the prompts as texts and ids, with the tokens' places in the texts if the response needs them."""
    given = list_prompts(fields.prompt, "prompt")
    if len(given) > MAX_PROMPTS:
      raise InvalidRequest(
        f"has {len(given)} entries, the limit is {MAX_PROMPTS}: send several requests", field="prompt"
      )
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

  async def _respond(
    self,
    request: Request,
    backend: Backend,
    requested: RequestedGeneration[Any],
    prompts: Sequence[Prompt],
    choices: Sequence[Choice[Any]],
  ) -> Response:
    prefix, kind = _KINDS[type(requested.fields)]
    answer_id = f"{prefix}-{requested.request.request_id or secrets.token_hex(16)}"
    model = requested.adapter or backend.model
    frame = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
    reply = _CompletionReply(requested, prompts, choices, frame, request.state.notes)
    return await self._responder.respond(request, backend, requested, prompts, reply, answer_id)


class _CompletionReply:
  """A response of either endpoint in the making."""

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
    prompts: the prompts.
    choices: requested.n for each prompt, in order.
    frame: the fields of each chunk, and of a whole response.
    notes: the access log's fields; receives the tokens of finished outputs.
    """
    self._requested = requested
    self._prompts = prompts
    self._choices = choices
    self._frame = frame
    self._notes = notes
    self._is_chat = isinstance(requested.fields, ChatCompletionRequest)
    self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    self._num_tokens = 0
    self._num_cached_tokens = 0

  def whole(self, generations: Sequence[Generation]) -> bytes:
    """Returns the JSON of finished generations. Slow with many log probabilities."""
    n = self._requested.n
    written = []
    for place, generation in enumerate(generations):
      self._prompts[place].logprobs.extend(generation.outputs[0].delta.prompt_logprobs)
      for index, output in enumerate(generation.outputs):
        assert output.finished is not None, "the generation has ended"
        self._count(output.finished)
        choice = self._choices[place * n + index].whole(output.delta, output.finished)
        if self._requested.fields.return_token_ids and not self._is_chat:
          choice["prompt_token_ids"] = list(self._prompts[place].token_ids)
        # One choice at a time: the encoder holds the interpreter's lock until it has finished.
        written.append(msgspec.Raw(msgspec.json.encode(choice)))
    answer = {**self._frame, "choices": written, "usage": self._usage()}
    if self._requested.fields.return_token_ids and self._is_chat:
      answer["prompt_token_ids"] = list(self._prompts[0].token_ids)
    return msgspec.json.encode(answer)

  async def events(self, running: RunningGenerations) -> AsyncGenerator[bytes]:
    """Yields chunks: one event for each choice with something new, all events of a step in one item."""
    fields, options = self._requested.fields, self._requested.stream_options
    frame = self._frame | ({"object": "chat.completion.chunk"} if self._is_chat else {})
    if options.include_usage:
      frame["usage"] = None
    prompts_sent: set[int] = set()
    async with contextlib.aclosing(running.messages()) as messages:
      async for place, message in messages:
        parts = []
        for index, delta, finished in _by_index(message):
          if delta is not None:
            self._prompts[place].logprobs.extend(delta.prompt_logprobs)
          at = place * self._requested.n + index
          choice = self._choices[at].chunk(delta, finished)
          if finished is not None:
            self._count(finished)
          if choice is None:
            continue
          chunk = {**frame, "choices": [choice]}
          if fields.return_token_ids and at not in prompts_sent:
            prompts_sent.add(at)
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
    if self._is_chat or not self._requested.fields.only_echo:
      self._num_tokens += finished.usage.completion_tokens
      self._notes["output_tokens"] = self._num_tokens
    if finished.index == 0:
      self._num_cached_tokens += finished.usage.cached_tokens

  def _usage(self) -> dict[str, Any]:
    return usage(self._num_prompt_tokens, self._num_tokens, self._num_cached_tokens)


def _by_index(message: pb.GenerateResponse) -> list[tuple[int, pb.Delta | None, pb.Finished | None]]:
  """Returns a message's delta and ending for each index."""
  deltas = {delta.index: delta for delta in message.deltas}
  endings = {finished.index: finished for finished in message.finished}
  return [(index, deltas.get(index), endings.get(index)) for index in sorted(deltas.keys() | endings.keys())]
