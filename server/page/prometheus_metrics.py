"""Makes the Prometheus metrics for each scrape. Counts nothing itself; it reads the counters of other modules.

Names follow Prometheus' rules: a prefix, base units, `_total` on counters, `_ratio` for shares. The model server
protocol of Kubernetes' Gateway API Inference Extension requires three gauges: `sluice_requests_waiting`
(TotalQueuedRequests), `sluice_requests_running` (TotalRunningRequests) and `sluice_kv_cache_usage_ratio`
(KVCacheUtilization). Its endpoint picker takes their names by flag, or knows vLLM's, which --vllm_metric_names adds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import time

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from engine.recorder import RungTotals
from server.generation.engine_client import Report
from server.generation.serving_state import Backend, ServingState
from server.telemetry.latency_histograms import Histogram, Observations
from server.telemetry.process_counts import Census, ProcessCounts
from server.version import server_version

_counter, _gauge = CounterMetricFamily, GaugeMetricFamily
# vLLM's name -> Sluice's name, of every metric with the same meaning.
_VLLM_NAMES = {
  "vllm:num_requests_waiting": "sluice_requests_waiting",
  "vllm:num_requests_running": "sluice_requests_running",
  "vllm:kv_cache_usage_perc": "sluice_kv_cache_usage_ratio",
  "vllm:prompt_tokens": "sluice_prefill_tokens",
  "vllm:generation_tokens": "sluice_output_tokens",
  "vllm:num_preemptions": "sluice_preemptions",
  "vllm:spec_decode_num_drafts": "sluice_draft_rows",
  "vllm:spec_decode_num_draft_tokens": "sluice_draft_tokens",
  "vllm:spec_decode_num_accepted_tokens": "sluice_accepted_draft_tokens",
  "vllm:spec_decode_num_accepted_tokens_per_pos": "sluice_accepted_draft_tokens_by_position",
  "vllm:prefix_cache_queries": "sluice_prefix_cache_query_tokens",
  "vllm:prefix_cache_hits": "sluice_prefix_cache_hit_tokens",
  "vllm:time_to_first_token_seconds": "sluice_time_to_first_token_seconds",
  "vllm:inter_token_latency_seconds": "sluice_inter_token_latency_seconds",
  "vllm:request_time_per_output_token_seconds": "sluice_time_per_output_token_seconds",
  "vllm:e2e_request_latency_seconds": "sluice_request_duration_seconds",
  "vllm:request_queue_time_seconds": "sluice_request_queue_time_seconds",
  "vllm:request_prompt_tokens": "sluice_request_prompt_tokens",
  "vllm:request_generation_tokens": "sluice_request_output_tokens",
}


class Metrics:
  """The metrics of one server."""

  def __init__(
    self,
    state: ServingState,
    census: Census,
    *,
    vllm_names: bool = False,
    more: Callable[[], Iterable[Metric]] = tuple,
  ):
    """Args:
    state: the serving state.
    census: the counts of the server's processes.
    vllm_names: also exports vLLM's names, for tools made for vLLM.
    more: returns metrics of parts that this module does not know.
    """
    self._more = more
    self._state = state
    self._census = census
    self._vllm_names = vllm_names

  async def look(self) -> "ServerLook":
    """Returns the values of an exposition. Runs on the event loop's thread."""
    state = self._state
    backend = state.backend
    report = await backend.engine.report() if backend is not None else None
    census = await self._census()
    return ServerLook(state.ready, state.alive, census, backend, report, self._vllm_names, tuple(self._more()))


