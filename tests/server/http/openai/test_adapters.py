"""LoRA adapters by their names as models: in every endpoint, loaded and unloaded beside running requests."""

from collections.abc import Iterator
import dataclasses
import json
import pathlib
import threading
from typing import Any

import grpc
import httpx
import openai
import pytest

from server.lifecycle.host import HostOptions
from server.proto import admin_pb2 as admin
from server.proto import admin_pb2_grpc
from server.proto import sluice_pb2 as pb
from server.rpc.admin_service import AdminActions
from tests.server.certificates import ADMIN_KEY, KEY
from tests.server.harness import END, Served, reason_of, running, tiny_config, token_ids_of

CONFIG = tiny_config(
  token_budgets=(8, 64, 128), eos_token_ids=(END,), enable_lora=True, max_loras=3, enable_embeddings=False
)
ACTIONS = AdminActions(flags=lambda: (), set_trace=lambda on: "")
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
PROMPT = [7, 8, 9]


def make_adapter(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  """A folder for --lora_dir, with adapters; one more is outside of it."""
  for name in ("a", "b", "c", "d", "team/sql"):
    make_adapter(tmp_path / "adapters" / name)
  make_adapter(tmp_path / "outside")
  (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
  (tmp_path / "adapters" / "empty").mkdir()
  (tmp_path / "adapters" / "file").write_text("no folder")
  return tmp_path / "adapters"


@pytest.fixture
def served(tokenizer, folder, secrets, tmp_path) -> Iterator[Served]:
  options = HostOptions(
    http_port=0,
    admin_port=0,
    admin_api_key_file=str(secrets / "admin_keys"),
    access_log=str(tmp_path / "calls"),
    vllm_metric_names=True,
  )
  with running(tokenizer, host=options, config=CONFIG, admin=ACTIONS, lora_dir=folder) as served:
    yield served


@pytest.fixture
def http(served) -> Iterator[httpx.Client]:
  with httpx.Client(base_url=f"http://127.0.0.1:{served.host.http_port}", timeout=60) as client:
    yield client


@pytest.fixture
def operator(served) -> admin_pb2_grpc.AdminServiceStub:
  return admin_pb2_grpc.AdminServiceStub(grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"))


def load(http: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
  return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more}, headers=ADMIN)


def unload(http: httpx.Client, name: str) -> httpx.Response:
  return http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def complete(http: httpx.Client, model: str | None = None, **more: Any) -> httpx.Response:
  body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
  return http.post("/v1/completions", json=body)


def text(http: httpx.Client, model: str | None = None) -> str:
  answer = complete(http, model)
  assert answer.status_code == 200, answer.text
  return answer.json()["choices"][0]["text"]


def names(http: httpx.Client) -> list[str]:
  return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_an_adapter_is_loaded_listed_used_and_unloaded(served, http, folder):
  base = text(http)
  answer = load(http, "sql", "team/sql")
  assert (answer.status_code, answer.json()) == (200, "Success: LoRA adapter 'sql' added successfully.")
  assert load(http, "a", str(folder / "a")).status_code == 200  # absolute, and below
  listed = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
  assert list(listed) == ["tiny", "sql", "a"]
  assert (listed["tiny"]["root"], listed["tiny"]["parent"]) == ("tiny", None)
  assert (listed["sql"]["root"], listed["sql"]["parent"]) == (str(folder / "team/sql"), "tiny")
  assert http.get("/v1/models/sql").json() == listed["sql"]
  assert http.get("/v1/models/other").json()["error"]["message"] == (
    "model='other' is not served here; send one of 'tiny', 'sql', 'a', or leave it empty"
  )
  texts = [text(http, model) for model in ("tiny", "sql", "a", "sql", "tiny")]
  assert texts == [base, texts[1], texts[2], texts[1], base] and len({*texts}) == 3
  assert unload(http, "sql").json() == "Success: LoRA adapter 'sql' removed successfully."
  assert names(http) == ["tiny", "a"]
  error = complete(http, "sql")
  assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
  again = unload(http, "sql")
  assert (again.status_code, again.json()["error"]["param"]) == (404, "lora_name")
  assert text(http, "a") == texts[2] and text(http) == base


def test_every_endpoint_takes_an_adapter_and_names_it(served, http, tmp_path):
  load(http, "a", "a")
  chat = {"model": "a", "max_tokens": 4, "messages": [{"role": "user", "content": "the cat"}]}
  for path, body in (
    ("/v1/completions", {"model": "a", "prompt": "the cat", "max_tokens": 4}),
    ("/v1/completions", {"model": "a", "prompt": ["the cat", "the dog"], "max_tokens": 4, "n": 2}),
    ("/v1/chat/completions", chat),
    ("/v1/messages", chat),
    ("/v1/responses", {"model": "a", "input": "the cat", "max_output_tokens": 4}),
  ):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "a", path
    with http.stream("POST", path, json=body | {"stream": True}) as stream:
      assert '"model":"a"' in "".join(stream.iter_text()), path
  for path, body in (("/tokenize", {"prompt": "the cat"}), ("/detokenize", {"tokens": PROMPT})):
    assert http.post(path, json=body | {"model": "a"}).status_code == 200
    assert http.post(path, json=body | {"model": "b"}).status_code == 404
  unary = served.generation.GenerateUnary(pb.GenerateRequest(model="a", token_ids=pb.TokenIds(ids=PROMPT)))
  assert unary.model == "a"
  messages = list(served.generation.Generate(pb.GenerateRequest(model="a", token_ids=pb.TokenIds(ids=PROMPT))))
  assert messages[0].started.model == "a"
  with pytest.raises(grpc.RpcError, match="send one of 'tiny', 'a', or leave it empty") as caught:
    served.generation.GenerateUnary(pb.GenerateRequest(model="b", token_ids=pb.TokenIds(ids=PROMPT)))
  assert caught.value.code() is grpc.StatusCode.NOT_FOUND
  assert list(served.model.GetModelInfo(pb.GetModelInfoRequest()).adapters) == ["a"]
  lines = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
  generating = [line for line in lines if "generation_id" in line]
  assert len(generating) == 12 and {line["adapter"] for line in generating} == {"a"}


def test_lines_of_a_batch_name_adapters(tokenizer, folder, secrets, tmp_path):
  host = HostOptions(http_port=0, batch_dir=str(tmp_path / "batches"), admin_api_key_file=str(secrets / "admin_keys"))
  with running(tokenizer, host=host, config=CONFIG, lora_dir=folder) as served:
    url = f"http://127.0.0.1:{served.host.http_port}"
    with (
      httpx.Client(base_url=url, timeout=60) as http,
      openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
      load(http, "a", "a")
      body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
      lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, "model": name}}
        for name in ("tiny", "a", "b")
      ]
      content = "\n".join(map(json.dumps, lines)).encode()
      file = client.files.create(file=("in.jsonl", content), purpose="batch")
      batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
      served.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
      batch = client.batches.retrieve(batch.id)
      assert batch.output_file_id is not None and batch.error_file_id is not None
      answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
      found = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
      assert {name: (body["model"], body["choices"][0]["text"]) for name, body in found.items()} == {
        name: (name, text(http, name)) for name in ("tiny", "a")
      }
      (refused,) = client.files.content(batch.error_file_id).text.splitlines()
      assert "model='b' is not served here" in refused


