"""Serves embeddings: the final hidden state of a text's last token, scaled to length 1. Knows no socket.

Scores and rankings are cosines of embeddings, as of a bi-encoder. An input is a request of one token, whose sample no
client sees, so it shares steps, prefixes and priorities with every other request.
"""

import array
import base64
from collections.abc import Sequence
import itertools
import math
import secrets
import sys
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams
from server.generation import request_validation
from server.generation.request_validation import GenerationCall
from server.generation.serving_state import Backend, ServingState
from server.http.embeddings.embedding_fields import (
  ENCODINGS,
  MAX_INPUTS,
  EmbeddingFields,
  EmbeddingRequest,
  RankedDocument,
  RerankRequest,
  ScoreRequest,
)
from server.http.http_options import HttpOptions
from server.http.json_exchange import read_json_object, unless_gone
from server.http.openai.generate_request import judge_ignored, list_prompts, read_fields
from server.http.openai.generation_responder import RunningGenerations
from server.proto import sluice_pb2 as pb

_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embed=True)
type Vector = array.array[float]


class EmbeddingEndpoints:
  """The three endpoints."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options

  async def embeddings(self, request: Request) -> Response:
    """POST /v1/embeddings."""
    with self._state.admit() as backend:
      fields, headers = await self._read(request, EmbeddingRequest, backend)
      encoding = fields.encoding_format or ENCODINGS[0]
      if encoding not in ENCODINGS:
        raise InvalidRequest(f"is not one that exists: send {' or '.join(ENCODINGS)}", field="encoding_format")
      check_dimensions(fields.dimensions, backend.config.embedding_size)
      inputs = list_prompts(fields.input, "input")
      vectors, num_tokens = await self._embed(request, backend, inputs, fields, "input")

      def write() -> bytes:
        data = []
        for index, vector in enumerate(vectors):
          shown = vector[: fields.dimensions]
          if fields.normalize is not False:
            shown = _scale_to_one(shown)
          value = base64.b64encode(_little_endian(shown)).decode() if encoding == "base64" else shown.tolist()
          data.append({"object": "embedding", "index": index, "embedding": value})
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": backend.model, "usage": usage})

      return Response(await self._state.run_in_text_pool(write), media_type="application/json", headers=headers)

  async def score(self, request: Request) -> Response:
    """POST /v1/score and /score, in vLLM's form."""
    with self._state.admit() as backend:
      fields, headers = await self._read(request, ScoreRequest, backend)
      first, second = ([texts] if isinstance(texts, str) else list(texts) for texts in (fields.text_1, fields.text_2))
      if not first or not second or len(first) not in (1, len(second)):
        raise InvalidRequest(
          f"has {len(second)} entries and text_1 has {len(first)}: send one text_1, or as many as text_2",
          field="text_2",
        )
      vectors, num_tokens = await self._embed(request, backend, [*first, *second], fields, "text_1")
      pairs = zip(itertools.cycle(vectors[: len(first)]), vectors[len(first) :], strict=False)
      data = [{"index": index, "object": "score", "score": _cosine(*pair)} for index, pair in enumerate(pairs)]
      body = {
        "id": f"score-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": backend.model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
      }
      return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)

  async def rerank(self, request: Request) -> Response:
    """POST /v1/rerank, /v2/rerank and /rerank, in the form of Jina and Cohere."""
    with self._state.admit() as backend:
      fields, headers = await self._read(request, RerankRequest, backend)
      texts = [each.text if isinstance(each, RankedDocument) else each for each in fields.documents]
      _check_count("top_n", fields.top_n)
      if not texts:
        raise InvalidRequest("is an empty list: send at least one document", field="documents")
      vectors, num_tokens = await self._embed(request, backend, [fields.query, *texts], fields, "documents")
      scores = [_cosine(vectors[0], vector) for vector in vectors[1:]]
      best = sorted(range(len(texts)), key=lambda index: -scores[index])[: fields.top_n]
      shows = fields.return_documents is not False
      results = [
        {"index": index} | ({"document": {"text": texts[index]}} if shows else {}) | {"relevance_score": scores[index]}
        for index in best
      ]
      body = {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": backend.model,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
      }
      return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)

  async def _read[T: EmbeddingFields](
    self, request: Request, kind: type[T], backend: Backend
  ) -> tuple[T, dict[str, str]]:
    """Returns the body's fields, and the header of ignored ones."""
    values = await read_json_object(request, self._state, self._options)
    fields, ignored = read_fields(values, kind)
    request_validation.check_model_name(fields.model or "", backend.model)
    if not backend.config.enable_embeddings:
      raise InvalidRequest("is not served for embeddings: serve it with --enable_embeddings", field="model")
    return fields, judge_ignored(ignored, strict=self._options.strict_requests)

  async def _embed(
    self,
    request: Request,
    backend: Backend,
    inputs: Sequence[str | list[int]],
    fields: EmbeddingFields,
    field: str,
  ) -> tuple[list[Vector], int]:
    """Returns the raw embedding of each input, and the tokens of all inputs.

    Args:
      request: a request whose body has been read.
      backend: the backend that serves.
      inputs: texts, or token ids.
      fields: the request's fields.
      field: the name of the inputs, for errors.
    """
    if len(inputs) > MAX_INPUTS:
      raise InvalidRequest(f"has {len(inputs)} entries, the limit is {MAX_INPUTS}: send several requests", field=field)
    prompts = await self._state.run_in_text_pool(lambda: _tokenize(backend, inputs, fields, field))
    request.state.field_names["prompt"] = field
    calls = [
      GenerationCall(
        request_id="",
        prompt_token_ids=prompt,
        params=(_PARAMS,),
        stop_strings=(),
        return_text=False,
        return_token_ids=False,
        skip_special_tokens=True,
        priority=fields.priority or 0,
        queue_timeout_s=None,
        cache_salt=b"",
        tenant=request.state.tenant,
      )
      for prompt in prompts
    ]
    config = backend.config
    vectors: list[Vector] = []
    # In waves, because a client may send more inputs than the queue holds.
    for wave in itertools.batched(calls, max(1, min(2 * config.max_num_seqs, config.max_queued_requests // 2))):
      running = RunningGenerations(backend.generations, request.state.tenant)
      try:
        for call in wave:
          await running.start_generation(call)
        await unless_gone(request.receive, running.wait_ended())
        vectors += (_read_vector(generation.outputs[0].embedding) for generation in running.live)
      finally:
        running.close()
    num_tokens = sum(map(len, prompts))
    request.state.notes.update(prompt_tokens=num_tokens)
    return vectors, num_tokens


def check_dimensions(dimensions: int | None, size: int) -> None:
  """Raises InvalidRequest for a number of dimensions that no embedding of `size` numbers has."""
  _check_count("dimensions", dimensions)
  if dimensions is not None and dimensions > size:
    raise InvalidRequest(f"={dimensions} is more than the model's {size}: send at most {size}", field="dimensions")


def _check_count(name: str, value: int | None) -> None:
  if value is not None and value < 1:
    raise InvalidRequest(f"={value} is not allowed: send at least 1, or leave it out", field=name)


def _tokenize(
  backend: Backend, inputs: Sequence[str | list[int]], fields: EmbeddingFields, field: str
) -> list[tuple[int, ...]]:
  """Returns the token ids of each input. Raises InvalidRequest, NoTokenizer."""
  prompts = []
  for each in inputs:
    if isinstance(each, str):
      wanted = pb.TokenizeRequest(text=each, add_special_tokens=fields.add_special_tokens)
      prompts.append(tuple(request_validation.prompt_token_ids(wanted, backend.tokenizer)))
    else:
      request_validation.check_token_ids(field, each, backend.config.vocab_size)
      prompts.append(tuple(each))
  return prompts


def _read_vector(values: bytes) -> Vector:
  vector = array.array("f", values)
  if sys.byteorder == "big":
    vector.byteswap()
  return vector


def _little_endian(vector: Vector) -> bytes:
  if sys.byteorder == "big":
    vector = vector[:]
    vector.byteswap()
  return vector.tobytes()


def _scale_to_one(vector: Vector) -> Vector:
  length = math.sqrt(math.sumprod(vector, vector))
  return array.array("f", (value / length for value in vector)) if length else vector


def _cosine(first: Vector, second: Vector) -> float:
  lengths = math.sqrt(math.sumprod(first, first) * math.sumprod(second, second))
  return math.sumprod(first, second) / lengths if lengths else 0.0
