"""Sends a real server bodies that schemathesis makes from its OpenAPI document, valid and invalid.

  python -m tools.chaos.http_bodies --count=20000

The server is a process with the fake device. Every response must be complete, in time, below 500 and of the documented
form. At the end the server must serve, with nothing left running. Prints JSON; exit code 1 if a check failed, 2 for a
bad command line.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any
import warnings

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisDeprecationWarning
import jsonschema
from prometheus_client.parser import text_string_to_metric_families
import psutil
import schemathesis
from schemathesis.core import NotSet

from server.http.openai import openapi
from server.http.openai.request_fields import INT32_MAX
from tools.arguments import CommandParser, output_file, positive_float, positive_int
from tools.measure import write_result
from tools.server_process import RunningServer

# The limit is small, since a request may generate up to it.
_FLAGS = ("--fake_device", "--max_model_len=256", "--http_port=0", "--host=127.0.0.1")
_MAX_FINDINGS = 20
_SHOWN_CHARS = 2000
# Earlier bodies fill caches.
_WARM_UP = 0.2
_UNCHECKED = (
  *(HealthCheck.data_too_large, HealthCheck.filter_too_much),
  *(HealthCheck.large_base_example, HealthCheck.too_slow),
)
# Bodies of one choice of fields.
_BATCH = 100
_SMALL = 100
# A body may have at most one of them.
_CONSTRAINTS = (
  *("response_format", "structured_outputs"),
  *(f"guided_{name}" for name in ("json", "regex", "choice", "grammar")),
)


@dataclasses.dataclass
class Tally:
  """The result of the bodies.

  Attributes:
    bodies, by_status, by_operation: counts.
    crashes: times the server ended, or closed a connection without a response.
    hangs: bodies without a complete response in time.
    server_errors: statuses of 500 and more.
    unlike_document: responses of an undocumented form.
    slowest_s: the slowest response.
    findings: the first faults, with their bodies.
  """

  bodies: int = 0
  by_status: Counter[str] = dataclasses.field(default_factory=Counter)
  by_operation: Counter[str] = dataclasses.field(default_factory=Counter)
  crashes: int = 0
  hangs: int = 0
  server_errors: int = 0
  unlike_document: int = 0
  slowest_s: float = 0.0
  findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  @property
  def is_clean(self) -> bool:
    return not (self.crashes or self.hangs or self.server_errors or self.unlike_document)

  def found(self, what: str, path: str, body: bytes) -> None:
    """Notes a fault."""
    if len(self.findings) < _MAX_FINDINGS:
      self.findings.append({"what": what, "path": path, "body": body.decode("utf-8", "replace")[:_SHOWN_CHARS]})


class Prober:
  """Sends bodies and judges responses."""

  def __init__(self, base_url: str, hang_s: float):
    """Args: base_url: the server's. hang_s: time limit of a response, in seconds."""
    self.tally = Tally()
    self._http = httpx.Client(base_url=base_url, timeout=hang_s)
    self._hang_s = hang_s
    self.document = self._http.get(openapi.PATH).raise_for_status().json()
    self.model = self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    self._validators: dict[tuple[str, bool], jsonschema.Draft202012Validator] = {}

  def close(self) -> None:
    self._http.close()

  def send(self, path: str, body: bytes) -> None:
    """Sends one body and counts the result."""
    tally = self.tally
    tally.bodies += 1
    tally.by_operation[path] += 1
    began = time.monotonic()
    try:
      answer = self._http.post(path, content=body, headers={"content-type": "application/json"})
    except httpx.TimeoutException:
      tally.hangs += 1
      tally.found(f"no answer within {self._hang_s:g} s", path, body)
      return
    except httpx.TransportError as error:
      tally.crashes += 1
      tally.found(f"no answer: {type(error).__name__}", path, body)
      return
    took = time.monotonic() - began
    tally.slowest_s = max(tally.slowest_s, took)
    tally.by_status[str(answer.status_code)] += 1
    if took > self._hang_s:
      tally.hangs += 1
      tally.found(f"took {took:.1f} s", path, body)
    if answer.status_code >= 500:
      tally.server_errors += 1
      tally.found(f"{answer.status_code}: {answer.text:.300}", path, body)
      return
    wrong = self._unlike(path, answer)
    if wrong:
      tally.unlike_document += 1
      tally.found(wrong, path, body)

  def _unlike(self, path: str, answer: httpx.Response) -> str:
    """Returns how a response differs from the document; empty if it does not."""
    good = answer.status_code == 200
    if good and answer.headers["content-type"].startswith("text/event-stream"):
      # After the first event an error is an event; otherwise the stream has an end event.
      last = answer.text.rstrip().rpartition("data: ")[2]
      return "" if last == "[DONE]" or "error" in json.loads(last) else f"the stream ends with {last:.100}"
    try:
      value = answer.json()
    except ValueError:
      return f"{answer.status_code} without JSON: {answer.text:.100}"
    error = next(self._validator(path, good).iter_errors(value), None)
    return "" if error is None else f"{answer.status_code}: {error.json_path} {error.message:.200}"

  def _validator(self, path: str, good: bool) -> jsonschema.Draft202012Validator:
    known = self._validators.get((path, good))
    if known is None:
      said = self.document["paths"][path]["post"]["responses"]["200" if good else "default"]
      schema = said["content"]["application/json"]["schema"] | {"components": self.document["components"]}
      known = self._validators[path, good] = jsonschema.Draft202012Validator(schema)
    return known

  def wait_idle(self) -> float:
    """Returns the server's unfinished requests after a wait; -1 if it does not report them."""
    deadline = time.monotonic() + self._hang_s
    live = -1.0
    while live != 0 and time.monotonic() < deadline:
      with contextlib.suppress(httpx.HTTPError):
        live = self._live()
      time.sleep(0.05)
    return live

  def _live(self) -> float:
    families = text_string_to_metric_families(self._http.get("/metrics").text)
    return sum(
      sample.value
      for family in families
      if family.name in ("sluice_requests_running", "sluice_requests_waiting")
      for sample in family.samples
    )


