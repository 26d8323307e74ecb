"""Gives a generation the form of a message, whole or as a stream of events. Knows no socket.

The whole message is put together from the stream's own events, so both always agree.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
import contextlib
import json
from typing import Any

import msgspec

from server.generation.generations import Generation
from server.http.json_exchange import encode_sse_event
from server.http.model_output.output_parser import CallPiece, OutputParser, OutputPiece, ReasoningPiece, TextPiece
from server.http.openai.generation_responder import RunningGenerations
from server.proto import sluice_pb2 as pb

# Clients send thinking back only if it is signed; nothing checks the signature here.
_SIGNATURE = "unsigned"


class ContentEvents:
  """Turns the pieces of one output into events of content blocks."""

  def __init__(self, *, shows_thinking: bool):
    """Args: shows_thinking: whether blocks of thinking have their text."""
    self._shows_thinking = shows_thinking
    self._index = -1
    # The open block: its kind, and a call's index. None before the first block.
    self._open: tuple[str, int] | None = None

  def add_piece(self, piece: OutputPiece) -> list[dict[str, Any]]:
    """Returns the events of a piece; a piece of another kind than the one before opens a block."""
    match piece:
      case TextPiece():
        events = self._open_block(("text", 0), {"type": "text", "text": ""})
        return [*events, self._delta("text_delta", "text", piece.text)]
      case ReasoningPiece():
        block = {"type": "thinking", "thinking": "", "signature": ""}
        events = self._open_block(("thinking", 0), block)
        return [*events, self._delta("thinking_delta", "thinking", piece.text)] if self._shows_thinking else events
      case CallPiece():
        block = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
        events = self._open_block(("tool_use", piece.index), block)
        return [*events, self._delta("input_json_delta", "partial_json", piece.arguments)]

  def close_block(self) -> list[dict[str, Any]]:
    """Returns the events that end the open block."""
    if self._open is None:
      return []
    kind, self._open = self._open[0], None
    events = [{"type": "content_block_stop", "index": self._index}]
    return [self._delta("signature_delta", "signature", _SIGNATURE), *events] if kind == "thinking" else events

  def _open_block(self, which: tuple[str, int], block: dict[str, Any]) -> list[dict[str, Any]]:
    if which == self._open:
      return []
    events = self.close_block()
    self._open = which
    self._index += 1
    return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

  def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}


def fold_content(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the content blocks that a client puts together from events. Arguments cut off by max_tokens become {}."""
  blocks: list[dict[str, Any]] = []
  arguments = ""
  for event in events:
    if event["type"] == "content_block_start":
      blocks.append(dict(event["content_block"]))
      arguments = ""
    elif event["type"] == "content_block_delta":
      kind, (name, text) = event["delta"]["type"], list(event["delta"].items())[1]
      if kind == "input_json_delta":
        arguments += text
      else:
        blocks[-1][name] += text
    elif blocks[-1]["type"] == "tool_use":
      with contextlib.suppress(ValueError):
        blocks[-1]["input"] = json.loads(arguments)
  return blocks


class MessageReply:
  """A message in the making; see generation_responder.Reply."""

  def __init__(
    self,
    answer_id: str,
    model: str,
    num_prompt_tokens: int,
    parser: OutputParser,
    notes: dict[str, Any],
    *,
    shows_thinking: bool,
  ):
    """Args:
    answer_id: the message's id.
    model: the served model.
    num_prompt_tokens: tokens of the prompt.
    parser: the output's parser.
    notes: the access log's fields; receives the output's tokens.
    shows_thinking: whether blocks of thinking have their text.
    """
    self._frame = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
    self._num_prompt_tokens = num_prompt_tokens
    self._parser = parser
    self._notes = notes
    self._content = ContentEvents(shows_thinking=shows_thinking)

  def whole(self, generations: Sequence[Generation]) -> bytes:
    """Returns the JSON of the finished generation."""
    [output] = generations[0].outputs
    assert output.finished is not None, "the generation has ended"
    content = fold_content(self._add_text(output.delta.text, ended=True))
    ending, usage = self._end(output.finished)
    return msgspec.json.encode({**self._frame, "content": content, **ending, "usage": usage})

  async def events(self, running: RunningGenerations) -> AsyncGenerator[bytes]:
    """Yields events, all of a step in one item."""
    began = False
    async with contextlib.aclosing(running.messages()) as messages:
      async for _, message in messages:
        events: list[dict[str, Any]] = []
        if not began:
          began = True
          events.append({"type": "message_start", "message": self._beginning()})
        text = "".join(delta.text for delta in message.deltas)
        events += self._add_text(text, ended=bool(message.finished))
        for finished in message.finished:
          ending, usage = self._end(finished)
          events += [{"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]
        if events:
          yield b"".join(encode_sse_event(event, event["type"]) for event in events)

  def _add_text(self, text: str, *, ended: bool) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for piece in self._parser.push_text(text, ended=ended):
      events += self._content.add_piece(piece)
    return events + self._content.close_block() if ended else events

  def _beginning(self) -> dict[str, Any]:
    ending = {"stop_reason": None, "stop_sequence": None}
    return {**self._frame, "content": [], **ending, "usage": self._usage(0, 0)}

  def _end(self, finished: pb.Finished) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the reason why the message ends, and its usage."""
    num_tokens, matched = finished.usage.completion_tokens, None
    self._notes["output_tokens"] = num_tokens
    if finished.reason == pb.FINISH_REASON_LENGTH:
      reason = "max_tokens"
    elif finished.WhichOneof("matched") == "stop_string":
      reason, matched = "stop_sequence", finished.stop_string
    else:
      reason = "tool_use" if self._parser.num_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": matched}, self._usage(num_tokens, finished.usage.cached_tokens)

  def _usage(self, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Returns Anthropic's usage object, in which input_tokens leaves out tokens from the prefix cache."""
    return {
      "input_tokens": self._num_prompt_tokens - num_cached_tokens,
      "cache_creation_input_tokens": 0,
      "cache_read_input_tokens": num_cached_tokens,
      "output_tokens": num_tokens,
    }