@dataclasses.dataclass(frozen=True)
class ServerLook(Collector):
  """A snapshot of the server.

  Attributes:
    ready, alive: see ServingState.
    counts: the counts of all processes.
    backend, report: set when the server serves.
    vllm_names: whether the exposition also has vLLM's names.
    more: metrics of other parts.
  """

  ready: bool
  alive: bool
  counts: ProcessCounts
  backend: Backend | None
  report: Report | None
  vllm_names: bool
  more: tuple[Metric, ...] = ()

  def exposition(self, accept: str = "") -> tuple[bytes, str]:
    """Returns all metrics in Prometheus' or OpenMetrics' format, and the content type. Any thread may call it.

    Args:
      accept: the request's Accept header.
    """
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
      # No name needs escaping, and prometheus_client's would turn vLLM's colons into underscores.
      return openmetrics.generate_latest(self, escaping=openmetrics.ALLOWUTF8), content_type
    return encode(self), content_type

  def collect(self) -> Iterator[Metric]:
    """Yields every metric of the snapshot."""
    yield from self._of_server()
    yield from _of_processes(self.counts.pids)
    yield from self.more
    backend, report, counts = self.backend, self.report, self.counts
    if backend is None or report is None:
      return
    stats = report.stats
    families = [
      *_gauges(backend, report, counts),
      *_counters(report, counts),
      *_rungs(backend, stats.rungs),
      *_histograms(counts.observations, report.queue),
    ]
    yield from families
    if self.vllm_names:
      yield from _vllm(backend, report, families)

  def _of_server(self) -> Iterator[Metric]:
    counts = self.counts
    yield _gauge("sluice_ready", "Whether requests are taken: 0 while loading and draining.", int(self.ready))
    yield _gauge("sluice_alive", "Whether the engine's loop turns.", int(self.alive))
    yield _gauge(
      "sluice_event_loop_lag_seconds", "What the slowest event loop took to answer its watchdog's look.", counts.lag_s
    )
    yield _gauge("sluice_processes", "Processes of this server.", len(counts.pids))
    yield _counter(
      "sluice_access_log_lost_lines", "Lines that the access log's disk did not take.", counts.num_lost_lines
    )
    yield _counter("sluice_unhandled_errors", "Errors in callbacks and tasks that nobody took.", counts.num_unhandled)
    info = _gauge("sluice_build_info", "Of the running server; always 1.", labels=["version"])
    info.add_metric([server_version()], 1)
    yield info
    calls = _counter("sluice_calls", "Calls that ended, by their status.", labels=["protocol", "method", "code"])
    for labels, count in list(counts.calls.items()):
      calls.add_metric(labels, count)
    yield calls
    failed = _counter(
      "sluice_calls_failed", "Calls that were refused or failed, by the reason.", labels=["protocol", "reason"]
    )
    for labels, count in list(counts.failed.items()):
      failed.add_metric(labels, count)
    yield failed


def _of_processes(pids: Sequence[int]) -> Iterator[Metric]:
  """Yields the operating system's metrics of the processes, summed, under prometheus_client's names."""
  sums: dict[str, Metric] = {}
  for pid in pids:
    for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():
      known = sums.setdefault(family.name, family)
      if known is not family:
        value = family.samples[0].value
        # The minimum: the earliest start, and the lowest limit.
        least = family.name in ("process_start_time_seconds", "process_max_fds")
        before = known.samples[0]
        known.samples[0] = before._replace(value=min(before.value, value) if least else before.value + value)
  yield from sums.values()


def _gauges(backend: Backend, report: Report, counts: ProcessCounts) -> Iterator[Metric]:
  config, stats = backend.config, report.stats
  yield _gauge("sluice_requests_waiting", "Requests in the queue.", max(0, stats.num_live - stats.num_running))
  yield _gauge("sluice_requests_running", "Requests in the batch.", stats.num_running)
  yield _gauge("sluice_kv_cache_usage_ratio", "Share of KV blocks held, 0 to 1.", stats.blocks_used / stats.num_blocks)
  yield _gauge("sluice_requests_waiting_prompt_tokens", "Prompt tokens in the queue.", stats.num_waiting_tokens)
  yield _gauge("sluice_requests_running_limit", "Requests that fit into the batch.", stats.max_num_seqs)
  yield _gauge("sluice_kv_blocks", "KV blocks of the pool.", stats.num_blocks)
  yield _gauge("sluice_kv_blocks_used", "KV blocks that requests hold.", stats.blocks_used)
  yield _gauge(
    "sluice_kv_blocks_cached",
    "KV blocks that no request holds and the prefix cache keeps until they are needed.",
    stats.blocks_cached,
  )
  yield _gauge("sluice_kv_block_size_tokens", "Tokens of a KV block.", config.block_size)
  yield _gauge("sluice_generations_live", "Generations that a client waits for.", counts.num_live)
  yield _gauge(
    "sluice_engine_heartbeat_age_seconds",
    "Since the engine's loop last turned.",
    max(0.0, report.now_s - report.heartbeat_s),
  )
  yield _gauge("sluice_model_load_seconds", "What loading the weights took.", backend.load_s)
  yield _gauge("sluice_warmup_seconds", "What compiling all steps took.", backend.warmup_s)
  if config.enable_lora:
    yield _gauge("sluice_adapters_loaded", "LoRA adapters that hold a slot.", len(report.adapters))
    yield _gauge("sluice_adapters_limit", "Slots of LoRA adapters.", config.max_loras)
    requests = _gauge("sluice_adapter_requests", "Live requests of each LoRA adapter.", labels=["adapter"])
    for adapter in report.adapters:
      requests.add_metric([adapter.name], adapter.num_live)
    yield requests
  if stats.host_pool is not None:
    yield _gauge("sluice_host_kv_blocks", "Evicted KV blocks that the host keeps.", stats.host_pool.num_kept)
    yield _gauge("sluice_host_kv_blocks_limit", "Evicted KV blocks that the host can keep.", config.num_host_blocks)
    yield _gauge(
      "sluice_host_kv_bytes", "Bytes of KV blocks that the host keeps.", stats.host_pool.num_kept * config.block_bytes
    )
  info = _gauge("sluice_model_info", "Of what is served; always 1.", labels=["model", "batching"])
  info.add_metric([backend.model, config.batching], 1)
  yield info


