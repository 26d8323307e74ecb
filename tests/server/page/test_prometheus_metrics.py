"""Metrics as a scraper gets them, from a server that served, refused and lost requests; and the numbers below them."""

import asyncio
import dataclasses
import json
import logging
import random
import shutil
import subprocess

import grpc
import httpx
from prometheus_client import parser as text_parser
from prometheus_client.openmetrics import parser as openmetrics_parser
import pytest

from engine.recorder import RequestRecord
from server.errors import Starting
from server.generation.serving_state import ServingState
from server.lifecycle.host import HostOptions
from server.page.prometheus_metrics import Metrics
from server.proto import sluice_pb2 as pb
from server.telemetry.access_log import AccessLog
from server.telemetry.latency_histograms import Histogram, Observations, percentiles
from server.telemetry.log_lines import Lines
from server.telemetry.process_counts import count_process
from tests.server.harness import Served, generate, running, tiny_config

CONFIG = tiny_config(max_model_len=64, num_blocks=64, max_num_seqs=4, max_queued_requests=1)
CANARY = "xyzzy-canary"


def scrape(served: Served, accept: str = "") -> str:
  answer = httpx.get(f"http://127.0.0.1:{served.host.http_port}/metrics", headers={"accept": accept}, timeout=30)
  assert answer.status_code == 200
  return answer.text


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
  """By name and labels; a sample that is there twice is an error."""
  found = {}
  for family in text_parser.text_string_to_metric_families(text):
    for sample in family.samples:
      key = sample.name, tuple(sorted(sample.labels.items()))
      assert key not in found, key
      found[key] = sample.value
  return found


def value(text: str, name: str, **labels: str) -> float:
  return values(text)[name, tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def worked(tokenizer):
  """A server that has something to tell of every kind, and is idle again."""
  with running(tokenizer, host=HostOptions(http_port=0, vllm_metric_names=True), config=CONFIG) as served:
    base = f"http://127.0.0.1:{served.host.http_port}"
    for _ in range(3):
      generate(served, token_ids=pb.TokenIds(ids=range(20, 40)), stopping=pb.StopParams(max_tokens=5, ignore_eos=True))
    for body, status in (
      ({"prompt": CANARY, "max_tokens": 4, "ignore_eos": True}, 200),
      ({"prompt": CANARY, "top_p": 7}, 400),
      ({"prompt": CANARY, "model": CANARY}, 404),
    ):
      assert httpx.post(f"{base}/v1/completions", json=body).status_code == status
    assert httpx.get(f"{base}/{CANARY}").status_code == 404
    with pytest.raises(grpc.RpcError):
      served.channel.unary_unary(f"/{CANARY}.Service/{CANARY}")(b"")
    served.wait_until(lambda: served.engine.num_live == 0 and len(served.generations) == 0)
    yield served


def test_promtool_finds_nothing(worked):
  promtool = shutil.which("promtool")
  if promtool is None:
    pytest.skip("no promtool on the path (Debian's package prometheus has it)")
  # vLLM's names are not what Prometheus recommends, and are left out.
  metrics = Metrics(worked.host._state, worked.host._own_census)
  text = asyncio.run(metrics.look()).exposition()[0]
  done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60)
  assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
  # It does find what is wrong.
  done = subprocess.run([promtool, "check", "metrics"], input=b"a_total_count 1\n", capture_output=True, timeout=60)
  assert done.returncode != 0


def test_both_formats_say_the_same(worked):
  text = scrape(worked)
  assert text.startswith("# HELP")
  other = scrape(worked, "application/openmetrics-text; version=1.0.0")
  assert other.endswith("# EOF\n")
  families = list(openmetrics_parser.text_string_to_metric_families(other))
  same = {
    (sample.name, tuple(sorted(sample.labels.items())))
    for family in families
    for sample in family.samples
    if family.name.startswith(("sluice", "vllm"))
  }
  # The calls of the scrapes themselves are what differs.
  of_text = {key for key in values(text) if key[0].startswith(("sluice", "vllm"))}
  assert {key for key in same ^ of_text if "/metrics" not in str(key)} == set()


