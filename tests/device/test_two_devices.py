"""One model over two devices gives the tokens of one; in a process of its own, since devices are counted at start."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import json
import jax
from engine.sampling_params import SamplingParams
from tests.device.serving import serve
from tests.device.tiny_model import make_runner

def tokens(devices):
  runner = make_runner(devices=devices, token_budgets=(16,))
  runner.warm_up(lambda *_: None)
  runner.seal()
  choices = [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 30}, {"presence_penalty": 1.0, "logit_bias": ((5, 2.0),)},
             {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}]
  requests = [(list(range(2 + index, 20 + 3 * index)), SamplingParams(8, ignore_eos=True, seed=index, **choice))
              for index, choice in enumerate(choices)]
  served, _ = serve(runner, requests, num_blocks=20, prefill_chunk=16)
  kv = runner.kv[0]
  return {"tokens": [one.tokens for one in served], "compiles": runner.compiles_after_ready,
          "kv_shares": [shard.data.nbytes / kv.nbytes for shard in kv.addressable_shards]}

print(json.dumps([tokens(jax.devices()[:1]), tokens(jax.devices())]))
"""


def test_two_devices_give_the_tokens_of_one():
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-4000:]
  one, two = json.loads(done.stdout.splitlines()[-1])
  assert one["tokens"] == two["tokens"]
  assert one["kv_shares"] == [1.0] and two["kv_shares"] == [0.5, 0.5]
  assert one["compiles"] == two["compiles"] == 0
