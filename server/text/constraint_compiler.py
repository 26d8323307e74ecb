"""From an output constraint on the wire to what the engine follows token by token, by llguidance. Knows no requests.

Grammars are other people's code: they are compiled away from the event loop, with limits on their size, depth and
number of rules (llguidance's compiler recurses over rules and schemas, and a process does not survive the end of its
stack), on the work of compiling and of a single mask, and on memory. What was compiled is kept for the same tenant.
"""

from collections.abc import Sequence
import json
import threading
from typing import Any, NoReturn

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from engine.constraint import ConstraintFailed
from engine.errors import InvalidRequest
from server.proto import sluice_pb2 as pb
from server.text.grammar_cache import GrammarCache
from server.text.repetition_limits import (
  MAX_REPEATS,
  count_grammar_repeats,
  count_pattern_repeats,
  count_schema_repeats,
)
from server.text.tokenizer import Tokenizer

MAX_SCHEMA_BYTES = 32 << 10
MAX_SCHEMA_DEPTH = 64
# Levels that the compiler may descend: a schema of depth D with R references has at most (R + 1) * D of them. It was
# seen to overflow a stack of 8 MiB at 1,800, and not at 1,024 with any keyword that nests.
MAX_SCHEMA_LEVELS = 512
# Of a schema in which some must hold together: the compiler intersects them in exponential time (16 took 0.07 s, 20
# took 2 s, 60 more than minutes), which no limit of its own ends.
MAX_PATTERNS_TOGETHER = 8
# Of one text in a schema, and of one choice.
MAX_TEXT_BYTES = 4 << 10
MAX_REGEX_BYTES = 8 << 10
MAX_GRAMMAR_BYTES = 16 << 10
# Of a grammar; each rule has one or two. A chain of 3,500 rules was seen to overflow the stack.
MAX_GRAMMAR_COLONS = 512
MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 32 << 10
_MAX_REASON_CHARS = 200
# Of a text that a grammar leaves no choice about, of which only the next token is needed: all of it was written as
# tokens anew for each, which for 9,000 characters took 11 ms of the engine's thread, and takes 0.4 so.
_MAX_FORCED_CHARS = 256
# Between the tokens of JSON: enough for an indented text. A model may otherwise write spaces until max_tokens.
_WHITESPACE = r"[ \t\r]?|\r?\n[ \t]{0,32}"
# What compiling may cost, and what one token may (tens of milliseconds, once: then the request ends), in llguidance's
# own units. The first is also spent on a text that leaves no choice: with the default of 1,000,000 (ab){100000} took
# 218 ms and 76 MB, and takes 45 and 25 so; no schema was seen to need 100,000. Of the 250,000 lexer states that it
# allows by default each has 1 to 2 kB.
_LIMITS = llguidance.LLParserLimits(
  initial_lexer_fuel=200_000,
  step_lexer_fuel=50_000,
  step_max_items=10_000,
  max_lexer_states=20_000,
  max_grammar_size=100_000,
  verbose_errors=False,
)
# Endings of a matcher that mean a complete output; all others are limits, or a grammar that leads nowhere.
_COMPLETE = ("NoExtension", "EndOfSentence")


class _Refused(Exception):
  """What is wrong with a constraint, and the remedy; whoever knows its field tells the client."""


