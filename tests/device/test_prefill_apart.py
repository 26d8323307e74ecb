"""Prefill on one device and decode on another give the tokens of one device.

In a process of its own, since devices are counted at start.
"""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

APART = """
import json
import jax
from extensions.disaggregated.engine import DisaggregatedEngine
from extensions.disaggregated.transfer import connect_runners
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.request import Request
from tests.device.serving import Served, config_for, serve
from tests.device.tiny_model import make_runner


choices = [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 30}, {"presence_penalty": 1.0, "logit_bias": ((5, 2.0),)},
           {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}]
requests = [(list(range(2 + i, 8 + 3 * i)), SamplingParams(8, ignore_eos=True, seed=i, **choices[i % 4]))
            for i in range(8)]
runners = [make_runner(devices=[device], token_budgets=(16,)) for device in jax.devices()]
for runner in runners:
  runner.warm_up(lambda *_: None)
alone, _ = serve(runners[0], requests, prefill_chunk=16)
export = connect_runners(*runners)
for runner in runners:
  runner.seal()
served = {str(index): Served() for index in range(len(requests))}

def emit(events):
  for event in events:
    served[event.request_id].add(event)

sides = [(Scheduler(config_for(runner, num_blocks=blocks, prefill_chunk=16)), runner)
         for runner, blocks in zip(runners, (64, 16))]
engine = DisaggregatedEngine(*sides, export, lambda: 0.0, emit)
for index, (prompt, params) in enumerate(requests):
  engine.submit(Request(str(index), prompt, params))
while engine.num_live:
  engine.step()
assert engine.dead is None, engine.dead
apart = [one.tokens for one in served.values()]
compiles = [runner.compiles_after_ready for runner in runners]
preempted = sides[1][0].num_preemptions
print(json.dumps({"apart": apart, "alone": [one.tokens for one in alone], "compiles": compiles,
                  "preempted": preempted, "reported": len(served["3"].prompt_logprobs)}))
"""


def run(program: str) -> dict:
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


def test_prefill_apart_from_decode_gives_the_tokens_of_one():
  found = run(APART)
  assert found["apart"] == found["alone"]
  assert found["compiles"] == [0, 0] and found["preempted"] > 0 and found["reported"] == 11
