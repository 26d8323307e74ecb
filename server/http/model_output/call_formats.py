"""Declares how families of models write tool calls. Holds shapes and does nothing.

A format consists of heads, each with the kind of arguments that follows it, and of what may follow a call.
"""

from collections.abc import Sequence
import dataclasses
import re
import secrets

from server.http.model_output.text_shapes import KEY, NAME, PYTHON_NAME, SPACE, Shape
from server.http.model_output.value_translator import FUNCTION_GEMMA, GEMMA4, JSON, Notation


@dataclasses.dataclass(frozen=True, slots=True)
class CallObject:
  """A JSON object with the call's name and arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class BracedArguments:
  """The arguments as an object."""

  notation: Notation = JSON


@dataclasses.dataclass(frozen=True, slots=True)
class KeywordArguments:
  """The arguments of a Python call, up to its closing parenthesis."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoArguments:
  """A call that ends with its head."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedArguments:
  """Arguments as text between tags.

  Attributes:
    openers: shapes of an argument's beginning, with the argument's name as `key` if the tool's schema says its type,
      or as `string_key` or `json_key` if the opener says it.
    closer: text after an argument.
    endings: shapes of the call's end.
    trims_lines: whether a line break after the opener, and one before the closer, belong to the tags.
  """

  openers: tuple[Shape, ...]
  closer: str
  endings: tuple[Shape, ...]
  trims_lines: bool = False


type Arguments = CallObject | BracedArguments | KeywordArguments | NoArguments | TaggedArguments


@dataclasses.dataclass(frozen=True, slots=True)
class CallHead:
  """The beginning of a call.

  Attributes:
    shape: the text up to the arguments, with the tool's name as `name`, except before a CallObject.
    arguments: what follows.
    num_unread: characters at the end of the shape that belong to the arguments.
  """

  shape: Shape
  arguments: Arguments
  num_unread: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CallFormat:
  """How a family of models writes calls.

  Attributes:
    markers: text with which `heads` begin.
    heads: beginnings of a call in text.
    bare_heads: beginnings of a call at the beginning of the output.
    next_heads: beginnings of a further call directly after a call.
    closers: what may follow a call, each once, in this order.
    special: names of special tokens in the format, besides the markers.
    arguments: the key of a call's arguments, for forced calls.
    short_ids: whether the model's template requires ids of nine letters and digits.
    has_channels: whether the output consists of Harmony's channels.
  """

  markers: tuple[str, ...] = ()
  heads: tuple[CallHead, ...] = ()
  bare_heads: tuple[CallHead, ...] = ()
  next_heads: tuple[CallHead, ...] = ()
  closers: tuple[Shape, ...] = ()
  special: tuple[str, ...] = ()
  arguments: str = "arguments"
  short_ids: bool = False
  has_channels: bool = False

  def new_id(self) -> str:
    """Returns a new id for a call."""
    return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


def _objects(*begins: str, opener: str = "") -> tuple[CallHead, ...]:
  """Returns heads of call objects, each after a marker, and after an opener if there is one."""
  parts = (SPACE, opener) if opener else ()
  return tuple(CallHead(Shape(begin, *parts, SPACE, "{"), CallObject(), 1) for begin in begins)


def _keywords(*begin: str | re.Pattern[str]) -> tuple[CallHead, ...]:
  """Returns heads of Python calls: one without arguments, and one before the first keyword."""
  key = re.compile(PYTHON_NAME.pattern.replace("name", "first"))
  return (
    CallHead(Shape(*begin, SPACE, PYTHON_NAME, "(", SPACE, ")"), NoArguments()),
    CallHead(Shape(*begin, SPACE, PYTHON_NAME, "(", SPACE, key, SPACE, "="), KeywordArguments()),
  )


def _deepseek_heads(*begin: str | re.Pattern[str]) -> tuple[CallHead, ...]:
  sep = "<｜tool▁sep｜>"
  return (
    CallHead(Shape(*begin, "function", sep, NAME, "\n```json\n", SPACE, "{"), BracedArguments(), 1),
    CallHead(Shape(*begin, NAME, sep, SPACE, "{"), BracedArguments(), 1),
  )


def _closers(*literals: str) -> tuple[Shape, ...]:
  return tuple(Shape(SPACE, literal) for literal in literals)


_NEXT_IN_LIST = (CallHead(Shape(SPACE, ",", SPACE, "{"), CallObject(), 1),)
_QWEN_TAGS = TaggedArguments(
  (Shape(SPACE, "<parameter=", KEY, ">"),),
  "</parameter>",
  (Shape(SPACE, "</function>"), Shape(SPACE, "</tool_call>")),
  trims_lines=True,
)
_GLM_TAGS = TaggedArguments(
  (Shape(SPACE, "<arg_key>", KEY, "</arg_key>", SPACE, "<arg_value>"),), "</arg_value>", _closers("</tool_call>")
)
_DSML_TAGS = TaggedArguments(
  (
    Shape(SPACE, '<｜DSML｜parameter name="', re.compile(KEY.pattern.replace("key", "string_key")), '" string="true">'),
    Shape(SPACE, '<｜DSML｜parameter name="', re.compile(KEY.pattern.replace("key", "json_key")), '" string="false">'),
  ),
  "</｜DSML｜parameter>",
  _closers("</｜DSML｜invoke>"),
)
_MINIMAX_TAGS = TaggedArguments(
  (Shape(SPACE, '<parameter name="', KEY, '">'),), "</parameter>", _closers("</invoke>"), trims_lines=True
)
_DSML_MARKERS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")


def _dsml_head(*begin: str | re.Pattern[str]) -> CallHead:
  return CallHead(Shape(*begin, SPACE, '<｜DSML｜invoke name="', NAME, '">'), _DSML_TAGS)


def _kimi_heads(*begin: str | re.Pattern[str]) -> tuple[CallHead, ...]:
  parts = (":", re.compile("[0-9]{1,6}"), SPACE, "<|tool_call_argument_begin|>", SPACE, "{")
  return (
    CallHead(Shape(*begin, "<|tool_call_begin|>", SPACE, "functions.", NAME, *parts), BracedArguments(), 1),
    CallHead(Shape(*begin, "<|tool_call_begin|>", SPACE, NAME, *parts), BracedArguments(), 1),
  )


FORMATS = {
  # {"name": ..., "arguments": {...}} between tags
  "hermes": CallFormat(("<tool_call>",), _objects("<tool_call>"), closers=_closers("</tool_call>")),
  # {"name": ..., "parameters": {...}}; several have semicolons between them
  "llama3": CallFormat(
    ("<|python_tag|>",),
    _objects("<|python_tag|>"),
    bare_heads=_objects(""),
    next_heads=(CallHead(Shape(SPACE, ";", SPACE, "{"), CallObject(), 1), *_objects("")),
    arguments="parameters",
  ),
  # [name(key=value), ...], or an object as in llama3
  "llama4": CallFormat(
    ("<|python_start|>",),
    (*_keywords("<|python_start|>", SPACE, "["), *_objects("<|python_start|>")),
    bare_heads=(*_keywords("["), *_objects("")),
    next_heads=_keywords(SPACE, ","),
    closers=_closers("]", "<|python_end|>"),
    special=("<|python_end|>",),
    arguments="parameters",
  ),
  # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}
  "mistral": CallFormat(
    ("[TOOL_CALLS]",),
    (
      *_objects("[TOOL_CALLS]", opener="["),
      CallHead(Shape("[TOOL_CALLS]", NAME, "{"), BracedArguments(), 1),
      CallHead(Shape("[TOOL_CALLS]", NAME, "[ARGS]", SPACE, "{"), BracedArguments(), 1),
      CallHead(
        Shape("[TOOL_CALLS]", NAME, "[CALL_ID]", re.compile(r"[A-Za-z0-9]{1,64}"), "[ARGS]", SPACE, "{"),
        BracedArguments(),
        1,
      ),
    ),
    next_heads=_NEXT_IN_LIST,
    closers=_closers("]"),
    special=("[ARGS]", "[CALL_ID]"),
    short_ids=True,
  ),
  # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
  "qwen3_coder": CallFormat(
    ("<tool_call>", "<function="),
    (
      CallHead(Shape("<tool_call>", SPACE, "<function=", NAME, ">"), _QWEN_TAGS),
      CallHead(Shape("<function=", NAME, ">"), _QWEN_TAGS),
      *_objects("<tool_call>"),
    ),
    next_heads=(CallHead(Shape(SPACE, "<function=", NAME, ">"), _QWEN_TAGS),),
    closers=_closers("</tool_call>"),
  ),
  # <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
  "glm45": CallFormat(
    ("<tool_call>",),
    (
      CallHead(Shape("<tool_call>", SPACE, NAME, SPACE, "<arg_key>"), _GLM_TAGS, len("<arg_key>")),
      CallHead(Shape("<tool_call>", SPACE, NAME, SPACE, "</tool_call>"), NoArguments()),
    ),
  ),
  # One after the other: ...function<｜tool▁sep｜>name\n```json\n{...}\n``` or ...name<｜tool▁sep｜>{...}
  "deepseek_v3": CallFormat(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    (
      *_deepseek_heads("<｜tool▁calls▁begin｜>", SPACE, "<｜tool▁call▁begin｜>"),
      *_deepseek_heads("<｜tool▁call▁begin｜>"),
    ),
    closers=_closers("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    special=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
  ),
  # <｜DSML｜invoke name="..."><｜DSML｜parameter name="..." string="true">value</｜DSML｜parameter></｜DSML｜invoke>
  "deepseek_v32": CallFormat(
    _DSML_MARKERS,
    tuple(map(_dsml_head, _DSML_MARKERS)),
    next_heads=(_dsml_head(),),
    closers=_closers("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    special=("｜DSML｜",),
  ),
  # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, in a section
  "kimi_k2": CallFormat(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    (*_kimi_heads("<|tool_calls_section_begin|>", SPACE), *_kimi_heads()),
    closers=_closers("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    special=("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
  ),
  # <invoke name="..."><parameter name="...">value</parameter></invoke>, in a section
  "minimax_m2": CallFormat(
    ("<minimax:tool_call>",),
    (CallHead(Shape("<minimax:tool_call>", SPACE, '<invoke name="', NAME, '">'), _MINIMAX_TAGS),),
    next_heads=(CallHead(Shape(SPACE, '<invoke name="', NAME, '">'), _MINIMAX_TAGS),),
    closers=_closers("</minimax:tool_call>"),
  ),
  "harmony": CallFormat(has_channels=True),
  # ```tool_code and Python calls, or a list of Python calls
  "gemma": CallFormat(
    ("```tool_code",),
    (*_keywords("```tool_code"), *_keywords("```tool_code", SPACE, "[")),
    bare_heads=_keywords("["),
    next_heads=(*_keywords(SPACE, ","), *_keywords("\n")),
    closers=_closers("]", "```"),
  ),
  # <start_function_call>call:name{key:<escape>value<escape>}<end_function_call>
  "functiongemma": CallFormat(
    ("<start_function_call>",),
    (CallHead(Shape("<start_function_call>", SPACE, "call:", NAME, "{"), BracedArguments(FUNCTION_GEMMA), 1),),
    closers=_closers("<end_function_call>"),
    special=("<end_function_call>", "<escape>"),
  ),
  # <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>
  "gemma4": CallFormat(
    ("<|tool_call>",),
    (CallHead(Shape("<|tool_call>", SPACE, "call:", NAME, "{"), BracedArguments(GEMMA4), 1),),
    closers=_closers("<tool_call|>"),
    special=("<tool_call|>", '<|"|>'),
  ),
  # <|tool_call|>[{"name": ..., "arguments": {...}}, ...]; Granite 4 writes as hermes
  "granite": CallFormat(
    ("<|tool_call|>", "<tool_call>"),
    (*_objects("<|tool_call|>", "<tool_call>", opener="["), *_objects("<tool_call>")),
    next_heads=_NEXT_IN_LIST,
    closers=_closers("]", "</tool_call>"),
  ),
  # functools[{"name": ..., "arguments": {...}}, ...] or the list between tags
  "phi4": CallFormat(
    ("functools", "<|tool_call|>"),
    (*_objects("functools", "<|tool_call|>", opener="["), *_objects("<|tool_call|>")),
    next_heads=_NEXT_IN_LIST,
    closers=_closers("]", "<|/tool_call|>"),
    special=("<|/tool_call|>",),
  ),
}
PARSERS = ("auto", *FORMATS, "none")
# Text in the chat template by which each format is recognized; the first one counts.
_SIGNS: Sequence[tuple[str, str]] = (
  ("harmony", "<|channel|>"),
  ("deepseek_v32", "｜DSML｜"),
  ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
  ("qwen3_coder", "<function="),
  ("glm45", "<arg_key>"),
  ("kimi_k2", "<|tool_call_begin|>"),
  ("minimax_m2", "<minimax:tool_call>"),
  ("mistral", "[TOOL_CALLS]"),
  ("functiongemma", "<start_function_call>"),
  ("gemma4", "<|tool_call>"),
  ("gemma", "tool_code"),
  ("phi4", "<|/tool_call|>"),
  ("phi4", "functools"),
  ("phi4", "<|/tool|>"),
  ("granite", "<|tool_call|>"),
  ("hermes", "<tool_call>"),
  ("llama4", "<|python_start|>"),
  ("llama3", '"parameters"'),
)


def find_format(parser: str, template: str | None) -> CallFormat | None:
  """Returns the format that --tool_call_parser selects for this chat template; None leaves calls in the text."""
  if parser == "auto":
    parser = next((name for name, sign in _SIGNS if sign in (template or "")), "none")
  return FORMATS.get(parser)


def forced_format(form: CallFormat | None) -> CallFormat:
  """Returns the format of forced calls, a list, for a model with this format."""
  known = form or FORMATS["hermes"]
  return CallFormat(
    bare_heads=_objects("["),
    next_heads=_NEXT_IN_LIST,
    closers=_closers("]"),
    arguments=known.arguments,
    short_ids=known.short_ids,
  )