def test_the_admin_service_does_the_same(served, http, operator):
  metadata = (("authorization", f"Bearer {ADMIN_KEY}"),)
  operator.LoadAdapter(admin.LoadAdapterRequest(lora_name="a", lora_path="a"), metadata=metadata)
  assert names(http) == ["tiny", "a"]
  with pytest.raises(grpc.RpcError, match="lora_name='a' is loaded already") as caught:
    operator.LoadAdapter(admin.LoadAdapterRequest(lora_name="a", lora_path="b"), metadata=metadata)
  assert reason_of(caught.value) == "INVALID_REQUEST"
  (adapter,) = operator.ListAdapters(admin.ListAdaptersRequest(), metadata=metadata).adapters
  assert (adapter.name, adapter.rank, adapter.live_requests, adapter.draining) == ("a", 8, 0, False)
  assert not operator.UnloadAdapter(admin.UnloadAdapterRequest(lora_name="a"), metadata=metadata).live_requests
  assert names(http) == ["tiny"]
  for method, request in (
    (operator.LoadAdapter, admin.LoadAdapterRequest(lora_name="a", lora_path="a")),
    (operator.UnloadAdapter, admin.UnloadAdapterRequest(lora_name="a")),
    (operator.ListAdapters, admin.ListAdaptersRequest()),
  ):
    with pytest.raises(grpc.RpcError) as caught:
      method(request)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
  with pytest.raises(grpc.RpcError) as caught:
    operator.UnloadAdapter(admin.UnloadAdapterRequest(lora_name="a"), metadata=metadata)
  assert caught.value.code() is grpc.StatusCode.NOT_FOUND and reason_of(caught.value) == "ADAPTER_NOT_LOADED"


