"""The program: flags, drain by signals, ports, TLS; and real servers behind it."""

import contextlib
import re
import signal
import ssl

import httpx
import openai
import pytest

from server.lifecycle.host import HostOptions
from server.router.__main__ import main
from tests.commands import run_here
from tests.server.harness import running
from tests.server.router.replica_stub import running_stubs
from tests.server.router.router_harness import running_router, wait_until
from tests.server.test_main import start, wait_for_file
from tools.certificates import Authority

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ([], "replicas is empty; set --replicas"),
    (["--replicas=a"], "replicas='a' is not HOST:PORT"),
    (["--replicas=a:0"], "'a:0' is not HOST:PORT"),
    (["--replicas=http://a:80"], "is not HOST:PORT"),
    (["--replicas=a:1,b:2,a:1"], "a:1 twice"),
    (["--replicas=a:1,https://a:1"], "a:1 twice"),
    (["--replica_ca_file=ca.pem"], "replica_ca_file=ca.pem needs a replica with TLS; write --replicas=https://"),
    (["--client_key_file=k.pem"], "need each other"),
    (["--client_cert_file=c.pem", "--client_key_file=k.pem"], "needs a replica with https://, or --prefill_ca_file"),
    (["--policy=best"], "policy='best' must be one of round_robin, least_loaded, prefix_aware"),
    (["--max_retries=-1"], "max_retries=-1 must be at least 0"),
    (["--probe_period_s=nan"], "finite number"),
    (["--port=x"], "--port"),
    (["--bogus=1"], "--bogus=1; --help lists the flags"),
    (["--batch_replica=b:1"], "batch_replica='b:1' is none of --replicas"),
    (["--replica_timeout_s=1"], "is below probe_timeout_s=2"),
  ],
)
def test_bad_flags_are_one_line(flags, words):
  done = run_here(
    "server.router.__main__", *(["--replicas=a:1"] if flags and "replicas=" not in flags[0] else []), *flags
  )
  assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr
  assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--tls_cert_file=/nowhere"], "--tls_key_file"),
    (["--replicas=https://a:1", "--replica_ca_file=/nowhere"], "replica_ca_file=/nowhere cannot be read: No such file"),
    (["--probe_api_key_file=/nowhere"], "probe_api_key_file=/nowhere: No such file"),
    (["--access_log=/nowhere/log"], "access_log=/nowhere/log cannot be opened"),
    (["--port={taken}"], "choose another --port"),
  ],
)
def test_what_cannot_be_used_ends_the_start(flags, words):
  with running_stubs(1) as [stub]:
    taken = stub.name.partition(":")[2]
    done = run_here(
      "server.router.__main__", "--replicas=a:1", "--port=0", *(each.format(taken=taken) for each in flags)
    )
  assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_help_names_every_flag():
  done = run_here("server.router.__main__", "--help")
  assert done.returncode == 0 and "--replica_timeout_s" in done.stdout and "prefix_aware" in done.stdout
  assert callable(main)


def test_sigterm_drains(tmp_path):
  with running_stubs(1) as [stub]:
    port_file = tmp_path / "port"
    process = start(
      f"--replicas={stub.name}", "--port=0", f"--port_file={port_file}", "--probe_period_s=0.05", module="server.router"
    )
    url = f"http://127.0.0.1:{wait_for_file(port_file, process).strip()}"
    stub.mode = "stream"
    stub.go.clear()
    with httpx.Client(base_url=url, timeout=30) as client, httpx.Client(base_url=url, timeout=30) as other:
      wait_until(lambda: client.get("/ready").status_code == 200)
      assert other.get("/health").status_code == 200  # opens its connection
      with client.stream("POST", CHAT, json={}) as answer:
        events = answer.iter_raw()
        next(events)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: other.get("/ready").status_code == 503)
        wait_until(lambda: other.post(CHAT, json={}).json()["error"]["code"] == "draining")
        stub.go.set()
        assert b"".join(events).endswith(b"[DONE]\n\n")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "open      http://127.0.0.1:" in said and said.endswith("stopped\n")


def test_a_second_signal_ends_the_drain(tmp_path):
  with running_stubs(1) as [stub], running_router([stub.name]) as router:
    router.wait_ready(1)
    stub.mode = "stream"
    stub.go.clear()
    with contextlib.suppress(httpx.HTTPError), router.http.stream("POST", CHAT, json={}) as answer:
      events = answer.iter_raw()
      next(events)
      router.stop()
      router.stop()
      assert b"DONE" not in b"".join(events)


def test_metrics_may_have_a_port_of_their_own():
  with running_stubs(1) as [stub], running_router([stub.name], metrics_port=0) as router:
    router.wait_ready(1)
    assert router.http.get("/metrics").json()["error"]["code"] == "not_routed"
    with httpx.Client(base_url=f"http://127.0.0.1:{router.program.metrics_port}", timeout=30) as other:
      page = other.get("/metrics").text
      assert f'sluice_router_replica_ready{{replica="{stub.name}"}} 1.0' in page
      assert other.get("/ready").status_code == 200 and other.get("/v1/models").status_code == 404


def test_tls(tmp_path):
  authority = Authority(tmp_path)
  certificate, key = authority.issue("server")
  files = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
  with running_stubs(1) as [stub], running_router([stub.name], **files) as router:
    url = f"https://127.0.0.1:{router.program.port}"
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=authority.file), timeout=30) as client:
      wait_until(lambda: client.get("/ready").status_code == 200)
      assert client.post(CHAT, json={}).json()["from"] == stub.name


def test_real_servers(tokenizer, secrets):
  """Keys, tenants, streams, stored responses and loads, of servers as they are."""
  keys = secrets / "keys"
  key = keys.read_text().split()[0]
  options = HostOptions(http_port=0, api_key_file=str(keys))
  with running(tokenizer, host=options) as first, running(tokenizer, host=options) as second:
    names = [f"127.0.0.1:{each.host.http_port}" for each in (first, second)]
    with running_router(names, policy="round_robin", probe_api_key_file=str(keys)) as router:
      router.wait_ready(2)
      asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the cat"}],
        "max_tokens": 20,
        "temperature": 0,
      }
      texts = []
      for url in (f"http://{names[0]}", str(router.http.base_url), str(router.http.base_url)):
        with openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0, timeout=30) as client:
          chunks = list(client.chat.completions.create(**asked, stream=True))
          texts.append("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices))
          if url.startswith(f"http://{names[0]}"):
            continue
          made = client.responses.create(model="tiny", input="the cat", max_output_tokens=5)
          for _ in range(3):
            following = client.responses.create(
              model="tiny", input="and", max_output_tokens=5, previous_response_id=made.id
            )
            assert following.previous_response_id == made.id
            assert client.responses.retrieve(made.id).id == made.id
      assert len(set(texts)) == 1 and texts[0]
      assert min(first.engine.recorder.num_steps, second.engine.recorder.num_steps) > 0
      refused = router.http.get("/v1/models", headers={"authorization": "Bearer wrong"})
      assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
      wait_until(lambda: re.search(r'replica_running{replica="127', router.http.get("/metrics").text))
