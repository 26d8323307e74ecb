"""Compiles output constraints with llguidance into grammars that the engine follows token by token. Knows no requests.

Grammars are untrusted code. Sluice compiles them away from the event loop, and limits their size, depth and number of
rules, the work of compiling and of a single mask, and memory. Depth and rules matter because llguidance's compiler
recurses over them, and a stack overflow kills the process. Compiled grammars are cached for their tenant.
"""

from collections.abc import Iterator, Sequence
import json
import math
import threading
from typing import Any, NoReturn

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from engine.constraint import ConstrainedDraft, ConstraintFailed
from engine.errors import InvalidRequest
from server.proto import sluice_pb2 as pb
from server.text.grammar_cache import GrammarCache
from server.text.repetition_limits import (
  MAX_REPEATS,
  count_grammar_repeats,
  count_pattern_repeats,
  count_schema_repeats,
)
from server.text.schema_alternatives import walk_objects
from server.text.schema_preparation import (
  MAX_PATTERNS_TOGETHER,
  PreparedSchema,
  SchemaRefused,
  UnenforcedKeyword,
  prepare_schema,
)
from server.text.tokenizer import Tokenizer

MAX_SCHEMA_BYTES = 32 << 10
MAX_SCHEMA_DEPTH = 64
# Levels that the compiler may descend: a schema of depth D with R references has at most (R + 1) * D of them. A stack
# of 8 MiB overflows at 1,800 levels; 1,024 are safe with every keyword that nests.
MAX_SCHEMA_LEVELS = 512
# The least common multiple of every multipleOf, without powers of ten: the compiler makes as many states of it (20,000
# take 0.1 s; 1,234,567 take 26 s and 700 MB), and has no limit for it.
MAX_MULTIPLE = 20_000
# Bytes of one text in a schema, and of one choice.
MAX_TEXT_BYTES = 4 << 10
MAX_REGEX_BYTES = 8 << 10
MAX_GRAMMAR_BYTES = 16 << 10
# Colons of a grammar; each rule has one or two. A chain of 3,500 rules overflows the stack.
MAX_GRAMMAR_COLONS = 512
MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 32 << 10
_MAX_REASON_CHARS = 200
# Bytes of a forced text that are tokenized, since only its next token is needed. Tokenizing all 9,000 characters of one
# for each token takes 11 ms of the engine's thread, with this limit 0.4 ms.
_MAX_FORCED_CHARS = 256
# Characters of forced texts whose tokens a grammar keeps; with these at most 0.6 MB.
_MAX_KEPT_CHARS = 16 << 10
# Whitespace between the tokens of JSON: enough to indent. Without a bound a model may write spaces until max_tokens.
WHITESPACE = r"[ \t\r]?|\r?\n[ \t]{0,32}"
# Limits of compiling and of one token (tens of milliseconds, once: then the request ends), in llguidance's own units.
# The first also covers forced texts: (ab){100000} takes 218 ms and 76 MB with the default of 1,000,000, and 45 ms and
# 25 MB with this one; known schemas need less than 100,000. The default of 250,000 lexer states has 1 to 2 kB each.
_LIMITS = llguidance.LLParserLimits(
  initial_lexer_fuel=200_000,
  step_lexer_fuel=50_000,
  step_max_items=10_000,
  max_lexer_states=20_000,
  max_grammar_size=100_000,
  verbose_errors=False,
)
# A matcher's stop reasons that mean a complete output; all others are limits, or a grammar without an output.
_COMPLETE = ("NoExtension", "EndOfSentence")


class _Refused(Exception):
  """What is wrong with a constraint, and the remedy; the caller adds the field's name."""


class _ForcedTexts:
  """The first tokens of texts that a compiled grammar has forced; its copies share them, and no other grammar.

  Tokenizing a forced text takes 10 us, and llguidance does it for each token. A client could measure the difference, as
  with compiled grammars, so tenants share no texts.
  """

  def __init__(self):
    self._tokens: dict[str, list[int]] = {}
    self._num_chars = 0

  def find(self, text: str) -> list[int] | None:
    """Returns the tokens of a kept text."""
    return self._tokens.get(text)

  def keep(self, text: str, tokens: list[int]) -> None:
    """Keeps the tokens of a text, until there are many."""
    if self._num_chars + len(text) <= _MAX_KEPT_CHARS:
      self._num_chars += len(text)
      self._tokens[text] = tokens


