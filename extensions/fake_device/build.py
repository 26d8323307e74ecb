"""Builds an engine on the fake device from a model folder's sizes. Loads no weights, compiles nothing.

The twin of engine/device/build.py for `--fake_device`. Loads no jax.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import pathlib
import time
from typing import Any

from engine.adapters import AdapterWeights
from engine.build_facts import DeviceFact, FactReporter, KVFact, ModelFact, ignore_fact
from engine.config import EngineConfig, choose_overlap, choose_speculation
from engine.engine import Emit, Engine
from engine.errors import CheckpointError, ConfigError
from engine.model_folder import name_of_model
from engine.scheduler import Scheduler
from engine.settings import DeviceSettings, check_settings, declared_settings
from engine.shapes import LadderChoice, choose_ladder
from extensions.disaggregated.engine import DisaggregatedEngine
from extensions.fake_device.device import FakeDevice

_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class FakeBuilt:
  """An engine that is ready; attributes as in engine.device.build.Built."""

  engine: Engine
  runner: FakeDevice
  model_name: str
  config: EngineConfig
  ladder: LadderChoice
  attention: str = "fake"
  matmul: str = "fake"
  quantization: str = "none"
  fallbacks: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()
  deterministic: str = ""
  lowered: str = ""
  load_s: float = 0.0
  warmup_s: float = 0.0
  read_adapter: Callable[[str], AdapterWeights] | None = None


@dataclasses.dataclass(frozen=True)
class FakeAdapter:
  """An adapter of the fake device, which reads no more than its rank."""

  rank: int
  path: str


def read_fake_adapter(path: str) -> FakeAdapter:
  """Reads the rank of an adapter's folder. Raises CheckpointError."""
  folder = pathlib.Path(path)
  return FakeAdapter(_number(folder, _read_json(folder / "adapter_config.json"), "r"), path)


def build_fake(
  model_dir: str,
  settings: Mapping[str, Any],
  step_s: float,
  emit: Emit,
  clock: Callable[[], float] = time.monotonic,
  engine_class: type[Engine] = Engine,
  report_fact: FactReporter = ignore_fact,
) -> FakeBuilt:
  """Makes an engine and its fake device.

  Args:
    model_dir: a folder with config.json.
    settings: named as in BuildOptions; ignores those of real devices.
    step_s: seconds a step takes.
    emit, clock: passed to the Engine.
    engine_class: Engine or a subclass.
    report_fact: called with the facts of a real build, except programs.

  Raises:
    CheckpointError: the folder lacks a number.
    ConfigError: settings contradict each other or do not fit the model.
  """
  folder = pathlib.Path(model_dir)
  raw = _read_json(folder / "config.json")
  vocab_size = _number(folder, raw, "vocab_size")
  longest = _number(folder, raw, "max_position_embeddings")
  max_model_len = settings.get("max_model_len") or longest
  if max_model_len > longest:
    raise ConfigError(
      f"max_model_len={max_model_len} exceeds the {longest} positions of {folder.name}; lower --max_model_len, or "
      "leave it at 0"
    )
  generation = folder / "generation_config.json"
  eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
  eos = raw.get("eos_token_id") if eos is None else eos
  eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
  if not all(type(token) is int for token in eos_token_ids):
    raise CheckpointError(f"{folder}: eos_token_id={eos!r} must be a token id or a list of them")
  devices = {declared.name for declared in declared_settings(DeviceSettings)}
  check_settings(DeviceSettings(**{name: value for name, value in settings.items() if name in devices}))
  if settings.get("enable_embeddings"):
    raise ConfigError("enable_embeddings: the fake device computes nothing; serve without --fake_device or without it")
  if settings.get("host_kv_mb"):
    raise ConfigError("host_kv_mb: the fake device has no KV to keep; serve without --fake_device or without it")
  if settings.get("draft_model"):
    raise ConfigError("draft_model: the fake device proposes nothing; serve without --fake_device or without it")
  if settings.get("enable_lora") and settings.get("batching") == "disaggregated":
    raise ConfigError(
      "enable_lora: two engines share no adapters; serve without --batching=disaggregated or without --enable_lora"
    )
  names = {field.name for field in dataclasses.fields(EngineConfig)}
  chosen = {name: value for name, value in settings.items() if name in names}
  chosen["overlap"] = choose_overlap(settings.get("overlap", "auto"), "fake", 0)
  block_size = settings.get("block_size") or _BLOCK_SIZE
  ladder = choose_ladder(
    "cpu",
    token_budgets=settings.get("token_budgets") or None,
    max_num_seqs=settings.get("max_num_seqs") or None,
    prefill_chunk=settings.get("prefill_chunk") or None,
    all_rungs=True,  # a block costs nothing here
  )
  # As large as a real pool: twice what can run at once.
  num_blocks = settings.get("num_blocks") or 2 * ladder.max_num_seqs * -(-max_model_len // block_size)
  chosen |= {
    "vocab_size": vocab_size,
    "max_model_len": max_model_len,
    "block_size": block_size,
    "num_blocks": num_blocks,
    "eos_token_ids": eos_token_ids,
    "token_budgets": ladder.token_budgets,
    "max_num_seqs": ladder.max_num_seqs,
    "prefill_chunk": ladder.prefill_chunk,
    "speculation": choose_speculation(
      settings.get("speculation", "none"), settings.get("batching", "chunked"), ladder.max_num_seqs
    ),
  }
  config = EngineConfig(**chosen)
  device = FakeDevice(config, step_s)
  if config.batching == "disaggregated":
    source = FakeDevice(config, step_s)
    sides = (Scheduler(config), source), (Scheduler(config), device)
    engine = DisaggregatedEngine(*sides, source.export_blocks, clock, emit, engine_class)
  else:
    engine = engine_class(Scheduler(config), device, clock, emit)
  named = folder / "sluice.json"
  name = _read_json(named).get("name") if named.is_file() else None
  name = name or name_of_model(folder)
  report_fact(DeviceFact(kind="fake device", count=1, dtype="no weights", attention="fake", matmul="fake"))
  report_fact(
    ModelFact(
      name=name,
      folder=model_dir,
      num_parameters=0,
      num_bytes=0,
      max_model_len=max_model_len,
      own_length=longest,
      is_chosen=bool(settings.get("max_model_len")),
    )
  )
  report_fact(KVFact(num_blocks=num_blocks, block_size=block_size, num_bytes=0, max_model_len=max_model_len))
  reader = read_fake_adapter if config.enable_lora else None
  return FakeBuilt(engine, device, name, config, ladder, read_adapter=reader)


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(file.read_text("utf-8"))
  except OSError as error:
    raise CheckpointError(f"{file}: {error.strerror}; --model takes a Hugging Face or Sluice model folder") from None
  except (ValueError, RecursionError) as error:
    raise CheckpointError(f"{file}: cannot be read as JSON ({error}); copy it again") from None
  if not isinstance(value, dict):
    raise CheckpointError(f"{file}: not a JSON object; copy the file again")
  return value


def _number(folder: pathlib.Path, raw: Mapping[str, Any], name: str) -> int:
  value = raw.get(name)
  if type(value) is not int or value < 1:
    raise CheckpointError(f"{folder}: {name}={value!r} must be a whole number of 1 or more")
  return value