class _Vocabulary:
  """The model's tokens as llguidance wants them: the very bytes that the detokenizer shows.

  A model without end-of-sequence ids gets one behind its last token, which nothing can sample.
  """

  def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
    self._tokenizer = tokenizer
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = {*tokenizer.special_token_ids, *eos_token_ids}
    if not eos_token_ids:
      special.add(vocab_size)
      tokens.append(b"<|end of output|>")
    self.eos_token_ids = list(eos_token_ids) or [vocab_size]
    self.eos_token_id = self.eos_token_ids[0]
    self.bos_token_id = None
    self.tokens = tokens
    self.special_token_ids = sorted(token_id for token_id in special if token_id < len(tokens))
    self.compiled: llguidance.LLTokenizer | None = None

  def __call__(self, text: str | bytes) -> list[int]:
    """Tokens of the beginning of a text that the grammar leaves no choice about.

    As the model would write it, if they spell exactly this text; some tokenizers put a space in front.
    """
    if isinstance(text, bytes):
      raise TypeError("only text")  # which is how llguidance asks whether bytes are taken
    text = text[:_MAX_FORCED_CHARS]
    token_ids = self._tokenizer.encode_plain(text)
    spelled = b"".join([self.tokens[token_id] for token_id in token_ids if token_id < len(self.tokens)])
    if spelled == text.encode():
      return token_ids
    assert self.compiled is not None, "nothing is matched before the tokenizer is there"
    return self.compiled.greedy_tokenize(text)


