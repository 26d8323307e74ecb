"""Declares the paths of /v1/files and /v1/batches. A server without batches imports this module alone."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.http.error_responses import Refused

_OFF = "batches are off here; start the server with --batch_dir=FOLDER"
_OPERATIONS = (
  ("/v1/files", "GET"),
  ("/v1/files", "POST"),
  ("/v1/files/{id}", "GET"),
  ("/v1/files/{id}", "DELETE"),
  ("/v1/files/{id}/content", "GET"),
  ("/v1/batches", "GET"),
  ("/v1/batches", "POST"),
  ("/v1/batches/{id}", "GET"),
  ("/v1/batches/{id}/cancel", "POST"),
)


def make_refusing_routes() -> list[Route]:
  """Returns routes that say how to switch batches on."""

  async def refuse(request: Request) -> Response:
    raise Refused(404, _OFF, code="batches_off")

  return make_batch_routes(*[refuse] * len(_OPERATIONS))


def make_batch_routes(*handlers: Callable[[Request], Awaitable[Response]]) -> list[Route]:
  """Returns the routes of both APIs; a handler for each operation, in their order."""
  return [Route(path, handler, methods=[method]) for (path, method), handler in zip(_OPERATIONS, handlers, strict=True)]
