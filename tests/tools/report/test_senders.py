"""Fair shares by hand, and what a kept run says of its tenants and priorities."""

import pytest

from tools.report.latency import Outcome
from tools.report.senders import SenderTally, fair_shares, sender_figures


def test_who_asks_for_little_gets_it_and_the_others_divide_the_rest():
  assert fair_shares({"a": 10, "b": 100, "c": 100}, 90) == {"a": 10, "b": 40, "c": 40}
  assert fair_shares({"a": 100, "b": 50}, 60) == {"a": 30, "b": 30}
  assert fair_shares({"a": 5, "b": 5}, 10) == {"a": 5, "b": 5}
  assert fair_shares({}, 0) == {}


def outcome(tenant: str, arrival_s: float, times: list[float], priority: int = 0, asked: int = 0) -> Outcome:
  chunks = tuple((time, 1) for time in times)
  error = None if not asked or asked == len(times) else "TIMEOUT: late"
  return Outcome(f"{tenant}{arrival_s}", asked or len(times), arrival_s, arrival_s, chunks, (), error, tenant, priority)


def test_service_counts_until_the_last_arrival():
  # Until 10.0: a gets a prompt of 8 and 2 tokens, b nothing; both asked for 12. The fair division gives each 5.
  outcomes = [outcome("a", 0.0, [1.0, 2.0, 11.0, 12.0]), outcome("b", 10.0, [13.0, 14.0, 15.0, 16.0])]
  figures = sender_figures(outcomes, [8, 8])
  assert figures["fairness"] == 0.0
  assert figures["tenants"]["a"] == {
    "requests": 1,
    "tokens": 12,
    "ttft_p50_ms": 1000.0,
    "ttft_p99_ms": 1000.0,
    "of_fair_share": 2.0,
  }
  assert "priorities" not in figures


def test_an_equal_division_is_fair_and_nothing_served_is_no_division():
  equal = [
    outcome("a", 0.0, [1.0, 2.0]),
    outcome("b", 0.0, [1.0, 2.0]),
    outcome("a", 3.0, [4.0]),
    outcome("b", 3.0, [4.0]),
  ]
  assert sender_figures(equal, [5, 5, 5, 5])["fairness"] == 1.0
  burst = [outcome("a", 0.0, [1.0]), outcome("b", 0.0, [1.0])]
  assert sender_figures(burst, [5, 5])["fairness"] is None
  assert sender_figures([outcome("a", 0.0, [1.0])], [5]) == {}
  assert SenderTally().figures() == {}


def test_a_request_that_failed_has_demand_and_no_ttft():
  outcomes = [outcome("", 0.0, [1.0], priority=1), outcome("", 0.0, [], priority=0, asked=3)]
  priorities = sender_figures(outcomes, [5, 5])["priorities"]
  assert priorities["0"]["ttft_p50_ms"] is None and priorities["0"]["tokens"] == 8
  assert priorities["1"]["ttft_p50_ms"] == pytest.approx(1000.0)
