"""Builds the items of a response from the pieces of an output, and the events that announce them. Knows no socket.

An item is open from its first piece until a piece of another one comes. The events of an output, taken together, say
what its items say, however the output was split into pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.http.model_output.output_parser import CallPiece, OutputPiece, ReasoningPiece, TextPiece
from server.http.responses.chat_translation import ToolName, new_id

type Event = dict[str, Any]
# The event of more text, and of all text, of each type of part.
_TEXT_EVENTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}


class ResponseOutput:
  """The items of one response.

  Attributes:
    items: the items so far, in the form of the API.
  """

  def __init__(self, tools: Mapping[str, ToolName]):
    """Args: tools: the functions by the names that the model calls them."""
    self.items: list[dict[str, Any]] = []
    self._tools = tools
    self._is_open = False
    self._call_index: int | None = None
    # Of tokens whose text has not come.
    self._logprobs: list[dict[str, Any]] = []

  @property
  def reasoning_text(self) -> str:
    """The text of all reasoning items."""
    return "".join(part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"])

  def push_pieces(self, pieces: Sequence[OutputPiece], logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Adds pieces, and the log probabilities of their tokens; yields the events in order."""
    self._logprobs += logprobs
    for piece in pieces:
      match piece:
        case CallPiece():
          yield from self._push_call(piece)
        case ReasoningPiece(text):
          yield from self._push_text("reasoning", "reasoning_text", text)
        case TextPiece(text):
          yield from self._push_text("message", "output_text", text)

  def end_output(self, *, is_cut: bool) -> Iterator[Event]:
    """Ends the output, whose last item is incomplete if the output was cut; an output without items is a message."""
    if not self.items or (self._logprobs and self.items[-1]["type"] == "message" and self._is_open):
      yield from self._push_text("message", "output_text", "")
    yield from self.close_item(is_cut=is_cut)

  def close_item(self, *, is_cut: bool) -> Iterator[Event]:
    """Ends the open item, if there is one; it is incomplete if the output was cut."""
    if not self._is_open:
      return
    self._is_open = False
    item = self.items[-1]
    item["status"] = "incomplete" if is_cut else "completed"
    if item["type"] == "function_call":
      done = {"arguments": item["arguments"], "name": item["name"]}
      yield self._event("response.function_call_arguments.done", **done)
    elif item["type"] == "custom_tool_call":
      yield self._event("response.custom_tool_call_input.done", input=item["input"])
    else:
      part = item["content"][0]
      more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
      yield self._event(f"{_TEXT_EVENTS[part['type']]}.done", content_index=0, text=part["text"], **more)
      yield self._event("response.content_part.done", content_index=0, part=part)
    yield self._item_event("response.output_item.done")

  def _push_text(self, item_type: str, part_type: str, text: str) -> Iterator[Event]:
    if not (self._is_open and self.items[-1]["type"] == item_type):
      yield from self.close_item(is_cut=False)
      part: dict[str, Any] = {"type": part_type, "text": ""}
      if item_type == "message":
        part |= {"annotations": [], "logprobs": []}
        item = {"type": "message", "id": new_id("message"), "role": "assistant"}
      else:
        item = {"type": "reasoning", "id": new_id("reasoning"), "summary": []}
      item |= {"status": "in_progress", "content": []}
      yield from self._open(item)
      yield self._event("response.content_part.added", part=part, content_index=0)
      self.items[-1]["content"] = [part | ({"logprobs": []} if item_type == "message" else {})]
    part = self.items[-1]["content"][0]
    part["text"] += text
    more: dict[str, Any] = {}
    if item_type == "message":
      more["logprobs"], self._logprobs = self._logprobs, []
      part["logprobs"] += more["logprobs"]
    if text or more.get("logprobs"):
      yield self._event(f"{_TEXT_EVENTS[part_type]}.delta", content_index=0, delta=text, **more)

  def _push_call(self, piece: CallPiece) -> Iterator[Event]:
    if piece.index != self._call_index:
      yield from self.close_item(is_cut=False)
      self._call_index = piece.index
      # A model may also call what nobody offered; the client must see it.
      tool = self._tools.get(piece.name or "", ToolName(piece.name or ""))
      item_type = "custom_tool_call" if piece.is_custom else "function_call"
      item = {
        "type": item_type,
        "id": new_id(item_type),
        "call_id": piece.call_id,
        "name": tool.name,
        "input" if piece.is_custom else "arguments": "",
        "status": "in_progress",
      }
      yield from self._open(item | ({"namespace": tool.namespace} if tool.namespace else {}))
    content, name = ("input", "custom_tool_call_input") if piece.is_custom else ("arguments", "function_call_arguments")
    self.items[-1][content] += piece.arguments
    if piece.arguments:
      yield self._event(f"response.{name}.delta", delta=piece.arguments)
    if piece.is_last:
      yield from self.close_item(is_cut=False)

  def _open(self, item: dict[str, Any]) -> Iterator[Event]:
    self.items.append(item)
    self._is_open = True
    yield self._item_event("response.output_item.added")

  def _event(self, event_type: str, **more: Any) -> Event:
    """Returns an event about the last item."""
    return {"type": event_type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}

  def _item_event(self, event_type: str) -> Event:
    return {"type": event_type, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}
