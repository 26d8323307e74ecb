"""Serves requests on several numbers of devices; the tests run it in a process of its own.

Devices are counted at JAX's start. The argument is the JSON of a Task. It prints the JSON of a result for each setting.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

from engine.build_facts import DeviceFact, ProgramsMadeFact
from engine.device.options import BuildOptions
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from extensions.disaggregated.build import build_any
from extensions.executable_bundle.bundle import Bundle
from tests.device.drafts import DraftCounts, limits_of, serve_with_drafts

ROOT = pathlib.Path(__file__).parents[2]
CHOICES: list[dict[str, Any]] = [
  {"temperature": 0.0},
  {"top_p": 0.9, "top_k": 30},
  {"presence_penalty": 1.0, "logit_bias": [[5, 2.0]], "min_p": 0.01},
  {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
  {"temperature": 0.0, "allowed_token_ids": list(range(4, 60)), "min_tokens": 4, "stop_token_ids": [7, 9]},
  {"temperature": 1.3, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "logprobs": 20},
  {"temperature": 1.0, "is_constrained": True},
]


@dataclasses.dataclass(frozen=True)
class Task:
  """Requests, and settings of the engines that serve them in turn.

  A request is a prompt and its parameters, with `is_constrained` and the name of an `adapter`, a folder of `adapters`.
  Settings may have a `bundle`, its folder and whether to write it, and `drafts`, whether a mixture of
  tests/device/drafts.py comes before the requests.
  """

  model: str
  settings: list[dict[str, Any]]
  requests: list[tuple[list[int], dict[str, Any]]]
  adapters: dict[str, str] = dataclasses.field(default_factory=dict)


class FewTokens:
  """An output constraint that allows a few tokens, which differ from position to position."""

  is_done = False

  def __init__(self, vocab_size: int):
    self._num_words, self._position = -(-vocab_size // 32), 0

  def allowed(self) -> bytes:
    words = [0] * self._num_words
    for index in range(3):
      words[(self._position + 2 * index) % (self._num_words - 1)] |= 5 << (self._position + 7 * index) % 29
    return b"".join(word.to_bytes(4, "little") for word in words)

  def accept(self, token: int) -> None:
    assert int.from_bytes(self.allowed()[token // 32 * 4 :][:4], "little") >> token % 32 & 1, "a forbidden token"
    self._position += 1


def make_requests(count: int, longest: int, max_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
  """Prompts of several lengths, in turn with each of CHOICES."""
  requests = []
  for index in range(count):
    prompt = [3 + (7 * index + 5 * position) % 80 for position in range(5 + index * longest // count)]
    requests.append((prompt, {"max_tokens": max_tokens, "ignore_eos": True} | CHOICES[index % len(CHOICES)]))
  return requests


def serve_on_devices(
  model: pathlib.Path,
  settings: list[dict[str, Any]],
  requests: list[tuple[list[int], dict[str, Any]]],
  adapters: dict[str, str] | None = None,
  devices: int = 8,
) -> list[dict[str, Any]]:
  """Returns a result for each of the settings, from a process with as many devices."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
  }
  task = json.dumps(dataclasses.asdict(Task(str(model), settings, requests, adapters or {})))
  done = subprocess.run(
    [sys.executable, "-m", "tests.device.several_devices", task],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


def _serve(task: Task, settings: dict[str, Any]) -> dict[str, Any]:
  events: list[TokenEvent] = []
  facts: list[Any] = []
  settings = dict(settings)
  folder, writes = settings.pop("bundle", ("", False))
  drafts = settings.pop("drafts", False)
  settings = {"speculation": "none"} | settings  # the choice of drafts depends on time
  options = BuildOptions(task.model, **{name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()})
  bundle = Bundle(folder, options.batching, writes) if folder else None
  built = build_any(options, lambda *_: None, events.extend, source=bundle, report_fact=facts.append)
  for name, folder in task.adapters.items():
    assert built.read_adapter is not None
    loaded = built.engine.load_adapter(name, built.read_adapter(folder))
    built.engine.step()
    loaded.result(timeout=0)
  counts = serve_with_drafts(built.runner, limits_of(built.runner), 0, atol=0.0) if drafts else DraftCounts()
  for index, (prompt, params) in enumerate(task.requests):
    fields = {name: tuple(map(tuple, x)) if name == "logit_bias" else x for name, x in params.items()}
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    is_constrained = fields.pop("is_constrained", False)
    constraint = FewTokens(built.config.vocab_size) if is_constrained else None
    adapter = fields.pop("adapter", "")
    built.engine.submit(
      Request(str(index), prompt, SamplingParams(**fields), seed=index, constraint=constraint, adapter=adapter)
    )
  while built.engine.num_live:
    built.engine.step()
    assert built.engine.dead is None, built.engine.dead
  tokens: list[list[int]] = [[] for _ in task.requests]
  embeddings: dict[str, list[float]] = {}
  logprobs: list[list[Any]] = [[] for _ in task.requests]
  for event in events:
    tokens[int(event.request_id)] += event.token_ids
    if event.embedding:
      embeddings[event.request_id] = np.frombuffer(event.embedding, "<f4").tolist()
    for entry in (*event.prompt_logprobs, *event.logprobs):
      logprobs[int(event.request_id)].append([entry.token_id, entry.logprob, *map(list, entry.top)])
  device = next(fact for fact in facts if isinstance(fact, DeviceFact))
  made = next(fact for fact in facts if isinstance(fact, ProgramsMadeFact))
  spec = built.runner.spec
  state = built.runner.slot_state.history
  return dataclasses.asdict(counts) | {
    "tokens": tokens,
    "logprobs": logprobs,
    "embeddings": embeddings,
    "compiles_before": made.num_compiled,
    "compiles": built.runner.compiles_after_ready,
    "preemptions": built.engine.stats().num_preemptions,
    "kernels": [device.attention, device.matmul, spec.sampling],
    "kv_shares": [shard.data.nbytes / built.runner.kv[0].nbytes for shard in built.runner.kv[0].addressable_shards],
    "state_share": state.addressable_shards[0].data.nbytes / state.nbytes,
    "programs": [[shape.logits, compiled.as_text()] for shape, compiled in built.runner.steps.items()],
  }


if __name__ == "__main__":
  given = Task(**json.loads(sys.argv[1]))
  print(json.dumps([_serve(given, each) for each in given.settings]), flush=True)
