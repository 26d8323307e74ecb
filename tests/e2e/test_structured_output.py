"""The demo model under constraints, behind a real server: every output conforms, and nothing compiles for it."""

from collections.abc import Iterator
import json
from pathlib import Path
import re

import pytest

from engine.device.build import Built, build_engine
from engine.device.options import BuildOptions
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tests.server.harness import Served, endings_of, generate, running, text_of, token_ids_of
from tests.server.text.test_constraint_compiler import COMPACT, PERSON, SCHEMAS, is_person

pytestmark = pytest.mark.usefixtures("quick_steps")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="json name color")])


@pytest.fixture(scope="module")
def built() -> Built:
  options = BuildOptions(
    model_dir=str(DEMO), token_budgets=(16, 64), max_num_seqs=16, prefill_chunk=64, num_blocks=256, max_model_len=512
  )
  return build_engine(options, lambda *_: None, lambda _: None)


@pytest.fixture(scope="module")
def server(built: Built) -> Iterator[Served]:
  built.runner.seal()
  with running(Tokenizer(DEMO), config=built.config, device=built.runner) as served:
    yield served
  assert built.runner.compiles_after_ready == 0


def ask(
  server: Served, n: int = 1, seed: int = 0, max_tokens: int = 300, **kind
) -> tuple[list[str], list[pb.Finished]]:
  messages = generate(
    server,
    chat=CHAT,
    sampling=pb.SamplingParams(temperature=1.0, n=n, seed=seed),
    stopping=pb.StopParams(max_tokens=max_tokens),
    constraint=pb.OutputConstraint(**kind),
  )
  return [text_of(messages, index) for index in range(n)], endings_of(messages)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_draw_is_one_of_the_schema(server: Served, name: str):
  schema, is_valid = SCHEMAS[name]
  for seed in (0, 100):
    texts, endings = ask(server, 16, seed, json_schema=json.dumps(schema | COMPACT))
    whole = [texts[ending.index] for ending in endings if ending.reason == pb.FINISH_REASON_STOP]
    # A tree may be deeper than max_tokens; everything else has an end.
    assert len(whole) == 16 or name == "tree"
    assert all(is_valid(json.loads(text)) for text in whole), whole


def test_every_draw_matches(server: Served):
  texts, _ = ask(server, 16, regex="(red|blue|green) [0-9]{1,4}")
  assert all(re.fullmatch("(red|blue|green) [0-9]{1,4}", text) for text in texts), texts
  texts, _ = ask(server, 16, choice=pb.Choices(values=["yes", "no", "perhaps"]))
  assert set(texts) <= {"yes", "no", "perhaps"}
  texts, _ = ask(server, 16, grammar='start: "<" word ("," word){0,2} ">"\nword: /[a-z]{1,6}/')
  assert all(re.fullmatch("<[a-z]{1,6}(,[a-z]{1,6}){0,2}>", text) for text in texts), texts


def test_neighbours_keep_their_tokens(server: Served):
  def plain() -> pb.GenerateRequest:
    return pb.GenerateRequest(
      chat=CHAT,
      sampling=pb.SamplingParams(temperature=1.0, seed=5),
      stopping=pb.StopParams(max_tokens=80, ignore_eos=True),
    )

  alone = token_ids_of(list(server.generation.Generate(plain(), timeout=60)))
  stream = server.generation.Generate(plain(), timeout=60)
  texts, _ = ask(server, 12, json_schema=json.dumps(PERSON | COMPACT))
  assert all(is_person(json.loads(text)) for text in texts)
  assert token_ids_of(list(stream)) == alone
