"""Request ids, the access log's lines, and incidents: what is told to whom, and never a prompt."""

import json

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import pytest

from engine.errors import ConfigError
from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.telemetry.access_log import AccessLog
from tests.server.certificates import KEY
from tests.server.harness import REFLECTION, reason_of, running

IDS = pb.TokenIds(ids=[7, 8, 9])
FEW = pb.StopParams(max_tokens=3, ignore_eos=True)


@pytest.mark.catalogue("I6")
def test_request_ids_are_echoed_or_made(served):
  stub = served.generation
  request = pb.GenerateRequest(token_ids=IDS, stopping=FEW)
  for sent in ("abc-1.2_3", "a" * 128):
    call = stub.Generate(request, metadata=(("x-request-id", sent),))
    list(call)
    assert dict(call.trailing_metadata())["x-request-id"] == sent
    _, unary = stub.GenerateUnary.with_call(request, metadata=(("x-request-id", sent),))
    assert dict(unary.trailing_metadata())["x-request-id"] == sent
    with pytest.raises(grpc.RpcError) as caught:
      stub.GenerateUnary(pb.GenerateRequest(), metadata=(("x-request-id", sent),))
    assert dict(caught.value.trailing_metadata())["x-request-id"] == sent
    assert not caught.value.initial_metadata(), "a refusal sends no header"
  made = set()
  for metadata in ((), (("x-request-id", ""),), (("x-request-id", "a b"),), (("x-request-id", "a" * 129),)):
    _, call = stub.GenerateUnary.with_call(request, metadata=metadata)
    made.add(dict(call.trailing_metadata())["x-request-id"])
  assert len(made) == 4 and all(len(each) == 32 and set(each) <= set("0123456789abcdef") for each in made)
  with Client(served.address) as client, pytest.raises(SluiceError) as failed:
    client.generate([])
  assert len(failed.value.request_id) == 32


@pytest.mark.catalogue("H6")
def test_the_access_log_has_a_line_a_call_and_no_text(tokenizer, secrets, tmp_path):
  log = tmp_path / "access.jsonl"

  def written(count: int) -> list[dict]:
    """The lines, once there are so many: some calls end for their client before their line is written."""
    served.wait_until(lambda: len(log.read_text().splitlines()) >= count)
    return [json.loads(line) for line in log.read_text().splitlines()]

  options = HostOptions(access_log=str(log), api_key_file=str(secrets / "keys"))
  with running(tokenizer, host=options) as served:
    with Client(served.address, api_key=KEY) as client:
      # What comes is the same each time, and long enough not to stand in a log by chance.
      answer = client.generate("the secret word", max_tokens=40, ignore_eos=True, temperature=0.0, request_id="mine")
      assert len(answer.text) >= 20
      with client.stream("the secret word", max_tokens=5, ignore_eos=True, n=2) as stream:
        list(stream)
      with pytest.raises(SluiceError):
        client.generate("the secret word", top_p=7.0)
      written(3)
      served.runner.seconds = 0.02
      with client.stream("the", max_tokens=400, ignore_eos=True) as stream:
        next(iter(stream))
      written(4)
      with pytest.raises(SluiceError):
        client.generate("the", max_tokens=400, ignore_eos=True, timeout_s=0.1)
      written(5)
      served.wait_until(lambda: served.engine.num_live == 0)
    stub = health_pb2_grpc.HealthStub(served.channel)
    stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    for serial, metadata in enumerate(((), (("x-api-key", KEY),))):
      with pytest.raises(grpc.RpcError):
        served.channel.unary_unary('/forged","code":"OK')(b"", metadata=metadata)
      lines = written(6 + serial)
  codes = [line["code"] for line in lines]
  # A client whose deadline has passed also cancels, and that may come first.
  assert codes.pop(4) in ("DEADLINE_EXCEEDED", "CANCELLED")
  assert codes == ["OK", "OK", "INVALID_ARGUMENT", "CANCELLED", "UNAUTHENTICATED", "UNIMPLEMENTED"]
  first = lines[0]
  assert first["method"] == "/sluice.v1.GenerationService/GenerateUnary" and first["generation_id"] == "mine"
  assert (first["prompt_tokens"], first["output_tokens"], first["tenant"]) == (
    answer.ending.prompt_tokens,
    40,
    "team-a",
  )
  assert lines[1]["output_tokens"] == 10
  assert (lines[2]["reason"], lines[5]["reason"]) == ("INVALID_REQUEST", "UNAUTHENTICATED")
  assert "tenant" not in lines[5] and "output_tokens" not in lines[3]
  assert all(line["time"].endswith("+00:00") and line["duration_s"] >= 0 and line["peer"] for line in lines)
  assert len({line["request_id"] for line in lines}) == len(lines)
  told = [str(value) for line in lines for value in line.values()]
  assert not any(word in value for word in ("secret", KEY, answer.text) for value in told)


@pytest.mark.catalogue("H7")
def test_the_access_log_cannot_be_forged_and_survives_its_file(tmp_path, capfd):
  path = tmp_path / "log"
  log = AccessLog(str(path))
  log.write(method="/a\n{}\r\x1b[31m\u2028", code="OK", reason=None, peer="x" * 10_000, count=3)
  path.rename(tmp_path / "rotated")
  log.write(method="/b", code="OK")
  (line,) = (tmp_path / "rotated").read_text().splitlines()
  assert line.isascii() and line.isprintable()
  assert json.loads(line) | {"time": ""} == {
    "time": "",
    "method": "/a\n{}\r\x1b[31m\u2028",
    "code": "OK",
    "peer": "x" * 256,
    "count": 3,
  }
  assert json.loads(path.read_text())["method"] == "/b"
  log.close()
  full = AccessLog("/dev/full")
  full.write(method="/c", code="OK")
  assert full.num_lost == 1
  full.close()
  assert capfd.readouterr().err == ""
  errors = AccessLog("-")
  errors.write(method="/d", code="OK")
  assert json.loads(capfd.readouterr().err)["method"] == "/d"
  with pytest.raises(ConfigError, match="access_log=/nowhere/log cannot be opened: No such file"):
    AccessLog("/nowhere/log")


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", *REFLECTION])
def test_malformed_messages_of_standard_services_are_told_alike(served, method):
  with pytest.raises(grpc.RpcError, match="the 3 bytes are no grpc.*Request; generate the client from") as caught:
    list(served.channel.stream_stream(method)(iter([b"\xff\xff\xff"]), timeout=10))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason_of(caught.value) == "MALFORMED_REQUEST"


@pytest.mark.catalogue("H6")
def test_an_incident_has_one_number_in_status_and_log(served, monkeypatch, caplog):
  def broken(*_, **__):
    raise ValueError("secret of ours")

  monkeypatch.setattr(served.engine, "stats", broken)
  with pytest.raises(grpc.RpcError) as caught:
    served.model.GetLoad(pb.GetLoadRequest())
  monkeypatch.undo()
  number = caught.value.details().split("incident ")[1].split()[0]
  assert caught.value.code() is grpc.StatusCode.INTERNAL and f"incident {number}:" in caplog.text
  assert not any("secret" in str(value) for _, value in caught.value.trailing_metadata())