def test_an_adapter_in_use_takes_no_new_requests_and_leaves_with_the_last_one(served, http, operator):
  load(http, "a", "a")
  expected = text(http, "a")
  served.runner.seconds = 0.01
  long = pb.StopParams(max_tokens=300, ignore_eos=True)
  sampling = pb.SamplingParams(temperature=0.0)
  call = served.generation.Generate(
    pb.GenerateRequest(model="a", token_ids=pb.TokenIds(ids=PROMPT), stopping=long, sampling=sampling)
  )
  messages = [next(call)]
  assert unload(http, "a").status_code == 200
  assert complete(http, "a").status_code == 404 and names(http) == ["tiny"]
  metadata = (("authorization", f"Bearer {ADMIN_KEY}"),)
  (adapter,) = operator.ListAdapters(admin.ListAdaptersRequest(), metadata=metadata).adapters
  assert (adapter.live_requests, adapter.draining) == (1, True)
  answer = load(http, "a", "b")
  assert answer.status_code == 400 and "is draining" in answer.json()["error"]["message"]
  served.runner.seconds = 0.0
  messages += list(call)
  assert len(token_ids_of(messages)) == 300
  served.wait_until(lambda: not served.engine.adapters())
  assert load(http, "a", "b").status_code == 200
  assert text(http, "a") != expected


def test_a_taken_name_or_a_full_table_is_refused_before_the_folder_is_read(served, http, folder):
  """So that nobody waits for gigabytes in vain; the folder here could not even be read."""
  for name in ("a", "b", "c"):
    assert load(http, name, name).status_code == 200
  (folder / "d" / "adapter_config.json").write_text("{")
  for name, words in (("a", "is loaded already"), ("d", "finds no free slot: 3 adapters are loaded")):
    answer = load(http, name, "d")
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
  assert unload(http, "c").status_code == 200
  assert "cannot be read as JSON" in load(http, "d", "d").json()["error"]["message"]


def test_load_inplace_replaces_an_idle_adapter(served, http):
  load(http, "a", "a")
  first = text(http, "a")
  assert load(http, "a", "b").status_code == 400
  assert load(http, "a", "b", load_inplace=True).status_code == 200
  second = text(http, "a")
  assert second != first, "neither the old weights nor the old prefixes"
  assert load(http, "a", "a", load_inplace=True).status_code == 200
  assert text(http, "a") == first
  served.runner.seconds = 0.01
  call = served.generation.Generate(
    pb.GenerateRequest(
      model="a", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StopParams(max_tokens=300, ignore_eos=True)
    )
  )
  next(call)
  answer = load(http, "a", "b", load_inplace=True)
  assert answer.status_code == 400 and "1 live requests" in answer.json()["error"]["message"]
  served.runner.seconds = 0.0
  list(call)
  assert names(http) == ["tiny", "a"]


