"""The latency words, on examples worked out by hand."""

import pytest

from tools.report.latency import Objectives, Outcome, percentile, summary


def outcome(chunks, *, intended_s=0.0, sent_s=0.0, output_len=None, error=None, identity=0) -> Outcome:
  count = sum(number for _, number in chunks)
  return Outcome(
    identity, count if output_len is None else output_len, intended_s, sent_s, tuple(chunks), tuple(range(count)), error
  )


# Wanted at 1 s, sent at 1.5 s; tokens at 2, 3, then three at once at 4.5, and one at 5.
EXAMPLE = outcome([(2.0, 1), (3.0, 1), (4.5, 3), (5.0, 1)], intended_s=1.0, sent_s=1.5)


def test_first_token_counts_from_the_intended_arrival():
  assert EXAMPLE.ttft_s == 1.0
  assert EXAMPLE.ttft_from_send_s == 0.5
  assert EXAMPLE.e2e_s == 4.0


def test_a_bundle_of_tokens_is_one_gap_and_zeros():
  assert EXAMPLE.itl_s == (1.0, 1.5, 0.0, 0.0, 0.5)
  assert EXAMPLE.chunk_gaps_s == (1.0, 1.5, 0.5)
  assert outcome([(2.0, 3)]).itl_s == (0.0, 0.0)


def test_time_per_output_token_leaves_the_first_out():
  assert EXAMPLE.tpot_s == pytest.approx(3.0 / 5)  # 6 tokens: 5 after the first
  assert outcome([(2.0, 1)]).tpot_s is None


def test_percentiles_interpolate():
  assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
  assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
  assert percentile([7.0], 99) == 7.0
  assert percentile([], 50) is None


def test_only_exactly_what_was_asked_for_is_good():
  assert outcome([(1.0, 2)]).ok
  assert not outcome([(1.0, 2)], output_len=3).ok
  assert not outcome([(1.0, 2)], error="INTERNAL: broken").ok


def test_summary_of_a_run():
  fast = outcome([(0.5, 1), (1.0, 1), (1.5, 1)], identity=1)
  slow = outcome([(3.0, 1), (4.0, 1)], intended_s=1.0, sent_s=1.0, identity=2)
  refused = Outcome(3, 5, 1.0, 1.0, (), (), "RESOURCE_EXHAUSTED: the queue is full")
  figures = summary([fast, slow, refused], prompt_tokens=11, objectives=Objectives(ttft_s=1.0, tpot_s=0.6))
  assert figures["wall_s"] == 4.0  # first intended arrival to last token
  assert figures["output_tok_s"] == pytest.approx(5 / 4)
  assert figures["total_tok_s"] == pytest.approx(16 / 4)
  assert (figures["requests"], figures["completed"], figures["failed"]) == (3, 2, 1)
  assert figures["ttft_p50_ms"] == pytest.approx(1250)  # 0.5 and 2.0 s
  assert figures["itl_p50_ms"] == pytest.approx(500)  # 0.5, 0.5 and 1.0 s, pooled
  assert figures["itl_max_ms"] == pytest.approx(1000)
  assert figures["tpot_p50_ms"] == pytest.approx(750)  # 0.5 and 1.0 s
  # Only the fast one meets both; the refused one is a miss, not a gap in the statistics.
  assert figures["slo_attainment"] == pytest.approx(1 / 3, abs=1e-4)
  assert figures["goodput_request_s"] == pytest.approx(1 / 4)


def test_objectives_count_both_limits_and_a_single_token_has_no_pace():
  one = outcome([(0.5, 1)])
  assert Objectives(ttft_s=0.5, tpot_s=0.001).met(one)
  assert not Objectives(ttft_s=0.4).met(one)
  pair = outcome([(0.5, 1), (1.5, 1)])
  assert Objectives().met(pair)
  assert not Objectives(tpot_s=0.9).met(pair)


def test_a_run_in_which_all_failed_has_no_rates():
  figures = summary([Outcome(0, 5, 0.0, 0.0, (), (), "UNAVAILABLE: no")], prompt_tokens=0)
  assert figures["wall_s"] is None
  assert figures["output_tok_s"] is None
  assert figures["ttft_p50_ms"] is None
  assert figures["slo_attainment"] == 0
