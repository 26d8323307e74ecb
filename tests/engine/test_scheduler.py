"""The scheduler's rules one by one, as literal lists of counts. What holds under any load is in test_world.py."""

import dataclasses

import pytest

from engine.batch import Batch, StepResult, TokenLogprobs
from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest, Overloaded, PrefillBacklog, RequestTooLong, TenantQuota
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.settings import POLICIES
from engine.validation import validate_request
from tools.chaos.server.books import check_scheduler

CONFIG = EngineConfig(
  vocab_size=100,
  max_model_len=64,
  num_blocks=64,
  block_size=4,
  token_budgets=(4, 8, 16, 32),
  max_num_seqs=8,
  prefill_chunk=16,
  queue_timeout_s=0.0,
  request_timeout_s=0.0,
  eos_token_ids=(1,),
)


def make(request_id: str, prompt: int | list[int], max_tokens: int = 8, **fields) -> Request:
  """`prompt` as a number is that many different tokens."""
  params = fields.pop("params", {})
  tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
  return Request(request_id, tokens, SamplingParams(max_tokens=max_tokens, **params), **fields)


class Driver:
  """Feeds a scheduler without overlap; every sampled token is 50 by default."""

  def __init__(self, *requests: Request, config: EngineConfig = CONFIG, **changes):
    self.scheduler = Scheduler(dataclasses.replace(config, **changes))
    self.now = 0.0
    for request in requests:
      self.scheduler.add_request(request)

  def plan(self) -> Batch:
    batch = self.scheduler.schedule(self.now)
    assert batch is not None
    check_scheduler(self.scheduler)
    return batch

  def commit(
    self,
    batch: Batch,
    *,
    tokens: dict[str, int] | None = None,
    bad: tuple[str, ...] = (),
    logprobs: dict[int, tuple[TokenLogprobs, ...]] | None = None,
  ) -> list[TokenEvent]:
    values = [(tokens or {}).get(request_id, 50) for request_id in batch.request_ids]
    bad_rows = frozenset(batch.request_ids.index(request_id) for request_id in bad)
    events = self.scheduler.commit(batch, StepResult(values, bad_rows, logprobs or {}), self.now)
    check_scheduler(self.scheduler)
    return events

  @staticmethod
  def commit_values(scheduler: Scheduler, batch: Batch, now: float) -> list[TokenEvent]:
    """Values for a batch of any scheduler."""
    return scheduler.commit(batch, StepResult([50] * len(batch.slots)), now)

  def step(self, **values) -> dict[str, int]:
    """One step; request id -> count."""
    batch = self.plan()
    self.commit(batch, **values)
    return counts(batch)


def counts(batch: Batch) -> dict[str, int]:
  return dict(zip(batch.request_ids, batch.counts, strict=True))


# Budgets and shapes.


def test_prompts_then_decodes():
  driver = Driver(make("a", 5), make("b", 3))
  assert driver.step() == {"a": 5, "b": 3}
  assert driver.step() == {"a": 1, "b": 1}


@pytest.mark.catalogue("C12")
def test_a_long_prompt_is_taken_in_chunks_and_never_stalls_a_decode():
  driver = Driver(make("a", 2))
  driver.step()
  driver.scheduler.add_request(make("b", 40))
  # 1 decode + a chunk of 16 needs the rung of 32: the chunk grows to its edge.
  assert driver.step() == {"a": 1, "b": 31}
  assert driver.step() == {"a": 1, "b": 9}
  assert driver.step() == {"a": 1, "b": 1}


def test_a_chunk_that_fills_its_rung_does_not_grow():
  driver = Driver(make("a", 40), prefill_chunk=16)
  batch = driver.plan()
  assert (batch.counts, batch.shape.tokens, batch.samples) == ((16,), 16, (False,))


def test_where_padding_is_left_out_no_chunk_grows_and_a_prompt_is_cut_in_equal_pieces():
  driver = Driver(make("a", 2), computes_padding=False)
  driver.step()
  driver.scheduler.add_request(make("b", [9] * 40))
  # Three steps of at most 16, as the rest of 8 after two full ones would take: the rung of 32 is no reason for more.
  assert [driver.step() for _ in range(4)] == [{"a": 1, "b": count} for count in (14, 13, 13, 1)]


