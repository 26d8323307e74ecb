"""The Ray Serve application without Ray: flags, the child server, both relays, the policy. Servers are real."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

from grpc_health.v1 import health_pb2
import httpx
import psutil
import pydantic
import pytest
import yaml

from deploy.ray.arguments import SluiceArguments
from deploy.ray.autoscaling import KV_USAGE, REQUESTS, ROWS, LoadFigures, SluicePolicy, count_needed_replicas
from deploy.ray.child_server import ChildServer, check_server_flags
from deploy.ray.grpc_relay import SERVICER_FUNCTIONS, GrpcRelay
from deploy.ray.http_relay import HttpRelay
from deploy.ray.replica import SluiceReplica
from engine.errors import ConfigError
from server.http.http_listener import Listener
from server.http.http_options import HttpOptions
from server.proto import sluice_pb2 as pb

ROOT = pathlib.Path(__file__).resolve().parents[2]
RAY_PYTHON = ROOT / ".venv-ray" / "bin" / "python"
FLAGS = ["--fake_device", "--fake_step_ms=5", f"--model={ROOT / 'models' / 'demo'}", "--strict_requests=false"]
LONG = {"prompt": "Once", "max_tokens": 3000, "stream": True, "ignore_eos": True}


class Context:
  """What Serve hands to a replica beside a gRPC message, as far as the relay uses it."""

  def __init__(self, *metadata):
    self.metadata, self.code, self.details, self.trailing = metadata, None, None, []

  def invocation_metadata(self):
    return self.metadata

  def set_code(self, code):
    self.code = code

  def set_details(self, details):
    self.details = details

  def set_trailing_metadata(self, trailing):
    self.trailing = trailing


@contextlib.asynccontextmanager
async def relayed_server():
  """A server, both relays to it, and the port of the HTTP relay."""
  server = ChildServer(FLAGS)
  await server.start()
  relay = GrpcRelay(server.grpc_port, lambda: server.is_alive)
  listener = Listener(HttpRelay(lambda: server.http_port), HttpOptions(port=0, head_timeout_s=60))
  port = await listener.start_listening()
  try:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
      yield server, relay, client, f"http://127.0.0.1:{port}"
  finally:
    await listener.stop_listening(0)
    await relay.close()
    server.kill()
    await server.stop()


async def wait_until_idle(relay: GrpcRelay) -> None:
  async with asyncio.timeout(60):
    while (load := await relay.model.GetLoad(pb.GetLoadRequest())).running_requests + load.queued_requests:
      await asyncio.sleep(0.02)


def test_answers_and_errors_pass_unchanged():
  async def run():
    async with relayed_server() as (server, relay, client, url):
      own = f"http://127.0.0.1:{server.http_port}"
      for method, path, body, headers in (
        ("POST", "/v1/completions", b'{"prompt": "Once", "max_tokens": 5, "temperature": 0}', {}),
        ("POST", "/v1/completions", b'{"prompt": "Once", "max_tokens": -5}', {}),
        ("POST", "/v1/completions", b'{"prompt": "' + b"x" * (8 << 20), {}),  # refused before it is read
        ("GET", "/v1/models", None, {}),
        ("HEAD", "/v1/models", None, {}),
        ("GET", "/v1/models", None, {"host": "evil.example.com"}),
        ("GET", "/v1/models/a%2Fb?c=d", None, {}),
        ("DELETE", "/v1/models", None, {}),
      ):
        there = await client.request(method, own + path, content=body, headers=headers)
        here = await client.request(method, url + path, content=body, headers=headers)
        assert here.status_code == there.status_code, (method, path)
        assert here.headers.get("content-type") == there.headers.get("content-type")
        if there.content:
          here, there = here.json(), there.json()
          for answer in (here, there):
            answer.pop("id", None), answer.pop("created", None)
          assert here == there
      # A body in pieces, whose length nobody announced.

      async def pieces():
        yield b'{"prompt": "Once",'
        yield b' "max_tokens": 3, "ignore_eos": true}'

      answer = await client.post(f"{url}/v1/completions", content=pieces())
      assert answer.json()["usage"]["completion_tokens"] == 3

  asyncio.run(run())


def test_a_client_that_leaves_ends_its_request_and_a_dead_server_is_told():
  async def run():
    async with relayed_server() as (server, relay, client, url):
      async with client.stream("POST", f"{url}/v1/completions", json=LONG) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        assert (await relay.model.GetLoad(pb.GetLoadRequest())).running_requests == 1
      await wait_until_idle(relay)
      stream = relay.relay_stream(
        relay.generation.Generate,
        pb.GenerateRequest(text="Once", stopping=pb.StopParams(max_tokens=3000, ignore_eos=True)),
        Context(),
        pb.GenerateResponse(),
      )
      await anext(stream)
      await stream.aclose()
      await wait_until_idle(relay)
      with pytest.raises(httpx.RemoteProtocolError):
        async with client.stream("POST", f"{url}/v1/completions", json=LONG) as response:
          async for _ in response.aiter_lines():
            server.kill()
      await server.wait_ended()
      answer = await client.post(f"{url}/v1/completions", json={"prompt": "Once"})
      assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
      context = Context()
      empty = await relay.relay_unary(
        relay.generation.Tokenize, pb.TokenizeRequest(text="a"), context, pb.TokenizeResponse()
      )
      assert empty == pb.TokenizeResponse() and context.code.name == "UNAVAILABLE"
      assert "ended" in context.details and any(
        b"ENGINE_DEAD" in value for _, value in context.trailing if isinstance(value, bytes)
      )

  asyncio.run(run())


def test_a_body_that_serve_loses_is_answered_at_once():
  """Serve raises from `receive` when its connection to the client's proxy breaks; the server would wait 30 s."""

  async def run():
    async with relayed_server() as (server, relay, _, _):
      app = HttpRelay(lambda: server.http_port)
      scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
      sent: list[Any] = []

      async def send(message: Any) -> None:
        sent.append(message)

      for parts in ([], [{"type": "http.request", "body": b'{"prompt":', "more_body": True}]):
        messages = iter(parts)

        async def receive() -> Any:
          for message in messages:  # noqa: B023
            return message
          raise RuntimeError("the actor is unavailable")

        sent.clear()
        async with asyncio.timeout(15):
          await app({**scope}, receive, send)
        assert sent[0]["status"] == 503 and json.loads(sent[1]["body"])["error"]["code"] == "unavailable"
        assert "send it again" in json.loads(sent[1]["body"])["error"]["message"]
      # Once the body is whole, its answer counts.
      messages = iter([{"type": "http.request", "body": b'{"prompt": "Once", "max_tokens": 3}'}])
      sent.clear()
      await app({**scope}, receive, send)
      assert sent[0]["status"] == 200
      await wait_until_idle(relay)

  asyncio.run(run())


