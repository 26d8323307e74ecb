"""Runs requests through the real Scheduler and Engine on a ModelRunner; shared by the tests of this folder."""

from collections.abc import Callable, Iterable
import dataclasses

from engine.batch import TokenLogprobs
from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from engine.engine import Engine
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.device.tiny_model import EOS, TINY


@dataclasses.dataclass
class Served:
  """All events of one request, put together."""

  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  finish_reason: FinishReason | None = None

  def add(self, event: TokenEvent) -> None:
    assert self.finish_reason is None, "an event after the last one"
    self.tokens += event.token_ids
    self.logprobs += event.logprobs
    self.prompt_logprobs += event.prompt_logprobs
    self.finish_reason = event.finish_reason


def config_for(runner: ModelRunner, **changes) -> EngineConfig:
  """Settings that agree with make_runner's defaults; the scheduler may use less of the pool than there is."""
  settings = {
    "vocab_size": TINY.vocab_size,
    "max_model_len": 64,
    "num_blocks": 64,
    "block_size": 4,
    "token_budgets": tuple(shape.tokens for shape in runner.steps),
    "max_num_seqs": 8,
    "prefill_chunk": 32,
    "eos_token_ids": EOS,
  }
  return EngineConfig(**(settings | changes))


def make_engine(
  runner: ModelRunner, emit: Callable[[list[TokenEvent]], None], tick_s: float = 1e-6, **changes
) -> Engine:
  """A fresh engine on a runner that may have served others before; so much time passes between looks at its clock."""
  clock = iter(range(10**9))
  return Engine(Scheduler(config_for(runner, **changes)), runner, lambda: next(clock) * tick_s, emit)


def serve(
  runner: ModelRunner, requests: Iterable[tuple[list[int], SamplingParams]], **changes
) -> tuple[list[Served], Engine]:
  """Submits all requests at once and steps until every one has ended."""
  served: dict[str, Served] = {}

  def emit(events: list[TokenEvent]) -> None:
    for event in events:
      served[event.request_id].add(event)

  loop = make_engine(runner, emit, **changes)
  for index, (prompt, params) in enumerate(requests):
    served[str(index)] = Served()
    loop.submit(Request(str(index), prompt, params, seed=params.seed or 0))
  while loop.num_live:
    loop.step()
    assert loop.dead is None, loop.dead
  return list(served.values()), loop
