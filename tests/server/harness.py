"""A whole server in the test's process: real sockets, real gRPC, the real engine loop; only the device is a fake."""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import faulthandler
import pathlib
import subprocess
import sys
import threading
import time

from google.rpc import error_details_pb2
import grpc
from grpc_status import rpc_status
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
import uvloop

from engine.batch import Runner
from engine.config import EngineConfig
from engine.scheduler import Scheduler
from extensions.fake_device.build import read_fake_adapter
from server.generation.adapter_loader import AdapterLoader
from server.generation.engine_client import LocalEngine
from server.generation.generations import Generations
from server.generation.sampling_defaults import SamplingDefaults
from server.generation.serving_state import Backend
from server.lifecycle.host import Host, HostOptions
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from server.rpc.admin_service import AdminActions
from server.text.tokenizer import Tokenizer
from tests.fakes import FakeRunner
from tools.chaos.server.checked_engine import CheckedEngine
from tools.chaos.server.composition import ChaosComposition
from tools.chaos.server.faults import Injector
from tools.chaos.server.invariants import Invariants

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END = SPECIAL.index("<|end|>")
CHAT_TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}"
  "{% if message['content'] == 'refuse me' %}{{ raise_exception('no such content') }}{% endif %}"
  "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


METHODS = [  # of sluice.v1
  f"/{service.full_name}/{method.name}"
  for service in pb.DESCRIPTOR.services_by_name.values()
  for method in service.methods
]
REFLECTION = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")]


def write_tokenizer(folder: pathlib.Path) -> None:
  """A byte-level BPE of a few hundred entries with a chat template, made in milliseconds."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=384, special_tokens=SPECIAL, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
  )
  text = "the cat sat on the mat and the dog ran to the park, naïve café 😀 日本"
  tokenizer.train_from_iterator([text] * 20, trainer)
  tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}}')
  (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


class SlowRunner(FakeRunner):
  """The fake device at a pace: each step waits for `pace` to allow it, so that a test can act in the middle.

  Attributes:
    seconds: how long a step takes at least.
    go: cleared, no step ends.
    held: a step has begun that does not end for that.
    fail: set, the next step raises it.
  """

  def __init__(self, config: EngineConfig, poison: int | None = None):
    super().__init__(config, poison)
    self.seconds = 0.0
    self.go = threading.Event()
    self.go.set()
    self.held = False
    self.fail: Exception | None = None

  def run_until(self, launched) -> None:
    self.held = not self.go.is_set()
    self.go.wait(400)
    self.held = False
    if self.seconds:
      time.sleep(self.seconds)
    if self.fail is not None:
      raise self.fail
    super().run_until(launched)


@dataclasses.dataclass
class Served:
  """A running server and its insides."""

  address: str
  host: Host
  composition: ChaosComposition
  engine: CheckedEngine
  runner: SlowRunner
  port: LocalEngine
  generations: Generations
  channel: grpc.Channel
  loop: asyncio.AbstractEventLoop
  thread: threading.Thread
  exit_code: list[int]
  breaks: bool = False  # the test breaks an invariant

  @property
  def generation(self) -> pb_grpc.GenerationServiceStub:
    return pb_grpc.GenerationServiceStub(self.channel)

  @property
  def model(self) -> pb_grpc.ModelServiceStub:
    return pb_grpc.ModelServiceStub(self.channel)

  def stop(self) -> None:
    """SIGTERM's effect."""
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
      self.loop.call_soon_threadsafe(self.host.request_stop)

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; fails after a long while."""
    give_up_at = time.monotonic() + 180
    while not condition():
      if time.monotonic() > give_up_at:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        raise AssertionError("the condition never came to hold; where all threads stand is in standard error")
      time.sleep(0.005)

  def wait_for_steps(self, count: int) -> None:
    """Lets the engine finish this many more steps."""
    before = self.engine.recorder.num_steps
    self.wait_until(lambda: self.engine.recorder.num_steps >= before + count)

  @property
  def invariants(self) -> Invariants | None:
    return self.composition.invariants

  @property
  def blocks_in_use(self) -> int:
    return self.engine.stats().blocks_used


def tiny_config(**changes) -> EngineConfig:
  """What the tests' tokenizer and prompts fit into, with these changes; nothing ends a sequence early."""
  fields = {"vocab_size": 400, "max_model_len": 512, "num_blocks": 256, "block_size": 8}
  return EngineConfig(**fields | {"token_budgets": (8, 64), "prefill_chunk": 64} | changes)


_LIVE: list[Served] = []
CHILDREN: list[subprocess.Popen] = []  # server processes of tests, ended or not


def give_up() -> None:
  """For a test that hangs: says where every thread stands, and takes the servers down, so that it fails instead."""
  print("this test takes too long; all threads:", file=sys.__stderr__)
  faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
  for served in list(_LIVE):
    served.runner.go.set()
    served.channel.close()
    served.stop()
    served.stop()
  for child in CHILDREN:
    child.kill()  # one that has ended is left alone


