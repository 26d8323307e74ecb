"""What a user may choose about sampling: frozen, and able to say what is wrong with it. Pure Python."""

import dataclasses
import math

from engine.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 1024
# Lowest and highest allowed value, and whether the lowest itself is not.
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
  """Names and meanings are the field's (OpenAI's, and vLLM's where OpenAI has none).

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
    allowed_token_ids: only these may be sampled; None is no restriction.
    min_tokens: end-of-sequence and stop ids cannot be sampled before this many tokens.
    stop_token_ids: end the request, and are not part of its text.
    ignore_eos: end-of-sequence ids are ordinary tokens.
    seed: makes draws repeatable; None lets the engine choose. A draw depends on seed and position alone.
    logprobs: how many alternatives to report for each generated token (0: the token's own only); None is off.
    prompt_logprobs: the same for the prompt's tokens.
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

  def validate(self, vocab_size: int) -> None:
    """Raises InvalidRequest with the value, the limit and the remedy."""

    def check(ok: bool, name: str, value: object, limit: str) -> None:
      if not ok:
        raise InvalidRequest(f"{name}={value!r:.80} is not allowed: {limit}")

    def whole(name: str, value: int, low: int, high: int) -> None:
      check(
        isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
        name,
        value,
        f"send a whole number from {low} to {high}",
      )

    def token_ids(name: str, ids: tuple[int, ...]) -> None:
      for token in ids:
        check(
          isinstance(token, int) and 0 <= token < vocab_size,
          name,
          token,
          f"token ids of this model are 0 to {vocab_size - 1}",
        )

    whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
    whole("min_tokens", self.min_tokens, 0, self.max_tokens)
    whole("top_k", self.top_k, 0, 2**31 - 1)
    for name, (low, high, above) in RANGES.items():
      value = getattr(self, name)
      inside = math.isfinite(value) and (low < value if above else low <= value) and value <= high
      check(inside, name, value, f"send a finite number {'above' if above else 'from'} {low:g} to {high:g}")
    check(
      len(self.logit_bias) <= MAX_LOGIT_BIAS,
      "logit_bias entries",
      len(self.logit_bias),
      f"send at most {MAX_LOGIT_BIAS}",
    )
    token_ids("logit_bias", tuple(token for token, _ in self.logit_bias))
    for token, bias in self.logit_bias:
      check(
        math.isfinite(bias) and -MAX_BIAS <= bias <= MAX_BIAS,
        f"logit_bias[{token}]",
        bias,
        f"send a finite number from -{MAX_BIAS} to {MAX_BIAS}",
      )
    if self.allowed_token_ids is not None:
      check(len(self.allowed_token_ids) > 0, "allowed_token_ids", (), "send at least one id, or leave it unset")
      token_ids("allowed_token_ids", self.allowed_token_ids)
    check(
      len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
      "stop_token_ids entries",
      len(self.stop_token_ids),
      f"send at most {MAX_STOP_TOKEN_IDS}",
    )
    token_ids("stop_token_ids", self.stop_token_ids)
    if self.seed is not None:
      whole("seed", self.seed, -(2**63), 2**63 - 1)
    for name in ("logprobs", "prompt_logprobs"):
      value = getattr(self, name)
      if value is not None:
        whole(name, value, 0, MAX_LOGPROBS)
