"""Serves vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, for administrators alone. Reads no adapter."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.generation import request_validation
from server.generation.serving_state import Backend, ServingState
from server.http.http_options import HttpOptions
from server.http.json_exchange import read_json_object
from server.http.openai.generate_request import judge_ignored, read_fields
from server.http.openai.request_fields import LoadAdapterRequest, RequestFields, UnloadAdapterRequest

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# The guard lets nobody through to these paths without a key of --admin_api_key_file.
ADMIN_PATHS = frozenset((_LOAD, _UNLOAD))


class AdapterEndpoints:
  """Both endpoints; gRPC's AdminService does the same."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options

  def handlers(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Returns the handler of each path."""
    return {_LOAD: self.load, _UNLOAD: self.unload}

  async def load(self, request: Request) -> Response:
    """POST /v1/load_lora_adapter. Responds when requests can use the adapter."""
    backend, fields, headers = await self._read(request, LoadAdapterRequest)
    await backend.engine.load_adapter(fields.lora_name, fields.lora_path, replaces=bool(fields.load_inplace))
    return JSONResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.", headers=headers)

  async def unload(self, request: Request) -> Response:
    """POST /v1/unload_lora_adapter. Responds when no new request can use the adapter."""
    backend, fields, headers = await self._read(request, UnloadAdapterRequest)
    await backend.engine.unload_adapter(fields.lora_name)
    return JSONResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.", headers=headers)

  async def _read[T: RequestFields](self, request: Request, kind: type[T]) -> tuple[Backend, T, dict[str, str]]:
    """Returns the backend, the body's fields, and the header of ignored ones."""
    backend = self._state.require_backend()
    values = await read_json_object(request, self._state, self._options)
    fields, ignored = read_fields(values, kind)
    request_validation.find_adapter(fields.model or "", backend.model)
    return backend, fields, judge_ignored(ignored, strict=self._options.strict_requests)