def _counters(report: Report, counts: ProcessCounts) -> Iterator[Metric]:
  stats = report.stats
  yield _counter("sluice_compiles", "XLA compilations since ready; any is a mistake.", report.compiles_after_ready)
  yield _counter("sluice_generations", "Generations that were accepted.", counts.num_started)
  ended = _counter("sluice_generations_ended", "What became of them; all but the live ones.", labels=["outcome"])
  for outcome, count in counts.num_ended.items():
    ended.add_metric([outcome], count)
  yield ended
  yield _counter(
    "sluice_numerical_errors", "Requests ended by NaN or infinite numbers of the model.", stats.num_numerical_errors
  )
  yield _counter("sluice_late_events", "Events that nobody waited for, dropped.", counts.num_late_events)
  yield _counter("sluice_decode_tokens", "Tokens computed by rows that decode.", stats.num_decode_tokens)
  yield _counter("sluice_prefill_tokens", "Prompt tokens computed, again after preemptions.", stats.num_prefill_tokens)
  yield _counter("sluice_padding_tokens", "Tokens computed for nobody, to fill a shape.", stats.num_padding_tokens)
  yield _counter("sluice_skipped_tokens", "Padding of shapes that kernels left out.", stats.num_skipped_tokens)
  yield _counter("sluice_output_tokens", "Tokens that reached requests.", stats.num_output_tokens)
  yield _counter(
    "sluice_prefix_cache_query_tokens", "Prompt tokens looked up, of ended requests.", stats.num_queried_tokens
  )
  yield _counter(
    "sluice_prefix_cache_hit_tokens", "Prompt tokens found there, of ended requests.", stats.num_cached_tokens
  )
  yield _counter("sluice_lost_tokens", "Tokens computed and lost to preemptions.", stats.num_lost_tokens)
  yield _counter("sluice_preemptions", "Requests that had to begin anew.", stats.num_preemptions)
  drafts = stats.drafts
  yield _counter("sluice_draft_rows", "Rows of steps that verified draft tokens.", drafts.rows)
  yield _counter("sluice_draft_tokens", "Draft tokens that steps verified.", drafts.tokens)
  yield _counter(
    "sluice_accepted_draft_tokens", "Draft tokens that were right; each saved its request a step.", drafts.accepted
  )
  by_position = _counter(
    "sluice_accepted_draft_tokens_by_position", "The same by place among the drafts of a row.", labels=["position"]
  )
  for position, accepted in enumerate(drafts.accepted_at):
    by_position.add_metric([str(position)], accepted)
  yield by_position
  yield _counter(
    "sluice_forced_tokens",
    "Output tokens that their constraint left no choice about; no step sampled them.",
    drafts.forced,
  )
  yield _counter("sluice_idle_slots", "Slots without a row while a request waited, summed.", stats.num_idle_slots)
  host = stats.host_pool
  if host is not None:
    yield _counter("sluice_host_kv_hits", "Requests whose prefix continued on the host.", host.num_hits)
    yield _counter("sluice_host_kv_saved_blocks", "Evicted KV blocks copied to the host.", host.num_saved)
    yield _counter(
      "sluice_host_kv_skipped_blocks", "Evicted KV blocks not copied, for want of a free slot.", host.num_skipped
    )
    yield _counter("sluice_host_kv_loaded_blocks", "KV blocks copied back to the device.", host.num_loaded)
    yield _counter(
      "sluice_host_kv_failed_blocks", "KV blocks computed again because their copy was not intact.", host.num_failed
    )
    yield _counter("sluice_host_kv_evicted_blocks", "KV blocks that left the host for others.", host.num_evicted)
  finished = _counter("sluice_requests_finished", "Requests of the engine that ended.", labels=["reason"])
  for reason, count in stats.finished.items():
    finished.add_metric([reason.value], count)
  yield finished


