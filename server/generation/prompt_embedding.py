"""Computes embeddings of prompts, for every protocol. Knows no socket and no fields of a request.

An input is a request of one token, whose sample no client sees, so it shares steps, prefixes and priorities with every
other request.
"""

import array
from collections.abc import Callable, Sequence
import math
import sys

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams
from server.generation import request_validation
from server.generation.request_validation import GenerationCall
from server.generation.serving_state import Backend
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer

MAX_INPUTS = 2048  # OpenAI's limit
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embed=True)
type Vector = array.array[float]
type EmbeddingInput = str | tuple[str, str] | list[int]
"""A text, a pair of texts, or token ids."""


def find_embedding_adapter(name: str | None, backend: Backend) -> str:
  """Returns the adapter that a `model` names, or "". Raises ModelNotFound, or InvalidRequest without embeddings."""
  adapter = backend.find_adapter(name)
  check_embeds(backend.config)
  return adapter


def check_embeds(config: EngineConfig) -> None:
  """Raises InvalidRequest if a server has no embeddings."""
  if config.labels:
    raise InvalidRequest(
      f"has a head of classes ({config.headless}) and gives no embeddings: send texts to /classify or Classify of gRPC",
      field="model",
    )
  if not config.enable_embeddings:
    raise InvalidRequest("is not served for embeddings: serve it with --enable_embeddings", field="model")


def check_dimensions(dimensions: int | None, config: EngineConfig) -> None:
  """Raises InvalidRequest for a number of dimensions that no embedding of the model has."""
  if dimensions is not None and not 1 <= dimensions <= config.embedding_size:
    raise InvalidRequest(
      f"={dimensions} is not allowed: send 1 to the model's {config.embedding_size}, or leave it out",
      field="dimensions",
    )


def check_num_inputs(num_inputs: int, field: str) -> None:
  """Raises InvalidRequest for too many inputs. Args: field: their name, for the error."""
  if num_inputs > MAX_INPUTS:
    raise InvalidRequest(f"has {num_inputs} entries, the limit is {MAX_INPUTS}: send several requests", field=field)


def tokenize_inputs(
  tokenizer: Tokenizer | None,
  config: EngineConfig,
  inputs: Sequence[EmbeddingInput],
  add_special_tokens: bool | None,
  field: str,
) -> list[tuple[int, ...]]:
  """Returns the token ids of each input, for a head of classes without padding at the end.

  Slow for long texts: call it away from the event loop.

  Args:
    tokenizer: the model's tokenizer, or None.
    config: the engine's.
    inputs: texts, pairs of texts, which the tokenizer joins in its own way, or token ids.
    add_special_tokens: for texts, the tokenizer's own tokens, such as BOS; None is true.
    field: the name of the inputs, for errors.

  Raises:
    InvalidRequest: an input is empty, or has ids outside the vocabulary.
    NoTokenizer: the model has none.
  """
  prompts = []
  for each in inputs:
    if not each or isinstance(each, tuple) and not all(each):
      raise InvalidRequest("has an empty entry: send at least one character or token in each", field=field)
    if isinstance(each, tuple):
      known = request_validation.need_tokenizer(tokenizer, field)
      prompts.append(tuple(known.encode_pair(*each, add_special_tokens=add_special_tokens is not False)))
    elif isinstance(each, str):
      wanted = pb.TokenizeRequest(text=each, add_special_tokens=add_special_tokens)
      prompts.append(tuple(request_validation.prompt_token_ids(wanted, tokenizer)))
    else:
      request_validation.check_token_ids(field, each, config.vocab_size)
      prompts.append(tuple(each))
  return [_strip_padding(prompt, config.pad_token_id) for prompt in prompts] if config.labels else prompts


async def embed_prompts(
  backend: Backend,
  prompts: Sequence[tuple[int, ...]],
  *,
  priority: int,
  tenant: str,
  owner: str,
  takes_free_slots: bool = False,
  adapter: str = "",
  time_remaining_s: Callable[[], float | None] = lambda: None,
) -> list[Vector]:
  """Returns the raw embedding of each prompt; ends what it started if it is cancelled.

  Args:
    backend: the backend that serves.
    prompts: token ids.
    priority: a lower number goes first.
    tenant: whose share the prompts count to.
    owner: the tenant of the caller's key, or "".
    takes_free_slots: start further prompts only in slots that other requests leave free, as batches do.
    adapter: name of a LoRA adapter, or "".
    time_remaining_s: returns the seconds until the client's deadline, or None.

  Raises:
    EngineError: of the first prompt that fails.
  """
  config, generations = backend.config, backend.generations
  vectors: list[Vector] = []
  # In waves, because a client may send more inputs than the queue holds.
  largest = max(1, min(2 * config.max_num_seqs, config.max_queued_requests // 2))
  while len(vectors) < len(prompts):
    live = []
    try:
      for prompt in prompts[len(vectors) : len(vectors) + largest]:
        if live and takes_free_slots and len(generations) >= backend.most_background:
          break
        call = make_embedding_call(prompt, priority, tenant, adapter)
        live.append(await generations.start_generation(call, time_remaining_s(), owner))
      for generation in live:
        await generation.wait_ended()
      vectors += (read_vector(generation.outputs[0].embedding) for generation in live)
    finally:
      for generation in live:
        generations.close_generation(generation)
  return vectors


def shorten_vector(vector: Vector, dimensions: int | None, normalize: bool) -> Vector:
  """Returns the first numbers of an embedding (None: all), scaled to length 1 if wanted."""
  shown = vector[:dimensions]
  length = math.sqrt(math.sumprod(shown, shown)) if normalize else 0.0
  return array.array("f", (value / length for value in shown)) if length else shown


def _strip_padding(token_ids: tuple[int, ...], pad_token_id: int) -> tuple[int, ...]:
  """Returns token ids without the padding at their end, which a head of classes does not read. At least one stays.

  This is how transformers finds the last token (GenericForSequenceClassification).
  """
  end = len(token_ids)
  while end > 1 and token_ids[end - 1] == pad_token_id:
    end -= 1
  return token_ids[:end]


def make_embedding_call(
  prompt: tuple[int, ...], priority: int = 0, tenant: str = "", adapter: str = ""
) -> GenerationCall:
  """Returns the request of one embedding, which is checked except for its length."""
  return GenerationCall(
    request_id="",
    prompt_token_ids=prompt,
    params=(_PARAMS,),
    stop_strings=(),
    return_text=False,
    return_token_ids=False,
    skip_special_tokens=True,
    priority=priority,
    queue_timeout_s=None,
    cache_salt=b"",
    tenant=tenant,
    adapter=adapter,
  )


def read_vector(values: bytes) -> Vector:
  """Returns the numbers of an embedding from their bytes."""
  vector = array.array("f", values)
  if sys.byteorder == "big":
    vector.byteswap()
  return vector