@contextlib.contextmanager
def running(
  tokenizer: Tokenizer | None,
  *,
  host: HostOptions | None = None,
  config: EngineConfig | None = None,
  poison: int | None = None,
  serve: bool = True,
  admin: AdminActions | None = None,
  device: Runner | None = None,
  faults: Injector | None = None,
  defaults: SamplingDefaults | None = None,
  model: str = "tiny",
  lora_dir: pathlib.Path | str = "",
) -> Iterator[Served]:
  """Runs a server in a thread until the block ends, then drains it and checks that no page is left.

  With `device`, a real one that agrees with `config`, the fake one stands idle. With config.enable_lora, adapters load
  from below `lora_dir`.
  """
  config = config or tiny_config(token_budgets=(8, 64, 128), eos_token_ids=(END,))
  host = host or HostOptions()
  host_options = dataclasses.replace(host, port=host.port if host.port != 50051 else 0)
  started = threading.Event()
  box: list[Served] = []
  failure: list[BaseException] = []

  async def run() -> None:
    composition = ChaosComposition(injector=faults, checks=True)
    server = Host(host_options, admin, composition=composition)
    port = await server.start_listening()
    runner = SlowRunner(config, poison)
    engine = CheckedEngine(Scheduler(config), device or runner, time.monotonic, server.emit)
    loader = AdapterLoader(
      engine, read_fake_adapter if config.enable_lora else None, model=model, lora_dir=str(lora_dir)
    )
    port_of_engine = LocalEngine(engine, adapter_loader=loader)
    generations = Generations(port_of_engine, tokenizer)
    if serve:
      await server.serve(
        Backend(
          model=model,
          engine=port_of_engine,
          tokenizer=tokenizer,
          generations=generations,
          load_s=0.5,
          warmup_s=0.25,
          defaults=defaults or {},
        )
      )
    address = f"127.0.0.1:{port}"
    box.append(
      Served(
        address,
        server,
        composition,
        engine,
        runner,
        port_of_engine,
        generations,
        grpc.insecure_channel(address, (("grpc.enable_channelz", 0),)),
        asyncio.get_running_loop(),
        threading.current_thread(),
        [],
      )
    )
    started.set()
    box[0].exit_code.append(await server.wait_stopped())

  def main() -> None:
    try:
      asyncio.run(run(), loop_factory=uvloop.new_event_loop)  # as server.main does
    except BaseException as error:
      failure.append(error)
      started.set()

  # A daemon: one that hangs must not keep the tests from ending.
  thread = threading.Thread(target=main, name="server", daemon=True)
  thread.start()
  if not started.wait(180):
    give_up()
    raise AssertionError("the server did not start")
  if failure:
    thread.join(180)
    raise failure[0]
  served = box[0]
  _LIVE.append(served)
  try:
    yield served
  finally:
    served.runner.go.set()
    served.channel.close()
    served.stop()
    thread.join(180)
    if thread.is_alive():
      give_up()
      thread.join(180)
      raise AssertionError("the server did not stop")
    _LIVE.remove(served)
    if failure:
      raise failure[0]
  invariants = served.invariants
  breach = invariants.breach if invariants is not None else None
  assert (breach is not None) == served.breaks, breach
  if served.exit_code == [0]:
    assert served.blocks_in_use == 0, "pages leaked"
    assert served.engine.num_checks > 0 or not serve
    assert served.engine.num_live == 0, "requests leaked"
  assert len(served.generations) == 0


def generate(server: Served, **fields) -> list[pb.GenerateResponse]:
  """All messages of a streamed generation."""
  return list(server.generation.Generate(pb.GenerateRequest(**fields), timeout=30))


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
  """The concatenated text of one index."""
  return "".join(delta.text for message in messages for delta in message.deltas if delta.index == index)


def token_ids_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
  """The concatenated token ids of one index."""
  return [
    token for message in messages for delta in message.deltas if delta.index == index for token in delta.token_ids
  ]


def endings_of(messages: list[pb.GenerateResponse]) -> list[pb.Finished]:
  """All endings, in order of arrival."""
  return [finished for message in messages for finished in message.finished]


def pages_come_back_within_two_steps(server: Served) -> None:
  """Of a paced server that has noticed that nobody is there any more; its device goes on now."""
  server.wait_until(lambda: len(server.generations) == 0)
  before = server.engine.recorder.num_steps
  server.runner.go.set()
  server.wait_until(lambda: server.blocks_in_use == 0 and server.engine.num_live == 0)
  assert server.engine.recorder.num_steps - before <= 2


def reason_of(error: grpc.RpcError) -> str:
  """The ErrorInfo reason of a status."""
  return detail_of(error, error_details_pb2.ErrorInfo).reason


def detail_of(error: grpc.RpcError, kind):
  """The status detail of this kind; fails where there is none."""
  for detail in rpc_status.from_call(error).details:
    found = kind()
    if detail.Unpack(found):
      return found
  raise AssertionError(f"no {kind.DESCRIPTOR.full_name} in the status details")