def _rungs(backend: Backend, totals: dict[int, RungTotals]) -> Iterator[Metric]:
  """Yields the metrics of each rung. Every rung of the ladder has its series from the start."""
  steps = _counter("sluice_steps", "Steps by the token budget of their shape.", labels=["rung"])
  tokens = _counter(
    "sluice_step_tokens", "Tokens of the steps' shapes, by what became of them.", labels=["rung", "kind"]
  )
  host = _counter("sluice_step_host_seconds", "Planning, packing and dispatch.", labels=["rung"])
  device = _counter("sluice_step_device_seconds", "From launch to the values.", labels=["rung"])
  for shape in backend.config.ladder.rungs():
    rung, total = str(shape.tokens), totals.get(shape.tokens, RungTotals())
    steps.add_metric([rung], total.steps)
    tokens.add_metric([rung, "decode"], total.decode_tokens)
    tokens.add_metric([rung, "prefill"], total.prefill_tokens)
    tokens.add_metric([rung, "padding"], total.padding)
    tokens.add_metric([rung, "skipped"], total.skipped(shape.tokens))
    host.add_metric([rung], total.host_s)
    device.add_metric([rung], total.device_s)
  yield from (steps, tokens, host, device)


def _histograms(seen: Observations, queue: Histogram) -> Iterator[Metric]:
  for name, text, histogram in (
    ("sluice_time_to_first_token_seconds", "From submission to the first token.", seen.time_to_first_token),
    ("sluice_inter_token_latency_seconds", "Between a request's tokens.", seen.inter_token),
    ("sluice_time_per_output_token_seconds", "A request's mean after its first token.", seen.per_output_token),
    ("sluice_request_duration_seconds", "From submission to the last token.", seen.end_to_end),
    ("sluice_request_queue_time_seconds", "From submission to the first step, of ended requests.", queue),
    ("sluice_request_prompt_tokens", "Lengths of prompts.", seen.prompt_tokens),
    ("sluice_request_output_tokens", "Lengths of outputs.", seen.output_tokens),
  ):
    bounds, counts = (*map(str, histogram.bounds), "+Inf"), itertools.accumulate(histogram.counts)
    yield HistogramMetricFamily(name, text, list(zip(bounds, counts, strict=True)), histogram.total)


def _vllm(backend: Backend, report: Report, families: list[Metric]) -> Iterator[Metric]:
  """Yields the same samples under vLLM's names and labels."""
  stats, config = report.stats, backend.config
  ours = {family.name: family for family in families}
  labels = {"model_name": backend.model, "engine": "0"}
  for name, of in _VLLM_NAMES.items():
    family = ours[of]
    alias = Metric(name, f"vLLM's name of {of}.", family.type)
    for sample in family.samples:
      alias.add_sample(name + sample.name.removeprefix(of), labels | sample.labels, sample.value)
    yield alias
  success = _counter(
    "vllm:request_success", "vLLM's name of sluice_requests_finished.", labels=[*labels, "finished_reason"]
  )
  for reason, count in stats.finished.items():
    success.add_metric([*labels.values(), reason.value], count)
  yield success
  info = _gauge(
    "vllm:cache_config_info", "Of the KV pool; always 1.", labels=["engine", "block_size", "num_gpu_blocks"]
  )
  info.add_metric(["0", str(config.block_size), str(stats.num_blocks)], 1)
  yield info
  if config.enable_lora:
    # No request waits for a slot, since every loaded adapter has one.
    names = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    lora = _gauge("vllm:lora_requests_info", "LoRA adapters with requests; the time of the scrape.", labels=names)
    running = ",".join(adapter.name for adapter in report.adapters if adapter.num_live)
    lora.add_metric([str(config.max_loras), running, ""], time.time())
    yield lora
