"""Declares the bodies of /v1/embeddings, /v1/score, /v1/rerank and /classify. Reads none itself."""

from typing import Annotated

import msgspec
from msgspec import Meta

from server.http.openai.request_fields import (
  PROMPT_REMEDY,
  Int32,
  PositiveCount,
  RequestFields,
  Text,
  TokenId,
  Unsupported,
)

ENCODINGS = ("float", "base64")
_HARMLESS = ("user", "metadata", "service_tier", "input_type", "embedding_types", "truncation_side")
_NO_IMAGES = "the model reads text; send texts"
_UNSUPPORTED: Unsupported = {
  "truncate_prompt_tokens": ((), "inputs are never cut; shorten them"),
  "truncate": (("NONE",), "inputs are never cut; shorten them"),
  "max_tokens_per_doc": ((), "documents are never cut; shorten them"),
  "max_chunks_per_doc": ((), "documents are never cut; shorten them"),
  "messages": ((), "send the rendered text as input"),
  "chat_template": ((), "send the rendered text as input"),
  "images": (([],), _NO_IMAGES),
  "mm_processor_kwargs": (({},), _NO_IMAGES),
}
type Texts = Text | list[Text]


class EmbeddingFields(RequestFields, kw_only=True):
  """Fields that embeddings, scores and rankings share."""

  harmless = _HARMLESS
  unsupported = _UNSUPPORTED
  priority: Annotated[Int32, Meta(description="Lower first.")] | None = None
  add_special_tokens: (
    Annotated[bool, Meta(description="Add the tokenizer's own tokens, such as BOS. Default true.")] | None
  ) = None


class EmbeddingRequest(EmbeddingFields, kw_only=True):
  """Fields that are not listed are ignored and named in x-sluice-ignored-fields, or refused under --strict_requests."""

  harmless = (*_HARMLESS, "use_activation")
  remedies = {"input": PROMPT_REMEDY}
  input: Text | list[Text | TokenId | list[TokenId]]
  encoding_format: Annotated[str, Meta(description="float (default) or base64 of little-endian float32.")] | None = None
  dimensions: (
    Annotated[PositiveCount, Meta(description="Keep the first numbers; for models trained so (Matryoshka).")] | None
  ) = None
  normalize: Annotated[bool, Meta(description="Scale to length 1. Default true.")] | None = None


class ClassFields(EmbeddingFields, kw_only=True):
  """Fields of requests that a head of classes may answer."""

  use_activation: (
    Annotated[bool, Meta(description="false: the numbers of a head of classes as they are. Default true.")] | None
  ) = None


class ClassifyRequest(ClassFields, kw_only=True):
  """Texts, or token ids, to classify by the model's head."""

  remedies = {"input": PROMPT_REMEDY}
  input: Text | list[Text | TokenId | list[TokenId]]


class ScoreRequest(ClassFields, kw_only=True):
  """One text against one or many, or two lists of one length."""

  text_1: Texts
  text_2: Texts


class RankedDocument(msgspec.Struct):
  """A document with its text in a field, as Jina's clients send it."""

  text: Text


class RerankRequest(ClassFields, kw_only=True):
  """A query and the documents to rank."""

  query: Text
  documents: list[Text | RankedDocument]
  top_n: Annotated[PositiveCount, Meta(description="Return the best alone. Default: all.")] | None = None
  return_documents: Annotated[bool, Meta(description="Results have the documents. Default true.")] | None = None
