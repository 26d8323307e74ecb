"""The operator's HTTP routes: the live page, its data, and the metrics. Holds no state.

The page is three files of this package, and its content security policy lets the browser load nothing else.
"""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.generation.serving_state import ServingState
from server.http.json_exchange import EventStream
from server.page.live_feed import Feed
from server.page.prometheus_metrics import Metrics

_FILES = {
  "/": ("page.html", "text/html; charset=utf-8"),
  "/page.css": ("page.css", "text/css; charset=utf-8"),
  "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# The files hold no data of the server. Their requests for data need an API key, if the server has keys.
PUBLIC_PATHS = tuple(_FILES)
_HEADERS = {
  "content-security-policy": (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
  ),
  "referrer-policy": "no-referrer",
  "cross-origin-opener-policy": "same-origin",
  "cross-origin-resource-policy": "same-origin",
  # A page of an older version must not talk to a newer server.
  "cache-control": "no-cache",
}


def make_page_routes(
  state: ServingState, metrics: Metrics, feed: Feed, *, stream_stall_timeout_s: float = 30.0
) -> list[Route]:
  """Returns the routes to mount.

  Args:
    state: the serving state, whose threads format the metrics.
    metrics: the source of /metrics.
    feed: the source of /live.
    stream_stall_timeout_s: disconnects a reader of /live that reads nothing for this long.
  """

  async def live(request: Request) -> Response:
    return EventStream(
      feed.messages(), stall_timeout_s=stream_stall_timeout_s, stalled=lambda: None, close=lambda: None
    )

  return [
    *(_static(path, name, kind) for path, (name, kind) in _FILES.items()),
    make_metrics_route(state, metrics),
    Route("/live", live),
  ]


def make_metrics_route(state: ServingState, metrics: Metrics) -> Route:
  """Returns the route of /metrics. The arguments are those of `make_page_routes`."""

  async def show(request: Request) -> Response:
    look = await metrics.look()
    text, content_type = await state.run_in_text_pool(lambda: look.exposition(request.headers.get("accept", "")))
    return Response(text, headers={"content-type": content_type, "cache-control": "no-store"})

  return Route("/metrics", show)


def _static(path: str, name: str, kind: str) -> Route:
  content = resources.files("server.page").joinpath(name).read_bytes()

  async def show(request: Request) -> Response:
    return Response(content, headers={"content-type": kind, **_HEADERS})

  return Route(path, show)
