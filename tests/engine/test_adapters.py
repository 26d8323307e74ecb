"""Adapters in the engine: the table of slots, requests that name them, and the prefix cache between them."""

import dataclasses

import pytest

from engine.adapters import AdapterTable
from engine.engine import Engine
from engine.errors import AdapterNotLoaded, InvalidRequest, Unavailable
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from extensions.fake_device.build import FakeAdapter
from extensions.fake_device.device import expected_tokens
from tests.fakes import FakeRunner, VirtualClock, small_config
from tools.chaos.server.faults import FaultPlan, Injector, inject_engine

CONFIG = small_config(enable_lora=True, max_loras=2)
PROMPT = tuple(range(1, 21))


class Front:
  """Collects the tokens and the ends of requests."""

  def __init__(self):
    self.tokens: dict[str, list[int]] = {}
    self.ends: dict[str, TokenEvent] = {}

  def __call__(self, events: list[TokenEvent]) -> None:
    for event in events:
      self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
      if event.finish_reason is not None:
        self.ends[event.request_id] = event


def serve(**changes) -> tuple[Engine, Front]:
  front, config = Front(), dataclasses.replace(CONFIG, **changes)
  return Engine(Scheduler(config), FakeRunner(config), VirtualClock(), front), front


def make(request_id: str, adapter: str = "", max_tokens: int = 6, **more) -> Request:
  return Request(request_id, PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True), adapter=adapter, **more)


def finish(engine: Engine) -> None:
  for _ in range(1000):
    if not engine.step():
      return
  raise AssertionError("the engine does not come to rest")


def load(engine: Engine, name: str, path: str = "", **more) -> None:
  loaded = engine.load_adapter(name, FakeAdapter(8, path or f"/adapters/{name}"), **more)
  engine.step()
  assert loaded.result(timeout=0) is None


def expected(path: str, max_tokens: int = 6) -> list[int]:
  params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
  tokens, _ = expected_tokens(
    PROMPT, params, vocab_size=CONFIG.vocab_size, eos_token_ids=CONFIG.eos_token_ids, adapter_path=path
  )
  return list(tokens)


def make_greedy(request_id: str, adapter: str = "", max_tokens: int = 6, **more) -> Request:
  params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
  return Request(request_id, PROMPT, params, adapter=adapter, **more)


def test_table_gives_each_load_a_slot_and_a_serial_of_its_own():
  table, weights = AdapterTable(2), FakeAdapter(4, "/a")
  first, second = table.begin_load("a", weights), table.begin_load("b", weights)
  assert (first.slot, second.slot) == (1, 2) and first.serial != second.serial
  with pytest.raises(AdapterNotLoaded, match="model='a' is loading; send the request when it is loaded"):
    table.find_adapter("a")
  table.finish_load(first)
  table.finish_load(second)
  with pytest.raises(InvalidRequest, match="lora_name='c' finds no free slot: 2 adapters are loaded.*max_loras=2"):
    table.begin_load("c", weights)
  table.begin_unload("a")
  third = table.begin_load("c", weights)
  assert third.slot == 1 and third.serial not in (first.serial, second.serial)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
def test_table_refuses_invalid_names(name: str):
  with pytest.raises(InvalidRequest, match="must have 1 to 256 printable characters; choose another name"):
    AdapterTable(2).begin_load(name, FakeAdapter(4, "/a"))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("scope", ["global", "tenant", "request", "off"])
def test_requests_of_several_adapters_share_a_batch_and_no_prefix(overlap: bool, scope: str):
  engine, front = serve(overlap=overlap, prefix_cache_scope=scope)
  load(engine, "a")
  load(engine, "b")
  for turn in range(3):
    for name in ("", "a", "b"):
      engine.submit(make_greedy(f"{name}{turn}", name))
    finish(engine)
  for turn in range(3):
    for name in ("", "a", "b"):
      assert front.tokens[f"{name}{turn}"] == expected(f"/adapters/{name}" if name else "")
  cached = {request_id: end.num_cached_tokens for request_id, end in front.ends.items()}
  assert cached["a0"] == cached["b0"] == 0
  assert (cached["a1"] > 0) == (scope in ("global", "tenant"))


