"""The engine's resolved settings: frozen, checked once, with derived values as properties. Pure Python."""

import dataclasses
import math

from engine.errors import ConfigError
from engine.settings import LOCKSTEP, SchedulingSettings, check_settings, check_speculation
from engine.shapes import PADDED, ShapeLadder, check_prefill_chunk

# The bytes that a CPU reads at 20 GB/s in twenty times the host's part of a step, 0.5 ms.
CPU_OVERLAP_BYTES = 200_000_000
# Of draft_step_limit=0 with speculation=auto: the 99th percentile of gaps between tokens stays as without drafts.
DRAFT_STEP_LIMIT = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingSettings):
  """The settings of the pure engine: the user's, and those that model and device decide.

  Attributes:
    vocab_size: token ids are 0..vocab_size-1.
    max_model_len: longest sequence, prompt and output together, in tokens.
    num_blocks: KV pool size in blocks, without device block 0, which belongs to padding.
    block_size: tokens a KV block.
    block_bytes: bytes of a KV block over all layers and devices; 0: unknown.
    num_host_blocks: evicted prefix blocks that the host's memory keeps; 0: none.
    token_budgets, max_num_seqs, prefill_chunk: see engine.shapes.LadderChoice. The device has max_num_seqs
      slots.
    computes_padding: the device computes the padding of a step, so chunks grow into it for free. Otherwise chunks do
      not grow, and a prompt of several chunks has equal ones.
    has_draft_model: the device proposes tokens by a draft model.
    overlap: plan and launch a step while the device computes the previous one. This hides the host's part of a step,
      but a new request waits one step more. If steps are long compared to the host's part, as on a CPU with all but
      small models, first tokens arrive sooner without it.
    eos_token_ids: ids that end a request, unless it ignores them.
    embedding_size: numbers of an embedding; 0 if the server serves none.
    pooling: last or mean, of an embedding; auto without embeddings.
    headless: the architecture of a model without a head of tokens, such as LlamaModel, which generates nothing; "": it
      generates.
    speculation: as choose_speculation resolves the setting; unlike a server's, none by default.
    labels: names of the classes whose scores take the place of embeddings; (): none.
    class_activation, pair_activation, pad_token_id: as in models.config.ClassHead.
  """

  vocab_size: int
  max_model_len: int
  num_blocks: int
  block_size: int = 16
  block_bytes: int = 0
  num_host_blocks: int = 0
  token_budgets: tuple[int, ...] = PADDED.token_budgets
  max_num_seqs: int = PADDED.max_num_seqs
  prefill_chunk: int = PADDED.prefill_chunk
  computes_padding: bool = True
  has_draft_model: bool = False
  overlap: bool = True
  eos_token_ids: tuple[int, ...] = ()
  embedding_size: int = 0
  pooling: str = "auto"
  headless: str = ""
  labels: tuple[str, ...] = ()
  class_activation: str = "none"
  pair_activation: str = "none"
  pad_token_id: int = -1
  speculation: str = dataclasses.field(
    default="none", metadata=SchedulingSettings.__dataclass_fields__["speculation"].metadata
  )

  def __post_init__(self):
    check_settings(self)
    check_speculation(self, without_drafts=("none",))
    for name in ("vocab_size", "max_model_len", "num_blocks", "block_size", "max_num_seqs", "prefill_chunk"):
      if getattr(self, name) < 1:
        raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; set --{name}")
    check_prefill_chunk(self.prefill_chunk, self.token_budgets[-1])
    if self.speculation != "none" and self.max_num_seqs == 1:
      raise ConfigError(
        f"speculation={self.speculation} needs logit rows for drafts, and a step has as many as max_num_seqs=1; set "
        "--max_num_seqs to 2 or more, or leave out --speculation"
      )
    if self.speculation != "none" and self.headless:
      raise ConfigError(
        f"speculation={self.speculation} needs a model that generates text, and {self.headless} has no head of tokens; "
        "leave out --speculation"
      )
    assert not self.num_host_blocks or self.shares_prefixes, "a host pool without a prefix cache"
    assert self.has_draft_model or self.speculation != "draft", "speculation=draft without a draft model"

  @property
  def ladder(self) -> ShapeLadder:
    """The rungs of a step. Raises ConfigError for invalid budgets."""
    return ShapeLadder(self.token_budgets, self.max_num_seqs)

  @property
  def most_step_ratio(self) -> float:
    """Most times that a step with drafts may be as long as one without; see draft_step_limit."""
    if self.draft_step_limit:
      return self.draft_step_limit
    return DRAFT_STEP_LIMIT if self.speculation == "auto" and not self.has_draft_model else math.inf

  @property
  def num_proposals(self) -> int:
    """Tokens that a draft model proposes for a row: with overlap one more, which may stand for a token in flight."""
    return self.num_speculative_tokens + self.overlap if self.has_draft_model else 0

  @property
  def shares_prefixes(self) -> bool:
    """Whether requests use the prefix cache."""
    return self.prefix_cache_scope != "off"

  @property
  def pool_tokens(self) -> int:
    """Tokens the whole KV pool holds."""
    return self.num_blocks * self.block_size


def choose_speculation(
  setting: str, batching: str, max_num_seqs: int, headless: str = "", has_draft_model: bool = False
) -> str:
  """Returns the setting, but none instead of auto where no step could verify a draft.

  Other values stay, and auto beside a draft model, so that EngineConfig refuses them.

  Args: all but `setting` as the fields of EngineConfig.
  """
  is_possible = batching not in LOCKSTEP and max_num_seqs > 1 and not headless
  return "none" if setting == "auto" and not is_possible and not has_draft_model else setting


def choose_overlap(setting: str, platform: str, weight_bytes: int) -> bool:
  """Returns whether steps overlap, for a setting of true, false or auto.

  Every step reads the weights. If that takes a CPU long, hiding the host's part gains little, and a new request would
  wait one more long step.
  """
  if setting == "auto":
    return platform != "cpu" or weight_bytes <= CPU_OVERLAP_BYTES
  return setting == "true"
