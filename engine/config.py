"""The engine's settings: frozen, checked once, derived values are properties. Pure Python."""

import dataclasses

from engine.errors import ConfigError

PREFIX_CACHE_SCOPES = ("global", "tenant", "request", "off")
# The default prefill_chunk with a CPU's own kernels. From 32 rows on a step takes as long as it has rows: more of them
# only save the decodes that a prompt's next step would have beside it, and lengthen the gaps that others see.
CPU_PREFILL_CHUNK = 192
# The default token_budgets with them. What a rung pads they leave out, so few rungs do: steps of 1, 9, 17 and 40 rows
# of a 125M model take as long as with twice as many, and a start has fewer programs to compile.
CPU_TOKEN_BUDGETS = (8, 32, 64, 256, 512)
# What a CPU reads at 20 GB/s in twenty times the host's part of a step, 0.5 ms.
CPU_OVERLAP_BYTES = 200_000_000


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Everything the pure part of the engine must know. Flags are turned into this in the composition root.

  Attributes:
    vocab_size: token ids are 0..vocab_size-1.
    max_model_len: longest sequence, prompt and output together, in tokens.
    num_blocks: KV pool size in blocks (device block 0 is reserved for padding and is not counted here).
    block_size: tokens a KV block.
    token_budgets: the shape ladder, tokens a step.
    max_num_seqs: sequences running at once; also the number of device slots.
    prefill_chunk: most prompt tokens taken in one step, before growing to the edge of the bucket.
    computes_padding: the device computes what a step is padded to, so that growing costs nothing. Where it leaves that
      out, chunks do not grow, and a prompt of several is cut in equal pieces.
    overlap: plan and launch a step while the one before is computed. It hides the host's part of a step, and a request
      that arrives waits for one step more. Where steps are long beside the host's part, as a CPU's are with all but
      small models, without it first tokens come sooner.
    max_queued_requests, max_queued_tokens: bounds on what waits (prompt tokens for the second).
    queue_timeout_s, request_timeout_s: defaults for a request that brings none; 0 is no limit.
    policy: a name in engine.policy.POLICIES.
    batching: a name in engine.batching.BATCHING.
    dynamic_window_s, dynamic_max_batch: with dynamic batching, how long a wave waits for company, and its most rows.
    admission: a name in engine.admission.ADMISSION.
    aging_s: with policy priority, seconds of waiting that are worth one unit of priority (0: no ageing).
    sjf_aging_tokens_per_s: with policy sjf, what a second of waiting is worth in max_tokens (0: no ageing).
    tier_share: with policy tiers, the part of slots and of prompt tokens a step that batch work may not take.
    tier_delay_s: with policy tiers, how long after a batch request an interactive one may arrive and still go first.
    tier_long_context: with policy tiers, batch rows longer than this make way for interactive ones (0: none does).
    max_queued_share_per_tenant: the part of both bounds that requests of one tenant may hold (1: all of them). Requests
      without a tenant are one.
    enable_prefix_caching: share full blocks of equal prefixes.
    prefix_cache_scope: between whom: global is anybody, tenant is requests of one tenant, request is the outputs of one
      request, off is nobody. Within it, requests share where their salts are the same.
    eos_token_ids: end a request unless it ignores them.
  """

  vocab_size: int
  max_model_len: int
  num_blocks: int
  block_size: int = 16
  token_budgets: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 384, 512)
  max_num_seqs: int = 64
  prefill_chunk: int = 512
  computes_padding: bool = True
  overlap: bool = True
  max_queued_requests: int = 256
  max_queued_tokens: int = 262_144
  queue_timeout_s: float = 60.0
  request_timeout_s: float = 600.0
  policy: str = "fcfs"
  batching: str = "chunked"
  dynamic_window_s: float = 0.05
  dynamic_max_batch: int = 64
  admission: str = "queue"
  aging_s: float = 10.0
  sjf_aging_tokens_per_s: float = 50.0
  tier_share: float = 0.25
  tier_delay_s: float = 30.0
  tier_long_context: int = 0
  max_queued_share_per_tenant: float = 1.0
  enable_prefix_caching: bool = True
  prefix_cache_scope: str = "tenant"
  eos_token_ids: tuple[int, ...] = ()

  def __post_init__(self):
    for name in (
      "vocab_size",
      "max_model_len",
      "num_blocks",
      "block_size",
      "max_num_seqs",
      "prefill_chunk",
      "max_queued_requests",
      "max_queued_tokens",
      "dynamic_max_batch",
    ):
      value = getattr(self, name)
      if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1; set --{name}")
    for name in ("queue_timeout_s", "request_timeout_s", "aging_s", "dynamic_window_s", "tier_delay_s"):
      value = getattr(self, name)
      if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={value} must be a finite number of seconds, 0 or more; set --{name}")
    if not 0 <= self.sjf_aging_tokens_per_s < float("inf"):
      raise ConfigError(
        f"sjf_aging_tokens_per_s={self.sjf_aging_tokens_per_s} must be finite and 0 or more; set "
        "--sjf_aging_tokens_per_s"
      )
    if not 0 <= self.tier_share < 1:
      raise ConfigError(f"tier_share={self.tier_share} must be at least 0 and below 1; set --tier_share")
    if not 0 < self.max_queued_share_per_tenant <= 1:
      raise ConfigError(
        f"max_queued_share_per_tenant={self.max_queued_share_per_tenant} must be above 0 and at most 1; set "
        "--max_queued_share_per_tenant"
      )
    if self.prefix_cache_scope not in PREFIX_CACHE_SCOPES:
      raise ConfigError(
        f"prefix_cache_scope={self.prefix_cache_scope!r} is unknown; set --prefix_cache_scope to one of "
        f"{', '.join(PREFIX_CACHE_SCOPES)}"
      )
    if self.tier_long_context < 0:
      raise ConfigError(f"tier_long_context={self.tier_long_context} must be 0 or more; set --tier_long_context")
    if self.prefill_chunk > self.token_budgets[-1]:
      raise ConfigError(
        f"prefill_chunk={self.prefill_chunk} exceeds the top token budget {self.token_budgets[-1]}; "
        "lower --prefill_chunk or extend --token_budgets"
      )
    bad = [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]
    if bad:
      raise ConfigError(
        f"eos token ids {bad} are outside the vocabulary 0..{self.vocab_size - 1}; "
        "fix the model's generation_config.json"
      )

  @property
  def shares_prefixes(self) -> bool:
    """Whether anything is looked for in the prefix cache."""
    return self.enable_prefix_caching and self.prefix_cache_scope != "off"

  @property
  def max_blocks_per_seq(self) -> int:
    """Length of a full block table."""
    return -(-self.max_model_len // self.block_size)

  @property
  def pool_tokens(self) -> int:
    """Tokens the whole KV pool holds."""
    return self.num_blocks * self.block_size


def default_prefill_chunk(token_budgets: tuple[int, ...], most: int = EngineConfig.prefill_chunk) -> int:
  """The prefill_chunk where nobody chose one: `most`, within the ladder."""
  return min(most, token_budgets[-1])


def default_overlap(platform: str, weight_bytes: int) -> bool:
  """Whether steps are launched ahead where nobody chose.

  Every step reads the weights. Where that alone takes a CPU long, hiding the host's part gains next to nothing, and who
  arrives would wait for one long step more.
  """
  return platform != "cpu" or weight_bytes <= CPU_OVERLAP_BYTES


def chosen_overlap(setting: str, default: bool) -> bool:
  """Whether steps are launched ahead, by the flag's word: true, false or auto (`default`). Raises ConfigError."""
  words = {"auto": default, "true": True, "false": False}
  if setting not in words:
    raise ConfigError(f"overlap={setting!r} is not one of {', '.join(words)}; set --overlap")
  return words[setting]
