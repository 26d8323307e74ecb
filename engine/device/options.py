"""The settings of an engine on a real device. Rejects contradictions; may not load anything."""

import dataclasses

from engine.batching import takes_chunks
from engine.errors import ConfigError
from engine.policy import find_policy_class
from engine.settings import (
  DeviceSettings,
  SchedulingSettings,
  check_draft_model,
  check_host_pool,
  check_pool_and_ladder,
  check_quantization,
  check_settings,
  check_speculation,
)
from engine.shapes import LadderChoice, choose_ladder
from pallas_kernels.paged_attention import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions(DeviceSettings, SchedulingSettings):
  """The settings of an engine on a real device, with those that only a caller sets.

  Attributes:
    model_dir: a Hugging Face or a Sluice folder.
    attention: the setting, or another registered implementation (pallas_kernels.paged_attention.api).
    compile_cache_dir: the setting, but without a default folder.
    num_token_ids: ids of the tokenizer; the build rejects a model with fewer. 0: there is no tokenizer.
    all_rungs: compiles every rung, for measurements, also rungs that this prefill_chunk never reaches.
  """

  model_dir: str = dataclasses.field(kw_only=False)
  attention: str = "auto"
  compile_cache_dir: str = ""
  num_token_ids: int = 0
  all_rungs: bool = False

  def __post_init__(self):
    check_settings(self)
    check_speculation(self)
    check_draft_model(self, self)
    find_policy_class(self.policy)
    names = ("auto", *api.IMPLEMENTATIONS)
    if self.attention not in names:
      raise ConfigError(f"attention={self.attention!r} must be one of {', '.join(names)}; set --attention")
    check_pool_and_ladder(self)
    check_quantization(self)
    check_host_pool(self, self)

  def choose_ladder(self, platform: str, leaves_out_padding: bool, one_size: bool) -> LadderChoice:
    """Returns the ladder for a device and its kernels; see engine.shapes.choose_ladder. Raises ConfigError."""
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