def test_grpc_statuses_keep_their_details():
  async def run():
    async with relayed_server() as (_, relay, _, _):
      bad = pb.GenerateRequest(text="Once", stopping=pb.StopParams(max_tokens=-1))
      for make in (
        lambda context: relay.relay_stream(relay.generation.Generate, bad, context, pb.GenerateResponse()),
        lambda context: relay.relay_unary(relay.generation.GenerateUnary, bad, context, pb.GenerateUnaryResponse()),
      ):
        context = Context(("x-request-id", "mine"), ("application", "sluice"), ("grpc-timeout", "1S"))
        made = make(context)
        messages = [message async for message in made] if hasattr(made, "__aiter__") else [await made]
        assert len(messages) == 1 and not messages[0].ByteSize()
        assert context.code.name == "INVALID_ARGUMENT" and "max_tokens=-1" in context.details
        trailing = dict(context.trailing)
        assert b"INVALID_REQUEST" in trailing["grpc-status-details-bin"] and trailing["x-request-id"] == "mine"
      # Names of fields that were ignored come behind a stream that ends well.
      unknown = pb.GenerateRequest.FromString(
        pb.GenerateRequest(text="a", stopping=pb.StopParams(max_tokens=2)).SerializeToString() + b"\xfa\x3e\x01a"
      )
      context = Context()
      stream = relay.relay_stream(relay.generation.Generate, unknown, context, pb.GenerateResponse())
      messages = [message async for message in stream]
      assert context.code is None and not messages[-1].ByteSize() and messages[-2].finished
      assert dict(context.trailing)["x-sluice-ignored-fields"]

  asyncio.run(run())


def test_every_rpc_has_a_method():
  services = [*pb.DESCRIPTOR.services_by_name.values(), health_pb2.DESCRIPTOR.services_by_name["Health"]]
  names = {method.name for service in services for method in service.methods} - {"List"}
  assert {name for name in vars(SluiceReplica) if name[0].isupper()} == names


