"""Makes the keys by which the policy compares prompts: hashes of pieces of a body's prompt. Knows no tokens.

A key stands for its piece and all pieces before it. The text is what the client sent, field by field in the order in
which a chat template writes them: the model, the tools, the instructions, the messages. So the same conversation, one
turn longer, begins with the same keys. Fields such as `stream` or `seed` are left out.
"""

import hashlib
import secrets
from typing import Any

import msgspec

# One key a process: nobody outside can make prompts whose keys collide.
_SECRET = secrets.token_bytes(16)
_KEY_BYTES = 8


class PromptFields(msgspec.Struct):
  """The fields of a body that hold its prompt, as raw JSON, and those that decide who may share it.

  Attributes:
    model, cache_salt: bodies with different ones share nothing.
    tools, system, instructions, prompt, input, messages: the prompt of one API or another.
    previous_response_id: a stored response that the prompt continues; None if there is none.
  """

  model: msgspec.Raw = msgspec.Raw()
  cache_salt: msgspec.Raw = msgspec.Raw()
  tools: msgspec.Raw = msgspec.Raw()
  system: msgspec.Raw = msgspec.Raw()
  instructions: msgspec.Raw = msgspec.Raw()
  prompt: msgspec.Raw = msgspec.Raw()
  input: msgspec.Raw = msgspec.Raw()
  messages: msgspec.Raw = msgspec.Raw()
  previous_response_id: Any = None

  @property
  def parts(self) -> tuple[msgspec.Raw, ...]:
    """The prompt's fields, in the order in which a chat template writes them."""
    return (self.tools, self.system, self.instructions, self.prompt, self.input, self.messages)

  @property
  def num_bytes(self) -> int:
    """Bytes of the prompt."""
    return sum(len(memoryview(part)) for part in self.parts)


_DECODER = msgspec.json.Decoder(PromptFields)


def read_prompt_fields(body: bytes) -> PromptFields | None:
  """Returns the prompt's fields; None if the body is no JSON object, which a replica then refuses."""
  try:
    return _DECODER.decode(body)
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
    return None


def make_prompt_keys(fields: PromptFields, piece_bytes: int, max_pieces: int) -> list[bytes]:
  """Returns the keys of a prompt's whole pieces from its start; none for a prompt shorter than a piece.

  Args:
    fields: the prompt.
    piece_bytes: bytes of a piece.
    max_pieces: the most keys; the rest of the prompt is not looked at.
  """
  digest = hashlib.blake2b(bytes(fields.model) + b"\0" + bytes(fields.cache_salt), digest_size=_KEY_BYTES, key=_SECRET)
  text = b"".join(memoryview(part)[: piece_bytes * max_pieces] for part in fields.parts)
  keys = []
  for start in range(0, min(len(text) - piece_bytes + 1, piece_bytes * max_pieces), piece_bytes):
    digest.update(text[start : start + piece_bytes])
    keys.append(digest.copy().digest())
  return keys