def test_what_equal_pieces_leave_of_a_chunk_goes_to_the_next_prompts():
  driver = Driver(make("z", 2), computes_padding=False)
  driver.step()
  for request in (make("a", 20), make("b", [9] * 12), make("c", [8] * 3)):
    driver.scheduler.add_request(request)
  # Of "b" there are 6 where 12 would fit a step; what is left of it is one piece again, and "c" gets the last token.
  assert [driver.step() for _ in range(3)] == [
    {"z": 1, "a": 10, "b": 6},
    {"z": 1, "a": 10, "b": 6},
    {"z": 1, "a": 1, "b": 1, "c": 3},
  ]


def test_where_nothing_runs_and_padding_is_left_out_prompts_fill_the_largest_rung():
  # A chunk is 16, the largest rung 32. "a" fits it whole; "b" of 20 is to have two steps, and gets what is left of one.
  driver = Driver(make("a", 24), make("b", [9] * 20), computes_padding=False)
  assert [driver.step() for _ in range(2)] == [{"a": 24, "b": 8}, {"a": 1, "b": 12}]


def test_where_nothing_runs_a_prompt_beyond_the_largest_rung_is_cut_as_beside_others():
  driver = Driver(make("a", 40), computes_padding=False)
  assert [driver.step() for _ in range(3)] == [{"a": 14}, {"a": 13}, {"a": 13}]


def test_equal_pieces_are_of_what_is_not_cached():
  driver = Driver(make("z", [9] * 2, max_tokens=9), computes_padding=False)
  driver.step()
  for request in (make("a", 24, max_tokens=1), make("b", 44, max_tokens=1)):
    driver.scheduler.add_request(request)
  assert [driver.step() for _ in range(2)] == [{"z": 1, "a": 12, "b": 4}, {"z": 1, "a": 12, "b": 4}]


def test_growth_admits_more_when_running_prompts_are_done():
  driver = Driver(make("a", 6), make("b", 6), prefill_chunk=5)
  # The chunk of 5 needs the rung of 8: "a" grows to its end at 6, and "b" gets the 2 tokens left.
  batch = driver.plan()
  assert counts(batch) == {"a": 6, "b": 2}
  assert batch.samples == (True, False)


def test_the_budget_is_shared_in_order():
  driver = Driver(make("a", 20), make("b", 20), make("c", [9] * 20), prefill_chunk=32)
  assert driver.step() == {"a": 20, "b": 12}
  assert driver.step() == {"a": 1, "b": 8, "c": 20}


def test_rows_are_bounded_by_slots():
  driver = Driver(*(make(f"r{number}", 1) for number in range(5)), max_num_seqs=3)
  assert driver.step() == {"r0": 1, "r1": 1, "r2": 1}
  assert driver.step() == {"r0": 1, "r1": 1, "r2": 1}
  assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (3, 2)


def test_columns_of_a_mixed_step():
  driver = Driver(make("a", 5))
  driver.step()
  driver.scheduler.add_request(make("b", 3))
  batch = driver.plan()
  assert batch.request_ids == ("a", "b")
  assert batch.slots == (0, 1)
  assert batch.starts == (5, 0)
  assert batch.counts == (1, 3)
  assert batch.token_ids == ((), (10, 11, 12))
  assert batch.num_logits == (1, 1)
  assert batch.samples == (True, True)
  assert [(admission.slot, admission.token_ids, admission.block_ids) for admission in batch.admissions] == [
    (1, (10, 11, 12), (3,))
  ]
  assert batch.step == 1 and batch.num_tokens == 4 and batch.shape.tokens == 4


def test_a_table_grows_when_the_position_needs_it():
  driver = Driver(make("a", 3))
  grown = []
  for _ in range(7):
    batch = driver.plan()
    grown.append(batch.new_blocks)
    driver.commit(batch)
  assert grown == [(), (), ((0, 1, 2),), (), (), (), ((0, 2, 3),)]


def test_nothing_to_do_is_no_batch():
  assert Driver().scheduler.schedule(0.0) is None


# Overlap: planning needs no values.


def test_plans_ahead_of_the_values_and_stops_at_the_length():
  driver = Driver(make("a", 2, max_tokens=3))
  scheduler = driver.scheduler
  first = driver.plan()
  second = driver.plan()
  assert (second.starts, second.token_ids) == ((2,), ((),))
  assert [event.token_ids for event in driver.commit(first)] == [(50,)]
  third = driver.plan()
  assert third.starts == (3,)
  driver.commit(second)
  assert scheduler.schedule(0.0) is None, "the length is a count: no row is wasted on it"
  (event,) = driver.commit(third)
  assert event.finish_reason is FinishReason.LENGTH and event.token_ids == (50,)
  assert scheduler.num_running == 0


