"""Scenario: wrong requests, unknown ids, other tenants and lost clients at every endpoint, on the demo model.

The server is server.main, with embeddings, batches and two tenants. In a minute or less.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import threading
import time
from typing import Any, Self

import httpx

from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig, wait_for
from tools.measure import ROOT
from tools.server_process import RunningServer

_FLAGS = (
  *(f"--model={ROOT / 'models' / 'demo'}", "--host=127.0.0.1", "--http_port=0", "--enable_embeddings"),
  *("--token_budgets=64", "--max_num_seqs=8", "--num_blocks=256", "--max_model_len=512"),
)
_KEYS = {"a": "rW5vJ8Jk2nq4uYt1sXzB8mE0", "b": "Qm3cT7uEw9pLz2aHk6dGf1Vx"}
_TIMEOUT_S = 60.0
_BATCH = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
_CHAT = [{"role": "user", "content": "37 + 5 = ?"}]
# A vector may differ in the last bits, by the other rows of its step.
_CLOSE = 1e-4


@dataclasses.dataclass(frozen=True)
class WrongRequest:
  """A request and its required status. Args of httpx are in `sent`."""

  method: str
  path: str
  status: int
  sent: dict[str, Any]


def _post(path: str, status: int, *bodies: dict[str, Any]) -> list[WrongRequest]:
  return [WrongRequest("POST", path, status, {"json": body}) for body in bodies]


def wrong_requests() -> list[WrongRequest]:
  """Returns requests that must be refused, of every endpoint."""
  long = "word " * 2000
  form: dict[str, Any] = {"files": {"file": ("a", b"x")}}
  return [
    *_post("/v1/responses", 400, {}, {"input": []}, {"input": "a", "max_output_tokens": 0}, {"input": long}),
    *_post("/v1/responses", 400, {"input": "a", "previous_response_id": "resp_0"}, {"input": "a", "background": True}),
    *_post("/v1/messages", 400, {}, {"messages": []}, {"messages": _CHAT, "max_tokens": 0}),
    *_post("/v1/messages", 400, {"messages": [{"role": "user", "content": long}], "max_tokens": 1}),
    *_post("/v1/embeddings", 400, {}, {"input": []}, {"input": [[]]}, {"input": ["a", 5]}, {"input": [[2**31 - 1]]}),
    *_post("/v1/embeddings", 400, {"input": "a", "dimensions": 257}, {"input": ["a"] * 2049}, {"input": long}),
    *_post("/v1/embeddings", 404, {"input": "a", "model": "gpt"}),
    *_post("/classify", 400, {}, {"input": []}, {"input": "a"}, {"input": [[2**31 - 1]]}, {"input": ["a"] * 2049}),
    *_post("/v1/score", 400, {}, {"text_1": ["a", "b"], "text_2": ["a"]}, {"text_1": "a", "text_2": long}),
    *_post("/v1/rerank", 400, {}, {"query": "a", "documents": []}, {"query": "a", "documents": ["b"], "top_n": 0}),
    WrongRequest("POST", "/v1/files", 400, form),
    WrongRequest("POST", "/v1/files", 400, form | {"data": {"purpose": "assistants"}}),
    WrongRequest("POST", "/v1/files", 415, {"json": {"purpose": "batch"}}),
    WrongRequest("GET", "/v1/files", 400, {"params": {"limit": "0"}}),
    *_post("/v1/batches", 400, {}, _BATCH | {"input_file_id": 7}),
    *_post("/v1/batches", 404, _BATCH | {"input_file_id": "file-0"}),
  ]


def unknown_ids(response: str = "resp_0", file: str = "file-0", batch: str = "batch_0") -> list[WrongRequest]:
  """Returns requests that name what does not exist, or belongs to another tenant."""
  return [
    WrongRequest("GET", f"/v1/responses/{response}", 404, {}),
    WrongRequest("GET", f"/v1/responses/{response}/input_items", 404, {}),
    WrongRequest("POST", f"/v1/responses/{response}/cancel", 404, {}),
    WrongRequest("DELETE", f"/v1/responses/{response}", 404, {}),
    *_post("/v1/responses", 400, {"input": "a", "previous_response_id": response}),
    WrongRequest("GET", f"/v1/files/{file}", 404, {}),
    WrongRequest("GET", f"/v1/files/{file}/content", 404, {}),
    WrongRequest("DELETE", f"/v1/files/{file}", 404, {}),
    *_post("/v1/batches", 404, _BATCH | {"input_file_id": file}),
    WrongRequest("GET", f"/v1/batches/{batch}", 404, {}),
    WrongRequest("POST", f"/v1/batches/{batch}/cancel", 404, {}),
  ]


class Tenant:
  """A client with a key."""

  def __init__(self, port: int, name: str):
    self.http = httpx.Client(
      base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S, headers={"authorization": f"Bearer {_KEYS[name]}"}
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.http.close()

  def refused(self, requests: Sequence[WrongRequest]) -> list[str]:
    """Sends requests; returns what was wrong with their answers."""
    faults = []
    for each in requests:
      answer = self.http.request(each.method, each.path, **each.sent)
      name = f"{each.method} {each.path} {str(each.sent)[:80]}"
      if answer.status_code != each.status:
        faults.append(f"{name} was answered {answer.status_code}, not {each.status}: {answer.text[:120]}")
      elif not (answer.json().get("error") or {}).get("message"):
        faults.append(f"{name} had no error object: {answer.text[:120]}")
    return faults

  def ask_all(self) -> dict[str, Any]:
    """Returns the answers of every endpoint to valid requests, without ids and times."""
    post = self._post
    chat = {"temperature": 0, "ignore_eos": True}
    vector = post("/v1/embeddings", input="the cat sat", dimensions=16)["data"][0]["embedding"]
    scores = post("/v1/score", text_1="the cat sat", text_2=["the cat sat", "37 + 5"])["data"]
    ranking = post("/v1/rerank", query="the cat sat", documents=["37 + 5", "the cat sat"])["results"]
    return {
      "responses": post("/v1/responses", input="37 + 5 = ?", max_output_tokens=8, store=False, **chat)["output"][0][
        "content"
      ],
      "messages": post("/v1/messages", messages=_CHAT, max_tokens=8, **chat)["content"],
      "embeddings": vector,
      "score": [each["score"] for each in scores],
      "rerank": [each["index"] for each in ranking],
    }

  def make_own(self) -> tuple[str, str, str]:
    """Returns the ids of a stored response, a file and a batch that has ended."""
    response = self._post("/v1/responses", input="a", max_output_tokens=2)["id"]
    line = {"custom_id": "1", "method": "POST", "url": _BATCH["endpoint"], "body": {"input": "a"}}
    form: dict[str, Any] = {"files": {"file": ("in", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
    file = self.http.post("/v1/files", **form).raise_for_status().json()["id"]
    batch = self._post("/v1/batches", **_BATCH, input_file_id=file)["id"]
    wait_for(lambda: self.http.get(f"/v1/batches/{batch}").json()["status"] == "completed", _TIMEOUT_S)
    return response, file, batch

  def missing(self, response: str, file: str, batch: str) -> list[str]:
    """Returns which of the own things are gone."""
    paths = (f"/v1/responses/{response}", f"/v1/files/{file}/content", f"/v1/batches/{batch}")
    return [f"{path} is gone" for path in paths if self.http.get(path).status_code != 200]

  def leave(self, path: str, after_s: float, **body: Any) -> None:
    """Sends a request, and closes the connection after a while."""
    with (
      httpx.Client(base_url=self.http.base_url, headers=self.http.headers, timeout=after_s) as client,
      contextlib.suppress(httpx.TimeoutException),
      client.stream("POST", path, json=body) as answer,
    ):
      for _ in answer.iter_raw():
        return

  def num_live(self) -> float:
    """Returns the requests that run or wait."""
    lines = self.http.get("/metrics").text.splitlines()
    return sum(
      float(line.split()[-1])
      for line in lines
      if line.startswith(("sluice_requests_running ", "sluice_requests_waiting "))
    )

  def _post(self, path: str, **body: Any) -> dict[str, Any]:
    return self.http.post(path, json=body).raise_for_status().json()


def endpoints(rig: Rig, asked: int = 40) -> list[Row]:
  """Checks the refusals, ids and lost clients of every endpoint beside valid requests, whose answers stay."""
  with _serving(rig) as port, Tenant(port, "a") as mine, Tenant(port, "b") as other:
    before = mine.ask_all()
    own = mine.make_own()
    wrong, unknown, of_another = wrong_requests(), unknown_ids(), unknown_ids(*own)
    faults_of_wrong, faults_of_unknown = mine.refused(wrong), mine.refused(unknown)
    faults_of_another = other.refused(of_another) + mine.missing(*own)
    for path in ("/v1/files", "/v1/batches"):
      if other.http.get(path).json()["data"]:
        faults_of_another.append(f"{path} lists what belongs to another tenant")
    left = _leave_in_the_middle(mine)
    wait_for(lambda: not mine.num_live(), _TIMEOUT_S)
    faults_of_lost = [f"{live:g} requests run on"] if (live := mine.num_live()) else []
    faults_of_good = _differences(before, mine.ask_all())
  return [
    none_of("wrong requests to every endpoint", "the required status, an error object", faults_of_wrong, len(wrong), 0),
    none_of("unknown ids", "404, or 400 where a body names them", faults_of_unknown, len(unknown), 0),
    none_of("ids of another tenant", "as unknown ones; their owner keeps them", faults_of_another, len(of_another), 0),
    none_of("clients that leave in the middle", "nothing runs on", faults_of_lost, left, asked),
    none_of("valid requests to every endpoint, before and after", "the same answers", faults_of_good, len(before), 0),
  ]


@contextlib.contextmanager
def _serving(rig: Rig) -> Iterator[int]:
  """Yields the HTTP port."""
  folder = rig.folder / f"endpoints-{time.monotonic_ns()}"
  folder.mkdir()
  keys, port_file = folder / "keys", folder / "http"
  keys.touch(0o600)
  keys.write_text("".join(f"{key} {name}\n" for name, key in _KEYS.items()), "utf-8")
  flags = (*_FLAGS, f"--batch_dir={folder / 'batches'}", f"--api_key_file={keys}", f"--http_port_file={port_file}")
  with RunningServer(flags, folder / "log"):
    yield int(port_file.read_text("utf-8"))


def _leave_in_the_middle(tenant: Tenant) -> int:
  """Loses clients at every endpoint, several at once; returns their number."""
  endless = {"temperature": 0, "ignore_eos": True}
  lost = []
  for number in range(10):
    after_s = 0.01 * (1 + number)
    lost += [
      ("/v1/embeddings", after_s, {"input": [f"number {each}" for each in range(1000)]}),
      ("/v1/rerank", after_s, {"query": "a", "documents": [f"number {each}" for each in range(1000)]}),
      ("/v1/responses", after_s, {"input": "a", "max_output_tokens": 400, "stream": number % 2 == 0, **endless}),
      ("/v1/messages", after_s, {"messages": _CHAT, "max_tokens": 400, "stream": number % 2 == 0, **endless}),
    ]
  threads = [threading.Thread(target=tenant.leave, args=(path, s), kwargs=body) for path, s, body in lost]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return len(threads)


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
  """Returns the endpoints whose answers differ."""
  faults = []
  for name, one in before.items():
    other = after[name]
    if name in ("embeddings", "score"):
      same = max(abs(a - b) for a, b in zip(one, other, strict=True)) < _CLOSE
    else:
      same = one == other
    if not same:
      faults.append(f"/v1/{name} was answered {str(other)[:100]}, before {str(one)[:100]}")
  return faults
