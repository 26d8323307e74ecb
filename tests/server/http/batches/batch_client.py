"""What the tests of batches do as clients: write lines, create batches, wait for their ends, read their outputs."""

import io
import json
import time
from typing import Any

import openai

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4, "seed": 1}


def make_line(custom_id: str, body: Any = BODY, url: str = CHAT, **more: Any) -> str:
  return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def upload(client: openai.OpenAI, lines: list[str]) -> str:
  return client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch").id


def create(client: openai.OpenAI, lines: list[str], endpoint: Any = CHAT) -> Any:
  return client.batches.create(input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h")


def wait(client: openai.OpenAI, batch_id: str) -> Any:
  """The batch, once it has ended."""
  for _ in range(6000):
    batch = client.batches.retrieve(batch_id)
    if batch.status in ("completed", "failed", "expired", "cancelled"):
      return batch
    time.sleep(0.02)
  raise AssertionError("the batch never ended")


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
  return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
