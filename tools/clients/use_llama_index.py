"""Uses a server through LlamaIndex as its users do; any fault is an exception. Knows nothing of Sluice.

python use_llama_index.py http://127.0.0.1:8000/v1 MODEL
"""

import sys
from typing import Literal

from llama_index.core import Document, VectorStoreIndex  # pyright: ignore[reportMissingImports]
from llama_index.core.llms import ChatMessage  # pyright: ignore[reportMissingImports]
from llama_index.core.prompts import PromptTemplate  # pyright: ignore[reportMissingImports]
from llama_index.embeddings.openai_like import OpenAILikeEmbedding  # pyright: ignore[reportMissingImports]
from llama_index.llms.openai_like import OpenAILike  # pyright: ignore[reportMissingImports]
import pydantic


class Temperature(pydantic.BaseModel):
  """The weather of one day."""

  city: Literal["Oslo", "Paris", "Rome"]
  degrees: int = pydantic.Field(ge=-9, le=39)


def main(base_url: str, model: str) -> None:
  """Gets a chat whole and streamed, a completion, an object by a tool, and an answer from an index of embeddings."""
  llm = OpenAILike(
    model=model,
    api_base=base_url,
    api_key="unused",
    temperature=0,
    max_tokens=100,
    context_window=4096,
    is_chat_model=True,
    is_function_calling_model=True,
  )
  question = [ChatMessage(role="user", content="37 + 5 = ?")]
  whole = llm.chat(question).message.content
  assert whole and "".join(piece.delta or "" for piece in llm.stream_chat(question)) == whole
  raw = OpenAILike(model=model, api_base=base_url, api_key="unused", temperature=0, max_tokens=8, is_chat_model=False)
  assert raw.complete("Once upon a time").text
  weather = PromptTemplate("What is the weather in {city}?")
  held = llm.structured_predict(Temperature, weather, city="Oslo")
  assert isinstance(held, Temperature), held
  embed = OpenAILikeEmbedding(model_name=model, api_base=base_url, api_key="unused")
  documents = [Document(text="The cat sat on the mat."), Document(text="37 + 5 = 42")]
  index = VectorStoreIndex.from_documents(documents, embed_model=embed)
  [best] = index.as_retriever(similarity_top_k=1).retrieve("The cat sat on the mat.")
  assert best.text == documents[0].text, best
  answer = index.as_query_engine(llm=llm, similarity_top_k=2).query("Where is the cat?")
  assert len(answer.source_nodes) == 2, answer
  print(f"{whole!r}, {held}, an answer from {len(answer.source_nodes)} documents")


if __name__ == "__main__":
  main(*sys.argv[1:])