def test_gauges_of_the_inference_gateway(worked):
  text = scrape(worked)
  for name in ("sluice_requests_waiting", "sluice_requests_running", "sluice_kv_cache_usage_ratio"):
    assert f"# TYPE {name} gauge" in text and value(text, name) == 0
  for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
    assert f"# TYPE {name} gauge" in text and value(text, name, model_name="tiny", engine="0") == 0
  assert value(text, "vllm:cache_config_info", engine="0", block_size="8", num_gpu_blocks="64") == 1


def test_gauges_while_requests_run_and_wait(tokenizer):
  config = dataclasses.replace(CONFIG, max_queued_requests=8)
  with running(tokenizer, host=HostOptions(http_port=0), config=config) as served:
    served.runner.go.clear()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[20] * 8), stopping=pb.StopParams(max_tokens=4))
    calls = []
    for count in range(1, 6):
      calls.append(served.generation.GenerateUnary.future(request))
      served.wait_until(lambda count=count: served.engine.num_live == count)
    text = scrape(served)
    running_now, waiting = value(text, "sluice_requests_running"), value(text, "sluice_requests_waiting")
    assert running_now + waiting == 5 and waiting >= 1
    assert value(text, "sluice_generations_live") == 5
    assert 0 < value(text, "sluice_kv_cache_usage_ratio") <= 1
    served.runner.go.set()
    for call in calls:
      call.result(30)


def test_counts_agree_with_what_was_sent(worked, tokenizer):
  text = scrape(worked)
  stats = worked.engine.stats()
  assert value(text, "sluice_generations_total") == 4
  assert value(text, "sluice_requests_finished_total", reason="length") == 4
  assert (
    value(text, "sluice_output_tokens_total")
    == 19
    == value(text, "vllm:generation_tokens_total", model_name="tiny", engine="0")
  )
  # Two of the three equal prompts found two of their blocks.
  assert value(text, "sluice_prefix_cache_hit_tokens_total") == 32
  looked_up = 3 * 20 + len(tokenizer.encode(CANARY))
  assert value(text, "sluice_prefix_cache_query_tokens_total") == looked_up
  of_vllm = {"model_name": "tiny", "engine": "0"}
  assert value(text, "vllm:prefix_cache_queries_total", **of_vllm) == looked_up
  assert value(text, "vllm:prefix_cache_hits_total", **of_vllm) == 32
  assert value(text, "sluice_compiles_total") == 0
  assert value(text, "sluice_preemptions_total") == 0
  by_rung = [value(text, "sluice_steps_total", rung=rung) for rung in ("8", "64")]
  assert sum(by_rung) == stats.num_steps and min(by_rung) > 0
  for kind, total in (
    ("decode", stats.num_decode_tokens),
    ("prefill", stats.num_prefill_tokens),
    ("padding", stats.num_padding_tokens),
    ("skipped", stats.num_skipped_tokens),
  ):
    assert sum(value(text, "sluice_step_tokens_total", rung=rung, kind=kind) for rung in ("8", "64")) == total
    assert value(text, f"sluice_{kind}_tokens_total") == total


def test_histograms_have_every_request_once(worked):
  text = scrape(worked)
  for name, count in (
    ("sluice_time_to_first_token_seconds", 4),
    ("sluice_request_duration_seconds", 4),
    ("sluice_request_queue_time_seconds", 4),
    ("sluice_time_per_output_token_seconds", 4),
    ("sluice_inter_token_latency_seconds", 15),
    ("sluice_request_prompt_tokens", 4),
    ("sluice_request_output_tokens", 4),
  ):
    assert value(text, f"{name}_count") == count, name
    assert value(text, f"{name}_bucket", le="+Inf") == count
    buckets = [number for key, number in values(text).items() if key[0] == f"{name}_bucket"]
    assert buckets == sorted(buckets)
  assert value(text, "sluice_request_output_tokens_sum") == 19
  assert value(text, "sluice_request_output_tokens_bucket", le="4.0") == 1
  assert value(text, "vllm:time_to_first_token_seconds_count", model_name="tiny", engine="0") == 4
  first, total = "sluice_time_to_first_token_seconds_sum", "sluice_request_duration_seconds_sum"
  assert 0 < value(text, first) < value(text, total)