class _OfThread(threading.local):
  """Attributes: texts: of the grammar that llguidance works on; None: nothing is kept."""

  texts: _ForcedTexts | None = None


_of_thread = _OfThread()


class _Vocabulary:
  """The model's tokens for llguidance: the bytes that the detokenizer shows.

  A model without end-of-sequence ids gets one after its last token, which nothing can sample.
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
    """Returns the first tokens of a forced text.

    They are the tokenizer's own if they spell exactly this text; some tokenizers put a space in front.
    """
    if isinstance(text, bytes):
      raise TypeError("only text")  # llguidance passes bytes to test whether they are supported
    text, texts = text[:_MAX_FORCED_CHARS], _of_thread.texts
    found = None if texts is None else texts.find(text)
    if found is None:
      found = self._tokenize(text)
      if texts is not None:
        texts.keep(text, found)
    return found

  def _tokenize(self, text: str) -> list[int]:
    token_ids = self._tokenizer.encode_plain(text)
    spelled = b"".join([self.tokens[token_id] for token_id in token_ids if token_id < len(self.tokens)])
    if spelled == text.encode():
      return token_ids
    assert self.compiled is not None, "nothing is matched before the tokenizer is there"
    return self.compiled.greedy_tokenize(text)


class OutputGrammar:
  """The state of one output in a grammar; implements engine.constraint.Constraint and DraftingConstraint.

  Attributes:
    source: the grammar in llguidance's form, from which another process compiles the same.
  """

  def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, source: str):
    """Computes the first mask.

    Raises:
      ConstraintFailed: no output is possible, or finding one exceeds the limits.
    """
    self.source = source
    self._matcher = matcher
    self._texts = _ForcedTexts()  # of its copies, too
    self._size = 4 * -(-vocab_size // 32)
    # Bits of the last word that are tokens; the added end-of-sequence is not.
    self._last = (1 << (vocab_size - 32 * (self._size // 4 - 1))) - 1
    self._mask = b""  # if no token is forced
    self._forced = -1  # token of a forced text, the only one allowed; -1: none
    self._ahead: list[tuple[int, bytes]] = []  # next tokens of the latest draft, and the masks after them
    self.is_done = False
    self._advance()

  def copy(self) -> "OutputGrammar":
    """Returns an independent copy of the state."""
    twin = object.__new__(OutputGrammar)
    twin.__dict__.update(self.__dict__)
    twin._matcher = self._matcher.deep_copy()
    twin._ahead = []
    return twin

  def allowed(self) -> bytes:
    """See engine.constraint.Constraint."""
    return self._mask if self._forced < 0 else (1 << self._forced).to_bytes(self._size, "little")

  def accept(self, token: int) -> None:
    """See engine.constraint.Constraint. Takes about 20 us, and at most a few milliseconds."""
    _of_thread.texts = self._texts
    if not self._matcher.consume_token(token):
      self._fail()
    ahead = self._ahead
    if ahead and ahead[0][0] == token:
      self._mask, self._forced = ahead.pop(0)[1], -1
    else:
      ahead.clear()
      self._advance()

  def find_forced(self) -> int:
    """See engine.constraint.DraftingConstraint."""
    if self._forced >= 0:
      return self._forced
    bits = 0 if self.is_done else int.from_bytes(self._mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else -1

  def find_draft(self, proposed: Sequence[int], count: int, forces: bool) -> ConstrainedDraft:
    """See engine.constraint.DraftingConstraint. Takes about 30 us a token.

    It never proposes the token that completes the output, since no mask could follow.
    """
    _of_thread.texts = self._texts
    matcher = self._matcher.deep_copy()  # an error in it concerns nobody
    forced = matcher.compute_ff_tokens() if forces else ()
    ahead: list[tuple[int, bytes]] = []
    mask, tokens, index = self.allowed(), list(forced or proposed), 0
    while len(ahead) < count:
      if index == len(tokens):
        more = matcher.compute_ff_tokens() if forces and ahead else ()
        if not more:
          break
        tokens += more
      token = tokens[index]
      index += 1
      if not (0 <= token < 8 * self._size and mask[token >> 3] >> (token & 7) & 1 and matcher.consume_token(token)):
        break
      mask = self._trim_mask(matcher.compute_bitmask())
      if matcher.is_stopped() or matcher.is_error() or mask == bytes(self._size):
        break
      ahead.append((token, mask))
    self._ahead = ahead
    return ConstrainedDraft(
      tuple([token for token, _ in ahead]), tuple([mask for _, mask in ahead]), bool(forced and ahead)
    )

  def _trim_mask(self, mask: bytes) -> bytes:
    """Returns a matcher's mask without the added end-of-sequence."""
    if len(mask) == self._size and self._last == 0xFFFFFFFF:
      return mask
    last = int.from_bytes(mask[self._size - 4 : self._size], "little") & self._last
    return mask[: self._size - 4] + last.to_bytes(4, "little")

  def _advance(self) -> None:
    """Sets the mask of the next token, or the only one, or `is_done`.

    llguidance's mask allows the first token of a forced text alone. To know that token costs less than a mask.
    """
    self._forced = -1
    if not self._ended():
      forced = self._matcher.compute_ff_tokens()
      mask = b"" if forced else self._matcher.compute_bitmask()
      if not self._ended():  # finds out what can follow
        if forced:
          self._forced = forced[0]
          return
        self._mask = self._trim_mask(mask)
        if self._mask == bytes(self._size):
          # Only an end-of-sequence can follow, which the model does not have.
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
  """Compiles constraints for one model. Its methods are slow; any thread may call them.

  Attributes:
    num_compiled: constraints compiled so far, without those that the cache held.
  """

  def __init__(
    self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], *, closes_objects: bool = True
  ):
    """Args: closes_objects: whether objects of a JSON schema are closed by default; see `prepare_schema`."""
    self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
    self._closes_objects = closes_objects
    self._lock = threading.Lock()
    self._vocabulary: llguidance.LLTokenizer | None = None
    self._cache: GrammarCache[OutputGrammar] = GrammarCache()
    self.num_compiled = 0

  def compile(self, constraint: pb.OutputConstraint, tenant: str = "") -> OutputGrammar:
    """Compiles a constraint of a tenant. Raises InvalidRequest with the field, the fault and the remedy."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
      raise InvalidRequest(
        "has no kind: send json_schema, json_object, regex, choice or grammar, or none", field="constraint"
      )
    try:
      if kind == "json_schema":
        return self._make(_json_schema(constraint.json_schema, self._closes_objects), tenant)
      return self._make(_GRAMMARS[kind](constraint), tenant)
    except _Refused as error:
      raise InvalidRequest(str(error), field=f"constraint.{kind}") from None

  def compile_source(self, source: str, tenant: str) -> OutputGrammar:
    """Compiles the `source` of a grammar that another process has compiled. Raises InvalidRequest if it does not."""
    try:
      return self._make(source, tenant)
    except _Refused as error:
      raise InvalidRequest(str(error), field="constraint") from None

  def _make(self, source: str, tenant: str) -> OutputGrammar:
    kept = self._cache.get(tenant, source)
    if kept is not None:
      return kept
    self.num_compiled += 1
    _of_thread.texts = None  # this thread's latest grammar may be another tenant's
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
    """The model's vocabulary, made when first needed."""
    with self._lock:
      if self._vocabulary is None:
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        self._vocabulary = vocabulary.compiled = llguidance.LLTokenizer(
          llguidance.TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids
        )
      return self._vocabulary


