"""Detokenisation and stop strings against their offline definitions, for any split into steps."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from server.text.detokenizer import Detokenizer, StopStrings

# Few letters, so that stop strings occur, overlap and nearly occur; some of several bytes and code points.
LETTERS = st.sampled_from(["a", "b", "c", "é", "日", "😀", "👩‍🚀"])
TEXTS = st.text(max_size=60) | st.lists(LETTERS, max_size=60).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=30)


def split(items, cuts):
  """`items` in consecutive pieces."""
  places = sorted({min(cut, len(items)) for cut in cuts} | {0, len(items)})
  return [items[start:end] for start, end in zip(places, places[1:], strict=False)]


@pytest.mark.catalogue("D7", "F7")
@settings(max_examples=300)
@given(text=TEXTS, cuts=CUTS)
def test_bytes_in_any_split_give_the_text_and_never_half_a_character(text, cuts):
  # The hardest tokenizer there is: one token a byte.
  detokenizer = Detokenizer(lambda token_id: bytes([token_id]))
  pieces = [detokenizer.push(piece) for piece in split(text.encode(), cuts)]
  assert "".join(pieces) == text
  assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=300)
@example(data=b"\xed\xa0", cuts=[])  # half a surrogate, which CPython's decoder also waits for
@given(data=st.binary(max_size=40), cuts=CUTS)
def test_invalid_bytes_become_what_the_standard_says(data, cuts):
  detokenizer = Detokenizer(lambda token_id: bytes([token_id]))
  text = "".join(detokenizer.push(piece) for piece in split(data, cuts))
  whole = data.decode("utf-8", "replace")
  # A character that never became whole is not shown at all (two signs, where its two bytes could never become one).
  assert whole.startswith(text) and whole[len(text) :] in ("", "\ufffd", "\ufffd\ufffd")


@pytest.mark.catalogue("D7", "F7")
@settings(max_examples=200)
@given(text=TEXTS, cuts=CUTS)
def test_a_real_tokenizer_in_any_split(tokenizer, text, cuts):
  token_ids = tokenizer.encode(text, add_special_tokens=False)
  detokenizer = tokenizer.detokenizer()
  pieces = [detokenizer.push(piece) for piece in split(token_ids, cuts)]
  assert "".join(pieces) == text == tokenizer.decode(token_ids)


@settings(max_examples=200)
@given(st.data())
def test_any_tokens_give_what_the_tokenizer_itself_decodes(tokenizer, data):
  token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
  skip = data.draw(st.booleans())
  detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
  text = "".join(detokenizer.push((token_id,)) for token_id in token_ids)
  whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
  assert whole.startswith(text) and whole[len(text) :] in ("", "\ufffd", "\ufffd\ufffd")


def cut_offline(text: str, stops: list[str]) -> tuple[str, str | None]:
  """The definition: of all occurrences the one completed first, of those the longest; the text ends before it."""
  for end in range(1, len(text) + 1):
    complete = [stop for stop in stops if text[:end].endswith(stop)]
    if complete:
      longest = max(complete, key=len)
      return text[: end - len(longest)], longest
  return text, None


@pytest.mark.catalogue("F5")
@settings(max_examples=500)
@given(text=TEXTS, cuts=CUTS, stops=st.lists(st.lists(LETTERS, min_size=1, max_size=5).map("".join), max_size=5))
def test_stop_strings_across_any_borders(text, cuts, stops):
  matcher = StopStrings(stops)
  wanted, matched = cut_offline(text, stops)
  shown = ""
  for piece in split(text, cuts):
    shown += matcher.push(piece)
    assert wanted.startswith(shown), "text was shown that the stop string takes back"
  shown += matcher.flush()
  assert (shown, matcher.matched) == (wanted, matched)


def cut_after(text: str, num_free: int, stops: list[str]) -> tuple[str, str | None]:
  """The definition where the first `num_free` characters may not end a stop string."""
  for end in range(num_free + 1, len(text) + 1):
    complete = [stop for stop in stops if text[:end].endswith(stop)]
    if complete:
      longest = max(complete, key=len)
      return text[: end - len(longest)], longest
  return text, None


@pytest.mark.catalogue("F5")
@settings(max_examples=500)
@given(
  text=TEXTS,
  free=st.integers(0, 20),
  cuts=CUTS,
  stops=st.lists(st.lists(LETTERS, min_size=1, max_size=5).map("".join), max_size=5),
)
def test_stop_strings_after_what_may_not_end_one(text, free, cuts, stops):
  free = min(free, len(text))
  matcher = StopStrings(stops)
  wanted, matched = cut_after(text, free, stops)
  shown = ""
  for piece in split(text[:free], cuts):
    shown += matcher.push(piece, may_match=False)
  for piece in split(text[free:], cuts):
    shown += matcher.push(piece)
    assert wanted.startswith(shown), "text was shown that the stop string takes back"
  shown += matcher.flush()
  assert (shown, matcher.matched) == (wanted, matched)


@pytest.mark.catalogue("F5")
def test_no_more_is_held_back_than_could_begin_a_stop_string():
  matcher = StopStrings(["abab!"])
  assert matcher.push("xxab") == "xx"
  assert matcher.push("ab") == ""
  assert matcher.push("ab") == "ab"  # "abab" may still go on to "!"
  assert matcher.push("c") == "ababc"
  assert matcher.push("abab!rest") == ""
  assert matcher.matched == "abab!"
  assert matcher.push("more") == "" and matcher.flush() == ""
