"""A server on the fake device, as a process: clients get what extensions/fake_device/device.py says they must."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import pathlib
import signal

import pytest

from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from extensions.fake_device.device import expected_tokens
from server.client import Client
from tests.server.test_main import DEMO, start, wait_for_file

SMALL_POOL = ("--num_blocks=40", "--block_size=8", "--max_model_len=320", "--max_num_seqs=16", "--token_budgets=8,64")


@contextlib.contextmanager
def fake_server(folder: pathlib.Path, *arguments: str):
  """The address of a server with all of the demo model but its weights."""
  port_file = folder / "port"
  process = start(
    "--fake_device",
    "--debug_invariants",
    f"--model={DEMO}",
    "--port=0",
    f"--port_file={port_file}",
    "--prefill_chunk=64",
    *arguments,
    module="tools.chaos.server",
  )
  try:
    yield f"127.0.0.1:{wait_for_file(port_file, process).strip()}"
  finally:
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=180)[1]
  assert process.returncode == 0 and "0 KV blocks in use" in said, said
  assert "jax" not in said.lower()


def check(client: Client, vocab_size: int, eos: tuple[int, ...], serial: int) -> None:
  """One request whose every token is known."""
  prompt = [3 + i % 7 for i in range(40)] + [100 + serial]
  options = {"max_tokens": 60, "temperature": 0.7 if serial % 2 else 0.0, "seed": serial, "top_p": 0.9}
  answer = client.generate(prompt, **options, ignore_eos=serial % 3 > 0)
  params = SamplingParams(**options, ignore_eos=serial % 3 > 0)
  tokens, reason = expected_tokens(prompt, params, vocab_size=vocab_size, eos_token_ids=eos)
  assert tuple(answer.token_ids) == tokens
  assert answer.ending.reason == ("stop" if reason is FinishReason.STOP else "length")


@pytest.mark.catalogue("C4", "D10")
@pytest.mark.parametrize("batching", ["chunked", "disaggregated"])
def test_every_token_is_the_expected_one(tmp_path, batching):
  """Greedy and seeded, stopped and not, on a pool so small that requests are preempted, with a shared prefix."""
  flags = *SMALL_POOL, f"--batching={batching}", "--fake_step_ms=0.2"
  with fake_server(tmp_path, *flags) as address, Client(address) as client, ThreadPoolExecutor(16) as pool:
    info = client.model_info()
    for done in [pool.submit(check, client, info.vocab_size, tuple(info.eos_token_ids), i) for i in range(48)]:
      done.result(180)
    load = client.load()
  assert load.preemptions_total > 0 and load.prefix_hit_tokens_total > 0
  assert load.kv_blocks_in_use == 0
