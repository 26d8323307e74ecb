"""Serves embeddings and classes, and scores and rankings made of either. Knows no socket.

A score is the cosine of two embeddings, as of a bi-encoder, or what a head of one class makes of both texts together,
as of a cross-encoder.
"""

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
from server.generation.prompt_classification import (
  check_scores_pairs,
  find_classifier_adapter,
  make_probabilities,
)
from server.generation.prompt_embedding import (
  EmbeddingInput,
  Vector,
  check_dimensions,
  check_num_inputs,
  embed_prompts,
  find_embedding_adapter,
  shorten_vector,
  tokenize_inputs,
)
from server.generation.serving_state import Backend, ServingState
from server.http.embeddings.embedding_fields import (
  ENCODINGS,
  ClassFields,
  ClassifyRequest,
  EmbeddingFields,
  EmbeddingRequest,
  RankedDocument,
  RerankRequest,
  ScoreRequest,
)
from server.http.http_options import HttpOptions
from server.http.json_exchange import read_json_object, unless_gone
from server.http.openai.generate_request import judge_ignored, list_prompts, read_fields


class EmbeddingEndpoints:
  """The four endpoints."""

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
      check_dimensions(fields.dimensions, backend.config)
      inputs = list_prompts(fields.input, "input")
      vectors, num_tokens = await self._embed(request, backend, inputs, fields, "input")

      def write() -> bytes:
        data = []
        for index, vector in enumerate(vectors):
          shown = shorten_vector(vector, fields.dimensions, fields.normalize is not False)
          value = base64.b64encode(_little_endian(shown)).decode() if encoding == "base64" else shown.tolist()
          data.append({"object": "embedding", "index": index, "embedding": value})
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return msgspec.json.encode(
          {"object": "list", "data": data, "model": fields.model or backend.model, "usage": usage}
        )

      return Response(await self._state.run_in_text_pool(write), media_type="application/json", headers=headers)

  async def classify(self, request: Request) -> Response:
    """POST /classify and /v1/classify, in vLLM's form."""
    with self._state.admit() as backend:
      fields, headers = await self._read(request, ClassifyRequest, backend)
      inputs = list_prompts(fields.input, "input")
      outputs, num_tokens = await self._embed(request, backend, inputs, fields, "input")
      labels, activation = backend.config.labels, _activation_of(fields, backend.config.class_activation)

      def write() -> bytes:
        data = []
        for index, output in enumerate(outputs):
          probs = make_probabilities(output, activation)
          label = labels[max(range(len(probs)), key=probs.__getitem__)]
          data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return msgspec.json.encode(
          {
            "id": f"classify-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": fields.model or backend.model,
            "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
          }
        )

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
      scores, num_tokens = await self._score_texts(request, backend, first, second, fields, "text_1")
      data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
      body = {
        "id": f"score-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": fields.model or backend.model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
      }
      return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)

  async def rerank(self, request: Request) -> Response:
    """POST /v1/rerank, /v2/rerank and /rerank, in the form of Jina and Cohere."""
    with self._state.admit() as backend:
      fields, headers = await self._read(request, RerankRequest, backend)
      texts = [each.text if isinstance(each, RankedDocument) else each for each in fields.documents]
      if fields.top_n is not None and fields.top_n < 1:
        raise InvalidRequest(f"={fields.top_n} is not allowed: send at least 1, or leave it out", field="top_n")
      if not texts:
        raise InvalidRequest("is an empty list: send at least one document", field="documents")
      scores, num_tokens = await self._score_texts(request, backend, [fields.query], texts, fields, "documents")
      best = sorted(range(len(texts)), key=lambda index: -scores[index])[: fields.top_n]
      shows = fields.return_documents is not False
      results = [
        {"index": index} | ({"document": {"text": texts[index]}} if shows else {}) | {"relevance_score": scores[index]}
        for index in best
      ]
      body = {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": fields.model or backend.model,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
      }
      return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)

  async def _read[T: EmbeddingFields](
    self, request: Request, kind: type[T], backend: Backend
  ) -> tuple[T, dict[str, str]]:
    """Returns the body's fields, and the header of ignored ones. Refuses a model that does not serve them."""
    values = await read_json_object(request, self._state, self._options)
    fields, ignored = read_fields(values, kind)
    request.state.notes.update(adapter=_find_adapter(fields, backend) or None)
    return fields, judge_ignored(ignored, strict=self._options.strict_requests)

  async def _score_texts(
    self,
    request: Request,
    backend: Backend,
    first: Sequence[str],
    second: Sequence[str],
    fields: ClassFields,
    field: str,
  ) -> tuple[list[float], int]:
    """Returns the score of each pair of texts, and the tokens of all.

    Args:
      request: a request whose body has been read.
      backend: the backend that serves.
      first: one text, or as many as `second`.
      second: the other texts.
      fields: the request's fields.
      field: the name of the inputs, for errors.
    """
    if not backend.config.labels:
      vectors, num_tokens = await self._embed(request, backend, [*first, *second], fields, field)
      pairs = zip(itertools.cycle(vectors[: len(first)]), vectors[len(first) :], strict=False)
      return [_cosine(*pair) for pair in pairs], num_tokens
    texts = list(zip(itertools.cycle(first), second, strict=False))
    outputs, num_tokens = await self._embed(request, backend, texts, fields, field)
    activation = _activation_of(fields, backend.config.pair_activation)
    return [make_probabilities(output, activation)[0] for output in outputs], num_tokens

  async def _embed(
    self,
    request: Request,
    backend: Backend,
    inputs: Sequence[EmbeddingInput],
    fields: EmbeddingFields,
    field: str,
  ) -> tuple[list[Vector], int]:
    """Returns the raw embedding of each input, or a head's outputs for it, and the tokens of all inputs.

    Args:
      request: a request whose body has been read.
      backend: the backend that serves.
      inputs: texts, pairs of texts, or token ids.
      fields: the request's fields.
      field: the name of the inputs, for errors.
    """
    check_num_inputs(len(inputs), field)
    prompts = await self._state.run_in_text_pool(
      lambda: tokenize_inputs(backend.tokenizer, backend.config, inputs, fields.add_special_tokens, field)
    )
    request.state.field_names["prompt"] = field
    tenant = request.state.tenant
    work = embed_prompts(
      backend,
      prompts,
      priority=fields.priority or 0,
      tenant=tenant,
      owner=tenant,
      takes_free_slots=getattr(request.state, "takes_free_slots", False),
      adapter=_find_adapter(fields, backend),
    )
    vectors = await unless_gone(request.receive, work)
    num_tokens = sum(map(len, prompts))
    request.state.notes.update(prompt_tokens=num_tokens)
    return vectors, num_tokens


def _find_adapter(fields: EmbeddingFields, backend: Backend) -> str:
  """Returns the adapter that a request names, or "". Raises InvalidRequest if the model does not serve the request."""
  if isinstance(fields, ClassFields) and backend.config.labels:
    if not isinstance(fields, ClassifyRequest):
      check_scores_pairs(backend.config)
    return backend.find_adapter(fields.model)
  if isinstance(fields, ClassifyRequest):
    return find_classifier_adapter(fields.model, backend)
  return find_embedding_adapter(fields.model, backend)


def _activation_of(fields: ClassFields, activation: str) -> str:
  return "none" if fields.use_activation is False else activation


def _little_endian(vector: Vector) -> bytes:
  if sys.byteorder == "big":
    vector = vector[:]
    vector.byteswap()
  return vector.tobytes()


def _cosine(first: Vector, second: Vector) -> float:
  lengths = math.sqrt(math.sumprod(first, first) * math.sumprod(second, second))
  return math.sumprod(first, second) / lengths if lengths else 0.0