BAD_LOADS = (
  ({}, "lora_name is missing: send"),
  ({"lora_name": "x"}, "lora_path is missing: send"),
  ({"lora_name": 5, "lora_path": "a"}, "lora_name is a whole number: send a string"),
  ({"lora_name": "x", "lora_path": ["a"]}, "lora_path is a list: send a string"),
  ({"lora_name": "x", "lora_path": "a", "load_inplace": "yes"}, "load_inplace is a string: send a boolean"),
  ({"lora_name": "", "lora_path": "a"}, "lora_name='' is not allowed: send 1 to 128 of"),
  ({"lora_name": "x" * 129, "lora_path": "a"}, "lora_name='xxx"),
  ({"lora_name": "two words", "lora_path": "a"}, "lora_name='two words' is not allowed"),
  ({"lora_name": "a\nb", "lora_path": "a"}, r"lora_name='a\nb' is not allowed"),
  ({"lora_name": "tiny", "lora_path": "a"}, "lora_name='tiny' is the served model's name: choose another"),
  ({"lora_name": "x", "lora_path": "../outside"}, "lora_path='../outside' is outside of --lora_dir="),
  ({"lora_name": "x", "lora_path": "/etc"}, "lora_path='/etc' is outside of --lora_dir="),
  ({"lora_name": "x", "lora_path": "link"}, "lora_path='link' is outside of --lora_dir="),
  ({"lora_name": "x", "lora_path": "nowhere"}, "lora_path='nowhere' is not a folder below --lora_dir="),
  ({"lora_name": "x", "lora_path": "file"}, "lora_path='file' is not a folder below --lora_dir="),
  ({"lora_name": "x", "lora_path": "."}, "lora_path='.' is not a folder below --lora_dir="),
  ({"lora_name": "x", "lora_path": ""}, "lora_path='' is not a folder below --lora_dir="),
  ({"lora_name": "x", "lora_path": "a\0b"}, r"lora_path='a\x00b' is not a folder below --lora_dir="),
  ({"lora_name": "x", "lora_path": "y" * 5000}, "lora_path='yyy"),
  ({"lora_name": "x", "lora_path": "empty"}, "lora_path='empty' cannot be served: "),
  ({"lora_name": "x", "lora_path": "a", "model": "other"}, "model='other' is not served here"),
  ({"lora_name": "x", "lora_path": "a", "is_3d_lora_weight": True}, "is_3d_lora_weight=true is not supported"),
)


def test_bad_loads_get_one_clear_error_each_and_harm_nobody(served, http):
  load(http, "a", "a")
  served.runner.seconds = 0.002
  call = served.generation.Generate(
    pb.GenerateRequest(
      model="a",
      token_ids=pb.TokenIds(ids=PROMPT),
      stopping=pb.StopParams(max_tokens=400, ignore_eos=True),
      sampling=pb.SamplingParams(temperature=0.0),
    )
  )
  messages = [next(call)]
  reading = threading.Thread(target=lambda: messages.extend(call))
  reading.start()
  for body, said in BAD_LOADS:
    answer = http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert answer.status_code in (400, 404), (body, answer.text)
    assert said in answer.json()["error"]["message"], (body, answer.text)
  for content in (b"", b"[]", b"{", b'{"lora_name": "x", "lora_name": "y", "lora_path": "a"}', b"\xff"):
    assert http.post("/v1/load_lora_adapter", content=content, headers=ADMIN).status_code == 400
  assert unload(http, "a" * 5000).status_code == 404
  for name in ("b", "c"):
    assert load(http, name, name).status_code == 200
  full = load(http, "d", "d")
  assert full.status_code == 400 and "serve with a larger --max_loras" in full.json()["error"]["message"]
  served.runner.seconds = 0.0
  reading.join(60)
  assert len(token_ids_of(messages)) == 400
  assert names(http) == ["tiny", "a", "b", "c"]
  unharmed = served.generation.GenerateUnary(
    pb.GenerateRequest(
      model="a",
      token_ids=pb.TokenIds(ids=PROMPT),
      stopping=pb.StopParams(max_tokens=400, ignore_eos=True),
      sampling=pb.SamplingParams(temperature=0.0),
    )
  )
  assert list(unharmed.completions[0].token_ids) == token_ids_of(messages)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_loading_is_a_right_of_administrators(tokenizer, folder, secrets, path):
  body = {"lora_name": "a", "lora_path": "a"}
  keys = {"api_key_file": str(secrets / "keys")}
  for options, key, status, code in (
    ({}, None, 403, "permission_denied"),
    (keys, KEY, 403, "permission_denied"),
    ({"admin_api_key_file": str(secrets / "admin_keys")}, None, 401, "invalid_api_key"),
    ({"admin_api_key_file": str(secrets / "admin_keys")}, "another-key-of-nobody", 401, "invalid_api_key"),
    (keys | {"admin_api_key_file": str(secrets / "admin_keys")}, KEY, 403, "permission_denied"),
    (keys | {"admin_api_key_file": str(secrets / "admin_keys")}, ADMIN_KEY, 200, None),
  ):
    host = dataclasses.replace(HostOptions(http_port=0), **options)
    with running(tokenizer, host=host, config=CONFIG, lora_dir=folder) as served:
      url = f"http://127.0.0.1:{served.host.http_port}"
      headers = {} if key is None else {"x-api-key": key}
      if status == 200 and "unload" in path:
        httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=headers)
      for spelled in (path, f"{path}/"):
        answer = httpx.post(f"{url}{spelled}", json=body, headers=headers, timeout=60)
        if status == 200 and spelled != path:
          break
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["code"] == code
      # A key of an administrator is none of a user.
      if key == ADMIN_KEY:
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401


