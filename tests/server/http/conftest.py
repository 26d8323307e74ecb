"""Fixtures of the HTTP tests: a server with both fronts, and clients of it."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from server.lifecycle.host import HostOptions
from tests.server.harness import Served, running


def url_of(served: Served) -> str:
  return f"http://127.0.0.1:{served.host.http_port}"


@pytest.fixture(scope="module")
def server(tokenizer) -> Iterator[Served]:
  """One server for a module: after every request, good or bad, it must still serve."""
  with running(tokenizer, host=HostOptions(http_port=0)) as served:
    yield served


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
  """A plain client."""
  with httpx.Client(base_url=url_of(server), timeout=30) as client:
    yield client


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
  """The real one, without its own retries: a test wants to see the first answer."""
  with openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="unused", max_retries=0, timeout=30) as client:
    yield client


@pytest.fixture
def paced(tokenizer) -> Iterator[Served]:
  """A server whose device takes some time, so that streams do not end before a test can act."""
  with running(tokenizer, host=HostOptions(http_port=0)) as served:
    served.runner.seconds = 0.005
    yield served
