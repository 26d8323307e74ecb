"""Which prefill server the router names to a replica, and what it knows of them."""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import threading

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
import pytest

from tests.server.router.replica_stub import running_stubs
from tests.server.router.router_harness import running_router, wait_until

CHAT = "/v1/chat/completions"
HEADER = "x-prefiller-host-port"
SERVICE = "sluice.transfer.v1.TransferService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.contextmanager
def prefill_servers(count: int) -> Iterator[list[tuple[str, health.HealthServicer]]]:
  """Servers of gRPC's health service alone, all ready."""
  servers, found = [], []
  for _ in range(count):
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set(SERVICE, SERVING)
    found.append((f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", servicer))
    server.start()
    servers.append(server)
  try:
    yield found
  finally:
    for server in servers:
      server.stop(None)


def chat(text: str) -> dict:
  return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded"])
def test_long_prompts_name_a_prefill_server(policy):
  with running_stubs(1) as [stub], prefill_servers(2) as [first, second]:
    names = (first[0], second[0])
    with running_router([stub.name], prefill_servers=names, policy=policy) as router:
      router.wait_ready(1)
      for name in names:
        wait_until(lambda name=name: router.value("sluice_router_prefill_ready", server=name) == 1)
      for text in ("x" * 2000, "y" * 2000, "x" * 2000, "short"):
        router.http.post(CHAT, json=chat(text), headers={HEADER: "evil:1"})
      named = [seen[2].get(HEADER) for seen in stub.seen]
      assert set(named[:2]) == set(names) and named[3] is None
      if policy == "prefix_aware":
        assert named[2] == named[0]
      assert router.value("sluice_router_prefill_waiting", server=named[0]) == 0


@pytest.fixture
def one():
  with (
    running_stubs(1) as [stub],
    prefill_servers(1) as [(name, servicer)],
    running_router([stub.name], prefill_servers=(name,)) as router,
  ):
    router.wait_ready(1)
    wait_until(lambda: router.value("sluice_router_prefill_ready", server=name) == 1)
    yield stub, name, servicer, router


def test_a_prefill_server_that_is_not_ready_is_left_out(one):
  stub, name, servicer, router = one
  servicer.set(SERVICE, NOT_SERVING)
  wait_until(lambda: router.value("sluice_router_prefill_ready", server=name) == 0)
  router.http.post(CHAT, json=chat("x" * 2000))
  servicer.set(SERVICE, SERVING)
  wait_until(lambda: router.value("sluice_router_prefill_ready", server=name) == 1)
  router.http.post(CHAT, json=chat("x" * 2000))
  assert [seen[2].get(HEADER) for seen in stub.seen] == [None, name]


def test_waiting_prompts_are_counted_until_the_first_byte(one):
  stub, name, _, router = one
  stub.mode = "hang"
  stub.go.clear()
  waiting = threading.Thread(target=lambda: router.http.post(CHAT, json=chat("x" * 2000)))
  waiting.start()
  wait_until(lambda: router.value("sluice_router_prefill_waiting", server=name) == 1)
  stub.frozen.clear()  # silence ends it
  waiting.join()
  stub.frozen.set()
  wait_until(lambda: router.value("sluice_router_prefill_waiting", server=name) == 0)
  router.wait_ready(1)
  stub.mode = "stream"
  with router.http.stream("POST", CHAT, json=chat("x" * 2000)) as answer:
    events = answer.iter_raw()
    next(events)
    assert router.value("sluice_router_replica_in_flight", replica=stub.name) == 1
    assert router.value("sluice_router_prefill_waiting", server=name) == 0
    stub.go.set()
    assert b"".join(events)
