"""Uses a server through Haystack as its users do; any fault is an exception. Knows nothing of Sluice.

python use_haystack.py http://127.0.0.1:8000/v1 MODEL
"""

import json
import sys
from typing import Literal

from haystack import Document, Pipeline  # pyright: ignore[reportMissingImports]
from haystack.components.builders import ChatPromptBuilder  # pyright: ignore[reportMissingImports]
from haystack.components.embedders import (  # pyright: ignore[reportMissingImports]
  OpenAIDocumentEmbedder,
  OpenAITextEmbedder,
)
from haystack.components.generators.chat import OpenAIChatGenerator  # pyright: ignore[reportMissingImports]
from haystack.components.retrievers.in_memory import (  # pyright: ignore[reportMissingImports]
  InMemoryEmbeddingRetriever,
)
from haystack.dataclasses import ChatMessage, StreamingChunk  # pyright: ignore[reportMissingImports]
from haystack.document_stores.in_memory import InMemoryDocumentStore  # pyright: ignore[reportMissingImports]
from haystack.utils import Secret  # pyright: ignore[reportMissingImports]
import pydantic


class NamedCity(pydantic.BaseModel):
  """The weather of one day."""

  city: Literal["Oslo", "Paris", "Rome"]


def main(base_url: str, model: str) -> None:
  """Gets a chat whole and streamed, a schema's object, and an answer from a pipeline with embeddings."""
  key = Secret.from_token("unused")

  def make_chat(**options: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
      api_key=key, model=model, api_base_url=base_url, generation_kwargs={"temperature": 0, "max_tokens": 60, **options}
    )

  question = [ChatMessage.from_user("37 + 5 = ?")]
  whole = make_chat().run(question)["replies"][0]
  pieces: list[str] = []

  def add(chunk: StreamingChunk) -> None:
    pieces.append(chunk.content)

  streamed = make_chat().run(question, streaming_callback=add)["replies"][0]
  assert "".join(pieces) == streamed.text == whole.text, pieces
  [held] = make_chat(response_format=NamedCity).run(question)["replies"]
  NamedCity.model_validate(json.loads(held.text))

  store = InMemoryDocumentStore()
  documents = [Document(content="The cat sat on the mat."), Document(content="37 + 5 = 42")]
  options = {"api_key": key, "model": model, "api_base_url": base_url}
  store.write_documents(OpenAIDocumentEmbedder(**options, progress_bar=False).run(documents)["documents"])
  pipeline = Pipeline()
  pipeline.add_component("embedder", OpenAITextEmbedder(**options))
  pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
  template = [ChatMessage.from_user("{% for each in documents %}{{ each.content }} {% endfor %}Where is the cat?")]
  pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables="*"))
  pipeline.add_component("chat", make_chat())
  pipeline.connect("embedder.embedding", "retriever.query_embedding")
  pipeline.connect("retriever.documents", "prompt.documents")
  pipeline.connect("prompt.prompt", "chat.messages")
  found = pipeline.run({"embedder": {"text": "The cat sat on the mat."}}, include_outputs_from={"retriever"})
  assert found["retriever"]["documents"][0].content == documents[0].content, found
  assert found["chat"]["replies"][0].text, found
  print(f"{whole.text!r}, {held.text}, an answer from a pipeline of {len(pipeline.graph)} components")


if __name__ == "__main__":
  main(*sys.argv[1:])
