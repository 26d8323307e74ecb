"""The model's own tokenizer: encodes text and chats to ids, and decodes ids to bytes. May not know requests or gRPC.

The text of a chat message is data: a special token spelled in it is encoded letter by letter. A raw text prompt is the
caller's own, so special tokens in it keep their meaning.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import hashlib
import json
import pathlib
import re
from typing import Any

import tokenizers

from engine.errors import ConfigError, InvalidRequest
from server.errors import NoChatTemplate
from server.text.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate, Message
from server.text.detokenizer import Detokenizer, TokenPlaces

# A Unicode noncharacter, inserted into special tokens that a message spells, so that the tokenizer does not match them.
_MARK = "\ufdd0"
# The largest known file has 35 MB. The library holds the interpreter's lock while it reads, at about 20 MB/s.
_MAX_FILE_BYTES = 128 << 20
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
  """Encodes and decodes. All methods may be called from any thread.

  Attributes:
    folder: the model's folder.
    digest: the SHA-256 of tokenizer.json.
    special_token_ids: the ids of tokens that are not text.
    special_tokens: names, for example "bos_token", and their text, from tokenizer_config.json.
    chat_template_error: why the folder's chat template cannot be used; "" if it can, or if there is none.
  """

  def __init__(self, folder: pathlib.Path, *, max_prompt_bytes: int = 1 << 20, chat_template: str = ""):
    """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja (the last two need not exist).

    Args:
      folder: the model's folder.
      max_prompt_bytes: the longest text to tokenize (some inputs take more than linear time).
      chat_template: the file of a template that replaces the model's; "": the model's.

    Raises:
      ConfigError: a file is missing, broken or of an unsupported kind. A broken chat template of the model only sets
        `chat_template_error`, since all requests except chats work without it.
    """
    self.folder = folder
    self._max_prompt_bytes = max_prompt_bytes
    source = folder / "tokenizer.json"
    try:
      size = source.stat().st_size
      if size > _MAX_FILE_BYTES:
        raise ConfigError(f"{source} has {size} bytes, the limit is {_MAX_FILE_BYTES}; restore it from its source")
      raw = source.read_bytes()
      self.digest = hashlib.sha256(raw).digest()
      text = raw.decode()
      self._tokenizer = tokenizers.Tokenizer.from_str(text)
      self._plain = tokenizers.Tokenizer.from_str(text)
      decoder = json.loads(text).get("decoder")
    except OSError as error:
      raise ConfigError(
        f"{source} cannot be read: {error.strerror}; restore it, or use a folder without a tokenizer "
        "to serve token ids only"
      ) from error
    except ConfigError:
      raise
    except BaseException as error:  # the library raises bare Exception, and panics
      if not isinstance(error, Exception) and not _is_panic(error):
        raise
      raise ConfigError(f"{source} is not a tokenizer: {str(error):.200}; restore it from its source") from error
    for each in (self._tokenizer, self._plain):
      each.no_truncation()
      each.no_padding()
    self._plain.encode_special_tokens = True
    self._piece_bytes = _piece_bytes(decoder, source)
    added = self._tokenizer.get_added_tokens_decoder()
    self._added = {token_id: token.content.encode() for token_id, token in added.items()}
    self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    self._special_ids = {added[token_id].content: token_id for token_id in self.special_token_ids}
    special = sorted((added[token_id].content for token_id in self.special_token_ids), key=len, reverse=True)
    self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
    self._marked = re.compile("|".join(re.escape(_mark(text)) for text in special) or r"(?!)")
    self._text_bytes = functools.lru_cache(maxsize=None)(functools.partial(self._bytes_of, skip_special=True))
    self._all_bytes = functools.lru_cache(maxsize=None)(functools.partial(self._bytes_of, skip_special=False))
    self.special_tokens, source = _read_chat_template(folder)
    self.chat_template_error = ""
    self._chat: ChatTemplate | None = None
    if chat_template:
      self._chat = read_chat_template(chat_template, self.special_tokens, 2 * max_prompt_bytes)
      return
    try:
      text = source.read_text(encoding="utf-8") if isinstance(source, pathlib.Path) else source
      if text is not None:
        self._chat = ChatTemplate(text, self.special_tokens, 2 * max_prompt_bytes)
    except (OSError, ValueError) as error:
      self.chat_template_error = f"chat_template.jinja cannot be read: {str(error):.200}; restore it from its source"
    except ConfigError as error:
      self.chat_template_error = str(error)

  @property
  def vocab_size(self) -> int:
    """The number of entries, with added tokens."""
    return self._tokenizer.get_vocab_size()

  @property
  def num_token_ids(self) -> int:
    """One more than the greatest id; some ids below it may be unused."""
    return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

  @property
  def has_chat_template(self) -> bool:
    """Whether the tokenizer has a chat template, which `encode_chat` needs."""
    return self._chat is not None

  @property
  def chat_template(self) -> str | None:
    """The template's source, or None."""
    return None if self._chat is None else self._chat.source

  @property
  def knows_tools(self) -> bool:
    """Whether the chat template passes tools to the model."""
    return self._chat is not None and "tools" in self._chat.variables

  def unread_variables(self, names: Iterable[str]) -> list[str]:
    """Returns the names that the chat template does not read; their values have no effect, as in transformers.

    Returns no names if there is no template.
    """
    return [] if self._chat is None else [name for name in names if name not in self._chat.variables]

  def find_special_tokens(self, names: Iterable[str]) -> frozenset[int]:
    """Returns the ids of the special tokens, which `skip_special_tokens` omits, among these names."""
    return frozenset(self._special_ids[name] for name in names if name in self._special_ids)

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Returns the token ids of a raw text, in which special tokens keep their meaning.

    Raises:
      InvalidRequest: the text exceeds the limit, or the model's tokenizer cannot split it.
    """
    self._check_size(len(text.encode()))
    with _without_panics():
      return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

  def encode_pair(self, first: str, second: str, *, add_special_tokens: bool = True) -> list[int]:
    """Returns the token ids of two raw texts, joined as the tokenizer's own template says.

    Raises:
      InvalidRequest: see `encode`.
    """
    self._check_size(len(first.encode()) + len(second.encode()))
    with _without_panics():
      return self._tokenizer.encode(first, second, add_special_tokens=add_special_tokens).ids

  def places(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Returns the character at which each token of `encode` begins; a token outside the text begins with the next one.

    Raises:
      InvalidRequest: see `encode`.
    """
    self._check_size(len(text.encode()))
    with _without_panics():
      spans = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).offsets
    places, seen = [], 0
    for start, end in spans:
      # Some tokenizers omit the space before a word from its span; the word's token begins at that space.
      places.append(min(start, seen) if end > start else seen)
      seen = max(seen, end)
    return places

  def decoded_places(self, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool = True) -> list[int]:
    """Returns the same as `places`, for ids whose `decode` is `text`."""
    places = self.token_places(skip_special_tokens=skip_special_tokens)
    begins = [places.push(token_id) for token_id in token_ids]
    # SentencePiece's decoder omits the first space.
    missing = max(0, places.end - len(text))
    return [max(0, begin - missing) for begin in begins]

  def encode_plain(self, text: str) -> list[int]:
    """Returns the token ids of a text in which special tokens are letters. Checks no limit; for the server's texts."""
    return self._plain.encode(text, add_special_tokens=False).ids

  def encode_chat(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Returns the token ids of a chat in the model's template. The arguments are those of `ChatTemplate.render`.

    Raises:
      NoChatTemplate: the model has no template.
      InvalidRequest: the template refuses the messages, or they are too long.
    """
    if self.chat_template_error:
      raise NoChatTemplate(f"{self.chat_template_error}; until then send the prompt as text")
    if self._chat is None:
      raise NoChatTemplate("the served model has no chat template; send the prompt as text")
    sizes = [len(message.content.encode()) for message in messages]
    sizes += [len(json.dumps(value)) for value in (tools, *(message.more for message in messages)) if value]
    self._check_size(sum(sizes))
    rendered = self._chat.render(
      [Message(message.role, self._defused(message.content), self._defused(message.more)) for message in messages],
      add_generation_prompt=add_generation_prompt,
      tools=self._defused(tools),
      variables=variables,
    )
    token_ids, at = [], 0
    with _without_panics():
      for found in self._marked.finditer(rendered):
        token_ids += self._tokenizer.encode(rendered[at : found.start()], add_special_tokens=False).ids
        token_ids += self._plain.encode(found[0].replace(_MARK, "", 1), add_special_tokens=False).ids
        at = found.end()
      return token_ids + self._tokenizer.encode(rendered[at:], add_special_tokens=False).ids

  def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Returns the text of a whole sequence from the tokenizer's own decoder. Ids must not be negative."""
    return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

  def detokenizer(
    self, *, skip_special_tokens: bool = True, shown_token_ids: frozenset[int] = frozenset()
  ) -> Detokenizer:
    """Returns a new incremental decoder for one sequence.

    Args:
      skip_special_tokens: whether the text omits special tokens.
      shown_token_ids: special tokens that the text has in any case.
    """
    if not skip_special_tokens:
      return Detokenizer(self._all_bytes)
    if not shown_token_ids:
      return Detokenizer(self._text_bytes)
    return Detokenizer(lambda token: self._all_bytes(token) if token in shown_token_ids else self._text_bytes(token))

  def token_places(self, *, skip_special_tokens: bool = True) -> TokenPlaces:
    """Returns a new tracker of where one sequence's tokens begin in its `detokenizer`'s text."""
    return TokenPlaces(self._text_bytes if skip_special_tokens else self._all_bytes)

  def token_bytes(self, token_id: int) -> bytes:
    """Returns the bytes of one token, special or not; they may be a part of a character."""
    return self._all_bytes(token_id)

  def _defused(self, value: Any) -> Any:
    """Returns a JSON value with a mark in every special token that its texts spell."""
    if isinstance(value, str):
      return self._special.sub(lambda found: _mark(found[0]), value)
    if isinstance(value, Mapping):
      return {self._defused(key): self._defused(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
      return [self._defused(inner) for inner in value]
    return value

  def _bytes_of(self, token_id: int, *, skip_special: bool) -> bytes:
    if skip_special and token_id in self.special_token_ids:
      return b""
    if token_id in self._added:
      return self._added[token_id]
    piece = self._tokenizer.id_to_token(token_id)
    return b"" if piece is None else self._piece_bytes(piece)

  def _check_size(self, size: int) -> None:
    if size > self._max_prompt_bytes:
      raise InvalidRequest(
        f"has {size} bytes of text, the limit is {self._max_prompt_bytes}: shorten it, or raise --max_prompt_bytes",
        field="prompt",
      )


def load_tokenizer(folder: pathlib.Path, *, max_prompt_bytes: int, chat_template: str = "") -> Tokenizer | None:
  """Returns the tokenizer of a model folder; None if it has none. The arguments are those of Tokenizer.

  Raises:
    ConfigError: Tokenizer raised it, or there is a chat template without a tokenizer.
  """
  if (folder / "tokenizer.json").is_file():
    return Tokenizer(folder, max_prompt_bytes=max_prompt_bytes, chat_template=chat_template)
  if chat_template:
    raise ConfigError(
      f"chat_template={chat_template} needs a tokenizer, and {folder} has no tokenizer.json; copy it there, or leave "
      "out --chat_template"
    )
  return None


def read_chat_template(file: str, special_tokens: dict[str, str], max_chars: int) -> ChatTemplate:
  """Reads a chat template from a file of its own. The arguments are those of ChatTemplate.

  Raises:
    ConfigError: the file is missing, too large or not jinja2.
  """
  try:
    with open(file, "rb") as stream:  # just enough to detect a file that is too large
      source = stream.read(MAX_TEMPLATE_BYTES + 1).decode()
    return ChatTemplate(source, special_tokens, max_chars)
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"chat_template={file} cannot be read: {str(error):.200}; set --chat_template to a Jinja file, or leave it out"
    ) from error
  except ConfigError as error:
    raise ConfigError(f"chat_template={file}: {error}") from error


def _is_panic(error: BaseException) -> bool:
  """Whether an error is a Rust panic. Its type is not importable, and is a BaseException but no Exception."""
  return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
  """Raises InvalidRequest if the library panics, as it does if the model's regular expression fails on a text."""
  try:
    yield
  except BaseException as error:
    if not _is_panic(error):
      raise
    raise InvalidRequest(
      "is a text that the model's tokenizer gave up on; change it, or send token ids", field="prompt"
    ) from error


def _mark(special: str) -> str:
  return special[:1] + _MARK + special[1:]


def _byte_level_alphabet() -> dict[str, int]:
  """Returns GPT-2's map from characters to bytes (encoder.py): printable bytes map to themselves."""
  alphabet = {chr(byte): byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255}
  others = [byte for byte in range(256) if byte not in alphabet.values()]
  alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
  return alphabet


def _piece_bytes(decoder: dict | None, source: pathlib.Path) -> Callable[[str], bytes]:
  """Returns the function from this tokenizer's pieces to bytes. Raises ConfigError for an unknown decoder."""
  parts = decoder.get("decoders", [decoder]) if decoder else []
  kinds = [part["type"] for part in parts]
  if "ByteLevel" in kinds:
    alphabet = _byte_level_alphabet()

    def byte_level(piece: str) -> bytes:
      if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
      return piece.encode()

    return byte_level
  if "ByteFallback" in kinds or "Metaspace" in kinds:

    def sentencepiece(piece: str) -> bytes:
      byte = _BYTE_PIECE.fullmatch(piece)
      return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    return sentencepiece
  raise ConfigError(
    f"{source} has a decoder of kind {kinds or None}; byte-level BPE and SentencePiece are supported: "
    "use a folder without a tokenizer to serve token ids only"
  )


def _read_chat_template(folder: pathlib.Path) -> tuple[dict[str, str], pathlib.Path | str | None]:
  """Returns the special tokens, and chat_template.jinja, else the template of tokenizer_config.json, else None."""
  config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
  if config_file.exists():
    try:
      config = json.loads(config_file.read_text(encoding="utf-8"))
      source = config.get("chat_template")
      tokens = ((name, config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token"))
      special = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens if token}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
      raise ConfigError(f"{config_file} is broken: {str(error):.200}; restore it from its source") from error
  else:
    source, special = None, {}
  if isinstance(source, list):  # several named templates
    named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    source = named.get("default")
  if template_file.exists():
    return special, template_file
  if not isinstance(source, str | None):
    raise ConfigError(f"{config_file}: chat_template must be text; restore the file from its source")
  return special, source