class OutputGrammar:
  """One output on its way through a grammar; implements engine.constraint.Constraint.

  Attributes:
    source: the grammar as llguidance reads it, which makes the same from it in another process.
  """

  def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, source: str):
    """Computes the first mask.

    Raises:
      ConstraintFailed: no output is possible, or it would take too much to find one.
    """
    self.source = source
    self._matcher = matcher
    self._size = 4 * -(-vocab_size // 32)
    # Bits of the last word that are tokens; a virtual end-of-sequence is not.
    self._last = (1 << (vocab_size - 32 * (self._size // 4 - 1))) - 1
    self._mask = b""
    self.is_done = False
    self._advance()

  def copy(self) -> "OutputGrammar":
    """The same state, on its own from here on."""
    twin = object.__new__(OutputGrammar)
    twin.__dict__.update(self.__dict__)
    twin._matcher = self._matcher.deep_copy()
    return twin

  def allowed(self) -> bytes:
    """See engine.constraint.Constraint."""
    return self._mask

  def accept(self, token: int) -> None:
    """See engine.constraint.Constraint. Takes about 50 us, at most some milliseconds."""
    if not self._matcher.consume_token(token):
      self._fail()
    self._advance()

  def _advance(self) -> None:
    """Sets the mask of the next token, or `is_done`."""
    if not self._ended():
      mask = self._matcher.compute_bitmask()
      if not self._ended():  # what can follow may be found out only now
        last = int.from_bytes(mask[self._size - 4 : self._size], "little") & self._last
        self._mask = mask[: self._size - 4] + last.to_bytes(4, "little")
        if self._mask == bytes(self._size):
          # All that is left is an end-of-sequence that the model does not have.
          if not self._matcher.is_accepting():
            self._fail()
          self.is_done = True

  def _ended(self) -> bool:
    matcher = self._matcher
    if matcher.is_error():
      self._fail()
    if not matcher.is_stopped():
      return False
    if matcher.stop_reason() not in _COMPLETE:
      self._fail()
    self.is_done = True
    return True

  def _fail(self) -> NoReturn:
    raise ConstraintFailed(
      "the output constraint could not be followed: no token is left, or one takes more work than is allowed; simplify "
      "the constraint"
    )


class ConstraintCompiler:
  """Compiles constraints for one model. All methods may be called from any thread, and take long.

  Attributes:
    num_compiled: how often that was done, and nothing found that was kept.
  """

  def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
    self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
    self._lock = threading.Lock()
    self._vocabulary: llguidance.LLTokenizer | None = None
    self._cache: GrammarCache[OutputGrammar] = GrammarCache()
    self.num_compiled = 0

  def compile(self, constraint: pb.OutputConstraint, tenant: str = "") -> OutputGrammar:
    """Raises InvalidRequest, with the field, what is wrong with it and the remedy. Args: tenant: whose it is."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
      raise InvalidRequest(
        "has no kind: send json_schema, json_object, regex, choice or grammar, or none", field="constraint"
      )
    try:
      return self._make(_GRAMMARS[kind](constraint), tenant)
    except _Refused as error:
      raise InvalidRequest(str(error), field=f"constraint.{kind}") from None

  def compile_source(self, source: str, tenant: str) -> OutputGrammar:
    """Makes anew what compile() has made elsewhere, of its `source`. Raises InvalidRequest if that cannot be."""
    try:
      return self._make(source, tenant)
    except _Refused as error:
      raise InvalidRequest(str(error), field="constraint") from None

  def _make(self, source: str, tenant: str) -> OutputGrammar:
    kept = self._cache.get(tenant, source)
    if kept is not None:
      return kept
    self.num_compiled += 1
    matcher = llguidance.LLMatcher(self._tokens(), source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
      raise _Refused(f"is not one that can be followed: {_reason(matcher.get_error())}")
    try:
      output = OutputGrammar(matcher, self._vocab_size, source)
    except ConstraintFailed:
      raise _Refused(
        "is not one that can be followed: it allows no output, or one that takes more work than is allowed; simplify it"
      ) from None
    if output.is_done:
      raise _Refused("is not one that can be followed: it allows no token; leave it out")
    self._cache.keep(tenant, source, output)
    return output

  def _tokens(self) -> llguidance.LLTokenizer:
    """Of the model; made once, when first needed."""
    with self._lock:
      if self._vocabulary is None:
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        self._vocabulary = vocabulary.compiled = llguidance.LLTokenizer(
          llguidance.TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids
        )
      return self._vocabulary


def _reason(error: str) -> str:
  """The compiler's verdict about the caller's own text, in one line."""
  lines = [line.strip() for line in error.splitlines() if line.strip() and not line.startswith("<")]
  # A regex's parser draws the pattern, and says what is wrong at the end.
  said = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
  return f"{said.removeprefix('error:').strip()[:_MAX_REASON_CHARS] or 'it is too complex'}; correct or simplify it"


def _check_size(text: str, limit: int) -> None:
  size = len(text.encode())
  if not 1 <= size <= limit:
    raise _Refused(f"has {size} bytes, allowed are 1 to {limit}: send a shorter one")


def _check_repeats(times: int, where: str = "") -> None:
  if times > MAX_REPEATS:
    raise _Refused(
      f"has a count of {times}{where} (nested ones multiply), the limit is {MAX_REPEATS}: send a smaller one, or none "
      "for any number"
    )


def _json_schema(constraint: pb.OutputConstraint) -> str:
  text = constraint.json_schema
  _check_size(text, MAX_SCHEMA_BYTES)
  too_deep = f"is nested too deeply: it has more than {MAX_SCHEMA_DEPTH} levels; send a flatter schema"
  try:
    schema = json.loads(text, parse_constant=_no_constant)
  except json.JSONDecodeError as error:
    raise _Refused(
      f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; send the text of a JSON schema"
    ) from None
  except RecursionError:
    raise _Refused(too_deep) from None
  except ValueError:
    raise _Refused("is not JSON: it has NaN or too long a number; leave it out") from None
  depth, references, patterns, together, longest = _survey(schema)
  if depth > MAX_SCHEMA_DEPTH:
    raise _Refused(too_deep)
  if (references + 1) * depth > MAX_SCHEMA_LEVELS:
    raise _Refused(
      f"is nested too deeply: it has {references} references in {depth} levels, and the limit is {MAX_SCHEMA_LEVELS} "
      "for the product of both; send a flatter schema"
    )
  if longest > MAX_TEXT_BYTES:
    raise _Refused(f"has a text of {longest} bytes, the limit for each is {MAX_TEXT_BYTES}: send shorter ones")
  if together and patterns > MAX_PATTERNS_TOGETHER:
    raise _Refused(
      f"has {patterns} patterns and an allOf, or a pattern beside a $ref, with which the limit is "
      f"{MAX_PATTERNS_TOGETHER}: send fewer patterns, or none that must hold together"
    )
  for keyword, times in count_schema_repeats(schema):
    _check_repeats(times, f" in {keyword}")
  return _from_schema(schema)


def _json_object(constraint: pb.OutputConstraint) -> str:
  if not constraint.json_object:
    raise _Refused("=false is not allowed: send true, or leave the constraint out")
  return _from_schema({"type": "object"})


def _from_schema(schema: Any) -> str:
  if schema is True:
    schema = {}
  text = json.dumps(schema)  # written anew, for the compiler pastes it between others
  if not isinstance(schema, dict):
    return llguidance.LLMatcher.grammar_from_json_schema(text)  # refused when it is compiled
  try:
    return llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
  except ValueError:
    raise _Refused("is not one that can be followed: x-guidance has options that do not exist; leave it out") from None


def _regex(constraint: pb.OutputConstraint) -> str:
  _check_size(constraint.regex, MAX_REGEX_BYTES)
  _check_repeats(count_pattern_repeats(constraint.regex))
  return llguidance.LLMatcher.grammar_from_regex(constraint.regex)


def _choice(constraint: pb.OutputConstraint) -> str:
  choices = list(constraint.choice.values)
  if not 1 <= len(choices) <= MAX_CHOICES:
    raise _Refused(f"has {len(choices)} strings, allowed are 1 to {MAX_CHOICES}: send so many")
  if not all(choices):
    raise _Refused("has an empty string: leave it out")
  sizes = [len(choice.encode()) for choice in choices]
  if max(sizes) > MAX_TEXT_BYTES:
    raise _Refused(f"has a string of {max(sizes)} bytes, the limit for each is {MAX_TEXT_BYTES}: send shorter ones")
  if sum(sizes) > MAX_CHOICES_BYTES:
    raise _Refused(f"has {sum(sizes)} bytes, the limit is {MAX_CHOICES_BYTES}: send shorter ones")
  # Strings are spelled as in JSON.
  return llguidance.LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _grammar(constraint: pb.OutputConstraint) -> str:
  text = constraint.grammar
  _check_size(text, MAX_GRAMMAR_BYTES)
  colons = text.count(":")
  if colons > MAX_GRAMMAR_COLONS:
    raise _Refused(
      f"has {colons} colons, by which its rules are counted, the limit is {MAX_GRAMMAR_COLONS}: send fewer rules"
    )
  if "%json" in text:
    raise _Refused("has %json, which is not taken there: send json_schema instead")
  try:
    lark = any_to_lark(text)
  except Exception as error:  # all that its parser raises, which is about the text alone
    raise _Refused(
      "is not one that can be followed: it has no line that begins with `start:`, as in Lark, and "
      f"is not GBNF either: {_reason(str(error))}"
    ) from None
  _check_repeats(count_grammar_repeats(lark))
  return llguidance.LLMatcher.grammar_from_lark(lark)


_GRAMMARS = {
  "json_schema": _json_schema,
  "json_object": _json_object,
  "regex": _regex,
  "choice": _choice,
  "grammar": _grammar,
}


def _survey(schema: Any) -> tuple[int, int, int, bool, int]:
  """Of a JSON schema: its levels, which are counted to soon after MAX_SCHEMA_DEPTH; references; patterns, and whether
  some may have to hold for one text; and the bytes of its longest text.
  """
  depth, references, patterns, together, longest, level = 0, 0, 0, False, 0, [schema]
  while level and depth <= MAX_SCHEMA_DEPTH:
    depth += any(isinstance(value, dict | list) for value in level)
    inner = []
    for value in level:
      if isinstance(value, dict):
        references += ("$ref" in value) + ("$dynamicRef" in value)
        patterns += ("pattern" in value) + ("format" in value)
        if isinstance(value.get("patternProperties"), dict):
          patterns += len(value["patternProperties"])
        together |= "allOf" in value or ("$ref" in value and "pattern" in value)
        inner += value.keys()
        inner += value.values()
      elif isinstance(value, list):
        inner += value
      elif isinstance(value, str):
        longest = max(longest, len(value.encode("utf-8", "replace")))
    level = inner
  return depth, references, patterns, together, longest


def _no_constant(name: str) -> NoReturn:
  raise ValueError(name)
