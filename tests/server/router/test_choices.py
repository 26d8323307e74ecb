"""Which replica gets a request: policies, loads, keys of prompts, and requests that only one replica can answer."""

import json

import pytest

from server.router.prompt_keys import make_prompt_keys, read_prompt_fields
from server.router.replicas.replica_probes import read_gauges
from tests.server.router.replica_stub import running_stubs
from tests.server.router.router_harness import running_router, wait_until

CHAT = "/v1/chat/completions"


def chat(*turns: str, **more) -> dict:
  return {"messages": [{"role": "user", "content": turn} for turn in turns], **more}


def keys_of(body: dict, piece: int = 16, most: int = 100) -> list[bytes]:
  fields = read_prompt_fields(json.dumps(body).encode())
  assert fields is not None
  return make_prompt_keys(fields, piece, most)


def test_a_longer_conversation_begins_with_the_same_keys():
  short = keys_of(chat("what is a sluice?", stream=True, seed=1))
  long = keys_of({"seed": 2, **chat("what is a sluice?", "and what is a weir?")})
  assert len(short) >= 3 and len(long) > len(short) and long[: len(short) - 1] == short[:-1]


@pytest.mark.parametrize(
  "change", [{"model": "other"}, {"cache_salt": "s"}, {"tools": [{"name": "t"}]}, {"system": "be brief, and be kind"}]
)
def test_what_comes_before_the_prompt_changes_all_keys(change):
  base = {"model": "a", "system": "you are a helpful assistant"} | chat("what is a sluice?")
  assert keys_of(base)[0] == keys_of(dict(base))[0]
  assert not set(keys_of(base)) & set(keys_of(base | change))


def test_keys_are_bounded():
  assert len(keys_of(chat("x" * 10_000), 16, 7)) == 7
  assert not keys_of(chat("hi"), 1000)
  assert read_prompt_fields(b"[]") is None and read_prompt_fields(b"{") is None and read_prompt_fields(b"\xff") is None


def test_gauges_are_read_by_their_whole_names():
  page = b"# HELP sluice_requests_running x\nsluice_requests_running_limit 9.0\nsluice_requests_running 3.0\nx 1\n"
  assert read_gauges(page) == {b"sluice_requests_running": 3.0}


@pytest.fixture
def three(request):
  with running_stubs(3) as stubs, running_router([each.name for each in stubs], policy=request.param) as router:
    router.wait_ready(3)
    yield stubs, router


@pytest.mark.parametrize("three", ["round_robin"], indirect=True)
def test_round_robin(three):
  stubs, router = three
  for _ in range(6):
    router.http.post(CHAT, json=chat("x" * 1000))
  assert [len(stub.seen) for stub in stubs] == [2, 2, 2]


@pytest.mark.parametrize("three", ["least_loaded"], indirect=True)
def test_least_loaded_counts_what_others_sent(three):
  stubs, router = three
  stubs[0].load, stubs[1].load = (2, 3), (0, 1)
  wait_until(lambda: router.value("sluice_router_replica_waiting", replica=stubs[0].name) == 2)
  wait_until(lambda: router.value("sluice_router_replica_running", replica=stubs[1].name) == 1)
  for _ in range(3):
    router.http.post(CHAT, json={})
  assert [len(stub.seen) for stub in stubs] == [0, 0, 3]
  assert router.value("sluice_router_replica_kv_cache_usage_ratio", replica=stubs[0].name) == 0.25


@pytest.mark.parametrize("three", ["prefix_aware"], indirect=True)
def test_prefix_aware(three):
  stubs, router = three
  homes = {}
  for turn in range(3):
    for name in "abcdef":
      answer = router.http.post(CHAT, json=chat(*[name * 600] * (turn + 1), seed=turn))
      assert homes.setdefault(name, answer.json()["from"]) == answer.json()["from"]
  assert [len(stub.seen) for stub in stubs] == [6, 6, 6]  # new prefixes spread
  assert router.value("sluice_router_prefix_hits_total") == 12
  assert router.value("sluice_router_known_pieces") > 0