@pytest.mark.catalogue("H6", "H8")
def test_refusals_by_reason_and_nothing_of_a_clients_words(worked):
  text = scrape(worked)
  assert value(text, "sluice_calls_failed_total", protocol="http", reason="http_400") == 1
  assert value(text, "sluice_calls_failed_total", protocol="http", reason="model_not_found") == 1
  assert value(text, "sluice_calls_failed_total", protocol="grpc", reason="unknown_method") == 1
  assert value(text, "sluice_calls_total", protocol="grpc", method="other", code="UNIMPLEMENTED") == 1
  assert value(text, "sluice_calls_total", protocol="http", method="other", code="404") == 1
  assert value(text, "sluice_calls_total", protocol="http", method="POST /v1/completions", code="200") == 1
  name = "sluice.v1.GenerationService/Generate"
  assert value(text, "sluice_calls_total", protocol="grpc", method=name, code="OK") == 3
  assert CANARY not in text


def test_no_vllm_names_unless_asked_and_a_server_that_loads():
  state = ServingState()
  state.refuse_work(Starting("loading"))

  async def census():
    return count_process(AccessLog(), 0.0)

  metrics = Metrics(state, census)
  text, content_type = asyncio.run(metrics.look()).exposition()
  assert content_type.startswith("text/plain")
  assert value(text.decode(), "sluice_ready") == 0 and value(text.decode(), "sluice_alive") == 1
  assert b"vllm" not in text and b"sluice_requests" not in text
  state.end_threads()


@pytest.mark.catalogue("H8")
def test_series_are_bounded():
  log = AccessLog()
  for number in range(1000):
    log.write(method="POST /v1/completions", code=number + 500, reason=f"r{number}")
  assert len(log.calls) <= 257 and len(log.failed) <= 257
  assert sum(log.calls.values()) == 1000 == sum(log.failed.values())


def test_clients_that_leave_have_not_failed():
  log = AccessLog()
  log.write(method="GET /live", code=499)
  log.write(method="/sluice.v1.GenerationService/Generate", code="CANCELLED")
  assert sum(log.calls.values()) == 2 and not log.failed


def test_histogram_counts_as_prometheus_defines_it():
  histogram = Histogram((1.0, 2.0))
  for number, times in ((0.5, 1), (1.0, 2), (1.5, 1), (2.5, 3)):
    histogram.observe(number, times)
  assert histogram.counts == [3, 1, 3] and sum(histogram.counts) == 7
  assert histogram.total == 0.5 + 2.0 + 1.5 + 7.5


def test_percentiles_are_those_of_the_values_written_out():
  random_ = random.Random(3)
  assert percentiles([], (0.5, 0.9)) == [None, None]
  for _ in range(50):
    pairs = [(random_.random(), random_.randint(1, 5)) for _ in range(random_.randint(1, 20))]
    flat = sorted(number for number, times in pairs for _ in range(times))
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
      wanted = next(x for x in flat if sum(y <= x for y in flat) >= share * len(flat))
      assert percentiles(pairs, (share,)) == [wanted]


def test_queue_times_are_looked_up_once_each():
  seen = Observations()

  def record(name: str, scheduled: float | None, side: str = "") -> RequestRecord:
    return RequestRecord(name, side, "stop", 10.0, scheduled, None, 20.0, 1, 0, 1, 0, 0)

  records = [record("a", 11.0), record("b", None), record("c", 12.0)]
  seen.queued(records)
  seen.queued(records)
  records += [record("d", 13.0), record("d", 13.0, "decode")]
  seen.queued(records[2:])
  assert (sum(seen.queue.counts), seen.queue.total) == (3, 1.0 + 2.0 + 3.0)
  seen.queued([record("e", 14.0)])  # all that was known has left the ring
  assert (sum(seen.queue.counts), seen.queue.total) == (4, 10.0)


def test_json_lines_of_the_program(capsys):
  root = logging.getLogger()
  handlers, level = root.handlers[:], root.level
  try:
    lines = Lines()
    lines.set_up("json")
    lines.say("error: two\nlines")
    try:
      raise ValueError("inside")
    except ValueError:
      logging.getLogger("server.lifecycle.host").exception("it %s", "failed")
  finally:
    root.handlers[:], root.level = handlers, level
  first, second = map(json.loads, capsys.readouterr().err.splitlines())
  assert (first["level"], first["message"]) == ("error", "two\nlines")
  assert (second["level"], second["logger"], second["message"]) == ("error", "server.lifecycle.host", "it failed")
  assert "ValueError: inside" in second["exception"] and second["time"].endswith("+00:00")