def test_a_server_without_slots_or_folder_says_what_to_set(tokenizer, secrets):
  host = HostOptions(http_port=0, admin_port=0, admin_api_key_file=str(secrets / "admin_keys"))
  for config, said in ((None, "serve with --enable_lora"), (CONFIG, "serve with --lora_dir=FOLDER")):
    with running(tokenizer, host=host, config=config, admin=ACTIONS) as served:
      url = f"http://127.0.0.1:{served.host.http_port}"
      body = {"lora_name": "a", "lora_path": "/tmp"}
      answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN)
      assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_configured")
      assert said in answer.json()["error"]["message"]
      operator = admin_pb2_grpc.AdminServiceStub(grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"))
      with pytest.raises(grpc.RpcError, match=said) as caught:
        operator.LoadAdapter(
          admin.LoadAdapterRequest(lora_name="a", lora_path="/tmp"), metadata=(("x-api-key", ADMIN_KEY),)
        )
      assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_metrics_name_adapters_and_their_requests(served, http):
  def samples() -> dict[str, str]:
    lines = http.get("/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if "adapter" in line and not line.startswith("#"))

  assert samples()["sluice_adapters_loaded"] == "0.0"
  load(http, "a", "a")
  load(http, "b", "b")
  served.runner.seconds = 0.01
  call = served.generation.Generate(
    pb.GenerateRequest(
      model="b", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StopParams(max_tokens=300, ignore_eos=True)
    )
  )
  next(call)
  found = samples()
  assert found["sluice_adapters_loaded"] == "2.0" and found["sluice_adapters_limit"] == "3.0"
  assert found['sluice_adapter_requests{adapter="a"}'] == "0.0"
  assert found['sluice_adapter_requests{adapter="b"}'] == "1.0"
  label = 'vllm:lora_requests_info{max_lora="3",running_lora_adapters="b",waiting_lora_adapters=""}'
  assert float(found[label]) > 0
  served.runner.seconds = 0.0
  list(call)


def test_a_load_goes_on_when_its_caller_leaves(served, http, operator, monkeypatch):
  reading, go = threading.Event(), threading.Event()
  loader = served.port.adapter_loader
  read = loader._read

  def slow(folder: pathlib.Path) -> Any:
    reading.set()
    assert go.wait(60)
    return read(folder)

  monkeypatch.setattr(loader, "_read", slow)
  call = operator.LoadAdapter.future(
    admin.LoadAdapterRequest(lora_name="a", lora_path="a"), metadata=(("x-api-key", ADMIN_KEY),)
  )
  assert reading.wait(60)
  assert text(http), "requests run while an adapter is read"
  call.cancel()
  go.set()
  served.wait_until(lambda: [adapter.state for adapter in served.engine.adapters()] == ["loaded"])
  assert text(http, "a") != text(http)
