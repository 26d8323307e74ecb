"""Defines "sluice", a model of EleutherAI's lm-eval that runs an LLM in lm-eval's process. Computes no metric.

  sluice lm-eval run --model sluice --model_args model=DIR --tasks TASK

lm-eval parses everything after `lm-eval`; importing this module registers the model. `--model_args` are the arguments
of LLM. Needs the package lm-eval. Chat templates (`--apply_chat_template`) are not supported.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from extensions.python_api.llm import LLM
from extensions.python_api.sampling_params import SamplingParams

_MAX_GEN_TOKS = 256  # for tasks that set no limit; the default of lm-eval's own models


@register_model("sluice")
class SluiceLM(LM):
  """Implements lm-eval's model interface with LLM.score and LLM.generate, which get all requests of a call at once."""

  def __init__(
    self,
    model: str = "demo",
    add_bos_token: bool = True,
    batch_size: Any = None,
    max_batch_size: Any = None,
    device: Any = None,
    **settings: Any,
  ):
    """Makes the LLM.

    Args:
      model, settings: the arguments of LLM.
      add_bos_token: whether texts begin with the tokenizer's leading special tokens. lm-eval's own API clients leave
        them out by default.
      batch_size, max_batch_size, device: ignored. lm-eval passes them to every model; the engine's settings decide.
    """
    super().__init__()
    self._llm = LLM(model, **settings)
    self._add_bos_token = add_bos_token
    self.max_length = self._llm.config.max_model_len - 1  # most scored tokens: a request also generates one
    # The token before a text without context.
    self._prefix = self._llm.tokenize("")[:1] or list(self._llm.config.eos_token_ids[:1])

  def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """Returns the log likelihoods of continuations after their contexts; truncates long contexts from the left."""
    pairs = []
    for context, continuation in (request.args for request in requests):
      whole = self._tokenize(context + continuation)
      first = len(self._tokenize(context.rstrip())) if context else 0
      pairs.append((whole[:first] or self._prefix, whole[first:]))
    return self._score(pairs, disable_tqdm)

  def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
    """Returns the log likelihoods of whole texts, in windows if they exceed the model's length."""
    windows, counts = [], []
    for (text,) in (request.args for request in requests):
      rolling = utils.get_rolling_token_windows(
        token_list=self._tokenize(text),
        prefix_token=self._prefix[0],
        max_seq_len=self.max_length - 1,
        context_len=1,
      )
      found = [utils.make_disjoint_window(window) for window in rolling]
      windows += found
      counts.append(len(found))
    scores = iter(self._score(windows, disable_tqdm))
    return [sum(next(scores)[0] for _ in range(count)) for count in counts]

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """Returns generated texts up to the task's stop strings; greedy unless the task samples."""
    prompts, params = [], []
    for context, wanted in (request.args for request in requests):
      params.append(_sampling_params(wanted))
      longest = self._llm.config.max_model_len - params[-1].max_tokens
      prompts.append(self._tokenize(context)[-longest:])
    outputs = self._llm.generate(prompts, params, progress=False if disable_tqdm else None)
    return [output.text for output in outputs]

  def _tokenize(self, text: str) -> list[int]:
    return self._llm.tokenize(text, add_special_tokens=self._add_bos_token)

  def _score(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[tuple[float, bool]]:
    contexts = [context[-max(1, self.max_length - len(continuation)) :] for context, continuation in pairs]
    progress = False if disable_tqdm else None
    scores = self._llm.score(contexts, [continuation for _, continuation in pairs], progress=progress)
    return [(score.total, score.is_greedy) for score in scores]


def _sampling_params(wanted: Mapping[str, Any]) -> SamplingParams:
  """Returns the sampling parameters for a task's generation_kwargs."""
  until = wanted.get("until") or None
  samples = wanted.get("do_sample", wanted.get("temperature", 0.0) > 0)
  return SamplingParams(
    max_tokens=wanted.get("max_gen_toks", _MAX_GEN_TOKS),
    stop=until,
    temperature=wanted.get("temperature", 1.0) if samples else 0.0,
    top_p=wanted.get("top_p"),
    top_k=wanted.get("top_k"),
  )


if __name__ == "__main__":
  from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

  cli_evaluate()
