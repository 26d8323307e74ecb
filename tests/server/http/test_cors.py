"""Scripts of web pages on other origins, which the flag allows; preflights have no credentials."""

from collections.abc import Iterator

import httpx
import pytest

from engine.errors import ConfigError
from server.lifecycle.host import HostOptions
from tests.server.harness import running
from tests.server.http.conftest import url_of

KEY = "rW5vJ8Jk2nq4uYt1sXzB8mE0"
CHAT = "https://chat.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


@pytest.fixture(scope="module")
def keyed(tokenizer, tmp_path_factory) -> Iterator[httpx.Client]:
  """A client without a key of a server that needs one and allows one origin."""
  keys = tmp_path_factory.mktemp("keys") / "keys"
  keys.write_text(f"{KEY}\n")
  keys.chmod(0o600)
  host = HostOptions(http_port=0, api_key_file=str(keys), http_allowed_origins=(CHAT, "http://localhost:3000"))
  with running(tokenizer, host=host) as server, httpx.Client(base_url=url_of(server)) as client:
    yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_preflight_needs_no_key(keyed, path):
  answer = keyed.options(path, headers={"origin": CHAT} | PREFLIGHT)
  assert answer.status_code == 200
  assert answer.headers["access-control-allow-origin"] == CHAT
  assert "POST" in answer.headers["access-control-allow-methods"]
  assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
  assert "Origin" in answer.headers["vary"]


def test_responses_and_errors_can_be_read(keyed):
  for headers, status in (({}, 401), ({"authorization": f"Bearer {KEY}"}, 200)):
    answer = keyed.get("/v1/models", headers={"origin": CHAT} | headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == CHAT and "Origin" in answer.headers["vary"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.com.evil.example", "null"])
def test_other_origins_are_refused(keyed, origin):
  preflight = keyed.options("/v1/models", headers={"origin": origin} | PREFLIGHT)
  assert preflight.status_code == 400 and "access-control-allow-origin" not in preflight.headers
  answer = keyed.get("/v1/models", headers={"origin": origin, "authorization": f"Bearer {KEY}"})
  assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_a_form_with_files_from_another_page_is_refused(tokenizer):
  """Browsers send it without a preflight; commands send no origin."""
  files = {"purpose": (None, "batch"), "file": ("a.jsonl", b"{}")}
  with running(tokenizer, host=HostOptions(http_port=0, http_allowed_origins=(CHAT,))) as server:
    for origin, refused in (("https://evil.example", True), ("null", True), (CHAT, False), (url_of(server), False)):
      answer = httpx.post(f"{url_of(server)}/v1/files", files=files, headers={"origin": origin})
      assert (answer.json()["error"]["code"] == "origin_not_allowed") == refused, origin
    assert httpx.post(f"{url_of(server)}/v1/files", files=files).json()["error"]["code"] != "origin_not_allowed"


def test_any_origin(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0, http_allowed_origins=("*",))) as server:
    body = {"prompt": "the cat", "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{url_of(server)}/v1/completions", json=body, headers={"origin": "http://a.example"})
    assert answer.headers["access-control-allow-origin"] == "*" and "[DONE]" in answer.text


@pytest.mark.parametrize(
  "origin", ["chat.example.com", "https://chat.example.com/", "https://Chat.example.com", "null"]
)
def test_what_is_not_an_origin_stops_the_start(origin):
  with pytest.raises(ConfigError, match="http_allowed_origins"):
    HostOptions(http_allowed_origins=(origin,)).check_options()
