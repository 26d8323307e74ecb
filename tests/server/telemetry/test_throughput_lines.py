"""Lines of throughput, of a real engine on the fake device whose steps are taken one by one."""

import pathlib

from engine.request import Request
from engine.sampling_params import SamplingParams
from extensions.fake_device.build import build_fake
from server.telemetry.throughput_lines import ThroughputLines

DEMO = str(pathlib.Path(__file__).resolve().parents[3] / "models" / "demo")


class Clock:
  now = 100.0

  def __call__(self) -> float:
    return self.now


def make_lines():
  clock, said = Clock(), []
  settings = {"token_budgets": (8, 32), "max_num_seqs": 2, "prefill_chunk": 8, "max_model_len": 64, "num_blocks": 16}
  engine = build_fake(DEMO, settings, 0.0, lambda events: None, clock).engine
  return engine, clock, said, ThroughputLines(engine.stats, clock, lambda line, **fields: said.append((line, fields)))


def submit(engine, name: str, num_tokens: int) -> None:
  params = SamplingParams(max_tokens=4, ignore_eos=True)
  engine.submit(Request(name, tuple(range(3, 3 + num_tokens)), params))


def test_a_line_says_what_changed_and_an_idle_engine_says_nothing():
  engine, clock, said, lines = make_lines()
  lines.say_line()
  assert said == []
  for name in "abc":
    submit(engine, name, 6)
  lines.say_line()  # nothing has run, but three wait
  assert (said[0][1]["running"], said[0][1]["waiting"], said[0][1]["prompt_tokens_per_s"]) == (0, 3, 0.0)
  while engine.num_live:
    engine.step()
  clock.now += 10
  lines.say_line()
  line, fields = said[1]
  assert (fields["running"], fields["waiting"], fields["kv_used_percent"]) == (0, 0, 0.0)
  assert fields["output_tokens_per_s"] == 12 / 10 and fields["prompt_tokens_per_s"] == 18 / 10
  stats = engine.stats()
  useful = stats.num_prefill_tokens + stats.num_decode_tokens
  assert fields["padding_percent"] == round(100 * stats.num_padding_tokens / (stats.num_padding_tokens + useful), 1) > 0
  assert line.startswith("running 0, waiting 0, prompt 2 tokens/s, output 1 tokens/s, KV used 0 %, prefix hits 0 %")
  clock.now += 10
  lines.say_line()
  assert len(said) == 2, "the engine is idle, and the last line said so"


def test_prefix_hits_and_preemptions_are_of_the_time_since_the_last_line():
  engine, clock, said, lines = make_lines()
  for name in ("first", "second"):
    submit(engine, name, 40)
    while engine.num_live:
      engine.step()
    clock.now += 10
    lines.say_line()
  assert [fields["prefix_hit_percent"] for _, fields in said] == [0.0, 80.0]
  assert [fields["preemptions"] for _, fields in said] == [0, 0]