def test_a_stop_wastes_one_row_that_is_dropped():
  driver = Driver(make("a", 2))
  first, second = driver.plan(), driver.plan()
  (event,) = driver.commit(first, tokens={"a": 1})
  assert (event.finish_reason, event.stop_token_id) == (FinishReason.STOP, 1)
  assert driver.commit(second) == []


def test_a_slot_and_an_id_are_used_again_while_the_old_row_is_in_flight():
  driver = Driver(make("a", 2), max_num_seqs=1)
  first, second = driver.plan(), driver.plan()
  driver.commit(first, tokens={"a": 1})
  driver.scheduler.add_request(make("a", 3))
  third = driver.plan()
  assert third.slots == (0,) and third.admissions[0].token_ids == (10, 11, 12)
  assert driver.commit(second) == []
  assert [event.token_ids for event in driver.commit(third)] == [(50,)]


# Endings.


@pytest.mark.parametrize(
  "params, token, reason",
  [
    ({}, 1, FinishReason.STOP),
    ({"ignore_eos": True}, 1, None),
    ({"stop_token_ids": (7,)}, 7, FinishReason.STOP),
    ({"stop_token_ids": (7,), "ignore_eos": True}, 7, FinishReason.STOP),
    ({}, 7, None),
  ],
)
def test_stop_tokens(params: dict, token: int, reason: FinishReason | None):
  driver = Driver(make("a", 2, params=params))
  (event,) = driver.commit(driver.plan(), tokens={"a": token})
  assert (event.token_ids, event.finish_reason) == ((token,), reason)
  assert event.stop_token_id == (token if reason else None)


def test_nan_ends_its_request_alone_and_publishes_nothing():
  driver = Driver(make("a", 20), make("b", [9] * 4), prefill_chunk=32)
  event, other = driver.commit(driver.plan(), bad=("a",))
  assert event.finish_reason is FinishReason.ERROR and "NaN" in event.message and not event.token_ids
  assert other == TokenEvent("b", (50,))
  assert len(driver.scheduler.pool.state()["keys"]) == 1, "the block of b"


def test_nan_in_the_middle_of_a_prompt_is_noticed_with_its_chunk():
  driver = Driver(make("a", 40), prefill_chunk=16)
  batch = driver.plan()
  assert (batch.samples, batch.num_logits) == ((False,), (1,))
  (event,) = driver.commit(batch, bad=("a",))
  assert event.finish_reason is FinishReason.ERROR
  assert not driver.scheduler.pool.state()["keys"]


@pytest.mark.catalogue("B2")
@pytest.mark.parametrize("state", ["waiting", "running", "in flight", "preempted", "unknown"])
def test_abort_in_every_state(state: str):
  driver = Driver(make("a", 6, max_tokens=26), make("b", 6, max_tokens=26), num_blocks=8)
  scheduler = driver.scheduler
  batch = None
  match state:
    case "running":
      driver.step()
    case "in flight":
      batch = driver.plan()
    case "preempted":
      while not scheduler.num_preemptions:
        driver.step()
    case "unknown":
      assert scheduler.abort_request("nobody") == []
  (event,) = scheduler.abort_request("b", FinishReason.STOP, "stop string")
  assert (event.request_id, event.finish_reason, event.message) == ("b", FinishReason.STOP, "stop string")
  assert scheduler.abort_request("b") == [], "a second abort is nothing"
  check_scheduler(scheduler)
  if batch:
    assert [event.request_id for event in driver.commit(batch)] == ["a"]
  while scheduler.num_running + scheduler.num_waiting:
    driver.step()
  assert scheduler.pool.num_used == 0


