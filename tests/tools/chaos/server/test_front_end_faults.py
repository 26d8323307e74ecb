"""Faults put into a running server: who is harmed is told, without secrets, and nobody else notices."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import functools
import json
import re
import signal
import time

import grpc
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.request import FinishReason, TokenEvent
from engine.sampling_params import SamplingParams
from extensions.fake_device.device import NAN, expected_tokens
from server.client import Client, SluiceError
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.rpc.admin_service import AdminActions
from server.text.tokenizer import Tokenizer
from tests.device import tiny_model
from tests.extensions.fake_device.test_server import fake_server
from tests.server.harness import generate, reason_of, running, token_ids_of
from tests.server.test_main import DEMO, wait_for_file
from tests.server.test_main import start as start_module
from tools.chaos.proto import chaos_pb2, chaos_pb2_grpc
from tools.chaos.server.faults import FaultPlan, Injector

NUM_REQUESTS = 48
start = functools.partial(start_module, module="tools.chaos.server")


def injector(*faults: dict) -> Injector:
  return Injector(FaultPlan.parse(json.dumps({"faults": faults})))


def ask(served, number: int, *, poisoned: bool, **fields) -> tuple[list[int], grpc.RpcError | None]:
  """The tokens of a request, and how it failed; every eighth shares its prompt."""
  prompt = [7 + number % 8, *range(40, 59)]
  fields = {"sampling": pb.SamplingParams(temperature=0.8, seed=number)} | fields
  try:
    messages = generate(
      served,
      request_id=f"{'poison' if poisoned else 'good'}-{number}",
      token_ids=pb.TokenIds(ids=prompt),
      stopping=pb.StopParams(max_tokens=25, ignore_eos=True),
      **fields,
    )
  except grpc.RpcError as error:
    return [], error
  return token_ids_of(messages), None


def wanted(served, number: int) -> list[int]:
  params = SamplingParams(max_tokens=25, ignore_eos=True, temperature=0.8, seed=number)
  config = served.engine.config
  prompt = [7 + number % 8, *range(40, 59)]
  tokens, _ = expected_tokens(prompt, params, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
  return list(tokens)


@pytest.mark.catalogue("D2", "D4")
@pytest.mark.parametrize(
  ("point", "action", "reason"),
  [
    ("admit", "raise", "INTERNAL"),
    ("constraint", "raise", "GENERATION_FAILED"),
    ("detokenize", "raise", "INTERNAL"),
    ("step_begin", "nan", "NUMERICAL_ERROR"),
  ],
)
def test_a_poisoned_request_fails_alone(tokenizer_dir, point, action, reason):
  """A quarter of the requests; the others, beside and after them and with the same prompts, get their own tokens."""
  faults = injector({"point": point, "action": action, "request": "poison-*"})
  more = {"constraint": pb.OutputConstraint(regex="[a-z]{50}")} if point == "constraint" else {}
  with running(Tokenizer(tokenizer_dir), faults=faults) as served, ThreadPoolExecutor(NUM_REQUESTS) as pool:
    asked = []
    for number in range(NUM_REQUESTS):
      poisoned = number % 4 == 0
      fields = more if poisoned else {}
      asked.append((number, poisoned, pool.submit(ask, served, number, poisoned=poisoned, **fields)))
    for number, poisoned, future in asked:
      tokens, error = future.result()
      if not poisoned:
        assert error is None and tokens == wanted(served, number)
        continue
      assert error is not None and error.code() is grpc.StatusCode.INTERNAL
      assert reason_of(error) == reason
      assert "njected" not in error.details() and "Fault" not in error.details() and "Error" not in error.details()
    for number in range(8):
      assert ask(served, number, poisoned=False) == (wanted(served, number), None)
    served.wait_until(lambda: served.generations._engine.num_held() == 0)  # every id can be used again
    stats = served.engine.stats()
    assert stats.num_numerical_errors == (NUM_REQUESTS // 4 if action == "nan" else 0)
    assert served.engine.dead is None
    if action == "nan":
      cached = served.engine._scheduler.pool._by_key.values()
      assert cached and not [block for block in cached if served.runner._pages[block] is NAN]


@pytest.mark.catalogue("D4", "D10")
def test_nan_in_a_real_model_fails_one_request_and_reaches_no_other():
  """Pages of NaN, on a device that computes: rows beside them are as before, bit for bit, and so are later owners."""
  config = EngineConfig(
    vocab_size=tiny_model.TINY.vocab_size,
    max_model_len=tiny_model.MAX_LEN,
    num_blocks=24,  # few: pages that held NaN are used again
    block_size=4,
    token_budgets=(8,),
    prefill_chunk=8,
    max_num_seqs=8,
    eos_token_ids=tiny_model.EOS,
  )
  runner = tiny_model.make_runner(num_blocks=config.num_blocks, token_budgets=config.token_budgets)
  faults = injector({"point": "step_begin", "action": "nan", "request": "poison-*"})

  def one(served, name: str, number: int):
    prompt = [5 + number % 3, *range(20, 29)]
    try:
      messages = generate(
        served,
        request_id=f"{name}-{number}",
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.9, seed=number),
        stopping=pb.StopParams(max_tokens=20, ignore_eos=True),
      )
    except grpc.RpcError as error:
      return error.code(), reason_of(error)
    return token_ids_of(messages)

  with running(None, config=config, device=runner, faults=faults) as served, ThreadPoolExecutor(12) as pool:
    alone = [one(served, "alone", number) for number in range(12)]
    assert all(len(tokens) == 20 for tokens in alone)
    for _ in range(3):
      together = list(pool.map(lambda number: one(served, "poison" if number % 3 == 0 else "good", number), range(12)))
      assert together[::3] == [(grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR")] * 4
      assert [tokens for number, tokens in enumerate(together) if number % 3] == [
        tokens for number, tokens in enumerate(alone) if number % 3
      ]
    assert served.engine.stats().num_numerical_errors == 12
    bad = {int(block) for layer in runner.kv for block in np.nonzero(np.isnan(np.asarray(layer)))[0]}
    cached = set(served.engine._scheduler.pool._by_key.values())
    assert cached and not bad & cached, "a page with NaN can be found by others"
    assert [one(served, "later", number) for number in range(12)] == alone


@pytest.mark.catalogue("D1")
def test_an_engine_that_fails_tells_every_stream(tmp_path):
  """As a process: INTERNAL with an incident for whom it worked, no class name, and an exit code."""
  plan = tmp_path / "plan.json"
  plan.write_text(json.dumps({"faults": [{"point": "step_end", "action": "raise", "nth": 10}]}))
  port_file = tmp_path / "port"
  process = start(
    "--fake_device",
    f"--model={DEMO}",
    f"--fault_plan={plan}",
    "--debug_invariants",
    "--fake_step_ms=20",
    "--port=0",
    f"--port_file={port_file}",
  )
  with Client(f"127.0.0.1:{wait_for_file(port_file, process).strip()}") as client:

    def one(number: int) -> SluiceError:
      with pytest.raises(SluiceError) as failed:
        client.generate([7, 8, number], max_tokens=500, ignore_eos=True, timeout_s=60)
      return failed.value

    with ThreadPoolExecutor(64) as pool:
      errors = list(pool.map(one, range(64)))
  said = process.communicate(timeout=180)[1]
  assert process.returncode == 1, said
  incidents = set()
  for error in errors:
    found = re.fullmatch(
      r"the engine has failed, incident ([0-9a-f]{8}) in the server's log; send the request to another server",
      str(error),
    )
    if found is None:  # it came when the engine had failed
      assert error.code is grpc.StatusCode.UNAVAILABLE
      assert "InjectedFault" not in str(error)
    else:
      assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAILURE")
      incidents.add(found[1])
  assert len(incidents) == 1 and f"incident {incidents.pop()}: the engine has failed" in said
  assert "InjectedFault: injected at step_end" in said


def test_a_killed_server_is_gone(tmp_path):
  plan = tmp_path / "plan.json"
  plan.write_text(json.dumps({"faults": [{"point": "emit", "action": "kill", "nth": 3}]}))
  port_file = tmp_path / "port"
  process = start(
    "--fake_device", f"--model={DEMO}", f"--fault_plan={plan}", "--port=0", f"--port_file={port_file}"
  )  # fmt: skip
  address = f"127.0.0.1:{wait_for_file(port_file, process).strip()}"
  with Client(address) as client, pytest.raises(SluiceError) as failed:
    client.generate([7, 8], max_tokens=50, ignore_eos=True)
  assert failed.value.code is grpc.StatusCode.UNAVAILABLE
  process.communicate(timeout=180)
  assert process.returncode == -signal.SIGKILL


def test_a_fault_while_loading_ends_the_start(tmp_path):
  plan = tmp_path / "plan.json"
  plan.write_text(json.dumps({"faults": [{"point": "load", "action": "raise"}]}))
  process = start("--fake_device", f"--model={DEMO}", f"--fault_plan={plan}", "--port=0")
  said = process.communicate(timeout=180)[1]
  assert process.returncode == 1 and "injected at load" in said and "ready on" not in said


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--fault_plan=/nowhere"], "fault_plan=/nowhere cannot be read: No such file"),
    (["--fault_plan=PLAN"], "fault_plan=PLAN: faults[0]: point='coffee' is not allowed"),
  ],
)
def test_a_bad_plan_ends_the_start(tmp_path, flags, said):
  plan = tmp_path / "plan.json"
  plan.write_text('{"faults": [{"point": "coffee", "action": "raise"}]}')
  flags = [flag.replace("PLAN", str(plan)) for flag in flags]
  process = start("--fake_device", f"--model={DEMO}", "--port=0", *flags)
  errors = process.communicate(timeout=180)[1].splitlines()
  assert process.returncode == 1 and said.replace("PLAN", str(plan)) in errors[-1]


def chaos_of(served, stack: contextlib.ExitStack) -> chaos_pb2_grpc.ChaosServiceStub:
  channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"))
  return chaos_pb2_grpc.ChaosServiceStub(channel)


def test_the_plan_can_be_changed(tokenizer_dir):
  faults = injector()
  actions = AdminActions(flags=lambda: (), set_trace=lambda on: "")
  options = HostOptions(admin_port=0)
  server = running(Tokenizer(tokenizer_dir), host=options, admin=actions, faults=faults)
  with server as served, contextlib.ExitStack() as stack:
    chaos = chaos_of(served, stack)

    def change(plan: str) -> list[int]:
      return list(chaos.SetFaultPlan(chaos_pb2.SetFaultPlanRequest(plan=plan), timeout=30).acted)

    assert change('{"faults": [{"point": "tokenize", "action": "raise", "nth": 2}]}') == []
    generate(served, text="the cat")
    with pytest.raises(grpc.RpcError) as failed:
      generate(served, text="the cat")
    assert failed.value.code() is grpc.StatusCode.INTERNAL and "incident" in str(failed.value.details())
    generate(served, text="the cat")
    with pytest.raises(grpc.RpcError) as refused:
      change('{"faults": 3}')
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "must be an object" in str(
      refused.value.details()
    )
    assert change('{"faults": []}') == [1]


def test_without_points_no_plan_is_taken():
  actions = AdminActions(flags=lambda: (), set_trace=lambda on: "")
  with running(None, host=HostOptions(admin_port=0), admin=actions) as served, contextlib.ExitStack() as stack:
    chaos = chaos_of(served, stack)
    with pytest.raises(grpc.RpcError) as refused:
      chaos.SetFaultPlan(chaos_pb2.SetFaultPlanRequest(), timeout=30)
  assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION and reason_of(refused.value) == "NOT_CONFIGURED"


@pytest.mark.catalogue("D5")
def test_late_events_are_ignored_and_counted(served):
  """Ten thousand, for requests that have ended and for some that never were; of two kinds, and twice each."""
  generate(served, request_id="done", text="the cat")
  events = [
    TokenEvent(name, (5,), finish_reason=reason)
    for name in ("done", "never")
    for reason in (None, FinishReason.STOP)
    for _ in range(2500)
  ]
  served.host.emit(events)
  stream = served.generation.Generate(pb.GenerateRequest(request_id="done", text="the cat"))
  served.wait_until(lambda: served.generations.num_late_events == 10_000)
  list(stream)
  served.engine.abort("never")
  generate(served, text="the cat")
  assert served.engine.dead is None


@pytest.mark.catalogue("D14")
def test_a_full_disk_hurts_no_client(tmp_path):
  full = ("--access_log=/dev/full", "--trace_file=/dev/full")
  with fake_server(tmp_path, *full) as address, Client(address) as client:
    info = client.model_info()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    tokens, _ = expected_tokens([5, 6], params, vocab_size=info.vocab_size, eos_token_ids=tuple(info.eos_token_ids))
    for _ in range(100):
      assert tuple(client.generate([5, 6], max_tokens=8, temperature=0.0, ignore_eos=True).token_ids) == tokens


@pytest.mark.catalogue("D9")
def test_the_wall_clock_may_jump(served, monkeypatch):
  """No deadline, latency or histogram is on it."""
  wall = time.time
  jumps = iter(range(10**9))
  monkeypatch.setattr(time, "time", lambda: wall() + (3600 if next(jumps) % 2 else -3600))
  for _ in range(5):
    messages = list(
      served.generation.Generate(
        pb.GenerateRequest(text="the cat", stopping=pb.StopParams(max_tokens=10, ignore_eos=True))
      )
    )
    timing = messages[-1].finished[-1].timing
    assert 0 <= timing.time_to_first_token_s <= timing.total_s < 60
  seen = served.generations.observations
  assert sum(seen.end_to_end.counts) == 5 and 0 <= seen.end_to_end.total < 300


@pytest.mark.catalogue("D1", "D2")
def test_with_front_end_processes(tmp_path):
  """Points of the engine are there: one request refused by a fault fails alone; a step that fails is told to all."""
  plan = tmp_path / "plan.json"
  faults = [
    {"point": "admit", "action": "raise", "request": "poison*"},
    {"point": "step_end", "action": "raise", "nth": 400},
  ]
  plan.write_text(json.dumps({"faults": faults}))
  port_file = tmp_path / "port"
  process = start(
    "--fake_device", f"--model={DEMO}", f"--fault_plan={plan}", "--debug_invariants",
    "--frontend_processes=2", "--fake_step_ms=2", "--port=0", f"--port_file={port_file}",
  )  # fmt: skip
  params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
  with Client(f"127.0.0.1:{wait_for_file(port_file, process).strip()}") as client, ThreadPoolExecutor(8) as pool:
    info = client.model_info()
    tokens, _ = expected_tokens([5, 6], params, vocab_size=info.vocab_size, eos_token_ids=tuple(info.eos_token_ids))
    options = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    for number in range(4):
      with pytest.raises(SluiceError) as failed:
        client.generate([5, 6], request_id=f"poison-{number}", **options)
      assert (failed.value.code, failed.value.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
      assert re.fullmatch(r"internal error, incident [0-9a-f]{8} in the server's log", str(failed.value))
      assert tuple(client.generate([5, 6], **options).token_ids) == tokens

    def one(number: int) -> SluiceError:
      with pytest.raises(SluiceError) as ended:
        client.generate([7, number], max_tokens=2000, ignore_eos=True, timeout_s=60)
      return ended.value

    for error in pool.map(one, range(8)):
      assert error.code is grpc.StatusCode.UNAVAILABLE or error.reason == "ENGINE_FAILURE"
      assert "Fault" not in str(error)
  said = process.communicate(timeout=180)[1]
  assert process.returncode == 1 and "injected at step_end" in said
