"""Gives a generation the form of a response, whole or as typed events. Knows no socket.

event: response.output_text.delta
data: {"type": "response.output_text.delta", "sequence_number": 4, "delta": "Hi", ...}
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
import contextlib
import time
from typing import Any

import msgspec

from server.generation.generations import Generation
from server.http.error_responses import make_error_answer
from server.http.json_exchange import encode_sse_event
from server.http.model_output.output_parser import OutputParser
from server.http.openai.completion_replies import TokenNames
from server.http.openai.generation_responder import RunningGenerations
from server.http.responses.chat_translation import ToolName
from server.http.responses.response_fields import ResponseRequest
from server.http.responses.response_output import Event, ResponseOutput
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer

_ABORTED = "aborted_by_request"


def describe_request(
  response_id: str,
  model: str,
  values: Mapping[str, Any],
  fields: ResponseRequest,
  defaults: Mapping[str, Any],
  *,
  is_stored: bool,
) -> dict[str, Any]:
  """Returns what a response says of its request.

  Args:
    response_id: its id.
    model: the served name.
    values, fields: the request's body.
    defaults: the model's sampling defaults.
    is_stored: whether the response will be stored.
  """
  reasoning, text = fields.reasoning, values.get("text") or {}
  return {
    "id": response_id,
    "object": "response",
    "created_at": int(time.time()),
    "model": model,
    "background": False,
    "instructions": fields.instructions,
    "max_output_tokens": fields.max_output_tokens,
    "max_tool_calls": values.get("max_tool_calls"),
    "metadata": fields.metadata or {},
    "parallel_tool_calls": fields.parallel_tool_calls is not False,
    "previous_response_id": fields.previous_response_id,
    "prompt_cache_key": fields.prompt_cache_key,
    "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
    "safety_identifier": fields.safety_identifier,
    "service_tier": "default",
    "store": is_stored,
    "temperature": defaults.get("temperature", 1.0) if fields.temperature is None else fields.temperature,
    "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
    "tool_choice": values.get("tool_choice") or "auto",
    "tools": values.get("tools") or [],
    "top_logprobs": fields.top_logprobs or 0,
    "top_p": defaults.get("top_p", 1.0) if fields.top_p is None else fields.top_p,
    "truncation": "disabled",
    "user": fields.user,
  }


class ResponseReply:
  """A response in the making.

  Attributes:
    response: the response object, as far as it is known.
  """

  def __init__(
    self,
    described: dict[str, Any],
    num_input_tokens: int,
    tools: Mapping[str, ToolName],
    parser: OutputParser,
    tokenizer: Tokenizer,
    notes: dict[str, Any],
    keep: Callable[[dict[str, Any]], Awaitable[None]],
  ):
    """Args:
    described: what the response says of its request.
    num_input_tokens: the prompt's tokens.
    tools: the functions by the names that the model calls them.
    parser: parses the output.
    tokenizer: the model's tokenizer.
    notes: the access log's fields; receives the output's tokens and a stream's error.
    keep: stores the finished response; it is called before a stream's last event.
    """
    self._output = ResponseOutput(tools)
    self._num_input_tokens = num_input_tokens
    self._parser = parser
    self._tokenizer = tokenizer
    self._token_names = TokenNames(tokenizer, as_ids=False)
    self._notes = notes
    self._keep = keep
    self._num_events = 0
    unknown = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    self.response = {**described, "status": "in_progress", "output": self._output.items, **unknown}

  def whole(self, generations: Sequence[Generation]) -> bytes:
    """Returns the JSON of the finished generation. It may run in another thread."""
    output = generations[0].outputs[0]
    for _ in self._take(output.delta, output.finished):
      pass
    return msgspec.json.encode(self.response)

  async def events(self, running: RunningGenerations) -> AsyncGenerator[bytes]:
    """Yields the events of each step in one item. The first ones come before the first token, for clients that cancel.

    An error ends the stream with response.failed.
    """
    yield b"".join(
      self._encode({"type": f"response.{name}", "response": self.response}) for name in ("created", "in_progress")
    )
    try:
      async with contextlib.aclosing(running.messages()) as messages:
        async for _, message in messages:
          delta = message.deltas[0] if message.deltas else None
          finished = message.finished[0] if message.finished else None
          events = b"".join(map(self._encode, self._take(delta, finished)))
          if events:
            yield events
      await self._keep(self.response)
      name = "incomplete" if self.response["status"] == "incomplete" else "completed"
    except Exception as error:
      said = make_error_answer(error).body["error"]
      self._notes["stream_error"] = said["code"]
      events = b"".join(map(self._encode, self._output.close_item(is_cut=True)))
      if events:
        yield events
      self.response["error"] = {"code": said["code"], "message": said["message"]}
      self.response["status"] = "cancelled" if said["code"] == _ABORTED else "failed"
      await self._keep(self.response)
      name = "failed"
    yield self._encode({"type": f"response.{name}", "response": self.response})

  def _encode(self, event: Event) -> bytes:
    numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
    self._num_events += 1
    return encode_sse_event(numbered, event["type"])

  def _take(self, delta: pb.Delta | None, finished: pb.Finished | None) -> Iterator[Event]:
    """Adds a part of the output; yields its events."""
    delta = delta or pb.Delta()
    pieces = self._parser.push_text(delta.text, ended=finished is not None)
    logprobs = [self._token_names.describe_logprobs(entry) for entry in delta.logprobs]
    yield from self._output.push_pieces(pieces, logprobs)
    if finished is None:
      return
    is_cut = finished.reason == pb.FINISH_REASON_LENGTH
    yield from self._output.end_output(is_cut=is_cut)
    self._notes["output_tokens"] = finished.usage.completion_tokens
    self.response |= {
      "status": "incomplete" if is_cut else "completed",
      "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
      "completed_at": None if is_cut else int(time.time()),
      "usage": self._usage(finished.usage),
    }

  def _usage(self, usage: pb.Usage) -> dict[str, Any]:
    reasoning = self._output.reasoning_text
    num_reasoning_tokens = len(self._tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
    return {
      "input_tokens": self._num_input_tokens,
      "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
      "output_tokens": usage.completion_tokens,
      "output_tokens_details": {"reasoning_tokens": min(num_reasoning_tokens, usage.completion_tokens)},
      "total_tokens": self._num_input_tokens + usage.completion_tokens,
    }
