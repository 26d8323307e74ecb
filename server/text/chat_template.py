"""Renders the chat template that comes with a model, in a sandbox with limits. May not tokenize.

A template is a program from the model's folder, never from a request, so Sluice trusts it about as much as the weights.
The sandbox keeps it from Python's internals, and the limits keep a mistake in it from taking the server down.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import json
import threading
import time
from typing import Any

import jinja2
from jinja2 import exceptions, ext, meta, nodes, parser, sandbox

from engine.errors import ConfigError, InvalidRequest

MAX_TEMPLATE_BYTES = 65_536
MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
_RENDER_TIMEOUT_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
  """One turn of a chat.

  Attributes:
    role, content: as templates know them.
    more: further fields of the turn, such as tool_calls and tool_call_id: plain JSON values.
  """

  role: str
  content: str
  more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _GenerationBlock(ext.Extension):
  """{% generation %} ... {% endgeneration %}: marks what the model wrote, for training; here its body is rendered."""

  tags = {"generation"}

  def parse(self, parser: parser.Parser) -> nodes.Node:
    """Parses the block's body in a scope of its own, as transformers' AssistantTracker does."""
    line = next(parser.stream).lineno
    return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
  """Adds a deadline to every lookup, call and operator, and a limit to repetition ('a' * 10**9 is legal jinja)."""

  intercepted_binops = frozenset(["*", "**", "+", "%"])

  def __init__(self, max_chars: int):
    # The settings with which Hugging Face templates are written.
    super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
    self._max_chars = max_chars
    self._thread = threading.local()
    self.filters["tojson"] = _to_json
    self.globals["raise_exception"] = _raise
    self.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)

  def start_clock(self) -> None:
    """Starts this thread's deadline for a rendering."""
    self._thread.deadline = time.monotonic() + _RENDER_TIMEOUT_S

  def check_clock(self) -> None:
    """Raises SecurityError after the deadline."""
    if time.monotonic() > getattr(self._thread, "deadline", float("inf")):
      raise exceptions.SecurityError(f"the template ran longer than {_RENDER_TIMEOUT_S:g} s")

  def call(self, *args: Any, **kwargs: Any) -> Any:
    self.check_clock()
    return super().call(*args, **kwargs)

  def getitem(self, *args: Any, **kwargs: Any) -> Any:
    self.check_clock()
    return super().getitem(*args, **kwargs)

  def getattr(self, *args: Any, **kwargs: Any) -> Any:
    self.check_clock()
    return super().getattr(*args, **kwargs)

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    self.check_clock()
    sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
    counts = [side for side in (left, right) if isinstance(side, int)]
    too_big = (
      operator == "*"
      and sizes
      and counts
      and sizes[0] * counts[0] > self._max_chars
      or operator == "+"
      and sum(sizes) > self._max_chars
      or operator == "**"
      and (not counts or max(map(abs, counts)) > 1024)
      or operator == "%"
      and isinstance(left, str)
    )
    if too_big:
      raise exceptions.SecurityError(f"operator {operator} in the template is past its limit")
    return super().call_binop(context, operator, left, right)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """The filter tojson with transformers' arguments; jinja2's own also escapes HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> None:
  """Refuses messages; templates call it as raise_exception."""
  raise jinja2.TemplateError(str(message))


class ChatTemplate:
  """A compiled chat template.

  Attributes:
    source: the template's text.
    variables: names that it reads, such as "messages", "tools" and the model's own.
  """

  def __init__(self, source: str, special_tokens: dict[str, str], max_chars: int):
    """Args: source: jinja2. special_tokens: names such as bos_token and their text. max_chars: longest rendering.

    Raises:
      ConfigError: the template is too large or not jinja2.
    """
    size = len(source.encode())
    if size > MAX_TEMPLATE_BYTES:
      raise ConfigError(
        f"the chat template has {size} bytes, the limit is {MAX_TEMPLATE_BYTES}; "
        "shorten it, or remove it to serve without chat"
      )
    self.source = source
    self._max_chars = max_chars
    self._special_tokens = special_tokens
    self._sandbox = _Sandbox(max_chars)
    try:
      self._template = self._sandbox.from_string(source)
      self.variables = frozenset(meta.find_undeclared_variables(self._sandbox.parse(source)))
    except Exception as error:  # of jinja2 or of Python's compiler, which compiles what that makes: about this text
      raise ConfigError(
        f"the chat template is not valid jinja2: {str(error):.200}; fix it, or remove it to serve without chat"
      ) from error

  def render(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """Returns the prompt's text, special tokens spelled out.

    Args:
      messages: the turns.
      add_generation_prompt: whether to open the assistant's turn.
      tools: that the model may call, as JSON values; None is none.
      variables: values for names that the template may read. Its own names are not among them.

    Raises:
      InvalidRequest: the template refuses the messages, a variable would replace its own, or a limit is passed.
    """
    if tools is not None and "tools" not in self.variables:
      raise InvalidRequest(
        "is not supported: the model's chat template does not know them; leave them out", field="tools"
      )
    own = {"messages", "add_generation_prompt", "tools", *self._special_tokens, *self._sandbox.globals}
    for name in variables or ():
      if name in own:
        known = ", ".join(sorted(self.variables - own)) or "none"
        raise InvalidRequest(
          f"is not a variable that a request may set: the template's are {known:.200}; leave it out",
          field=f"chat_template_kwargs.{name:.40}",
        )
    if not messages:
      raise InvalidRequest("=[] is empty: send at least one message", field="chat.messages")
    if len(messages) > MAX_MESSAGES:
      raise InvalidRequest(
        f"has {len(messages)} messages, the limit is {MAX_MESSAGES}: send fewer", field="chat.messages"
      )
    for index, message in enumerate(messages):
      if message.role not in ROLES:
        # Templates build control tokens from the role, so it must not be free text.
        raise InvalidRequest(
          f"={message.role!r:.40} is unknown: send one of {', '.join(ROLES)}", field=f"chat.messages[{index}].role"
        )
    pieces, size = [], 0
    self._sandbox.start_clock()
    try:
      for piece in self._template.generate(
        messages=[{**message.more, "role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        **self._special_tokens,
        **(variables or {}),
      ):
        self._sandbox.check_clock()
        size += len(piece)
        if size > self._max_chars:
          raise exceptions.SecurityError(f"the rendering is longer than {self._max_chars} characters")
        pieces.append(piece)
    except jinja2.TemplateError as error:
      raise InvalidRequest(f": the model's template refuses these messages: {str(error):.200}", field="chat") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
      raise InvalidRequest(
        ": the model's template fails on these messages; send plain alternating turns, or the prompt as text",
        field="chat",
      ) from error
    return "".join(pieces)