def test_preempted_requests_and_siblings_keep_their_adapter():
  engine, front = serve(num_blocks=16, max_num_seqs=8, prefix_cache_scope="request")
  load(engine, "a")
  for number in range(6):
    engine.submit(make_greedy(f"r{number}", "a" if number % 2 else "", max_tokens=20))
  engine.submit_all([make_greedy("s0", "a"), make_greedy("s1", "a", leader_id="s0"), make_greedy("s2", leader_id="s0")])
  finish(engine)
  assert engine.stats().num_preemptions > 0
  for number in range(6):
    assert front.tokens[f"r{number}"] == expected("/adapters/a" if number % 2 else "", 20)
  assert front.tokens["s0"] == front.tokens["s1"] == expected("/adapters/a") != front.tokens["s2"] == expected("")


def test_second_load_of_a_name_shares_no_prefix_with_the_first():
  engine, front = serve()
  load(engine, "a", "/adapters/old")
  engine.submit(make_greedy("before", "a"))
  finish(engine)
  load(engine, "a", "/adapters/new", replaces=True)
  engine.submit(make_greedy("after", "a"))
  finish(engine)
  assert front.ends["after"].num_cached_tokens == 0
  assert front.tokens["before"] == expected("/adapters/old") and front.tokens["after"] == expected("/adapters/new")


def test_unload_waits_for_live_requests_and_refuses_new_ones():
  engine, front = serve()
  load(engine, "a")
  engine.submit(make_greedy("live", "a"))
  engine.step()
  with pytest.raises(InvalidRequest, match="lora_name='a' has 1 live requests, so it cannot be replaced"):
    engine.load_adapter("a", FakeAdapter(8, "/x"), replaces=True)
  unloaded = engine.unload_adapter("a")
  again = engine.unload_adapter("a")
  assert not unloaded.done() and [(each.state, each.num_live) for each in engine.adapters()] == [("draining", 1)]
  with pytest.raises(AdapterNotLoaded, match="model='a' is draining"):
    engine.submit(make_greedy("late", "a"))
  with pytest.raises(InvalidRequest, match="lora_name='a' is draining already"):
    engine.load_adapter("a", FakeAdapter(8, "/x"))
  finish(engine)
  assert unloaded.result(timeout=0) is again.result(timeout=0) is None
  assert engine.adapters() == [] and front.tokens["live"] == expected("/adapters/a")
  load(engine, "a", "/adapters/new")
  engine.submit(make_greedy("next", "a"))
  finish(engine)
  assert front.tokens["next"] == expected("/adapters/new")


def test_aborted_request_lets_its_adapter_go():
  engine, front = serve()
  load(engine, "a")
  engine.submit(make_greedy("live", "a"))
  engine.abort("live")
  unloaded = engine.unload_adapter("a")
  finish(engine)
  assert unloaded.done() and front.ends["live"].finish_reason is FinishReason.ABORT


def test_refusals_name_the_remedy_and_accept_nothing():
  engine, _ = serve()
  load(engine, "a")
  with pytest.raises(AdapterNotLoaded, match=r"model='b' is no loaded adapter \(loaded: a\); load it first"):
    engine.submit_all([make("one", "a"), make("two", "b")])
  assert engine.num_live == 0 and engine.adapters()[0].num_live == 0
  with pytest.raises(InvalidRequest, match="lora_name='a' is loaded already; unload it first, or set load_inplace"):
    engine.load_adapter("a", FakeAdapter(8, "/x"))
  with pytest.raises(AdapterNotLoaded, match="lora_name='b' is no loaded adapter"):
    engine.unload_adapter("b")
  without, _ = serve(enable_lora=False)
  with pytest.raises(AdapterNotLoaded, match="this server has none; serve with --enable_lora"):
    without.submit(make("one", "a"))
  with pytest.raises(InvalidRequest, match="cannot be loaded; serve with --enable_lora"):
    without.load_adapter("a", FakeAdapter(8, "/x"))


def test_weights_that_do_not_fit_fail_their_load_alone():
  class Refusing(FakeRunner):
    def write_adapter(self, slot, weights):
      raise ValueError("of another model")

  front = Front()
  engine = Engine(Scheduler(CONFIG), Refusing(CONFIG), VirtualClock(), front)
  loaded = engine.load_adapter("a", FakeAdapter(8, "/a"))
  engine.submit(make_greedy("other"))
  finish(engine)
  with pytest.raises(ValueError, match="of another model"):
    loaded.result(timeout=0)
  assert engine.adapters() == [] and front.tokens["other"] == expected("")


