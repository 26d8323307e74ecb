"""Scenarios: mutated protobufs, through parsing and validation in this process, and over the wire."""

import asyncio
from collections import Counter
from collections.abc import Callable
import dataclasses
import random
import time
import traceback
from typing import Any

from google.protobuf import message as protobuf_message
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.request import Request
from engine.validation import validate_request
from server.generation import request_validation
from server.proto import sluice_pb2 as pb
from server.text.tokenizer import Tokenizer
from tools.chaos.report import Row
from tools.chaos.rig import Rig
from tools.chaos.streams import demo_model, on_loop, random_prompt
from tools.measure import ROOT

_HANG_S = 1.0
_MODEL_LEN = 128
_INT_EDGES = (0, 1, -1, 2, 16, 17, 127, 128, 255, 256, 2048, 65536, 2**31 - 1, -(2**31))
_FLOAT_EDGES = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"), 0.5, 100.0)
_TEXTS = ("", "a", "é", "日本", "\0", "<|end|>", "a" * 300, "{{", "../x", "\U0001f600" * 40, "x" * 3000, "g-1", " ")
_METHODS = {
  "/sluice.v1.GenerationService/GenerateUnary": pb.GenerateRequest,
  "/sluice.v1.GenerationService/Generate": pb.GenerateRequest,
  "/sluice.v1.GenerationService/Abort": pb.AbortRequest,
  "/sluice.v1.GenerationService/Tokenize": pb.TokenizeRequest,
  "/sluice.v1.GenerationService/Detokenize": pb.DetokenizeRequest,
  "/sluice.v1.ModelService/GetModelInfo": pb.GetModelInfoRequest,
  "/sluice.v1.ModelService/GetLoad": pb.GetLoadRequest,
}
# Statuses allowed for a mutated message. RESOURCE_EXHAUSTED: it is too large, or too many requests wait.
_ALLOWED = frozenset(
  {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
  | {"FAILED_PRECONDITION", "CANCELLED"}
)


def seeds(rng: random.Random) -> list[protobuf_message.Message]:
  """Returns valid messages that together use every field of every request."""
  ids = pb.TokenIds(ids=random_prompt(rng, 12))
  chat = pb.ChatPrompt(
    messages=[pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="37 + 5 = ?")],
    add_generation_prompt=True,
  )
  sampling = pb.SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.1,
    seed=1234567890123,
    n=2,
    logit_bias={5: 1.5, 77: -100.0},
    allowed_token_ids=ids,
  )
  stopping = pb.StopParams(max_tokens=9, min_tokens=2, stop=["\n\n", "END"], stop_token_ids=[3, 9], ignore_eos=True)
  output = pb.OutputParams(
    logprobs=3, prompt_logprobs=2, return_text=True, return_token_ids=True, skip_special_tokens=False
  )
  plain = pb.GenerateRequest(text="Once upon a time", stopping=pb.StopParams(max_tokens=6))
  whole = pb.GenerateRequest(
    model="sluice-demo",
    request_id="fuzz.request-1",
    token_ids=ids,
    sampling=sampling,
    stopping=stopping,
    output=output,
    priority=2,
    cache_salt="salt",
    tenant="tenant",
  )
  whole.queue_timeout.FromMilliseconds(1500)
  messages: list[protobuf_message.Message] = [plain, whole, pb.GenerateRequest(chat=chat, stopping=stopping)]
  for constraint in (
    pb.OutputConstraint(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    pb.OutputConstraint(json_object=True),
    pb.OutputConstraint(regex="[a-c]{1,3}"),
    pb.OutputConstraint(choice=pb.Choices(values=["yes", "no"])),
    pb.OutputConstraint(grammar='start: "a" | "b" start'),
  ):
    messages.append(pb.GenerateRequest(text="Answer:", constraint=constraint, stopping=pb.StopParams(max_tokens=6)))
  return [
    *messages,
    pb.AbortRequest(request_ids=["a", "b.c"]),
    pb.TokenizeRequest(model="sluice-demo", text="the cat", add_special_tokens=True),
    pb.TokenizeRequest(chat=chat),
    pb.DetokenizeRequest(token_ids=ids.ids, skip_special_tokens=True),
    pb.GetModelInfoRequest(),
    pb.GetLoadRequest(steps_after_s=1.0),
  ]


class Mutator:
  """Mutates valid messages: half by their fields' values, half by their bytes on the wire."""

  def __init__(self, seed: int):
    self.rng = random.Random(seed)
    self._seeds = seeds(self.rng)
    self._raw = [message.SerializeToString() for message in self._seeds]

  def make(self) -> tuple[type[protobuf_message.Message], bytes]:
    """Returns a message's type, and bytes that may or may not parse as one."""
    rng = self.rng
    index = rng.randrange(len(self._seeds))
    kind = type(self._seeds[index])
    if rng.random() < 0.5:
      message = kind()
      message.CopyFrom(self._seeds[index])
      for _ in range(rng.randint(1, 3)):
        self._change_field(message)
      raw = message.SerializeToString()
      return kind, raw if rng.random() < 0.9 else self._change_bytes(raw)
    return kind, self._change_bytes(self._raw[index])

  def _change_field(self, message: protobuf_message.Message) -> None:
    """Sets, clears or repeats one field anywhere in the tree."""
    rng = self.rng
    field = rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    if field is None:
      return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
      getattr(message, field.name)[rng.choice(_INT_EDGES)] = rng.choice(_FLOAT_EDGES)
    elif field.is_repeated:
      items = getattr(message, field.name)
      if field.message_type is not None:
        self._change_field(items.add())
      else:
        items.extend(self._value(field) for _ in range(rng.choice((1, 2, 20, 300))))
    elif field.message_type is not None:
      if rng.random() < 0.1:
        message.ClearField(field.name)
      else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        self._change_field(inner)
    elif rng.random() < 0.15:
      message.ClearField(field.name)
    else:
      setattr(message, field.name, self._value(field))

  def _value(self, field) -> object:
    rng = self.rng
    kinds = type(field)
    match field.cpp_type:
      case kinds.CPPTYPE_INT32 | kinds.CPPTYPE_ENUM:
        return rng.choice(_INT_EDGES) if rng.random() < 0.7 else rng.randrange(-50, 3000)
      case kinds.CPPTYPE_INT64:
        return rng.choice((*_INT_EDGES, 2**63 - 1, -(2**63)))
      case kinds.CPPTYPE_BOOL:
        return rng.random() < 0.5
      case kinds.CPPTYPE_STRING:
        return rng.choice(_TEXTS)
      case _:
        return rng.choice(_FLOAT_EDGES)

  def _change_bytes(self, raw: bytes) -> bytes:
    rng = self.rng
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
      at = rng.randrange(len(data) + 1)
      match rng.randrange(7):
        case 0 if at < len(data):
          data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
          data[at] = rng.randrange(256)
        case 2:
          data[at:at] = rng.randbytes(rng.randint(1, 8))
        case 3:
          del data[at : at + rng.randint(1, 8)]
        case 4:
          del data[at:]
        case 5:
          data += data[at : at + 40]
        case 6:
          other = rng.choice(self._raw)
          data[at:at] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


@dataclasses.dataclass
class Fuzzed:
  """The result of many inputs. `faults` describes the first few."""

  count: int = 0
  outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
  faults: list[str] = dataclasses.field(default_factory=list)
  slowest_s: float = 0.0

  def fault(self, text: str) -> None:
    """Notes a fault."""
    self.outcomes["fault"] += 1
    if len(self.faults) < 10:
      self.faults.append(text)

  def add(self, other: "Fuzzed") -> None:
    """Adds another process's result."""
    self.count += other.count
    self.outcomes += other.outcomes
    self.faults += other.faults
    self.slowest_s = max(self.slowest_s, other.slowest_s)


# --- In process -------------------------------------------------------------------------------------------------------


def _validator() -> Callable[[protobuf_message.Message], None]:
  """Returns a function that validates a request completely, without compiling its constraint."""
  model = demo_model()
  config = EngineConfig(
    vocab_size=model.vocab_size, max_model_len=_MODEL_LEN, num_blocks=64, eos_token_ids=model.eos_token_ids
  )
  tokenizer = Tokenizer(ROOT / "models" / "demo", max_prompt_bytes=1 << 20)

  def validate(message: protobuf_message.Message) -> None:
    match message:
      case pb.GenerateRequest():
        request_validation.unknown_fields(message)
        request_validation.find_adapter(message.model, "sluice-demo")
        prompt = request_validation.prompt_token_ids(message, tokenizer)
        call = request_validation.make_generation_call(message, config, tokenizer, prompt, {})
        for params in call.params:
          request = Request("fuzz", call.prompt_token_ids, params, call.priority, cache_salt=call.cache_salt)
          validate_request(config, request)
      case pb.TokenizeRequest():
        request_validation.find_adapter(message.model, "sluice-demo")
        request_validation.prompt_token_ids(message, tokenizer)
      case pb.DetokenizeRequest():
        request_validation.check_token_ids("token_ids", message.token_ids, config.vocab_size)
        tokenizer.decode(list(message.token_ids), skip_special_tokens=message.skip_special_tokens)
      case pb.AbortRequest():
        for request_id in message.request_ids:
          request_validation.check_request_id(request_id)

  return validate


def parse_many(count: int, seed: int) -> Fuzzed:
  """A job: parses and validates `count` mutated messages. Anything but an EngineError is a fault."""
  mutator, validate, fuzzed = Mutator(seed), _validator(), Fuzzed(count)
  for _ in range(count):
    kind, raw = mutator.make()
    began = time.perf_counter()
    try:
      validate(kind.FromString(raw))
      outcome = "valid"
    except protobuf_message.DecodeError:
      outcome = "malformed"
    except EngineError as error:
      outcome = error.reason
    except Exception:
      outcome = "crash"
      fuzzed.fault(f"{kind.__name__} {raw.hex()}: {traceback.format_exc().strip().splitlines()[-1]}")
    seconds = time.perf_counter() - began
    fuzzed.slowest_s = max(fuzzed.slowest_s, seconds)
    fuzzed.outcomes[outcome] += 1
    if seconds > _HANG_S:
      fuzzed.fault(f"{kind.__name__} {raw.hex()} took {seconds:.1f} s")
  return fuzzed


def parse(rig: Rig, count: int = 1_000_000, asked: int = 1_000_000) -> list[Row]:
  """Runs mutated protobufs through parsing and validation."""
  share = count // 2
  jobs = [rig.submit(parse_many, share, seed) for seed in range(2)]
  fuzzed = Fuzzed()
  for job in jobs:
    fuzzed.add(job.result())
  outcomes = fuzzed.outcomes
  counts = (
    f"{fuzzed.count:,}: {outcomes['valid']:,} valid, {outcomes['malformed']:,} malformed, "
    f"{fuzzed.count - outcomes['valid'] - outcomes['malformed'] - outcomes['crash']:,} refused, "
    f"{outcomes['crash']:,} crashed, slowest {1000 * fuzzed.slowest_s:.0f} ms"
  )
  measured = counts if not fuzzed.faults else f"{counts}; {fuzzed.faults[0][:300]}"
  # The fuzzer must get inputs past parsing, or it proves nothing.
  passed = not fuzzed.faults and min(outcomes["valid"], outcomes["malformed"]) > fuzzed.count // 100
  return [
    Row("mutated protobufs, parsed and validated", "0 crashes, 0 over 1 s", measured, passed, asked, fuzzed.count)
  ]


# --- Over the wire ----------------------------------------------------------------------------------------------------


def wire_many(target: str, count: int, at_once: int, seed: int) -> Fuzzed:
  """A job: sends `count` mutated messages to a server, `at_once` at a time, and checks its health in between."""
  return on_loop(_wire_many(target, count, at_once, seed))


async def _wire_many(target: str, count: int, at_once: int, seed: int) -> Fuzzed:
  mutator, fuzzed = Mutator(seed), Fuzzed()
  methods: dict[type, list[str]] = {}
  for name, kind in _METHODS.items():
    methods.setdefault(kind, []).append(name)
  async with grpc.aio.insecure_channel(target) as channel:
    health: Any = health_pb2_grpc.HealthStub(channel)
    unary = {name: channel.unary_unary(name) for name in _METHODS}
    stream = channel.unary_stream("/sluice.v1.GenerationService/Generate")

    async def one() -> None:
      kind, raw = mutator.make()
      name = mutator.rng.choice(methods[kind])
      if mutator.rng.random() < 0.02:
        name = mutator.rng.choice(tuple(_METHODS))  # another method's message
      began = time.perf_counter()
      try:
        if name.endswith("/Generate"):
          async for _ in stream(raw, timeout=30):
            pass
        else:
          await unary[name](raw, timeout=30)
        code = "OK"
      except grpc.aio.AioRpcError as error:
        code = error.code().name
        if code not in _ALLOWED:
          fuzzed.fault(f"{name} {raw.hex()[:400]}: {code} {error.details()}")
      seconds = time.perf_counter() - began
      fuzzed.count += 1
      fuzzed.outcomes[code] += 1
      fuzzed.slowest_s = max(fuzzed.slowest_s, seconds)
      if seconds > _HANG_S:
        fuzzed.fault(f"{name} {raw.hex()[:400]} took {seconds:.1f} s: {code}")

    async def client(share: int) -> None:
      for index in range(share):
        await one()
        if index % 500 == 499:
          answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
          if answer.status != health_pb2.HealthCheckResponse.SERVING:
            fuzzed.fault(f"health is {answer.status} after {fuzzed.count} messages")

    await asyncio.gather(*(client(count // at_once) for _ in range(at_once)))
  return fuzzed


def wire(rig: Rig, count: int = 50_000, asked: int = 50_000) -> list[Row]:
  """Sends mutated protobufs to a server."""
  flags = (f"--max_model_len={_MODEL_LEN}", "--queue_timeout_s=5", "--max_queued_requests=64", "--num_blocks=512")
  with rig.server(*flags) as server:
    jobs = [rig.submit(wire_many, server.target, count // 2, 8, seed) for seed in (11, 12)]
    fuzzed = Fuzzed()
    for job in jobs:
      fuzzed.add(job.result())
    left = server.settle()
    serving = server.is_serving()
  codes = ", ".join(f"{code} {number:,}" for code, number in fuzzed.outcomes.most_common() if code != "fault")
  measured = f"{fuzzed.count:,}: {codes}; slowest {1000 * fuzzed.slowest_s:.0f} ms"
  faults = fuzzed.faults + left + ([] if serving else ["not SERVING afterwards"])
  if faults:
    measured += f"; {len(faults)} faults: {faults[0]}"
  passed = not faults and fuzzed.outcomes["OK"] > fuzzed.count // 100
  return [
    Row(
      "mutated protobufs over the wire",
      "0 UNKNOWN or INTERNAL, 0 over 1 s, SERVING",
      measured,
      passed,
      asked,
      fuzzed.count,
    )
  ]
