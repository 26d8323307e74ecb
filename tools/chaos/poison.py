"""Scenario: requests that fail by themselves, among others. No other request may be affected."""

import dataclasses
import json
import random

from tools.chaos import plans
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig
from tools.chaos.streams import Answer, StreamRequest, random_prompt

_GROUPS = 40
_SHARED = 48  # shared tokens at the start of a group's prompts: three pages
# The failure, and the request's field that leads to it.
_KINDS = {"nan": {}, "admit": {}, "detokenize": {"text": True}, "constraint": {"regex": "[a-z ]{30,60}"}}


def poisoned(rig: Rig, count: int = 1000, neighbours: int = 9000, asked: int = 1000) -> list[Row]:
  """Gives half of the requests NaN in their own page and the others an exception; then sends their prompts unharmed."""
  rng = random.Random(10)
  shared = [random_prompt(rng, _SHARED) for _ in range(_GROUPS)]

  def ask(name: str, **options) -> StreamRequest:
    prompt = rng.choice(shared) + random_prompt(rng, rng.randint(1, 30))
    return StreamRequest(prompt, rng.randint(4, 24), name, unary=rng.random() < 0.9, **options)

  kinds = list(_KINDS)
  order = [kinds[0] if index % 2 else kinds[1 + index // 2 % 3] for index in range(count)]
  bad = [ask(f"{kind}-{index}", **_KINDS[kind]) for index, kind in enumerate(order)]
  asks = [*bad, *(ask(f"neighbour-{index}", text=index % 4 == 0) for index in range(neighbours))]
  rng.shuffle(asks)
  once_more = [dataclasses.replace(each, request_id=f"again-{each.request_id}", text=False, regex="") for each in bad]
  plan = rig.folder / "poison.json"
  plan.write_text(json.dumps(plans.poison(kinds)))
  with rig.server(f"--fault_plan={plan}") as server:
    answers = rig.ask(server.target, asks, at_once=64)
    again = rig.ask(server.target, once_more, at_once=64)
    serving = server.is_serving()
    held = server.settle() + server.imbalance() if serving else ["the server is not SERVING"]
  failed = [answer for answer in answers if _is_bad(answer) and answer.code == "INTERNAL" and answer.sound]
  others = [
    f"{answer.ask.request_id} ended {answer.code}" for answer in answers if _is_bad(answer) and answer not in failed
  ]
  harmed = [answer.fault() for answer in answers if not _is_bad(answer) and not answer.exact]
  return [
    Row(
      "requests with NaN or an exception in their row",
      "only they: INTERNAL, nothing held, SERVING",
      f"{len(failed):,} of {len(bad):,} INTERNAL" + (f"; {(others + held)[0]}" if others + held else ", 0 held"),
      len(failed) == len(bad) and not held,
      asked,
      len(bad),
    ),
    none_of("other requests in the same steps and with the same prefixes", "0 changed", harmed, neighbours, 0),
    none_of(
      "the poisoned prompts once more: no NaN page in the prefix cache",
      "all exact",
      [answer.fault() for answer in again if not answer.exact],
      len(again),
      0,
    ),
  ]


def _is_bad(answer: Answer) -> bool:
  return answer.ask.request_id.startswith(tuple(f"{kind}-" for kind in _KINDS))