def test_a_failed_replacement_leaves_the_old_adapter_serving():
  """With its slot, its serial and so its cached prefixes, and with no slot lost."""

  class RefusingOnce(FakeRunner):
    refuses = False

    def write_adapter(self, slot, weights):
      if self.refuses:
        raise ValueError("of another model")
      super().write_adapter(slot, weights)

  front, runner = Front(), RefusingOnce(CONFIG)
  engine = Engine(Scheduler(CONFIG), runner, VirtualClock(), front)
  load(engine, "a", "/adapters/old")
  runner.refuses = True
  failed = engine.load_adapter("a", FakeAdapter(8, "/adapters/new"), replaces=True)
  with pytest.raises(AdapterNotLoaded, match="model='a' is loading"):
    engine.submit(make_greedy("meanwhile", "a"))
  finish(engine)
  with pytest.raises(ValueError, match="of another model"):
    failed.result(timeout=0)
  assert [(each.name, each.path, each.state) for each in engine.adapters()] == [("a", "/adapters/old", "loaded")]
  engine.submit(make_greedy("after", "a"))
  finish(engine)
  assert front.tokens["after"] == expected("/adapters/old")
  runner.refuses = False
  load(engine, "a", "/adapters/new", replaces=True)
  load(engine, "b")
  engine.submit(make_greedy("last", "a"))
  finish(engine)
  assert front.tokens["last"] == expected("/adapters/new")


def test_a_load_that_cannot_be_is_refused_before_its_weights_are_read():
  engine, _ = serve()
  for name in ("a", "b"):
    engine.check_adapter_load(name)
    load(engine, name)
  with pytest.raises(InvalidRequest, match="lora_name='a' is loaded already"):
    engine.check_adapter_load("a")
  engine.check_adapter_load("a", replaces=True)
  with pytest.raises(InvalidRequest, match="lora_name='c' finds no free slot: 2 adapters are loaded"):
    engine.check_adapter_load("c")
  assert [each.name for each in engine.adapters()] == ["a", "b"]
  without, _ = serve(enable_lora=False)
  with pytest.raises(InvalidRequest, match="cannot be loaded; serve with --enable_lora"):
    without.check_adapter_load("a")


def test_an_engine_with_faults_takes_adapters():
  """As servers of make chaos do: the engine looks for write_adapter on the runner that injects faults."""
  engine, front = serve()
  inject_engine(engine, Injector(FaultPlan.parse('{"faults": []}')))
  load(engine, "a", "/adapters/a")
  engine.submit(make_greedy("one", "a"))
  finish(engine)
  assert front.tokens["one"] == expected("/adapters/a")


def test_failed_engine_completes_loads_and_unloads():
  engine, _ = serve()
  load(engine, "a")
  engine.submit(make_greedy("live", "a"))
  engine.step()
  unloaded, loaded = engine.unload_adapter("a"), engine.load_adapter("b", FakeAdapter(8, "/b"))
  engine.fail(RuntimeError("test"))
  for future in (unloaded, loaded):
    with pytest.raises(Unavailable, match="the engine has failed"):
      future.result(timeout=0)


@pytest.mark.catalogue("I2")
def test_blocks_on_the_host_belong_to_one_load_of_an_adapter():
  engine, front = serve(num_blocks=10, num_host_blocks=40)
  load(engine, "a", "/adapters/first")

  def ask(request_id: str, adapter: str, path: str) -> None:
    engine.submit(make_greedy(request_id, adapter))
    finish(engine)
    assert front.tokens[request_id] == expected(path), request_id

  for turn in range(3):  # a pool of 10 blocks keeps one of the two prompts at most
    ask(f"a{turn}", "a", "/adapters/first")
    ask(f"base{turn}", "", "")
  loads = engine._scheduler.loads
  assert loads is not None
  num_hits = loads.host.counts.num_hits
  assert num_hits >= 3 and loads.host.counts.num_loaded
  load(engine, "a", "/adapters/second", replaces=True)
  ask("replaced", "a", "/adapters/second")
  assert loads.host.counts.num_hits == num_hits, "the host gave blocks of the adapter that was replaced"
