"""Writes docs/reference/router.md, the page of the router's flags and metrics, from its own declarations.

python -m tools.repository.generate_router_reference
"""

from server.router.__main__ import make_policy
from server.router.replicas.prefill_servers import PrefillServers
from server.router.replicas.replica_pool import ReplicaPool
from server.router.router_metrics import RouterMetrics
from server.router.router_settings import RouterSettings, router_flags
from tools.measure import ROOT
from tools.repository.generate_flag_reference import list_flags
from tools.repository.markdown import make_table

PAGE = ROOT / "docs" / "reference" / "router.md"
_HEAD = """# The router

`make docs` writes this page from the settings and metrics that the code declares; a test compares.
`python -m server.router --help` shows the same flags. [The how-to page](../how-to/several-replicas.md) shows how to use
it.

## Flags
"""
_METRICS = """
## Metrics

Prometheus scrapes `/metrics` on the router's HTTP port, or on a port of its own (`--metrics_port=9090`). The label
`outcome` is a class of status (`2xx`) or one of these:

| outcome | meaning |
| --- | --- |
| `unreachable` | no connection to the replica |
| `broken` | the connection ended before the first byte of an answer |
| `broken_stream` | it ended after the first byte; the client got an error event, or a connection that is cut off |
| `client_gone` | the client closed its connection first |
"""
_ERRORS = """
## Errors

Errors that the router returns itself have the form of the path's API. All others are the replicas' own
([errors](errors.md)).

| status, code | meaning |
| --- | --- |
| 400 `not_configured` | files and batches need `--batch_replica` |
| 403 `host_not_allowed` | the Host header is none of the router's names (`--http_allowed_hosts`) |
| 404 `not_routed` | the page shows one server; open it at a replica |
| 408, 413, 431 | the body is late, or body or headers are too large |
| 429 `server_overloaded` | `--max_requests` requests are in progress |
| 502 `replica_lost` | the replica was lost, and no other could take the request |
| 503 `unavailable` | no replica takes requests, or not the one that the request needs |
| 503 `draining` | the router is shutting down |
"""


def router_reference() -> str:
  """Returns the page's text."""
  lines = [_HEAD.rstrip("\n"), *list_flags(router_flags(), "###", marks_common=False)]
  settings = RouterSettings(replicas=("127.0.0.1:8000",))
  pool = ReplicaPool(settings.replicas, make_policy(settings))
  metrics = RouterMetrics(pool, PrefillServers((), make_policy(settings), "", 1.0, 1.0))
  families = [family for family in metrics.collect() if family.name.startswith("sluice")]
  rows = [
    (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
    for family in families
  ]
  table = make_table(("metric", "kind", "meaning"), rows)
  return "\n".join(lines) + f"\n{_METRICS}\n{table}\n{_ERRORS}"


def main() -> None:
  """Runs the command line."""
  PAGE.write_text(router_reference(), "utf-8")


if __name__ == "__main__":
  main()
