"""Builds an engine from a model folder; --batching=disaggregated builds two, each on its own devices."""

from collections.abc import Callable
import dataclasses
import time

from engine.build_facts import FactReporter, ignore_fact
from engine.device.build import Built, ExecutableSource, begin_build, build_engine, build_side, finish_build
from engine.device.options import BuildOptions
from engine.device.runner import Progress
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from extensions.disaggregated.engine import DisaggregatedEngine
from extensions.disaggregated.transfer import connect_runners
from models.split import ModelSplit


def build_any(
  options: BuildOptions,
  progress: Progress,
  emit: Emit,
  clock: Callable[[], float] = time.monotonic,
  engine_class: type[Engine] = Engine,
  source: ExecutableSource | None = None,
  report_fact: FactReporter = ignore_fact,
) -> Built:
  """Builds one engine, or two for --batching=disaggregated. Arguments and errors: see engine.device.build.build."""
  if options.batching != "disaggregated":
    return build_engine(options, progress, emit, clock, engine_class, source, report_fact)
  assert source is None, "two engines, and executables for one"
  if options.enable_embeddings:
    raise ConfigError(
      "enable_embeddings: an embedding needs no decode; serve without --batching=disaggregated or without "
      "--enable_embeddings"
    )
  if options.enable_lora:
    raise ConfigError(
      "enable_lora: two engines share no adapters; serve without --batching=disaggregated or without --enable_lora"
    )
  devices, cache_reason = begin_build(options)
  num_prefill = options.prefill_devices or len(devices) // 2
  num_decode = len(devices) - num_prefill
  if not 0 < num_prefill < len(devices):
    raise ConfigError(
      f"batching=disaggregated splits {len(devices)} devices into {num_prefill} for prefill and {num_decode} for "
      "decode, and each side needs one; set --num_devices and --prefill_devices"
    )
  if options.deterministic and num_prefill != num_decode:
    raise ConfigError(
      f"deterministic: {num_prefill} devices for prefill and {num_decode} for decode split sums differently, and a "
      "preempted request may go through either; set --prefill_devices to half of --num_devices"
    )
  prefill = build_side(options, devices[:num_prefill], progress, None, num_sides=2, report_fact=report_fact)
  model = prefill.loaded.config
  heads = [ModelSplit(model, number).padded.num_kv_heads for number in (num_prefill, num_decode)]
  if heads[0] != heads[1]:
    raise ConfigError(
      f"batching=disaggregated: {model.num_kv_heads} KV heads become {heads[0]} on {num_prefill} devices for prefill, "
      f"and {heads[1]} on {num_decode} for decode; both sides need blocks of one shape, so set --prefill_devices to "
      "half of --num_devices"
    )
  # Both sides must accept the same requests.
  options = dataclasses.replace(options, max_model_len=prefill.scheduler.config.max_model_len)
  decode = build_side(options, devices[num_prefill:], progress, None, report_fact=report_fact)
  if prefill.trial != decode.trial:
    raise ConfigError(
      "deterministic: a trial prompt gives different bits on the prefill and the decode devices; serve "
      "without --batching=disaggregated or without --deterministic"
    )
  export = connect_runners(prefill.runner, decode.runner)
  sides = (prefill.scheduler, prefill.runner), (decode.scheduler, decode.runner)
  engine = DisaggregatedEngine(*sides, export, clock, emit, engine_class)
  return finish_build(options, cache_reason, engine, decode, prefill)
