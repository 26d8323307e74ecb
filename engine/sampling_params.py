"""The sampling parameters of a request, and their validation. Pure Python; may not sample."""

import dataclasses

from engine.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 1024
# Lowest and highest allowed value, and whether the lowest is excluded.
RANGES = {
  "temperature": (0.0, 100.0, False),
  "top_p": (0.0, 1.0, True),
  "min_p": (0.0, 1.0, False),
  "presence_penalty": (-2.0, 2.0, False),
  "frequency_penalty": (-2.0, 2.0, False),
  "repetition_penalty": (0.0, 100.0, True),
}
MAX_BIAS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
  """Sampling parameters, with the names and meanings of OpenAI's API, else of vLLM.

  engine/device/sampler.py documents the order in which they apply.

  Attributes:
    max_tokens: most tokens to generate, at least 1.
    temperature: 0 is greedy.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set whose probability reaches top_p (nucleus, arXiv:1904.09751).
    min_p: keep tokens at least min_p times as likely as the most likely one (arXiv:2407.01082).
    presence_penalty, frequency_penalty: subtracted from logits of generated tokens, once / per occurrence.
    repetition_penalty: divides positive and multiplies negative logits of prompt and generated tokens
      (arXiv:1909.05858); 1 is off.
    logit_bias: (token id, value in -100..100) pairs added to the logits.
    allowed_token_ids: allows only these tokens; None: no restriction.
    min_tokens: forbids end-of-sequence and stop ids before this many tokens.
    stop_token_ids: ids that end the request and are not part of its text.
    ignore_eos: treats end-of-sequence ids as ordinary tokens.
    seed: makes sampling repeatable; None: the engine chooses. The random number depends only on seed and position.
    logprobs: number of alternatives to report for each generated token, at most the vocabulary (0: only the token's
      own log probability); None: off.
    prompt_logprobs: the same for the prompt's tokens.
    embed: whether to report an embedding of the prompt, as EngineConfig.pooling makes it; needs max_tokens=1.
  """

  max_tokens: int = 256
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  allowed_token_ids: tuple[int, ...] | None = None
  min_tokens: int = 0
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  seed: int | None = None
  logprobs: int | None = None
  prompt_logprobs: int | None = None
  embed: bool = False

  def validate(self, vocab_size: int) -> None:
    """Raises InvalidRequest with the value, the limit and the remedy."""

    _check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
    _check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
    _check_whole("top_k", self.top_k, 0, 2**31 - 1)
    for name, (low, high, above) in RANGES.items():
      value = getattr(self, name)
      # All limits are finite, so infinities and NaN are outside.
      if not (low < value <= high if above else low <= value <= high):
        raise _refusal(name, value, f"send a finite number {'above' if above else 'from'} {low:g} to {high:g}")
    if len(self.logit_bias) > MAX_LOGIT_BIAS:
      raise _refusal("logit_bias", len(self.logit_bias), f"send at most {MAX_LOGIT_BIAS}", "entries")
    _check_token_ids("logit_bias", tuple(token for token, _ in self.logit_bias), vocab_size)
    for token, bias in self.logit_bias:
      if not -MAX_BIAS <= bias <= MAX_BIAS:
        raise _refusal(f"logit_bias[{token}]", bias, f"send a finite number from -{MAX_BIAS} to {MAX_BIAS}")
    if self.allowed_token_ids is not None:
      if not self.allowed_token_ids:
        raise _refusal("allowed_token_ids", (), "send at least one id, or leave it unset")
      _check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
    if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
      raise _refusal("stop_token_ids", len(self.stop_token_ids), f"send at most {MAX_STOP_TOKEN_IDS}", "entries")
    _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
    if self.seed is not None:
      _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
    if self.embed and self.max_tokens != 1:
      raise _refusal("max_tokens", self.max_tokens, "send 1 with embed, since only the prompt has an embedding")
    for name in ("logprobs", "prompt_logprobs"):
      value = getattr(self, name)
      if value is not None:
        _check_whole(name, value, 0, MAX_LOGPROBS)


# Formats texts only for invalid values, because every request is validated, some twice.


def _check_whole(name: str, value: int, low: int, high: int) -> None:
  if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
    raise _refusal(name, value, f"send a whole number from {low} to {high}")


def _check_token_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
  for token in ids:
    if not isinstance(token, int) or not 0 <= token < vocab_size:
      raise _refusal(name, token, f"token ids of this model are 0 to {vocab_size - 1}")


def _refusal(name: str, value: object, limit: str, part: str = "") -> InvalidRequest:
  return InvalidRequest(f"{part}={value!r:.80} is not allowed: {limit}", field=name)
