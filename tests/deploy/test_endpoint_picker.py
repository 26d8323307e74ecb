"""What the endpoint picker of the Gateway API Inference Extension reads from a server under load, by its own rules.

The contract beside this file records the names, types, labels and rules. Prometheus' published parser reads the page.
"""

import json
import pathlib
import urllib.request

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
import pytest

from server.host_options import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.conftest import no_test_hangs as no_test_hangs
from tests.server.conftest import tokenizer as tokenizer
from tests.server.conftest import tokenizer_dir as tokenizer_dir
from tests.server.harness import Served, running, tiny_config

CONTRACT = json.loads((pathlib.Path(__file__).parent / "endpoint_picker_contract.json").read_text())["metrics"]
CONFIG = tiny_config(max_num_seqs=2, enable_lora=True, max_loras=3)


def scrape(served: Served) -> dict[str, Metric]:
  with urllib.request.urlopen(f"http://127.0.0.1:{served.host.http_port}/metrics", timeout=60) as answer:
    return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


@pytest.fixture(scope="module")
def served(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0, vllm_metric_names=True), config=CONFIG) as served:
    yield served


def test_the_picker_finds_every_metric_of_its_contract(served):
  """Also while there is nothing to report: a metric that is missing would count as an error at each scrape."""
  found = scrape(served)
  for name, expected in CONTRACT.items():
    family = found[name]
    assert family.type == expected["type"] and family.samples, name
    assert {*expected.get("labels", ())} <= family.samples[0].labels.keys(), name
    if own := expected.get("sluice"):  # for a picker that is given Sluice's names by its flags
      assert found[own].type == expected["type"] and found[own].samples[0].value == family.samples[0].value


def test_the_picker_sees_the_load(served):
  served.runner.seconds = 0.1  # the calls outlast the scrapes on a busy machine, too
  request = pb.GenerateRequest(text="the cat sat on the mat", stopping=pb.StopParams(max_tokens=200, ignore_eos=True))
  calls = [served.generation.Generate(request) for _ in range(3)]
  found = {}

  def sees_all() -> bool:  # in any order: the server chooses which of the calls waits
    found.update(scrape(served))
    return [found[f"vllm:num_requests_{what}"].samples[0].value for what in ("running", "waiting")] == [2, 1]

  served.wait_until(sees_all)
  assert 0 < found["vllm:kv_cache_usage_perc"].samples[0].value < 1
  cache = found["vllm:cache_config_info"].samples[0].labels
  assert (int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (CONFIG.block_size, CONFIG.num_blocks)
  lora = max(found["vllm:lora_requests_info"].samples, key=lambda sample: sample.value).labels
  assert int(lora["max_lora"]) == 3 and lora["running_lora_adapters"] == ""
  served.runner.seconds = 0.0
  for call in calls:
    list(call)


def test_the_documents_name_the_pickers_flags():
  text = (pathlib.Path(__file__).resolve().parents[2] / "deploy" / "README.md").read_text()
  for name, expected in CONTRACT.items():
    if "sluice" in expected:
      assert f"`--{expected['flag']}={expected['sluice']}`" in text, name