@pytest.mark.parametrize("three", ["round_robin"], indirect=True)
def test_a_stored_response_is_where_it_was_made(three):
  stubs, router = three
  stubs[0].stored.add("resp_1")
  assert router.http.post("/v1/responses", json={"input": "hi"}).json()["id"] == "resp_1"
  for _ in range(3):
    following = router.http.post("/v1/responses", json={"input": "hi", "previous_response_id": "resp_1"})
    assert following.json()["from"] == stubs[0].name
    assert router.http.get("/v1/responses/resp_1").json()["from"] == stubs[0].name
    stubs[0].stored.add("input_tokens")  # the path's own name
    counted = router.http.post("/v1/responses/input_tokens", json={"input": "hi", "previous_response_id": "resp_1"})
    assert counted.json()["from"] == stubs[0].name
  assert router.http.delete("/v1/responses/resp_1").json()["from"] == stubs[0].name
  assert not stubs[1].seen and not stubs[2].seen


@pytest.mark.parametrize("three", ["round_robin"], indirect=True)
def test_a_stored_response_that_the_router_has_not_seen(three):
  """As after a restart, or behind two routers."""
  stubs, router = three
  stubs[2].stored.add("resp_2")
  headers = {"authorization": "Bearer mine"}
  answer = router.http.post("/v1/responses/resp_2/cancel", headers=headers)
  assert answer.json()["from"] == stubs[2].name
  assert [stub.seen[0][2]["authorization"] for stub in stubs] == ["Bearer mine"] * 3
  assert router.http.get("/v1/responses/resp_3").status_code == 404  # a replica's own answer
  stubs[2].is_ready = False
  router.wait_ready(2)
  refused = router.http.get("/v1/responses/resp_2")
  assert refused.status_code == 503 and "holds what this request names" in refused.json()["error"]["message"]


@pytest.mark.parametrize("three", ["round_robin"], indirect=True)
def test_adapters_are_loaded_everywhere(three):
  stubs, router = three
  body = {"lora_name": "a", "lora_path": "b"}
  assert router.http.post("/v1/load_lora_adapter", json=body).status_code == 200
  assert [json.loads(stub.seen[0][3]) for stub in stubs] == [body] * 3
  stubs[1].status = 400
  answer = router.http.post("/v1/unload_lora_adapter", json=body)
  assert answer.status_code == 400 and answer.json()["from"] == stubs[1].name and len(stubs[2].seen) == 1
  stubs[0].is_ready = False
  router.wait_ready(2)
  refused = router.http.post("/v1/load_lora_adapter", json=body)
  assert refused.status_code == 503 and stubs[0].name in refused.json()["error"]["message"]


@pytest.mark.parametrize("three", ["round_robin"], indirect=True)
def test_what_is_not_routed(three):
  stubs, router = three
  refused = router.http.get("/v1/files")
  assert refused.status_code == 400 and "--batch_replica" in refused.json()["error"]["message"]
  for path in ("/", "/live"):
    assert router.http.get(path).json()["error"]["code"] == "not_routed"
  assert not any(stub.seen for stub in stubs)


def test_batches_and_uploads_go_to_their_replica():
  with running_stubs(2) as stubs:
    names = [stub.name for stub in stubs]
    with running_router(names, batch_replica=names[1], max_request_bytes=1024, max_upload_bytes=1 << 20) as router:
      router.wait_ready(2)
      large = b"x" * 300_000
      for content in (large, (large[at : at + 50_000] for at in range(0, len(large), 50_000))):
        answer = router.http.post("/v1/files", content=content)
        assert answer.json() == {"id": "x", "from": names[1], "size": len(large)}
      assert router.http.get("/v1/batches/b1").json()["from"] == names[1]
      refused = router.http.post("/v1/files", content=b"x" * ((1 << 20) + 1))
      assert refused.status_code == 413 and "--max_upload_bytes" in refused.json()["error"]["message"]
      stubs[1].mode = "close"
      lost = router.http.post("/v1/files", content=large)
      assert lost.status_code == 502 and lost.json()["error"]["code"] == "replica_lost"
  assert not stubs[0].seen
