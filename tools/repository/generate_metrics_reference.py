"""Writes docs/reference/metrics.md from the metrics that a server exposes. Holds no metric itself.

python -m tools.repository.generate_metrics_reference
"""

import dataclasses
import os
import types
from typing import cast

from prometheus_client import Metric

from engine.adapters import AdapterInfo, AdapterState
from engine.config import EngineConfig
from engine.recorder import Recorder
from engine.request import FinishReason
from engine.scheduler import Scheduler
from extensions.kv_events.event_publisher import make_event_metrics
from extensions.multi_host.leader import make_metrics
from extensions.prefill_decode.transfer_counts import TransferCounts
from server.generation.engine_client import Report
from server.generation.serving_state import Backend
from server.page.prometheus_metrics import ServerLook
from server.telemetry.latency_histograms import Observations
from server.telemetry.process_counts import ProcessCounts
from tools.measure import ROOT
from tools.repository.markdown import make_table

PAGE = ROOT / "docs" / "reference" / "metrics.md"
_HEAD = """# Metrics

`make docs` writes this page from the metrics that the code declares; a test compares. Prometheus scrapes `/metrics` on
the HTTP port, or on a port of its own without TLS and keys (`--metrics_port=9090`). Names have base units; counters end
in `_total`, and shares in `_ratio`. `sluice_compiles_total` stays 0 after ready.

The Gateway API Inference Extension of Kubernetes needs three gauges: `sluice_requests_waiting`,
`sluice_requests_running` and `sluice_kv_cache_usage_ratio`. Servers with `--role=prefill` or `--role=decode` alone have
`sluice_transfer_*`.
"""
_VLLM = """
## vLLM's names

`--vllm_metric_names` adds these, for dashboards and routers made for vLLM.
"""
_PROCESS = """
## The process

Sums over the processes of the server, from the system.
"""


def _all_metrics() -> list[Metric]:
  """Returns the metrics of an idle server, with one sample of every label."""
  config = EngineConfig(vocab_size=2, max_model_len=16, num_blocks=1, num_host_blocks=1, enable_lora=True)
  stats = dataclasses.replace(Recorder().stats(Scheduler(config), 0, 0), finished={FinishReason.STOP: 0})
  counts = ProcessCounts(
    calls={("grpc", "Generate", "OK"): 0},
    failed={("grpc", "OVERLOADED"): 0},
    num_ended={"stop": 0},
    pids=[os.getpid()],
  )
  backend = cast(Backend, types.SimpleNamespace(config=config, model="", load_s=0.0, warmup_s=0.0))
  adapters = (AdapterInfo("", 0, "", 0, AdapterState.LOADED.value),)
  report = Report(stats, 0.0, 0.0, 0, 0, Observations().queue, adapters=adapters)
  more = (*TransferCounts().collect_metrics(), *make_metrics(2, 0.0, 0, {1: 0.0}, {1: 0}), *make_event_metrics(0, 0))
  return list(ServerLook(True, True, counts, backend, report, vllm_names=True, more=more).collect())


def _row(metric: Metric) -> tuple[str, str, str, str]:
  labels = [name for name in dict.fromkeys(key for sample in metric.samples for key in sample.labels) if name != "le"]
  name = f"{metric.name}_total" if metric.type == "counter" else metric.name
  return f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation


def metrics_reference() -> str:
  """Returns the page's text."""
  metrics = _all_metrics()
  head = ("metric", "type", "labels", "")
  ours = [_row(metric) for metric in metrics if metric.name.startswith("sluice_")]
  theirs = [_row(metric) for metric in metrics if metric.name.startswith("vllm:")]
  rest = [_row(metric) for metric in metrics if not metric.name.startswith(("sluice_", "vllm:"))]
  parts = [
    _HEAD,
    "## Sluice\n",
    make_table(head, ours),
    _PROCESS,
    make_table(head, rest),
    _VLLM,
    make_table(head, theirs),
  ]
  return "\n".join(parts) + "\n"


def main() -> None:
  """Runs the command line."""
  PAGE.write_text(metrics_reference())


if __name__ == "__main__":
  main()
