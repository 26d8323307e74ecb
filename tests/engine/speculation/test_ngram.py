"""The n-gram index against a plain search, and the drafter on requests that grow."""

import random

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.speculation.ngram import LEAST_MATCH, LONGEST_MATCH, MOST_NEW_TOKENS, NgramDrafter, NgramIndex

EVERY_LINK = 1 << 30


def search(tokens: list[int]) -> tuple[int, int]:
  """What find_match returns, by comparing everything: the longest match, of equals the latest."""
  best, position = 0, -1
  for end in range(len(tokens) - 2, -1, -1):
    length = 0
    while length < min(LONGEST_MATCH, end + 1) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
      length += 1
    if length > best and length >= LEAST_MATCH:
      best, position = length, end + 1
  return best, position


def text(rng: random.Random, length: int) -> list[int]:
  """Random tokens of a small or large vocabulary with copies of earlier parts."""
  vocab_size = rng.choice((2, 3, 30, 100_000))
  tokens = [rng.randrange(vocab_size)]
  while len(tokens) < length:
    if rng.random() < 0.3:
      first = rng.randrange(len(tokens))
      tokens += tokens[first : first + rng.randint(1, 12)]
    tokens.append(rng.randrange(vocab_size))
  return tokens[:length]


@pytest.mark.parametrize("seed", range(40))
def test_the_index_finds_what_a_search_finds(seed: int):
  rng = random.Random(seed)
  tokens = text(rng, rng.randint(1, 200))
  index = NgramIndex(rng.choice((1, 300)), EVERY_LINK)
  known: list[int] = []
  while len(known) < len(tokens):
    more = tokens[len(known) : len(known) + rng.randint(1, 9)]
    known += more
    index.extend(more)
    length, position = search(known)
    assert index.find_match() == (length, position)
    assert index.may_match or not length
    count = rng.randint(1, 20)
    if length:
      wanted = list(known)
      for step in range(count):  # a copy reads what it has just written
        wanted.append(wanted[position + step])
      assert index.read_continuation(position, count) == tuple(wanted[len(known) :])


def test_few_links_find_the_latest_matches():
  rng = random.Random(1)
  tokens = text(rng, 2000)
  some, every = NgramIndex(2000), NgramIndex(2000, EVERY_LINK)
  found = 0
  for token in tokens:
    some.extend((token,))
    every.extend((token,))
    (length, position), (longest, _) = some.find_match(), every.find_match()
    assert length <= longest
    if length:
      found += 1
      assert [*some.read_continuation(position - length, length)] == list(tokens[len(some) - length : len(some)])
  assert found > 100


def test_a_search_looks_at_a_bounded_number_of_positions():
  index = NgramIndex(100, most_links=3)
  index.extend([1, 2, 3, 9] + [1, 2, 4] * 3)
  index.extend([8, 2, 3])  # (2, 3) has occurred once
  assert index.find_match() == (2, 3)
  index = NgramIndex(100, most_links=3)
  index.extend([7, 1, 2, 3] + [5, 1, 2, 4] * 3 + [7, 1, 2])
  assert index.find_match() == (2, 15), "the match of three tokens is four links back"


def make_request(prompt: list[int], max_tokens: int = 50, name: str = "r") -> Request:
  return Request(name, prompt, SamplingParams(max_tokens=max_tokens))


def test_the_drafter_copies_the_prompt_and_follows_the_output():
  drafter, request = NgramDrafter(), make_request([5, 6, 7, 8, 9, 10, 11, 12, 13])
  assert not drafter.update(request) and not drafter.propose(request, 4).tokens
  request.output_token_ids.append(6)
  assert not drafter.update(request), "13, 6 is new"
  request.output_token_ids += [7]
  assert drafter.update(request)
  assert drafter.propose(request, 4) == ((8, 9, 10, 11), "prompt2")
  request.output_token_ids += [8, 9]
  drafter.update(request)
  assert drafter.propose(request, 2) == ((10, 11), "prompt4")
  request.output_token_ids += [20]
  assert not drafter.update(request)
  request.output_token_ids += [21, 13, 20, 21]
  assert drafter.update(request)
  assert drafter.propose(request, 2) == ((13, 20), "ngram2"), "the output had it before"
  drafter.forget("r")
  drafter.forget("r")
  assert drafter.num_indexed("r") == 0 and not drafter.propose(request, 4).tokens


def test_a_longer_match_wins_and_sources_name_lengths():
  drafter = NgramDrafter()
  prompt = [1, 2, 3, 4, 40] + [9, 3, 4, 41] + [0, 1, 2, 3, 4]
  request = make_request(prompt)
  assert drafter.update(request)
  assert drafter.propose(request, 1) == ((40,), "prompt4")
  run = list(range(10, 30))
  request = make_request(run + run[:12], name="long")
  drafter.update(request)
  assert drafter.propose(request, 3) == ((22, 23, 24), "prompt8")


def test_a_long_prompt_is_indexed_in_pieces_and_proposes_when_complete():
  drafter, request = NgramDrafter(), make_request([*range(3000), 0, 1])
  updates = 1
  while not drafter.update(request):
    assert drafter.num_indexed("r") == updates * MOST_NEW_TOKENS
    updates += 1
  assert updates == 3 and drafter.propose(request, 2).tokens == (2, 3)
  request.output_token_ids += range(100, 100 + 2 * MOST_NEW_TOKENS)
  assert not drafter.update(request), "an index that is behind proposes nothing"
  assert drafter.update(request)


def test_a_restored_index_is_that_of_the_same_tokens():
  rng = random.Random(3)
  request = make_request(text(rng, 50), 100)
  drafter, twin = NgramDrafter(), NgramDrafter()
  drafter.update(request)
  request.output_token_ids += text(rng, 20)
  twin.restore_index(request, drafter.num_indexed("r"))
  for _ in range(50):
    assert drafter.update(request) == twin.update(request)
    assert drafter.propose(request, 5) == twin.propose(request, 5)
    request.output_token_ids.append(rng.choice(request.prompt_token_ids))