@pytest.mark.catalogue("B6", "B7")
def test_deadlines():
  driver = Driver(
    make("a", 4, deadline=5.0), make("b", 4, queue_deadline=2.0), make("c", 4, queue_deadline=2.0), max_num_seqs=2
  )
  driver.step()
  scheduler = driver.scheduler
  assert scheduler.expire_requests(1.99) == []
  (event,) = scheduler.expire_requests(2.0)
  assert (event.request_id, event.finish_reason) == ("c", FinishReason.TIMEOUT)
  assert "still queued after 2.0 s" in event.message
  (event,) = scheduler.expire_requests(5.0)
  assert (event.request_id, event.finish_reason) == ("a", FinishReason.TIMEOUT)
  assert "not finished after 5.0 s" in event.message
  assert scheduler.expire_requests(100.0) == [], "b was scheduled in time and has no other deadline"
  check_scheduler(scheduler)


def test_default_deadlines_come_from_the_settings():
  first, second = make("a", 4, arrival_time=1.0), make("b", 4, arrival_time=1.0, queue_deadline=9.0)
  Driver(first, second, queue_timeout_s=2.0, request_timeout_s=3.0)
  assert (first.queue_deadline, first.deadline) == (3.0, 4.0)
  assert (second.queue_deadline, second.deadline) == (9.0, 4.0)


# Order and preemption.


def test_first_come_first_served_by_arrival_not_by_call():
  driver = Driver(make("late", 5, arrival_time=2.0), make("early", 5, arrival_time=1.0))
  assert list(driver.step()) == ["early", "late"]


@pytest.mark.catalogue("C10")
def test_priority_and_ageing():
  requests = [
    make("patient", 16, priority=1, arrival_time=0.0),
    make("urgent", 16, priority=0, arrival_time=5.0),
    make("later", 16, priority=0, arrival_time=30.0),
  ]
  order = ["urgent", "patient", "later"]  # 10 s are worth one unit: patient counts as 1.0, urgent 0.5, later 3.0
  driver = Driver(*requests, policy="priority", aging_s=10.0, max_num_seqs=1)
  seen = []
  while driver.scheduler.num_running + driver.scheduler.num_waiting:
    seen += [request_id for request_id in driver.step() if request_id not in seen]
  assert seen == order


@pytest.mark.catalogue("C11")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_is_not_cached_waits_no_longer_than_its_place(policy):
  """However many come after it whose prompt is in the cache, and cost next to nothing."""
  hot = list(range(10, 34))
  driver = Driver(make("warm", hot, max_tokens=1), max_num_seqs=2, policy=policy, aging_s=10.0)
  driver.step()
  driver.step()
  started: list[str] = []
  for number in range(20):
    if number == 3:
      driver.scheduler.add_request(make("cold", list(range(50, 74)), max_tokens=1, arrival_time=driver.now))
    for index in range(3):
      driver.scheduler.add_request(make(f"hot{number}-{index}", hot, max_tokens=1, arrival_time=driver.now))
    started += driver.step()
    driver.now += 0.1
  started = list(dict.fromkeys(started))
  assert started[:9] == [f"hot{number}-{index}" for number in range(3) for index in range(3)]
  assert started[9] == "cold", "three turns of three were before it"


def test_priority_without_ageing_is_strict():
  driver = Driver(
    make("low", 16, priority=1, arrival_time=0.0),
    make("high", 16, priority=0, arrival_time=1e6),
    policy="priority",
    aging_s=0.0,
  )
  assert list(driver.step()) == ["high"]


def test_who_does_not_fit_is_not_overtaken():
  driver = Driver(
    make("a", 20, max_tokens=4),
    make("big", 20, max_tokens=4),
    make("small", 2, max_tokens=4),
    num_blocks=6,
    prefill_chunk=32,
  )
  assert driver.step() == {"a": 20}


@pytest.mark.catalogue("C4")
def test_preempts_the_last_in_order_and_brings_it_back_with_all_its_tokens():
  driver = Driver(make("a", 6, max_tokens=18), make("b", [90] * 6, max_tokens=18), num_blocks=6)
  scheduler = driver.scheduler
  b = scheduler._requests["b"]
  history = []
  while scheduler.num_running + scheduler.num_waiting:
    history.append(driver.step())
  alone = history.index({"a": 1})
  assert history[:alone] == [{"a": 6, "b": 6}] + [{"a": 1, "b": 1}] * 6, "12 tokens each fill the 6 blocks"
  assert b.num_preemptions == scheduler.num_preemptions == 1
  # b comes back when a has ended: 13 tokens are known; its first block but the last token's may still be cached.
  back = next(step for step in history[alone:] if "b" in step)
  assert "a" not in back and 1 <= back["b"] <= 13
  assert len(b.output_token_ids) == 18 and scheduler.pool.num_used == 0


