"""Clients of the OpenAI-compatible API that know every expected token. Jobs for client processes."""

import asyncio
from collections.abc import Sequence
import contextlib
import json
import random
from typing import Any

import httpx

from tools.chaos.streams import TIMEOUT_S, Answer, StreamRequest, on_loop

_EVENT = "data: "


def complete_all(http_port: int, asks: Sequence[StreamRequest], at_once: int, seed: int) -> list[Answer]:
  """Runs a closed loop: a third whole, a third streamed, a third left after a few events, with no answer."""
  return on_loop(_complete_all(http_port, asks, at_once, random.Random(seed)))


async def _complete_all(
  http_port: int, asks: Sequence[StreamRequest], at_once: int, rng: random.Random
) -> list[Answer]:
  answers: list[Answer] = []
  waiting = iter(asks)
  limits = httpx.Limits(max_connections=at_once)
  async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=TIMEOUT_S, limits=limits) as client:

    async def work() -> None:
      for ask in waiting:
        how = rng.randrange(3)
        answer = Answer(ask, code="OK")
        ended = True
        if how == 0:
          await _whole(client, answer)
        else:
          ended = await _streamed(client, answer, rng.randint(0, 3) if how == 2 else None)
        if ended:
          answer.judge()
          answers.append(answer)

    await asyncio.gather(*(work() for _ in range(at_once)))
  return answers


def _body(ask: StreamRequest, *, stream: bool) -> dict[str, Any]:
  return {
    "prompt": list(ask.prompt),
    "max_tokens": ask.max_tokens,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": stream,
  }


async def _whole(client: httpx.AsyncClient, answer: Answer) -> None:
  response = await client.post("/v1/completions", json=_body(answer.ask, stream=False))
  if response.status_code != 200:
    answer.code, answer.reason = str(response.status_code), response.text[:200]
    return
  answer.tokens.extend(response.json()["choices"][0]["token_ids"])


async def _streamed(client: httpx.AsyncClient, answer: Answer, most: int | None) -> bool:
  """Reads at most this many events (None: all); returns whether the stream ended."""
  async with client.stream("POST", "/v1/completions", json=_body(answer.ask, stream=True)) as response:
    if response.status_code != 200:
      answer.code, answer.reason = str(response.status_code), (await response.aread()).decode()[:200]
      return True
    events = 0
    generator: Any = response.aiter_lines()  # missing in its type
    async with contextlib.aclosing(generator) as lines:
      async for line in lines:
        if not line.startswith(_EVENT):
          continue
        if events == most:
          return False
        events += 1
        if line == f"{_EVENT}[DONE]":
          return True
        for choice in json.loads(line.removeprefix(_EVENT)).get("choices", ()):
          answer.tokens.extend(choice.get("token_ids") or ())
  answer.code = "CUT OFF"
  return True