def _reason(error: str) -> str:
  """Returns the compiler's error about the caller's text, in one line."""
  lines = [line.strip() for line in error.splitlines() if line.strip() and not line.startswith("<")]
  # The parser of regular expressions prints the pattern first, and the fault last.
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


def prepare_schema_text(text: str, *, closes: bool) -> tuple[str, list[UnenforcedKeyword]]:
  """Rewrites the text of a JSON schema with `prepare_schema`.

  Returns:
    The text, and the keywords that it lacks now.

  Raises:
    InvalidRequest: the text is no schema, has a value that cannot be followed, or exceeds a limit.
  """
  try:
    prepared = _prepare(text, closes)
  except _Refused as error:
    raise InvalidRequest(str(error), field="constraint.json_schema") from None
  return json.dumps(prepared.schema), prepared.unenforced


def _prepare(text: str, closes: bool) -> PreparedSchema:
  """Rewrites a schema; what is written for a keyword never exceeds a limit that the schema itself keeps."""
  schema = _read_schema(text)
  try:
    prepared = prepare_schema(schema, closes=closes)
    try:
      _read_schema(json.dumps(prepared.schema))
    except _Refused:
      prepared = prepare_schema(schema, closes=closes, expresses=False)
  except SchemaRefused as error:
    raise _Refused(str(error)) from None
  return prepared


