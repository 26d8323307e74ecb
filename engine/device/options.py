"""What a user may choose for an engine on a real device; refuses what contradicts itself before anything is loaded."""

import dataclasses

from engine.admission import AdmissionControl
from engine.batching import make_batching, reachable_budgets
from engine.config import CPU_PREFILL_CHUNK, CPU_TOKEN_BUDGETS, EngineConfig, chosen_overlap, default_prefill_chunk
from engine.errors import ConfigError
from engine.policy import make_policy
from engine.shapes import ShapeLadder
from pallas_kernels.paged_attention import api

_DTYPES = ("auto", "float32", "bfloat16")
_MATMULS = ("auto", "xla", "packed")
_QUANTIZATIONS = ("none", "int8")


@dataclasses.dataclass(frozen=True)
class BuildOptions:
  """What a user may choose; names as the flags'. Those that EngineConfig has too mean the same there.

  Attributes:
    model_dir: a Hugging Face or a Sluice folder.
    random_weights: draw the weights; the folder needs config.json alone.
    dtype: of weights, activations and KV: float32 or bfloat16; auto is float32 on CPU, bfloat16 elsewhere.
    attention: name of the paged attention (pallas_kernels.paged_attention.api.IMPLEMENTATIONS); auto is the platform's.
    matmul: xla, or packed: weights are laid out at load for a kernel (pallas_kernels/packed_matmul), on one CPU; auto:
      packed where that can be.
    quantization: none, or int8: the linear layers' weights and the head's are held as int8 with a scale an output.
    block_size: tokens a KV block; 0 is what the attention likes best.
    kv_cache_mb: memory for KV in MiB, over all devices; 0 takes what is free (on CPU, where nobody knows, 256).
    num_blocks: exact size of the pool instead; 0 sizes it by memory.
    max_model_len: 0 is the model's own.
    prefill_chunk: 0 is what suits the matmul, within the ladder.
    num_devices: how many to spread the model over; 0 is all.
    overlap: auto, true or false; auto is true, but on a CPU whose steps are long beside the host's part.
    prefill_devices: with batching disaggregated, how many of them do prefill; 0 is half of them.
    compile_cache_dir: where compiled programs are kept between starts; "" keeps none.
    executable_bundle: folder of executables made before, which are loaded instead of compiled where they fit; "": none.
    write_executable_bundle: store there what had to be compiled.
    num_token_ids: ids that the tokenizer makes; a model of fewer is refused. 0: there is no tokenizer.
    deterministic: the same request has the same bits in any company (engine/device/deterministic.py).
    all_rungs: compile every rung, also those that no step reaches with this prefill_chunk; to measure them.
  """

  model_dir: str
  random_weights: bool = False
  dtype: str = "auto"
  attention: str = "auto"
  matmul: str = "auto"
  quantization: str = "none"
  kv_cache_mb: int = 0
  num_blocks: int = 0
  block_size: int = 0
  token_budgets: tuple[int, ...] = EngineConfig.token_budgets
  max_num_seqs: int = EngineConfig.max_num_seqs
  max_model_len: int = 0
  prefill_chunk: int = 0
  overlap: str = "auto"
  max_queued_requests: int = EngineConfig.max_queued_requests
  max_queued_tokens: int = EngineConfig.max_queued_tokens
  queue_timeout_s: float = EngineConfig.queue_timeout_s
  request_timeout_s: float = EngineConfig.request_timeout_s
  policy: str = EngineConfig.policy
  batching: str = EngineConfig.batching
  dynamic_window_s: float = EngineConfig.dynamic_window_s
  dynamic_max_batch: int = EngineConfig.dynamic_max_batch
  admission: str = EngineConfig.admission
  aging_s: float = EngineConfig.aging_s
  sjf_aging_tokens_per_s: float = EngineConfig.sjf_aging_tokens_per_s
  tier_share: float = EngineConfig.tier_share
  tier_delay_s: float = EngineConfig.tier_delay_s
  tier_long_context: int = EngineConfig.tier_long_context
  max_queued_share_per_tenant: float = EngineConfig.max_queued_share_per_tenant
  enable_prefix_caching: bool = EngineConfig.enable_prefix_caching
  prefix_cache_scope: str = EngineConfig.prefix_cache_scope
  num_devices: int = 1
  prefill_devices: int = 0
  compile_cache_dir: str = ""
  executable_bundle: str = ""
  write_executable_bundle: bool = False
  num_token_ids: int = 0
  deterministic: bool = False
  all_rungs: bool = False

  def __post_init__(self):
    if self.dtype not in _DTYPES:
      raise ConfigError(f"dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}; set --dtype")
    if self.attention not in ("auto", *api.IMPLEMENTATIONS):
      raise ConfigError(
        f"attention={self.attention!r} is not one of auto, {', '.join(api.IMPLEMENTATIONS)}; set --attention"
      )
    if self.matmul not in _MATMULS:
      raise ConfigError(f"matmul={self.matmul!r} is not one of {', '.join(_MATMULS)}; set --matmul")
    if self.quantization not in _QUANTIZATIONS:
      raise ConfigError(
        f"quantization={self.quantization!r} is not one of {', '.join(_QUANTIZATIONS)}; set --quantization"
      )
    for name in ("kv_cache_mb", "num_blocks", "block_size", "max_model_len", "num_devices", "prefill_devices"):
      if getattr(self, name) < 0:
        raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more; set --{name}")
    if self.kv_cache_mb and self.num_blocks:
      raise ConfigError(
        f"kv_cache_mb={self.kv_cache_mb} and num_blocks={self.num_blocks} both size the KV pool; "
        "set only one of --kv_cache_mb and --num_blocks"
      )
    if self.executable_bundle and self.batching == "disaggregated":
      raise ConfigError(
        f"executable_bundle={self.executable_bundle} holds the programs of one engine, and batching=disaggregated has "
        "two; leave --executable_bundle empty, or choose another --batching"
      )
    if self.write_executable_bundle and not self.executable_bundle:
      raise ConfigError("write_executable_bundle needs a folder to write to; set --executable_bundle")
    ShapeLadder(self.token_budgets, self.max_num_seqs)
    config = self._config_of_no_model()
    make_policy(config)
    AdmissionControl(config)
    make_batching(config)

  def _config_of_no_model(self) -> EngineConfig:
    return self.engine_config(
      vocab_size=2**31 - 1,
      max_model_len=max(1, self.max_model_len),
      num_blocks=max(1, self.num_blocks),
      block_size=max(1, self.block_size),
      eos_token_ids=(),
      overlap=chosen_overlap(self.overlap, default=True),
      computes_padding=True,
    )

  def for_packed_matmul(self) -> "BuildOptions":
    """These, with what suits kernels that leave padding out where nobody has chosen otherwise."""
    budgets = self.token_budgets
    if budgets == EngineConfig.token_budgets and not self.all_rungs:
      budgets = CPU_TOKEN_BUDGETS
    chunk = self.prefill_chunk or default_prefill_chunk(budgets, CPU_PREFILL_CHUNK)
    return dataclasses.replace(self, token_budgets=budgets, prefill_chunk=chunk)

  def without_unreachable_rungs(self) -> "BuildOptions":
    """These, with the rungs that steps may have; each costs a compilation. To be asked once prefill_chunk is known."""
    if self.all_rungs:
      return self
    return dataclasses.replace(self, token_budgets=reachable_budgets(self._config_of_no_model()))

  def engine_config(
    self,
    vocab_size: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    eos_token_ids: tuple[int, ...],
    overlap: bool,
    computes_padding: bool,
  ) -> EngineConfig:
    """The engine's settings, once the model and the device are known. Raises ConfigError."""
    known = {
      "vocab_size": vocab_size,
      "max_model_len": max_model_len,
      "num_blocks": num_blocks,
      "block_size": block_size,
      "eos_token_ids": eos_token_ids,
      "overlap": overlap,
      "computes_padding": computes_padding,
    }
    chosen = {
      field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig) if field.name not in known
    }
    chosen["prefill_chunk"] = self.prefill_chunk or default_prefill_chunk(self.token_budgets)
    return EngineConfig(**known, **chosen)
