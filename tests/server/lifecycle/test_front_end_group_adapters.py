"""LoRA adapters of a server with several front ends: each of them serves an adapter from its load to its unload."""

import contextlib
import json
import pathlib

import grpc
import httpx
import psutil
import pytest

from server.proto import admin_pb2 as admin
from server.proto import admin_pb2_grpc
from server.proto import sluice_pb2 as pb
from tests.server.certificates import ADMIN_KEY
from tests.server.lifecycle.test_front_end_group import Running, asked, expected, serving
from tools.certificates import replace_file

ADMIN = {"x-api-key": ADMIN_KEY}


def post(server: Running, path: str, **body: str) -> httpx.Response:
  return httpx.post(server.url(path), json=body, headers=ADMIN, timeout=60)


def tokens_of(stub, model: str) -> list[int]:
  response = stub.GenerateUnary(asked(model=model, stopping=pb.StopParams(max_tokens=8, ignore_eos=True)), timeout=60)
  assert response.model == (model or "sluice-demo")
  return list(response.completions[0].token_ids)


def test_every_front_end_knows_the_adapters(tmp_path: pathlib.Path) -> None:
  for name in ("first", "second"):
    (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "adapters" / name / "adapter_config.json").write_text(json.dumps({"r": 4}))
  replace_file(tmp_path / "admin_keys", f"{ADMIN_KEY}\n".encode())
  with (
    serving(
      *(tmp_path, 2, "--enable_lora", f"--lora_dir={tmp_path / 'adapters'}"),
      *(f"--lora_modules=a={tmp_path / 'adapters' / 'first'}", f"--admin_api_key_file={tmp_path / 'admin_keys'}"),
      *("--admin_port=0", f"--access_log={tmp_path / 'calls'}"),
    ) as server,
    contextlib.ExitStack() as stack,
  ):
    stubs = server.stubs(stack)
    base = expected(max_tokens=8, ignore_eos=True)
    first = tokens_of(stubs[0], "a")
    assert first != base and [tokens_of(stub, "a") for stub in stubs] == [first] * len(stubs)
    for stub in stubs:
      with pytest.raises(grpc.RpcError) as caught:
        tokens_of(stub, "b")
      assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    answer = post(server, "/v1/load_lora_adapter", lora_name="b", lora_path="second")
    assert answer.status_code == 200, answer.text
    second = tokens_of(stubs[0], "b")
    assert second not in (first, base) and [tokens_of(stub, "b") for stub in stubs] == [second] * len(stubs)
    for body, said in (
      ({"lora_name": "b", "lora_path": "first"}, "lora_name='b' is loaded already"),
      ({"lora_name": "c", "lora_path": "../admin_keys"}, "is outside of --lora_dir="),
      ({"lora_name": "sluice-demo", "lora_path": "first"}, "is the served model's name"),
    ):
      answer = post(server, "/v1/load_lora_adapter", **body)
      assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert httpx.post(server.url("/v1/unload_lora_adapter"), json={"lora_name": "b"}).status_code == 401
    text = httpx.get(server.url("/metrics")).text
    assert "sluice_adapters_loaded 2.0" in text and 'sluice_adapter_requests{adapter="b"} 0.0' in text
    assert post(server, "/v1/unload_lora_adapter", lora_name="a").status_code == 200
    for stub in stubs:
      with pytest.raises(grpc.RpcError, match="send one of 'sluice-demo', 'b', or leave it empty"):
        tokens_of(stub, "a")
    assert [tokens_of(stub, "") for stub in stubs] == [base] * len(stubs)
    lines = (tmp_path / "calls").read_text().splitlines()
    named = [json.loads(line).get("adapter") for line in lines if "generation_id" in line]
    assert sorted(filter(None, named)) == ["a"] * (len(stubs) + 1) + ["b"] * (len(stubs) + 1)


def test_the_admin_service_of_the_engine_reaches_every_front_end(tmp_path: pathlib.Path) -> None:
  (tmp_path / "adapter").mkdir()
  (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 4}))
  with (
    serving(
      *(tmp_path, 2, "--enable_lora", f"--lora_dir={tmp_path}", "--admin_port=0"),
    ) as server,
    contextlib.ExitStack() as stack,
  ):
    stubs = server.stubs(stack)
    (port,) = {
      found.laddr.port
      for found in psutil.Process(server.process.pid).net_connections("tcp")
      if found.status == "LISTEN" and found.laddr.port not in (server.port, server.http_port)
    }
    operator = admin_pb2_grpc.AdminServiceStub(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))
    operator.LoadAdapter(admin.LoadAdapterRequest(lora_name="a", lora_path="adapter"))
    assert len({tuple(tokens_of(stub, "a")) for stub in stubs}) == 1
    (adapter,) = operator.ListAdapters(admin.ListAdaptersRequest()).adapters
    assert (adapter.name, adapter.rank, adapter.path) == ("a", 4, str(tmp_path / "adapter"))
    operator.UnloadAdapter(admin.UnloadAdapterRequest(lora_name="a"))
    for stub in stubs:
      with pytest.raises(grpc.RpcError) as caught:
        tokens_of(stub, "a")
      assert caught.value.code() is grpc.StatusCode.NOT_FOUND
