"""Turns a generation's messages into OpenAI's choices, whole or in chunks. Knows no socket.

A `Choice` receives everything once and in order, so its chunks concatenate to the whole.
"""

from collections.abc import Sequence
import math
from typing import Any

from server.http.model_output.output_parser import CallPiece, OutputParser, ReasoningPiece, TextPiece
from server.http.openai.request_fields import ChatCompletionRequest, CompletionRequest, GenerationFields
from server.proto import sluice_pb2 as pb
from server.text.detokenizer import TokenPlaces
from server.text.tokenizer import Tokenizer

# The log probability of a probability of 0, as in vLLM: JSON has no infinity.
_ZERO_LOGPROB = -9999.0
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def _finite(logprob: float) -> float:
  return logprob if math.isfinite(logprob) else _ZERO_LOGPROB


class TokenNames:
  """Names of tokens in logprobs: their text, or "token_id:N" if requested or if there is no text."""

  def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool):
    self._tokenizer = None if as_ids else tokenizer

  def bytes_of(self, token_id: int) -> bytes:
    """Returns the bytes of a token."""
    return self.name(token_id).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

  def name(self, token_id: int) -> str:
    """Returns a token's text; replaces bytes that are not whole characters."""
    if self._tokenizer is None:
      return f"token_id:{token_id}"
    return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

  def describe_logprobs(self, entry: pb.TokenLogprobs) -> dict[str, Any]:
    """Returns a token's log probabilities in the form of chats."""
    top = [self._describe_token(top.token_id, top.logprob) for top in entry.top]
    return {**self._describe_token(entry.token_id, entry.logprob), "top_logprobs": top}

  def _describe_token(self, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": self.name(token_id), "logprob": _finite(logprob), "bytes": list(self.bytes_of(token_id))}


class Prompt:
  """One prompt of a request, which the response may echo, with its log probabilities once they are there.

  Attributes:
    token_ids: at least one.
    text: the echoed text.
    places: where tokens begin in the text, if requested.
    logprobs: log probabilities of all tokens except the first, if requested. Only index 0 brings them.
  """

  def __init__(self, token_ids: Sequence[int], text: str = "", places: Sequence[int] = ()):
    self.token_ids = token_ids
    self.text = text
    self.places = places
    self.logprobs: list[pb.TokenLogprobs] = []


class Choice[T: GenerationFields]:
  """One output of a response; subclasses define its form."""

  def __init__(self, index: int, fields: T, names: TokenNames):
    """Args: index: its index in the response. fields: the request's fields. names: names of tokens."""
    self.index = index
    self.num_tokens = 0
    self._fields = fields
    self._names = names

  def chunk(self, delta: pb.Delta | None, finished: pb.Finished | None) -> dict[str, Any] | None:
    """Returns the choice of a chunk, or None while there is nothing to send."""
    delta = delta or pb.Delta()
    self.num_tokens += len(delta.token_ids)
    body = self._body(delta, finished, whole=False)
    return None if body is None else self._with_ending(body, delta, finished)

  def whole(self, delta: pb.Delta, finished: pb.Finished) -> dict[str, Any]:
    """Returns the choice of a whole response."""
    body = self._body(delta, finished, whole=True)
    assert body is not None, "a whole output says at least how it ended"
    return self._with_ending(body, delta, finished)

  def _body(self, delta: pb.Delta, finished: pb.Finished | None, *, whole: bool) -> dict[str, Any] | None:
    raise NotImplementedError

  def _with_ending(self, body: dict[str, Any], delta: pb.Delta, finished: pb.Finished | None) -> dict[str, Any]:
    choice = {"index": self.index, **body, "finish_reason": None, "stop_reason": None}
    if self._fields.return_token_ids:
      choice["token_ids"] = list(delta.token_ids)
    if finished is not None:
      choice["finish_reason"] = self._reason(finished)
      matched = finished.WhichOneof("matched")
      choice["stop_reason"] = getattr(finished, matched) if matched else None
    return choice

  def _wants_ids_of(self, delta: pb.Delta) -> bool:
    return bool(self._fields.return_token_ids and delta.token_ids)

  def _reason(self, finished: pb.Finished) -> str:
    return _REASONS[finished.reason]


class ChatChoice(Choice[ChatCompletionRequest]):
  """A choice of /v1/chat/completions. The role comes with the first text, so no chunk is empty."""

  def __init__(self, index: int, fields: ChatCompletionRequest, names: TokenNames, parser: OutputParser):
    """Args: index, fields, names: see Choice. parser: finds the calls in this output."""
    super().__init__(index, fields, names)
    self._began = False
    self._parser = parser

  def _body(self, delta: pb.Delta, finished: pb.Finished | None, *, whole: bool) -> dict[str, Any] | None:
    logprobs = None
    if self._fields.logprobs:
      logprobs = {"content": [self._names.describe_logprobs(entry) for entry in delta.logprobs]}
    pieces = self._parser.push_text(delta.text, ended=finished is not None)
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
    if whole:
      content = text if text or not (calls or reasoning) else None
      message = {"role": "assistant", "content": content, "refusal": None, **_reasoning_fields(reasoning)}
      return {"message": message | ({"tool_calls": _whole_calls(calls)} if calls else {}), "logprobs": logprobs}
    if not (text or reasoning or calls or delta.logprobs or finished is not None or self._wants_ids_of(delta)):
      return None
    message: dict[str, Any] = {}
    if not self._began:
      self._began = True
      message["role"] = "assistant"
      message["content"] = ""
    if text:
      message["content"] = text
    message |= _reasoning_fields(reasoning)
    if calls:
      message["tool_calls"] = [_call_chunk(piece) for piece in calls]
    return {"delta": message, "logprobs": logprobs}

  def _reason(self, finished: pb.Finished) -> str:
    reason = super()._reason(finished)
    return "tool_calls" if self._parser.num_calls and reason == "stop" else reason


def _reasoning_fields(text: str) -> dict[str, str]:
  """Returns reasoning under the name that most clients read, and under vLLM's newer one."""
  return {"reasoning_content": text, "reasoning": text} if text else {}


# The type of a call and the name of its text, by whether it is of a custom tool.
_CALL_NAMES = (("function", "arguments"), ("custom", "input"))


def _call_chunk(piece: CallPiece) -> dict[str, Any]:
  """Returns a part of a call, as a chunk has it."""
  kind, content = _CALL_NAMES[piece.is_custom]
  if piece.name is None:
    return {"index": piece.index, kind: {content: piece.arguments}}
  return {
    "index": piece.index,
    "id": piece.call_id,
    "type": kind,
    kind: {"name": piece.name, content: piece.arguments},
  }


def _whole_calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
  """Returns the calls of a whole output."""
  calls: list[dict[str, Any]] = []
  for piece in pieces:
    kind, content = _CALL_NAMES[piece.is_custom]
    if piece.name is None:
      calls[-1][kind][content] += piece.arguments
    else:
      calls.append({"id": piece.call_id, "type": kind, kind: {"name": piece.name, content: piece.arguments}})
  return calls


class TextChoice(Choice[CompletionRequest]):
  """A choice of /v1/completions, with the prompt before it if requested."""

  def __init__(
    self, index: int, fields: CompletionRequest, names: TokenNames, prompt: Prompt, places: TokenPlaces | None
  ):
    """Args:
    index, fields, names: see Choice.
    prompt: the echoed prompt, if requested.
    places: where the output's tokens begin, without the echo; None without a tokenizer.
    """
    super().__init__(index, fields, names)
    self._echo = prompt if fields.echo else None
    self._places = places
    self._start = len(prompt.text) if fields.echo else 0
    self._began = False

  def _body(self, delta: pb.Delta, finished: pb.Finished | None, *, whole: bool) -> dict[str, Any] | None:
    if self._fields.only_echo:
      delta.Clear()
    text, tokens, places = "", [], []
    if self._echo is not None and not self._began:
      if self._fields.logprobs is not None and len(self._echo.logprobs) < len(self._echo.token_ids) - 1:
        assert not delta.logprobs and finished is None, "the prompt's logprobs come before the first token"
        return None
      text = self._echo.text
      tokens = [(self._echo.token_ids[0], None), *((entry.token_id, entry) for entry in self._echo.logprobs)]
      places = list(self._echo.places)
    if not (whole or text or delta.text or delta.logprobs or finished is not None or self._wants_ids_of(delta)):
      return None
    self._began = True
    logprobs = None
    if self._fields.logprobs is not None:
      places += (self._start + self._place(entry.token_id) for entry in delta.logprobs)
      logprobs = self._logprobs([*tokens, *((entry.token_id, entry) for entry in delta.logprobs)], places)
    return {"text": text + delta.text, "logprobs": logprobs}

  def _place(self, token_id: int) -> int:
    return 0 if self._places is None else self._places.push(token_id)

  def _logprobs(self, tokens: Sequence[tuple[int, pb.TokenLogprobs | None]], places: list[int]) -> dict[str, Any]:
    """Returns four lists of equal length. The prompt's first token has no probability."""
    return {
      "text_offset": places,
      "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in tokens],
      "tokens": [self._names.name(token_id) for token_id, _ in tokens],
      "top_logprobs": [None if entry is None else self._top(entry) for _, entry in tokens],
    }

  def _top(self, entry: pb.TokenLogprobs) -> dict[str, float]:
    """Returns log probabilities by name, most likely first, always with the sampled token.

    Where several tokens share a name, the most likely one counts.
    """
    top: dict[str, float] = {}
    for token_id, logprob in [*((top.token_id, top.logprob) for top in entry.top), (entry.token_id, entry.logprob)]:
      top.setdefault(self._names.name(token_id), _finite(logprob))
    return top


def usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
  """Returns OpenAI's usage object. Every prompt counts once, however many outputs it has."""
  return {
    "prompt_tokens": num_prompt_tokens,
    "completion_tokens": num_tokens,
    "total_tokens": num_prompt_tokens + num_tokens,
    "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
  }