def test_the_victims_value_on_its_way_is_kept():
  driver = Driver(make("a", 4, max_tokens=12), make("b", 4, max_tokens=12), num_blocks=4, prefix_cache_scope="off")
  scheduler = driver.scheduler
  b = scheduler._requests["b"]
  batch = driver.plan()
  while not scheduler.num_preemptions:
    previous, batch = batch, driver.plan()
    if not scheduler.num_preemptions:
      driver.commit(previous)
  assert b.status is RequestStatus.WAITING and b.num_in_flight == 1
  known = len(b.output_token_ids)
  driver.commit(previous)
  assert (len(b.output_token_ids), b.num_in_flight, b.status) == (known + 1, 0, RequestStatus.WAITING)


# Prefix cache.


def test_full_blocks_are_shared_but_never_the_last_token():
  driver = Driver(make("a", 8))
  driver.step()
  driver.scheduler.add_request(make("b", 8))
  batch = driver.plan()
  assert counts(batch) == {"a": 1, "b": 4}, "8 tokens are 2 full blocks, of which 1 is served"
  assert batch.starts[1] == 4 and batch.admissions[0].block_ids[0] == 1
  driver.commit(batch)
  driver.scheduler.add_request(make("c", 9))
  assert driver.step()["c"] == 1, "of 9 tokens both full blocks are served"


def test_a_block_is_found_only_after_its_step_has_come_back():
  driver = Driver(make("a", 8))
  first = driver.plan()
  driver.scheduler.add_request(make("b", 9))
  second = driver.plan()
  assert counts(second) == {"a": 1, "b": 9}
  driver.commit(first)
  driver.scheduler.add_request(make("c", 9))
  assert counts(driver.plan())["c"] == 1


def test_generated_text_is_found_by_the_next_turn():
  driver = Driver(make("a", 6, max_tokens=8))
  for _ in range(8):
    driver.step()
  assert driver.scheduler.num_running == 0
  driver.scheduler.add_request(make("b", [*range(10, 16), *[50] * 8, 60, 61]))
  assert driver.step() == {"b": 4}, "13 of 14 tokens were computed: 3 full blocks"


@pytest.mark.catalogue("I1")
def test_salts_do_not_share():
  driver = Driver(make("a", 8, cache_salt=b"one"))
  driver.step()
  driver.scheduler.add_request(make("b", 8, cache_salt=b"two"))
  assert driver.step()["b"] == 8
  driver.scheduler.add_request(make("c", 8, cache_salt=b"one"))
  assert driver.step()["c"] == 4


@pytest.mark.catalogue("I1")
@pytest.mark.parametrize(
  "scope, hits",
  [  # of: the same tenant and salt, another tenant, another salt, another tenant and salt that spell the same
    ("global", (4, 4, 0, 0)),
    ("tenant", (4, 0, 0, 0)),
    ("request", (0, 0, 0, 0)),
    ("off", (0, 0, 0, 0)),
  ],
)
def test_who_shares_with_whom(scope, hits):
  driver = Driver(make("a", 8, tenant="t", cache_salt=b"s"), prefix_cache_scope=scope)
  driver.step()
  cached = []
  for tenant, salt in (("t", b"s"), ("u", b"s"), ("t", b"x"), ("ts", b"")):
    driver.scheduler.add_request(make(f"{tenant}-{salt}", 8, tenant=tenant, cache_salt=salt))
    cached.append(8 - driver.step()[f"{tenant}-{salt}"])
  assert tuple(cached) == hits


@pytest.mark.catalogue("I1")
@pytest.mark.parametrize("scope, cached", [("global", 8), ("tenant", 8), ("request", 8), ("off", 0)])
def test_outputs_of_one_request_share_its_prompt(scope, cached):
  leader, sibling = make("a", 9, tenant="t"), make("a/1", 9, tenant="t", leader_id="a")
  driver = Driver(leader, sibling, prefix_cache_scope=scope)
  driver.step()
  driver.step()
  assert (leader.num_prompt_cached_tokens, sibling.num_prompt_cached_tokens) == (0, cached)


def test_without_prefix_caching_nothing_is_shared():
  driver = Driver(make("a", 8), prefix_cache_scope="off")
  driver.step()
  driver.scheduler.add_request(make("b", 8))
  assert driver.step()["b"] == 8
  assert not driver.scheduler.pool.state()["keys"]


