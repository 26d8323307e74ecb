"""What a follower reads is the Batch that the leader's scheduler planned, for real schedules of all kinds."""

import dataclasses
import itertools

import pytest

from engine.batch import IN_FLIGHT, Admission, Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.shapes import StepShape
from extensions.fake_device.device import FakeDevice
from extensions.multi_host.frame_channel import HostLost, Kind
from extensions.multi_host.step_codec import StepDecoder, StepEncoder

CONFIG = EngineConfig(
  vocab_size=500,
  max_model_len=256,
  num_blocks=40,
  block_size=4,
  token_budgets=(8, 32),
  max_num_seqs=8,
  prefill_chunk=24,
  overlap=True,
)
PARAMS = (
  SamplingParams(30, temperature=0.0),
  SamplingParams(60, top_p=0.9, top_k=30, seed=5, ignore_eos=True),
  SamplingParams(40, presence_penalty=1.0, logit_bias=((5, 2.0), (7, -100.0)), stop_token_ids=(8, 9)),
  SamplingParams(20, logprobs=3, prompt_logprobs=2, allowed_token_ids=(3, 4, 5), min_tokens=2),
)


class Recording:
  """A fake device that keeps every batch."""

  def __init__(self) -> None:
    self.batches: list[Batch] = []
    self._device = FakeDevice(CONFIG, 0.0)

  def launch(self, batch: Batch):
    self.batches.append(batch)
    return self._device.launch(batch)


def as_sent(batch: Batch) -> Batch:
  """Without request ids, which stay on the leader; token lists are tuples."""
  admissions = tuple(dataclasses.replace(each, token_ids=tuple(each.token_ids)) for each in batch.admissions)
  return dataclasses.replace(batch, request_ids=("",) * len(batch.slots), admissions=admissions)


def test_a_follower_reads_what_the_scheduler_planned():
  runner = Recording()
  engine = Engine(Scheduler(CONFIG), runner, itertools.count().__next__, lambda events: None)
  for index in range(16):
    engine.submit(Request(str(index), [3 + index] * (5 + 6 * index), PARAMS[index % 4], seed=index))
    for _ in range(index % 5):
      engine.step()
  while engine.num_live:
    engine.step()
  assert engine.dead is None and engine.stats().num_preemptions > 0
  encoder, decoder = StepEncoder(), StepDecoder()
  frames = [encoder.encode_step(batch) for batch in runner.batches]
  for number, (frame, batch) in enumerate(zip(frames, runner.batches, strict=True)):
    assert decoder.decode_step(*frame) == as_sent(batch)
    if number % 3:  # as a follower does, if it has the time
      decoder.prepare_repetition()
      decoder.rehearse_step()
  repeats = [len(body) for kind, body in frames if kind is Kind.REPEAT]
  assert len(repeats) > 30 and max(repeats) < 60


def test_masks_and_every_parameter_pass():
  params = SamplingParams(
    7, 0.5, 3, 0.4, 0.1, 0.2, -0.3, 1.4, ((3, 1.5),), (1, 2), 2, (4,), True, -(2**63), 5, 0, False
  )
  admission = Admission(2, (1, 2, 3), 2, (7, 9), params, 2**32 - 1, True, None, 3)
  batch = Batch(
    -1,
    StepShape(8, 4, 4),
    ("", ""),
    (2, 1),
    (0, 9),
    (3, 2),
    (1, 2),
    (True, True),
    ((1, 2, 3), (IN_FLIGHT, 5)),
    (admission,),
    ((1, 2, 30),),
    ((0, b"\xff\x00\x01\x02"), (1, b"\x01\x00\x00\x00"), (1, b"\x02\x00\x00\x00")),
    6,
    (0, 1),
  )
  decoder = StepDecoder()
  assert decoder.decode_step(*StepEncoder().encode_step(batch)) == batch


@pytest.mark.parametrize(
  ("kind", "body"),
  [(Kind.STEP, b""), (Kind.STEP, b"\x90"), (Kind.STEP, b"\xff" * 40), (Kind.REPEAT, b"\x93\x01\x90\x90")],
)
def test_junk_is_no_step(kind: Kind, body: bytes):
  decoder = StepDecoder()
  decoder.decode_step(*StepEncoder().encode_step(Batch(0, StepShape(8, 4, 4), (), (), (), (), (), (), ())))
  with pytest.raises(HostLost, match="holds no step"):
    decoder.decode_step(kind, body)


def test_a_repetition_needs_a_step():
  with pytest.raises(HostLost, match="repeats a step before it has sent one"):
    StepDecoder().decode_step(Kind.REPEAT, b"\x92\x01\x90")