def bodies(document: dict[str, Any], model: str, count: int, number: int) -> Iterator[tuple[str, bytes]]:
  """Yields (path, body) `count` times, spread over all operations with a body, half of them valid.

  Args:
    document: OpenAPI.
    model: the served name.
    count: number of bodies.
    number: seed.
  """
  modes = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
  paths = sorted(
    path
    for path, methods in document["paths"].items()
    if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
  )
  left, turn = count, 0
  while left > 0:
    path, mode = paths[turn % len(paths)], modes[turn // len(paths) % len(modes)]
    # Every other round has all fields, which seldom passes validation as a whole.
    wide = turn // (len(paths) * len(modes)) % 2 == 1
    chosen = document if wide else _narrowed(document, path, model, random.Random(number + turn))
    operation = schemathesis.openapi.from_dict(chosen)[path]["POST"]
    made = _make(operation, mode, min(left, _BATCH, -(-count // (len(paths) * len(modes)))), number + turn)
    turn, left = turn + 1, left - len(made)
    yield from ((path, body) for body in made)


def _narrowed(document: dict[str, Any], path: str, model: str, chance: random.Random) -> dict[str, Any]:
  """Returns the document with a few optional fields of one body, and values that the server mostly accepts."""
  narrow = json.loads(json.dumps(document), object_hook=_small)
  content = narrow["paths"][path]["post"]["requestBody"]["content"]["application/json"]
  # /tokenize takes a body of either of two kinds.
  content["schema"] = chance.choice(content["schema"].get("anyOf", [content["schema"]]))
  schema = narrow["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
  properties = schema["properties"]
  optional = [name for name in properties if name not in schema.get("required", ()) and name not in _CONSTRAINTS]
  keep = {*chance.sample(optional, min(6, len(optional))), *schema.get("required", ()), chance.choice(_CONSTRAINTS)}
  schema["properties"] = {name: value for name, value in properties.items() if name in keep}
  if "model" in keep:
    schema["properties"]["model"] = {"enum": [model, None]}
  return narrow


def _small(schema: dict[str, Any]) -> dict[str, Any]:
  """Returns a schema with valid token ids and lengths."""
  return schema | {"maximum": _SMALL} if schema.get("maximum") == INT32_MAX else schema


def _make(operation: Any, mode: schemathesis.GenerationMode, count: int, number: int) -> list[bytes]:
  made: list[bytes] = []

  @seed(number)
  @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=_UNCHECKED)
  @given(operation.as_strategy(generation_mode=mode))
  def note(case: Any) -> None:
    body = case.body
    if not isinstance(body, bytes):
      # Nothing is sent if there is no body. NaN and infinities are written as Python does.
      body = b"" if isinstance(body, NotSet) else json.dumps(_plain(body)).encode()
    made.append(body)

  with warnings.catch_warnings():
    # Hypothesis warns when any thread of the process calls the module `random`.
    warnings.filterwarnings("ignore", "Do not use the `random` module", HypothesisDeprecationWarning)
    note()
  return made[:count]


def probe(count: int, *, number: int, hang_s: float, say: Any = None) -> dict[str, Any]:
  """Starts a server, sends it `count` bodies, and returns the result."""
  with tempfile.TemporaryDirectory(prefix="sluice-bodies-") as folder:
    port_file = pathlib.Path(folder) / "http"
    with RunningServer([*_FLAGS, f"--http_port_file={port_file}"], pathlib.Path(folder) / "log") as server:
      prober = Prober(f"http://127.0.0.1:{port_file.read_text('utf-8').strip()}", hang_s)
      with contextlib.closing(prober):
        memory, process = 0, psutil.Process(server.pid)
        for serial, (path, body) in enumerate(bodies(prober.document, prober.model, count, number)):
          if serial == int(_WARM_UP * count):
            memory = process.memory_info().rss
          if not server.is_alive:
            prober.tally.crashes += 1
            prober.tally.found(f"the server ended: {server.last_words()}", path, b"")
            break
          prober.send(path, body)
          if say is not None and serial % 1000 == 999:
            say(f"{serial + 1} of {count}")
        live = prober.wait_idle() if server.is_alive else -1.0
        growth = process.memory_info().rss - memory if server.is_alive else 0
  tally = prober.tally
  return {
    **vars(tally),
    "live_at_the_end": live,
    "memory_growth_bytes": growth,
    "seed": number,
    "clean": tally.is_clean and live == 0,
  }


def _plain(value: Any) -> Any:
  """Turns 2.0 into 2: both are integers for JSON Schema, but clients send the latter in lists of token ids."""
  if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
    return int(value)
  if isinstance(value, list):
    return [_plain(each) for each in value]
  if isinstance(value, dict):
    return {name: _plain(each) for name, each in value.items()}
  return value


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.chaos.http_bodies", "Send a server valid and invalid bodies over HTTP.")
  parser.add_argument("--count", type=positive_int, default=20_000, help="bodies")
  parser.add_argument("--hang_s", type=positive_float, default=10.0, help="seconds until a response counts as a hang")
  parser.add_argument("--seed", type=int, default=1, help="seed of the bodies")
  parser.add_argument("--output", type=output_file, default="", help="file for the result as JSON")
  args = parser.parse_args(arguments)
  say = functools.partial(print, file=sys.stderr, flush=True)
  result = probe(args.count, number=args.seed, hang_s=args.hang_s, say=say)
  print(json.dumps(result, indent=2))
  if args.output:
    write_result(args.output, result)
  return 0 if result["clean"] else 1


if __name__ == "__main__":
  sys.exit(main())