def test_siblings_wait_for_their_leader_and_share_its_blocks():
  driver = Driver(make("a", 20), make("a1", 20, leader_id="a"), make("a2", 20, leader_id="a"), make("z", 2))
  assert driver.step() == {"a": 16}
  assert driver.step() == {"a": 4, "z": 2}
  batch = driver.plan()
  assert counts(batch) == {"a": 1, "z": 1, "a1": 4, "a2": 4}
  tables = [admission.block_ids for admission in batch.admissions]
  assert tables[0][:4] == tables[1][:4] and tables[0][4] != tables[1][4]
  event = driver.scheduler.abort_request("a1")[0]
  assert event.num_cached_tokens == 16


def test_siblings_go_on_when_their_leader_is_gone():
  driver = Driver(make("a", 20), make("a1", 20, leader_id="a"))
  driver.step()
  driver.scheduler.abort_request("a")
  driver.scheduler.add_request(make("x", [9] * 4, leader_id="never heard of"))
  assert driver.step() == {"a1": 4, "x": 4}, "what the leader had computed is found"


# Prompt log probabilities.


def entries(batch: Batch, row: int) -> tuple[TokenLogprobs, ...]:
  """One a logit row, whose number is the position it belongs to."""
  end = batch.starts[row] + batch.counts[row]
  return tuple(TokenLogprobs(50, float(position), ()) for position in range(end - batch.num_logits[row], end))


def test_prompt_logprobs_are_limited_by_logit_rows_and_told_once_each():
  request = make("a", 20, params={"prompt_logprobs": 2, "logprobs": 1})
  driver = Driver(request, make("b", 3), max_num_seqs=8)
  told, sizes, answers = [], [], []
  while len(request.output_token_ids) < 2:
    batch = driver.plan()
    row = batch.request_ids.index("a")
    assert sum(batch.num_logits) <= batch.shape.logits
    sizes.append((batch.counts[row], batch.num_logits[row]))
    for event in driver.commit(batch, logprobs={row: entries(batch, row)}):
      told += [entry.logprob for entry in event.prompt_logprobs]
      answers += [entry.logprob for entry in event.logprobs]
  assert told == list(range(19)), "of the second prompt token and on"
  assert answers == [19.0, 20.0]
  assert sizes == [(8, 8), (8, 8), (4, 4), (1, 1)], "and b has to wait for a row of logits"


def test_prompt_logprobs_do_not_read_the_cache():
  driver = Driver(make("a", 9))
  driver.step()
  driver.scheduler.add_request(make("b", 9, params={"prompt_logprobs": 0}))
  batch = driver.plan()
  assert batch.starts[1] == 0 and batch.num_logits[1] == batch.counts[1] == 7


# Admission.


@pytest.mark.parametrize(
  "request_, error, message",
  [
    (make("a", []), InvalidRequest, "prompt is empty"),
    (
      make("a", [5, 100]),
      InvalidRequest,
      "prompt token id 100 is not in the vocabulary; ids of this model are 0 to 99",
    ),
    (make("a", [-1]), InvalidRequest, "prompt token id -1"),
    (make("a", 60, max_tokens=5), RequestTooLong, "max_tokens=5 is 65, but the maximum context length is 64 tokens"),
    (make("a", 4, params={"temperature": float("nan")}), InvalidRequest, "temperature=nan"),
  ],
)
def test_refuses_with_value_limit_and_remedy(request_: Request, error: type[Exception], message: str):
  with pytest.raises(error, match=message.replace("+", r"\+")):
    validate_request(CONFIG, request_)


@pytest.mark.catalogue("C3")
def test_refuses_what_the_pool_can_never_hold():
  config = dataclasses.replace(CONFIG, num_blocks=4)
  validate_request(config, make("a", 10, max_tokens=6))
  with pytest.raises(RequestTooLong, match="is 17, but the maximum context length is 16 tokens, which the KV"):
    validate_request(config, make("a", 10, max_tokens=7))


@pytest.mark.catalogue("C5")
def test_what_just_fits_the_pool_runs_to_its_end():
  driver = Driver(make("a", 10, max_tokens=6), num_blocks=4)
  for _ in range(6):
    driver.step()
  assert driver.scheduler.num_running == 0


