"""Measures interactive requests alone, and beside a flood of batch lines, on one server with the demo model.

  python -m tools.bench.beside_batches
  python -m tools.bench.beside_batches --requests=100 --lines=20000 -- --policy=priority --max_num_seqs=32

Flags after -- are the server's. Requests are chats of --tokens tokens, one after the other, as of a lone user. The tool
prints the time of the first token and the gaps between chunks, both ways, and the lines that ran meanwhile.
"""

from collections.abc import Iterator, Sequence
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import httpx

from engine.errors import ConfigError
from tools.arguments import CommandParser, positive_int
from tools.measure import ROOT, machine
from tools.report.latency import percentile
from tools.server_process import RunningServer

_CHAT = "/v1/chat/completions"
_EVENT = "data: "


def measure_requests(client: httpx.Client, count: int, tokens: int) -> dict[str, float | None]:
  """Returns percentiles of `count` streamed chats, in milliseconds."""
  firsts, gaps = [], []
  for number in range(count):
    times = [time.perf_counter(), *_times_of_chunks(client, _make_body(f"user {number}", tokens))]
    if len(times) < 2:
      raise ConfigError(f"request {number} had no tokens; see the server's log")
    firsts.append(times[1] - times[0])
    gaps += [later - earlier for earlier, later in zip(times[1:], times[2:], strict=False)]
  return {
    f"{name} p{share}": 1000 * value
    for name, values in (("first token ms", firsts), ("gap ms", gaps))
    for share in (50, 99)
    if (value := percentile(values, share)) is not None
  }


def start_flood(client: httpx.Client, lines: int, tokens: int) -> str:
  """Returns the id of a batch of so many chats, once some of them have ended."""
  texts = (
    json.dumps({"custom_id": str(n), "method": "POST", "url": _CHAT, "body": _make_body(f"line {n}", tokens)})
    for n in range(lines)
  )
  form: dict[str, Any] = {"files": {"file": ("in.jsonl", "\n".join(texts).encode())}, "data": {"purpose": "batch"}}
  file_id = client.post("/v1/files", **form).raise_for_status().json()["id"]
  body = {"input_file_id": file_id, "endpoint": _CHAT, "completion_window": "24h"}
  batch_id = client.post("/v1/batches", json=body).raise_for_status().json()["id"]
  while not count_done(client, batch_id):
    time.sleep(0.1)
  return batch_id


def count_done(client: httpx.Client, batch_id: str) -> int:
  """Returns the finished lines of a batch. Raises ConfigError if it has failed."""
  batch = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
  if batch["status"] == "failed":
    raise ConfigError(f"the batch failed: {batch['errors']}")
  return batch["request_counts"]["completed"]


def measure(requests: int, tokens: int, lines: int, flags: Sequence[str]) -> dict[str, Any]:
  """Runs both measurements on one server and returns the results."""
  with tempfile.TemporaryDirectory(prefix="sluice-beside-") as name:
    folder = pathlib.Path(name)
    own = (f"--model={ROOT / 'models' / 'demo'}", "--host=127.0.0.1", "--http_port=0")
    files = (f"--http_port_file={folder / 'http'}", f"--batch_dir={folder / 'batches'}")
    with RunningServer([*own, *files, *flags], folder / "log"):
      url = f"http://127.0.0.1:{(folder / 'http').read_text('utf-8').strip()}"
      with httpx.Client(base_url=url, timeout=600) as client:
        measure_requests(client, 5, tokens)
        alone = measure_requests(client, requests, tokens)
        batch_id = start_flood(client, lines, tokens)
        before, began = count_done(client, batch_id), time.perf_counter()
        beside = measure_requests(client, requests, tokens)
        seconds, done = time.perf_counter() - began, count_done(client, batch_id)
        is_flooded = done < lines
        client.post(f"/v1/batches/{batch_id}/cancel")
  if not is_flooded:
    raise ConfigError(f"--lines={lines}: the batch ended before the requests did; send more lines")
  return {"alone": alone, "beside the batch": beside, "lines a second": (done - before) / seconds}


def _make_body(text: str, tokens: int) -> dict[str, Any]:
  messages = [{"role": "user", "content": text}]
  return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _times_of_chunks(client: httpx.Client, body: dict[str, Any]) -> Iterator[float]:
  """Yields the time of each chunk that has text."""
  with client.stream("POST", _CHAT, json=body | {"stream": True}) as response:
    response.raise_for_status()
    for line in response.iter_lines():
      if line.startswith(_EVENT) and '"content"' in line:
        yield time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench.beside_batches", __doc__)
  parser.add_argument("--requests", type=positive_int, default=50, help="interactive requests of each measurement")
  parser.add_argument("--tokens", type=positive_int, default=64, help="output tokens of a request and of a line")
  parser.add_argument("--lines", type=positive_int, default=10_000, help="lines of the batch")
  parser.add_argument("flags", nargs="*", help="flags of the server, after --")
  args = parser.parse_args(arguments)
  try:
    found = measure(args.requests, args.tokens, args.lines, args.flags)
  except ConfigError as error:
    return parser.failed(error)
  print(json.dumps({"machine": machine(), **found}, indent=2))
  return 0


if __name__ == "__main__":
  sys.exit(main())
