"""What a user may choose for an engine on a real device; refuses what contradicts itself before anything is loaded."""

import dataclasses

from engine.batching import takes_chunks
from engine.errors import ConfigError
from engine.settings import DeviceSettings, SchedulingSettings, check_settings
from engine.shapes import LadderChoice, ShapeLadder, check_prefill_chunk, choose_ladder
from pallas_kernels.paged_attention import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions(DeviceSettings, SchedulingSettings):
  """The settings of an engine on a real device, and what its caller alone decides.

  Attributes:
    model_dir: a Hugging Face or a Sluice folder.
    attention: as the setting, or another implementation that was registered (pallas_kernels.paged_attention.api).
    compile_cache_dir: as the setting, but nothing is kept unasked.
    num_token_ids: ids that the tokenizer makes; a model of fewer is refused. 0: there is no tokenizer.
    all_rungs: compile every rung, also those that no step reaches with this prefill_chunk; to measure them.
  """

  model_dir: str = dataclasses.field(kw_only=False)
  attention: str = "auto"
  compile_cache_dir: str = ""
  num_token_ids: int = 0
  all_rungs: bool = False

  def __post_init__(self):
    check_settings(self)
    names = ("auto", *api.IMPLEMENTATIONS)
    if self.attention not in names:
      raise ConfigError(f"attention={self.attention!r} must be one of {', '.join(names)}; set --attention")
    if self.kv_cache_mb and self.num_blocks:
      raise ConfigError(
        f"kv_cache_mb={self.kv_cache_mb} and num_blocks={self.num_blocks} both size the KV pool; "
        "set only one of --kv_cache_mb and --num_blocks"
      )
    if self.token_budgets:
      ShapeLadder(self.token_budgets, self.max_num_seqs or 1)
      check_prefill_chunk(self.prefill_chunk or 1, self.token_budgets[-1])

  def choose_ladder(self, platform: str, leaves_out_padding: bool, one_size: bool) -> LadderChoice:
    """The ladder, once the device and its kernels are known; see engine.shapes.choose_ladder. Raises ConfigError."""
    return choose_ladder(
      platform,
      leaves_out_padding=leaves_out_padding,
      one_size=one_size,
      chunked=takes_chunks(self.batching),
      token_budgets=self.token_budgets or None,
      max_num_seqs=self.max_num_seqs or None,
      prefill_chunk=self.prefill_chunk or None,
      all_rungs=self.all_rungs,
    )