@pytest.mark.catalogue("C1", "C2")
def test_the_queue_is_bounded_in_requests_and_in_prompt_tokens():
  driver = Driver(make("a", 10), make("b", 10), max_queued_requests=3, max_queued_tokens=25)
  scheduler = driver.scheduler
  scheduler.check_capacity(make("c", 5))
  with pytest.raises(Overloaded, match="20 prompt tokens are queued and this request has 6, the limit is 25") as caught:
    scheduler.check_capacity(make("c", 6))
  assert caught.value.retry_after_s > 0
  with pytest.raises(Overloaded, match="3 requests are queued, the limit is 3"):
    scheduler.check_capacity(make("c", 1), requests_ahead=1)
  driver.step()
  scheduler.check_capacity(make("c", 25))
  assert Driver(max_queued_tokens=5).scheduler.check_capacity(make("c", 9)) is None, "an empty queue takes any prompt"


@pytest.mark.catalogue("C14")
def test_a_tenant_has_its_share_of_the_queue_and_no_more():
  queued = [make(name, 10, tenant="greedy") for name in "ab"]
  limits = {"max_queued_requests": 6, "max_queued_tokens": 50, "max_queued_share_per_tenant": 0.5}
  scheduler = Driver(*queued, **limits).scheduler
  said = "20 prompt tokens of this tenant are queued and this request has 6, its share of the queue is 25; try again in"
  with pytest.raises(TenantQuota, match=said) as caught:
    scheduler.check_capacity(make("c", 6, tenant="greedy"))
  assert caught.value.reason == "TENANT_QUOTA" and caught.value.retry_after_s > 0
  scheduler.check_capacity(make("c", 5, tenant="greedy"))
  with pytest.raises(TenantQuota, match="3 requests of this tenant are queued, its share of the queue is 3; try"):
    scheduler.check_capacity(make("c", 1, tenant="greedy"), 1, 1, (1, 1))
  for tenant in ("", "other"):
    scheduler.check_capacity(make("c", 30, tenant=tenant))
  with pytest.raises(PrefillBacklog, match="20 prompt tokens are queued and this request has 31, the limit is 50"):
    scheduler.check_capacity(make("c", 31, tenant="other"))
  assert Driver(**limits).scheduler.check_capacity(make("c", 40, tenant="greedy")) is None, "one request always enters"


@pytest.mark.catalogue("C14")
def test_with_a_share_others_get_in_however_much_one_tenant_offers():
  """100 requests of one to 1 of the other: the other is never refused, and runs as soon as a slot is free."""
  engine_config = dataclasses.replace(
    CONFIG, max_num_seqs=2, max_queued_requests=8, max_queued_share_per_tenant=0.75, policy="fair"
  )
  scheduler = Scheduler(engine_config)
  refused, waited, now = 0, [], 0.0
  for turn in range(50):
    for index in range(100):
      try:
        scheduler.check_capacity(
          request := make(f"g{turn}-{index}", 8, max_tokens=4, tenant="greedy", arrival_time=now)
        )
      except TenantQuota:
        refused += 1
        continue
      scheduler.add_request(request)
    victim = make(f"v{turn}", 8, max_tokens=4, tenant="other", arrival_time=now)
    scheduler.check_capacity(victim)
    scheduler.add_request(victim)
    steps = 0
    while victim.first_token_time is None:
      now += 1.0
      batch = scheduler.schedule(now)
      Driver.commit_values(scheduler, batch, now)
      steps += 1
    waited.append(steps)
  assert refused > 4000 and max(waited) <= 5, "a slot is free after 4 steps at the latest"


def test_retry_after_follows_the_pace_of_admissions():
  driver = Driver(*(make(f"r{number}", 4, max_tokens=1) for number in range(6)), max_num_seqs=1, max_queued_requests=1)
  for _ in range(5):
    driver.step()
    driver.now += 2.5
  with pytest.raises(Overloaded) as caught:
    driver.scheduler.check_capacity(make("c", 1))
  assert caught.value.retry_after_s == 3, "2.5, in whole seconds"


def test_unknown_policy_names_the_choices():
  with pytest.raises(ConfigError, match="policy='lifo' must be one of fair, fcfs, .* or MODULE:CLASS; set --policy"):
    Driver(policy="lifo")
  with pytest.raises(ConfigError, match="batching='waves' must be one of chunked, continuous"):
    Driver(batching="waves")


