"""Serves /v1/files and /v1/batches: reads requests, and gives files and batches OpenAI's form. Runs no batch."""

import asyncio
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import json
import logging
import sqlite3
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from engine.errors import InvalidRequest, Overloaded
from server.generation.serving_state import Backend, ServingState
from server.http.batches.batch_fields import ENDPOINTS, WINDOW, BatchRequest
from server.http.batches.batch_routes import make_batch_routes
from server.http.batches.batch_runner import BatchRunner
from server.http.batches.batch_store import BatchLimits, BatchStore
from server.http.batches.file_upload import receive_upload
from server.http.embeddings.embedding_endpoints import EmbeddingEndpoints
from server.http.error_responses import Refused, UnsupportedField
from server.http.http_options import HttpOptions
from server.http.json_exchange import ClientGone, read_json_object
from server.http.json_fields import convert_fields
from server.http.openai.completions import CompletionEndpoints
from server.http.openai.generate_request import judge_ignored
from server.http.responses.response_endpoints import ResponseEndpoints

_MAX_UPLOADS = 8  # at once; each may have the size of the largest file
_MAX_PAGE = {"files": 10_000, "batches": 100}
_DEFAULT_PAGE = {"files": 10_000, "batches": 20}
_MAX_METADATA = (16, 64, 512)  # pairs, characters of a key, characters of a value
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

_log = logging.getLogger(__name__)