def test_a_server_ends_with_its_parent_even_when_it_is_stopped():
  code = (
    "import asyncio, sys, time\n"
    "from deploy.ray.child_server import ChildServer\n"
    f"server = ChildServer({FLAGS!r})\n"
    "asyncio.run(server.start())\n"
    "print(server.pid, flush=True)\n"
    "time.sleep(600)\n"
  )
  with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
    child = psutil.Process(int(parent.stdout.readline()))
    child.suspend()
    parent.kill()
  with contextlib.suppress(psutil.NoSuchProcess):
    child.wait(60)
  assert not child.is_running()


def test_a_server_that_cannot_start_says_why():
  with pytest.raises(ConfigError, match="/no/such"):
    asyncio.run(ChildServer(["--model=/no/such/folder", "--fake_device"]).start())


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--port=1234", "free port"),
    ("--tls-cert-file=a", "Serve's proxies"),
    ("--batch_dir=/tmp", "a server of its own"),
    ("--num_hosts=2", "one host"),
    ("--drain_timeout_s=3", "drain_timeout_s"),
    ("--max_num_seqs=-1", "max_num_seqs=-1"),
    ("--no_such_flag=1", "no_such_flag"),
  ],
)
def test_flags_are_refused_before_anything_is_allocated(flag, words):
  with pytest.raises(ConfigError, match=words) as caught:
    check_server_flags([flag])
  assert "\n" not in str(caught.value)
  with pytest.raises(pydantic.ValidationError, match=words):
    SluiceArguments(server_flags=[flag])


def test_arguments_are_refused_by_name():
  with pytest.raises(pydantic.ValidationError, match="min_replicas=3 is above max_replicas=2"):
    SluiceArguments(min_replicas=3, max_replicas=2)
  with pytest.raises(pydantic.ValidationError, match="replicas_max"):
    SluiceArguments(replicas_max=2)
  given = SluiceArguments(model="/a", num_devices=4, server_flags=["--max_num_seqs=3"])
  assert given.all_flags() == ["--model=/a", "--num_devices=4", "--max_num_seqs=3"]


def test_the_configuration_is_what_the_application_takes():
  config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
  assert tuple(config["grpc_options"]["grpc_servicer_functions"]) == SERVICER_FUNCTIONS
  (application,) = config["applications"]
  assert application["import_path"] == "deploy.ray.app:build_app"
  SluiceArguments(**application["args"])


def test_the_scarcer_resource_decides():
  def needed(*loads, queued=0.0):
    named = {str(index): LoadFigures(*load) for index, load in enumerate(loads)}
    return count_needed_replicas(named, queued, target_rows=0.5, target_kv=0.8)

  assert needed() == needed((0, 8, 0.0)) == needed((4, 8, 0.0)) == 1
  assert needed((5, 8, 0.0)) == 2  # 5 of the wanted 4
  assert needed((40, 8, 0.1)) == 10
  assert needed((1, 8, 0.9)) == 2  # few long prompts
  assert needed((4, 8, 0.1), (4, 8, 0.1), (0, 8, 0.0)) == 2
  assert needed((4, 8, 0.1), queued=8) == 3
  policy = SluicePolicy(0.5, 0.8)
  metrics = {REQUESTS: {"a": 40.0, "b": 1.0}, ROWS: {"a": 8.0}, KV_USAGE: {"a": 0.0}}
  context = types.SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=0.0, target_num_replicas=7)
  assert policy(context) == (10, {}), "a replica that has not reported everything counts nothing"
  context.aggregated_metrics = {}
  assert policy(context) == (7, {})


def test_nothing_but_the_application_needs_ray():
  code = (
    "import deploy.ray.replica, deploy.ray.arguments, deploy.ray.guarded_server, sys; assert 'ray' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=180)


@pytest.mark.long
@pytest.mark.skipif(not RAY_PYTHON.exists(), reason="Ray's environment is not here: make setup-ray")
@pytest.mark.parametrize("scenario", ["answers", "lost", "scaling", "devices"])
def test_real_ray(scenario, tmp_path):
  """Ray, its proxies and replicas as processes of this machine."""
  output = tmp_path / "table.json"
  command = [str(RAY_PYTHON), "-m", "tools.ray_check", f"--scenario={scenario}", "--rounds=1", f"--output={output}"]
  done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900, check=False, env=os.environ)
  missed = (
    [row for row in json.loads(output.read_text())["rows"] if not row["passed"]] if output.exists() else "nothing"
  )
  assert done.returncode == 0, (missed, done.stderr[-2000:])
