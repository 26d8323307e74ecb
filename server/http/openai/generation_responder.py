"""Starts the generations of a checked request and responds from them, whole or as a stream. Knows no fields.

A request may have several prompts, each a generation of its own. They start together or not at all, and end together
when the client disconnects. A `Reply` gives the response its form.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.errors import SlowConsumer
from server.generation import request_validation
from server.generation.generations import Generation, Generations
from server.generation.serving_state import Backend, ServingState
from server.http.http_options import HttpOptions
from server.http.json_exchange import EventStream, unless_gone
from server.http.openai.completion_replies import Prompt
from server.http.openai.generate_request import RequestedGeneration, judge_ignored, relax_schema
from server.proto import sluice_pb2 as pb

# Above this number of log probabilities, responses are encoded away from the loop.
_INLINE_LOGPROBS = 256


class RunningGenerations:
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

  async def wait_ended(self) -> None:
    """Returns when all have ended; raises the first error among them in the order of prompts."""
    for generation in self.live:
      await generation.wait_ended()

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


class Reply(Protocol):
  """A response in the making."""

  def whole(self, generations: Sequence[Generation]) -> bytes:
    """Returns the JSON of finished generations, one for each prompt. It may run in another thread."""
    ...

  def events(self, running: RunningGenerations) -> AsyncGenerator[bytes]:
    """Yields server-sent events, several in one item where they arise in one step."""
    ...


class GenerationResponder:
  """Responds to requests of every form."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options

  async def respond(
    self,
    request: Request,
    backend: Backend,
    requested: RequestedGeneration[Any],
    prompts: Sequence[Prompt],
    reply: Reply,
    answer_id: str,
  ) -> Response:
    """Starts the generations and responds from them.

    Args:
      request: a request whose body has been read.
      backend: the backend that serves.
      requested: the checked request.
      prompts: its prompts, one generation each, with requested.n outputs.
      reply: the response's form.
      answer_id: the response's id, by which the request can be aborted.

    Raises:
      InvalidRequest, UnsupportedField: a field is wrong.
      EngineError: the engine refused the request, or the generation failed.
      ClientGone: the client left.
    """
    headers = judge_ignored(requested.ignored, strict=self._options.strict_requests)
    limit = backend.config.max_queued_requests
    if len(prompts) * requested.n > limit:
      raise InvalidRequest(
        f"has {len(prompts)} entries of n={requested.n} outputs, but at most {limit} requests may wait here: send "
        "several requests, or raise --max_queued_requests",
        field="prompt",
      )
    calls = []
    for place, prompt in enumerate(prompts):
      requested.request.request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{place}"
      token_ids = list(prompt.token_ids)
      call = request_validation.make_generation_call(
        requested.request, backend.config, backend.tokenizer, token_ids, backend.defaults, requested.adapter
      )
      calls.append(dataclasses.replace(call, shown_token_ids=requested.shown_token_ids))
    ignored = await self._relax_schema(request, requested)
    if ignored:
      headers = judge_ignored(requested.ignored + ignored, strict=False)
    calls = await self._state.add_constraints(requested.request, calls, requested.reasoning)
    running = RunningGenerations(backend.generations, request.state.tenant)
    with contextlib.ExitStack() as cleanup:
      cleanup.callback(running.close)
      for call in calls:
        await running.start_generation(call)
      num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
      request.state.notes.update(
        generation_id=answer_id, prompt_tokens=num_prompt_tokens, adapter=requested.adapter or None
      )
      if not requested.fields.stream:
        await unless_gone(request.receive, running.wait_ended())
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

  async def _relax_schema(self, request: Request, requested: RequestedGeneration[Any]) -> list[str]:
    """Leaves keywords that are not enforced out of the request's JSON schema; returns their names."""
    constraint = requested.request.constraint
    if constraint.WhichOneof("kind") != "json_schema":
      return []
    constraint.json_schema, ignored = await self._state.run_in_text_pool(
      functools.partial(
        relax_schema,
        constraint.json_schema,
        request.state.field_names.get("constraint.json_schema", "constraint.json_schema"),
        closes=self._state.closes_objects,
        strict=requested.strict_schema or self._options.strict_requests,
      )
    )
    return ignored


def _num_logprobs(generations: Sequence[Generation]) -> int:
  deltas = [output.delta for generation in generations for output in generation.outputs]
  return sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)
