"""The engine's settings: frozen, checked once, derived values are properties. Pure Python."""

import dataclasses

from engine.errors import ConfigError
from engine.settings import SchedulingSettings, check_settings
from engine.shapes import PADDED, ShapeLadder, check_prefill_chunk

# What a CPU reads at 20 GB/s in twenty times the host's part of a step, 0.5 ms.
CPU_OVERLAP_BYTES = 200_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingSettings):
  """Everything the pure part of the engine must know: what the user set, and what model and device have decided.

  Attributes:
    vocab_size: token ids are 0..vocab_size-1.
    max_model_len: longest sequence, prompt and output together, in tokens.
    num_blocks: KV pool size in blocks (device block 0 is reserved for padding and is not counted here).
    block_size: tokens a KV block.
    token_budgets, max_num_seqs, prefill_chunk: as in engine.shapes.LadderChoice; a server's are chosen there. Slots of
      the device are as many as max_num_seqs.
    computes_padding: the device computes what a step is padded to, so that growing costs nothing. Where it leaves that
      out, chunks do not grow, and a prompt of several is cut in equal pieces.
    overlap: plan and launch a step while the one before is computed. It hides the host's part of a step, and a request
      that arrives waits for one step more. Where steps are long beside the host's part, as a CPU's are with all but
      small models, without it first tokens come sooner.
    eos_token_ids: end a request unless it ignores them.
  """

  vocab_size: int
  max_model_len: int
  num_blocks: int
  block_size: int = 16
  token_budgets: tuple[int, ...] = PADDED.token_budgets
  max_num_seqs: int = PADDED.max_num_seqs
  prefill_chunk: int = PADDED.prefill_chunk
  computes_padding: bool = True
  overlap: bool = True
  eos_token_ids: tuple[int, ...] = ()

  def __post_init__(self):
    check_settings(self)
    for name in ("vocab_size", "max_model_len", "num_blocks", "block_size", "max_num_seqs", "prefill_chunk"):
      if getattr(self, name) < 1:
        raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; set --{name}")
    check_prefill_chunk(self.prefill_chunk, self.token_budgets[-1])

  @property
  def ladder(self) -> ShapeLadder:
    """The rungs that a step may have. Raises ConfigError where there can be none."""
    return ShapeLadder(self.token_budgets, self.max_num_seqs)

  @property
  def shares_prefixes(self) -> bool:
    """Whether anything is looked for in the prefix cache."""
    return self.prefix_cache_scope != "off"

  @property
  def pool_tokens(self) -> int:
    """Tokens the whole KV pool holds."""
    return self.num_blocks * self.block_size


def choose_overlap(setting: str, platform: str, weight_bytes: int) -> bool:
  """Whether steps are launched ahead, by the setting's word: true, false or auto.

  Every step reads the weights. Where that alone takes a CPU long, hiding the host's part gains next to nothing, and who
  arrives would wait for one long step more.
  """
  if setting == "auto":
    return platform != "cpu" or weight_bytes <= CPU_OVERLAP_BYTES
  return setting == "true"