# Other batching modes, for comparison.


def test_static_runs_a_wave_to_completion_at_its_first_width():
  lengths = [2, 2, 2, 6, 3]
  driver = Driver(
    *(make(f"r{number}", 2, max_tokens=length) for number, length in enumerate(lengths)),
    max_num_seqs=4,
    token_budgets=(2, 4, 8),
    prefill_chunk=8,
    batching="static",
  )
  steps = []
  while driver.scheduler.num_running + driver.scheduler.num_waiting:
    batch = driver.plan()
    steps.append((batch.shape.tokens, len(batch.slots)))
    driver.commit(batch)
  assert steps == [(8, 4), (4, 4), (4, 1), (4, 1), (4, 1), (4, 1), (2, 1), (2, 1), (2, 1)]


def test_a_static_wave_pays_for_its_longest_prompt_in_every_row():
  """Prompts of 1, 4, 20 and 40 are padded to 4 rows of 40: in a step's 32 tokens, 8 of each row."""
  driver = Driver(
    *(make(f"r{number}", length, max_tokens=2) for number, length in enumerate((1, 4, 20, 40))),
    max_num_seqs=4,
    token_budgets=(4, 8, 16, 32),
    prefill_chunk=16,
    batching="static",
    prefix_cache_scope="off",
  )
  steps = []
  while driver.scheduler.num_running + driver.scheduler.num_waiting:
    batch = driver.plan()
    steps.append((batch.shape.tokens, batch.padded_tokens, max(batch.counts), batch.num_tokens))
    driver.commit(batch)
  first = [(32, 32, 8, useful) for useful in (21, 18, 12, 9, 8)]
  assert steps == [*first, (4, 4, 1, 1)], "4 rows are paid for when one is left"


def test_a_static_wave_reserves_for_all_its_tokens_and_nothing_is_preempted():
  driver = Driver(
    *(make(f"r{number}", 4, max_tokens=12) for number in range(4)), num_blocks=9, batching="static", max_num_seqs=4
  )
  assert driver.step() == {"r0": 4, "r1": 4}, "two requests of 16 tokens fit 36"
  while driver.scheduler.num_running:
    driver.step()
  assert driver.step() == {"r2": 4, "r3": 4}
  assert driver.scheduler.num_preemptions == 0


def test_a_dynamic_wave_waits_for_company_up_to_its_window():
  settings = {"batching": "dynamic", "dynamic_window_s": 0.05, "dynamic_max_batch": 3}
  driver = Driver(make("a", 2, max_tokens=2, arrival_time=1.0), **settings)
  driver.now = 1.04
  assert driver.scheduler.schedule(driver.now) is None
  assert driver.scheduler.opens_at() == pytest.approx(1.05)
  driver.scheduler.add_request(make("b", 2, max_tokens=3, arrival_time=1.04))
  driver.now = 1.05
  assert driver.step() == {"a": 2, "b": 2}
  driver.scheduler.add_request(make("c", 2, arrival_time=1.05))
  assert driver.scheduler.opens_at() is None, "a wave runs, and time alone will not end it"
  assert [driver.step(), driver.step()] == [{"a": 1, "b": 1}, {"b": 1}]
  driver.now = 1.06
  assert driver.scheduler.schedule(driver.now) is None, "a new wave, a new window"
  for request_id in "de":
    driver.scheduler.add_request(make(request_id, 2, arrival_time=1.06))
  assert driver.step() == {"c": 2, "d": 2, "e": 2}, "full: there is nothing to wait for"


def test_continuous_takes_prompts_whole():
  driver = Driver(
    make("a", 20),
    make("b", 20),
    make("c", 5),
    batching="continuous",
    token_budgets=(4, 32),
    prefill_chunk=8,
    prefix_cache_scope="off",
  )
  assert driver.step() == {"a": 20}, "b does not fit, and is not overtaken"
  assert driver.step() == {"a": 1, "b": 20, "c": 5}


@pytest.mark.parametrize("computes_padding", [True, False])
def test_continuous_cuts_only_what_no_step_can_hold(computes_padding):
  driver = Driver(
    make("a", 40),
    make("b", 5),
    batching="continuous",
    token_budgets=(4, 32),
    prefix_cache_scope="off",
    computes_padding=computes_padding,
  )
  assert driver.step() == {"a": 32}
  assert driver.step() == {"a": 8, "b": 5}
