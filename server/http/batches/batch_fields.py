"""Declares the body of POST /v1/batches. Reads none itself."""

from typing import Annotated

import msgspec
from msgspec import Meta

ENDPOINTS: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
WINDOW = "24h"


class BatchRequest(msgspec.Struct, kw_only=True):
  """A batch of an uploaded file of requests."""

  input_file_id: Annotated[str, Meta(description="A file of one request a line.")]
  endpoint: Annotated[str, Meta(description="Of every line.", extra_json_schema={"enum": [*ENDPOINTS]})]
  completion_window: Annotated[
    str, Meta(description="A batch that takes longer expires.", extra_json_schema={"enum": [WINDOW]})
  ]
  metadata: Annotated[dict[str, str], Meta(description="Of no effect but in the batch; at most 16 pairs.")] | None = (
    None
  )