def _json_schema(text: str, closes: bool) -> str:
  prepared = _prepare(text, closes)
  if prepared.unenforced:
    raise _Refused(describe_unenforced(prepared.unenforced[0]))
  return _from_schema(prepared.schema)


def describe_unenforced(keyword: UnenforcedKeyword) -> str:
  """Returns the problem and the remedy, for an error."""
  where = "/".join(keyword.path)[:_MAX_REASON_CHARS]
  return f"has {keyword.keyword} at {where}, which cannot be enforced: leave it out"


def _read_schema(text: str) -> Any:
  """Returns a schema that is within the limits."""
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
  multiple = math.lcm(*_multiples(schema))
  if multiple > MAX_MULTIPLE:
    raise _Refused(
      f"has multipleOf with a least common multiple of {min(multiple, 10**12)}, the limit is {MAX_MULTIPLE} times a "
      "power of ten: send a smaller one, or none"
    )
  return schema


def _json_object(constraint: pb.OutputConstraint) -> str:
  if not constraint.json_object:
    raise _Refused("=false is not allowed: send true, or leave the constraint out")
  return _from_schema({"type": "object"})


def _from_schema(schema: Any) -> str:
  if schema is True:
    schema = {}
  text = json.dumps(schema)  # normalized, since the compiler embeds it in other text
  if not isinstance(schema, dict):
    return llguidance.LLMatcher.grammar_from_json_schema(text)  # refused when it is compiled
  options = schema.get("x-guidance")
  is_compact = isinstance(options, dict) and options.get("whitespace_flexible") is False
  try:
    return llguidance.LLMatcher.grammar_from_json_schema(
      text,
      defaults={} if is_compact else {"whitespace_pattern": WHITESPACE},
      overrides={"lenient": False, "coerce_one_of": False},  # would ignore in silence
    )
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
  except Exception as error:  # every error of its parser, which concerns the text alone
    raise _Refused(
      "is not one that can be followed: it has no line that begins with `start:`, as in Lark, and "
      f"is not GBNF either: {_reason(str(error))}"
    ) from None
  _check_repeats(count_grammar_repeats(lark))
  return llguidance.LLMatcher.grammar_from_lark(lark)


_GRAMMARS = {
  "json_object": _json_object,
  "regex": _regex,
  "choice": _choice,
  "grammar": _grammar,
}


def _survey(schema: Any) -> tuple[int, int, int, bool, int]:
  """Measures a JSON schema: levels, counted to just above MAX_SCHEMA_DEPTH; references; patterns, and whether several
  may apply to one text; and the bytes of its longest text.
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


def _multiples(schema: Any) -> Iterator[int]:
  """Yields the digits of every multipleOf in a schema, as whole numbers without the powers of ten in them."""
  for value in walk_objects(schema):
    number = value.get("multipleOf")
    if isinstance(number, int | float) and 0 < number < math.inf:
      yield int(repr(number).partition("e")[0].replace(".", "").strip("0"))


def _no_constant(name: str) -> NoReturn:
  raise ValueError(name)