class BatchEndpoints:
  """Both APIs, and the work behind them. Belongs to the server's event loop."""

  def __init__(
    self, state: ServingState, options: HttpOptions, folder: str, limits: BatchLimits, *, max_lines_at_once: int
  ):
    """Opens the folder.

    Args:
      state: admits lines as it admits requests.
      options: the HTTP side's.
      folder: the store's; see BatchStore.
      limits: of the store.
      max_lines_at_once: see BatchRunner.

    Raises:
      ConfigError: the folder cannot be used.
    """
    completions = CompletionEndpoints(state, options)
    self._state = state
    self._options = options
    # Responses of batches are in their output files alone.
    responses = ResponseEndpoints(state, dataclasses.replace(options, max_stored_responses=0))
    embeddings = EmbeddingEndpoints(state, options)
    handlers = (completions.chat, completions.completions, responses.create, embeddings.embeddings)
    self._endpoints = dict(zip(ENDPOINTS, handlers, strict=True))
    self._store = BatchStore(folder, limits)
    self._runner = BatchRunner(
      self._store, self._endpoints, max_line_bytes=options.max_body_bytes, max_lines_at_once=max_lines_at_once
    )
    self._num_uploads = 0

  def make_routes(self) -> list[Route]:
    """Returns the routes of both APIs."""
    return make_batch_routes(
      self.list_files,
      self.upload_file,
      self.retrieve_file,
      self.delete_file,
      self.download_file,
      self.list_batches,
      self.create_batch,
      self.retrieve_batch,
      self.cancel_batch,
    )

  async def start_running(self, backend: Backend) -> None:
    """Goes on with unfinished batches."""
    await self._runner.start_running(backend)

  async def stop_running(self) -> None:
    """Ends the work; unfinished batches go on after the next start."""
    await self._runner.stop_running()

  async def close(self) -> None:
    """Ends the work and closes the folder. A second call does nothing."""
    await self._runner.stop_running()
    await asyncio.to_thread(self._store.close_store)

  # Files.

  async def upload_file(self, request: Request) -> Response:
    """POST /v1/files."""
    store, tenant = self._store, request.state.tenant
    if self._num_uploads == _MAX_UPLOADS:
      raise Overloaded(f"{_MAX_UPLOADS} uploads are in progress, which is the limit")
    self._num_uploads += 1
    file_id = store.make_file_id()
    path = store.path_of(file_id)
    try:
      with _disk_errors():
        await store.run(store.check_space, tenant, 0)
        upload = await receive_upload(request, path, store.limits.max_file_bytes, self._options.body_timeout_s)
        try:
          _check_upload(upload.fields)
          row = await store.run(store.add_file, file_id, tenant, upload.name or "", "batch", check=True)
        except Exception:
          path.unlink(missing_ok=True)
          raise
    finally:
      self._num_uploads -= 1
    return JSONResponse(_show_file(row))

  async def list_files(self, request: Request) -> Response:
    """GET /v1/files."""
    purpose = request.query_params.get("purpose")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
      raise InvalidRequest("is not one that exists: send asc or desc", field="order")
    after, limit = _read_page(request, "files", ("purpose", "order"))
    with _disk_errors():
      rows = await self._store.run(
        self._store.list_files, request.state.tenant, purpose, after, limit, oldest_first=order == "asc"
      )
    return _show_page(rows, limit, _show_file)

  async def retrieve_file(self, request: Request) -> Response:
    """GET /v1/files/ID."""
    return JSONResponse(_show_file(await self._find_file(request)))

  async def download_file(self, request: Request) -> Response:
    """GET /v1/files/ID/content."""
    row = await self._find_file(request)
    return _FileContent(self._store.path_of(row["id"]), self._options.stream_stall_timeout_s)

  async def delete_file(self, request: Request) -> Response:
    """DELETE /v1/files/ID."""
    file_id = request.path_params["id"]
    with _disk_errors():
      await self._store.run(self._store.delete_file, file_id, request.state.tenant)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})

  async def _find_file(self, request: Request) -> sqlite3.Row:
    with _disk_errors():
      return await self._store.run(self._store.find_file, request.path_params["id"], request.state.tenant)

  # Batches.

  async def create_batch(self, request: Request) -> Response:
    """POST /v1/batches."""
    values = await read_json_object(request, self._state, self._options)
    fields = convert_fields(values, BatchRequest)
    if fields.endpoint not in self._endpoints:
      raise InvalidRequest(f"is not served in batches: send one of {', '.join(self._endpoints)}", field="endpoint")
    if fields.completion_window != WINDOW:
      raise InvalidRequest(f"is not one that exists: send {WINDOW}", field="completion_window")
    if values.get("output_expires_after") is not None:
      raise UnsupportedField(
        "is not supported: files stay until they are deleted; leave it out", field="output_expires_after"
      )
    _check_metadata(fields.metadata or {})
    known = BatchRequest.__struct_fields__
    ignored = [name for name, value in values.items() if value is not None and name not in known]
    headers = judge_ignored(ignored, strict=self._options.strict_requests)
    with _disk_errors():
      batch = await self._store.run(
        self._store.add_batch, request.state.tenant, fields.input_file_id, fields.endpoint, fields.metadata
      )
    self._runner.start_batch(batch)
    return JSONResponse(_show_batch(batch), headers=headers)

  async def list_batches(self, request: Request) -> Response:
    """GET /v1/batches."""
    after, limit = _read_page(request, "batches", ())
    with _disk_errors():
      rows = await self._store.run(self._store.list_batches, request.state.tenant, after, limit)
    return _show_page(rows, limit, _show_batch)

  async def retrieve_batch(self, request: Request) -> Response:
    """GET /v1/batches/ID."""
    with _disk_errors():
      row = await self._store.run(self._store.find_batch, request.path_params["id"], request.state.tenant)
    return JSONResponse(_show_batch(row))

  async def cancel_batch(self, request: Request) -> Response:
    """POST /v1/batches/ID/cancel."""
    with _disk_errors():
      row = await self._store.run(self._store.cancel_batch, request.path_params["id"], request.state.tenant)
    self._runner.cancel_batch(row)
    return JSONResponse(_show_batch(row))


