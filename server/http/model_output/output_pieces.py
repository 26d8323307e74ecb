"""The pieces of an output, in the form that every API reads. Knows no model's format."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
  """Text of the answer."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPiece:
  """Text of the model's reasoning, which comes before the answer."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
  """A part of a tool call.

  Attributes:
    index: the call's index in the output.
    call_id, name: the call's id and tool in its first piece; None later.
    arguments: more of the arguments' JSON text, which may be empty; the pieces of a call concatenate to the whole. Of a
      custom tool, more of the input's text.
    is_last: whether this is the call's last piece.
    is_custom: whether the call is of a custom tool.
  """

  index: int
  call_id: str | None
  name: str | None
  arguments: str
  is_last: bool
  is_custom: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
  """A part of a tool call, before the call has an index and an id.

  Attributes:
    name: the tool in the call's first part; None later.
    arguments: more of the arguments' JSON text.
    is_last: whether this is the call's last part.
  """

  name: str | None
  arguments: str
  is_last: bool


type OutputPiece = TextPiece | ReasoningPiece | CallPiece
