"""Streams generations from an OpenAI-compatible HTTP API, with the interface of server.client.Client. Prints nothing.

For terminals that reach only a server's HTTP port. Covers only the part of the API that a chat needs. Knows no flag.
"""

from collections.abc import Iterator, Mapping, Sequence
import http.client
import json
import ssl
import time
from typing import Any, Self
import urllib.parse

import grpc

from server.client import Ending, Piece, SluiceError

_CODES = {
  400: grpc.StatusCode.INVALID_ARGUMENT,
  401: grpc.StatusCode.UNAUTHENTICATED,
  403: grpc.StatusCode.PERMISSION_DENIED,
  404: grpc.StatusCode.NOT_FOUND,
  413: grpc.StatusCode.RESOURCE_EXHAUSTED,
  429: grpc.StatusCode.RESOURCE_EXHAUSTED,
  503: grpc.StatusCode.UNAVAILABLE,
}
_CONNECT_S = 10.0
_PROBE_S = 2.0


class HttpStream:
  """One generation: an iterator of pieces, and a context that ends it. Iteration may raise SluiceError."""

  def __init__(self, client: "HttpClient", path: str, body: Mapping[str, Any], timeout_s: float | None):
    self._client, self._path, self._body, self._timeout_s = client, path, body, timeout_s
    self._connection: http.client.HTTPConnection | None = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.cancel()

  def cancel(self) -> None:
    """Closes the connection, so the server ends the generation."""
    if self._connection is not None:
      self._connection.close()

  def __iter__(self) -> Iterator[Piece]:
    began, first_s, reason, usage = time.monotonic(), 0.0, "stop", {}
    self._connection, response = self._client.ask("POST", self._path, self._body, self._timeout_s)
    for event in _read_events(response):
      if "error" in event:
        raise SluiceError(str(event["error"].get("message", "the stream failed")), grpc.StatusCode.INTERNAL)
      usage = event.get("usage") or usage
      for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        reason = choice.get("finish_reason") or reason
        if text:
          first_s = first_s or time.monotonic() - began
          yield Piece(0, text, ())
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), cached
    yield Piece(0, "", (), ending=Ending(reason, None, *counts, first_s, time.monotonic() - began))


class HttpClient:
  """A client of one server.

  Args of the constructor:
    url: the server's URL, such as http://127.0.0.1:8000; a path goes before /v1.
    api_key: the bearer token.
    tls_ca_file, tls_cert_file, tls_key_file: PEM files for https. An unreadable file raises OSError.
  """

  def __init__(
    self, url: str, api_key: str = "", tls_ca_file: str = "", tls_cert_file: str = "", tls_key_file: str = ""
  ):
    self._url = urllib.parse.urlsplit(url)
    self._prefix = self._url.path.rstrip("/").removesuffix("/v1")
    self._headers = {"content-type": "application/json"}
    self._headers |= {"authorization": f"Bearer {api_key}"} if api_key else {}
    self._tls = None
    if self._url.scheme == "https":
      self._tls = ssl.create_default_context(cafile=tls_ca_file or None)
      if tls_cert_file:
        self._tls.load_cert_chain(tls_cert_file, tls_key_file or None)
    self._model = ""

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    pass

  def model_name(self) -> str:
    """Returns the server's name for its model. Raises SluiceError."""
    if not self._model:
      connection, response = self.ask("GET", "/v1/models", None, _CONNECT_S)
      try:
        self._model = str(json.loads(response.read())["data"][0]["id"])
      except (ValueError, LookupError, TypeError) as error:
        raise SluiceError("/v1/models lists no model; is it an OpenAI API?", grpc.StatusCode.INTERNAL) from error
      finally:
        connection.close()
    return self._model

  def stream(self, prompt: str | Sequence[Mapping[str, str]], **options: Any) -> HttpStream:
    """Starts a generation for raw text or chat messages; options are those of server.client.Options in the API."""
    timeout_s = options.pop("timeout_s", None)
    body = {"model": self.model_name(), "stream": True, "stream_options": {"include_usage": True}, **options}
    if isinstance(prompt, str):
      return HttpStream(self, "/v1/completions", body | {"prompt": prompt}, timeout_s)
    return HttpStream(self, "/v1/chat/completions", body | {"messages": list(prompt)}, timeout_s)

  def ask(
    self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
  ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Makes one call on a new connection. Raises SluiceError unless the status is 200."""
    host, port = self._url.hostname or "", self._url.port
    if self._tls is not None:
      connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
    else:
      connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
      connection.request(method, self._prefix + path, None if body is None else json.dumps(body), self._headers)
      response = connection.getresponse()
      if response.status == 200:
        return connection, response
      text = response.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
      connection.close()
      raise SluiceError(
        f"{self._url.netloc} does not speak HTTP; if it is the gRPC port, set --target={self._url.netloc}",
        grpc.StatusCode.UNAVAILABLE,
      ) from error
    except OSError as error:
      connection.close()
      raise SluiceError(
        f"no server answers at {self._url.netloc} ({error.strerror or error}); start one, or correct --target",
        grpc.StatusCode.UNAVAILABLE,
      ) from error
    connection.close()
    wait = response.headers.get("retry-after", "")
    raise SluiceError(
      _error_message(text) or f"HTTP {response.status} {response.reason}",
      _CODES.get(response.status, grpc.StatusCode.INTERNAL),
      retry_after_s=float(wait) if wait.isdecimal() else None,
      request_id=response.headers.get("x-request-id", ""),
    )


def _read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
  """Yields the JSON objects of server-sent events. Raises SluiceError for a truncated or invalid stream."""
  try:
    for line in response:
      text = line.decode("utf-8", "replace").strip()
      if text == "data: [DONE]":
        return
      if text.startswith("data: "):
        yield json.loads(text.removeprefix("data: "))
  except (OSError, ValueError, http.client.HTTPException) as error:
    raise SluiceError(f"the answer was cut: {error}", grpc.StatusCode.UNAVAILABLE) from error
  raise SluiceError("the server hung up before the answer's end", grpc.StatusCode.UNAVAILABLE)


def _error_message(text: str) -> str:
  try:
    return str(json.loads(text)["error"]["message"])
  except (ValueError, LookupError, TypeError):
    return ""


def speaks_http(target: str) -> bool:
  """Returns whether HOST:PORT answers a plain HTTP request; a gRPC port does not."""
  try:
    url = urllib.parse.urlsplit(f"//{target}")
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_PROBE_S)
    connection.request("GET", "/health")
    connection.getresponse()
  except (OSError, ValueError, http.client.HTTPException):
    return False
  connection.close()
  return True