class _FileContent(FileResponse):
  """A file's content; a client that reads nothing for a while is disconnected."""

  def __init__(self, path: Any, stall_timeout_s: float):
    super().__init__(path, media_type="application/octet-stream")
    self._stall_timeout_s = stall_timeout_s

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    async def send_in_time(message: Message) -> None:
      try:
        async with asyncio.timeout(self._stall_timeout_s):
          await send(message)
      except TimeoutError:
        scope["state"]["abort"]()
        raise ClientGone from None

    await super().__call__(scope, receive, send_in_time)


@contextlib.contextmanager
def _disk_errors():
  """Turns errors of the disk into one that a client understands."""
  try:
    yield
  except (OSError, sqlite3.OperationalError) as error:
    _log.error("a request for files or batches failed, since the disk of --batch_dir refuses: %s", error)
    raise Refused(
      507,
      "the disk for files and batches is full or broken; delete files, or see the server's log",
      code="storage_unavailable",
      headers={"x-should-retry": "false"},
    ) from None


def _check_upload(fields: dict[str, str]) -> None:
  if "purpose" not in fields:
    raise InvalidRequest("is missing: send purpose=batch", field="purpose")
  if fields["purpose"] != "batch":
    raise InvalidRequest("is not served here: send purpose=batch", field="purpose")
  for name in fields:
    if name.startswith("expires_after"):
      raise UnsupportedField("is not supported: files stay until they are deleted; leave it out", field="expires_after")
    if name != "purpose":
      raise UnsupportedField("has a field besides purpose and file: leave it out", field="body")


def _check_metadata(metadata: dict[str, str]) -> None:
  most, most_key, most_value = _MAX_METADATA
  if len(metadata) > most:
    raise InvalidRequest(f"has {len(metadata)} pairs, the limit is {most}: send fewer", field="metadata")
  for key, value in metadata.items():
    if len(key) > most_key or len(value) > most_value:
      raise InvalidRequest(
        f"has a key of {len(key)} and a value of {len(value)} characters, the limits are {most_key} and {most_value}: "
        "send shorter ones",
        field="metadata",
      )


def _read_page(request: Request, table: str, more: Sequence[str]) -> tuple[str | None, int]:
  """Returns the query's `after` and `limit`. Raises InvalidRequest, UnsupportedField."""
  query = request.query_params
  for name in query:
    if name not in ("after", "limit", *more):
      raise UnsupportedField(f"has a name besides {', '.join(('after', 'limit', *more))}: leave it out", field="query")
  text, most = query.get("limit", str(_DEFAULT_PAGE[table])), _MAX_PAGE[table]
  if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
    raise InvalidRequest(f"is not allowed: send a whole number from 1 to {most}", field="limit")
  return query.get("after"), int(text)


def _show_page(rows: list[sqlite3.Row], limit: int, show: Callable[[sqlite3.Row], dict[str, Any]]) -> Response:
  data = [show(row) for row in rows[:limit]]
  ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
  return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(rows) > limit})


def _show_file(row: sqlite3.Row) -> dict[str, Any]:
  return {
    "id": row["id"],
    "object": "file",
    "bytes": row["bytes"],
    "created_at": row["created_at"],
    "expires_at": None,
    "filename": row["name"],
    "purpose": row["purpose"],
    "status": "processed",
    "status_details": None,
  }


def _show_batch(row: sqlite3.Row) -> dict[str, Any]:
  errors, metadata = row["errors"], row["metadata"]
  return {
    "id": row["id"],
    "object": "batch",
    "endpoint": row["endpoint"],
    "errors": errors and {"object": "list", "data": json.loads(errors)},
    "input_file_id": row["input_file_id"],
    "completion_window": WINDOW,
    "status": row["status"],
    "output_file_id": row["output_file_id"],
    "error_file_id": row["error_file_id"],
    "created_at": row["created_at"],
    "expires_at": row["expires_at"],
    **{f"{name}_at": row[f"{name}_at"] for name in _TIMES},
    "request_counts": {"total": row["total"], "completed": row["completed"], "failed": row["failed"]},
    "metadata": metadata and json.loads(metadata),
  }
