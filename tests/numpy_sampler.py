"""A plain numpy sampler in f64, with sorts, against which tests compare the device's sampler and its kernels.

It takes one row of logits at a time and follows the list of steps in engine/device/sampler.py. It may use no other code
of Sluice than SamplingParams.
"""

from collections.abc import Collection, Sequence

import numpy as np

from engine.sampling_params import SamplingParams


def adjust(
  logits: np.ndarray,
  params: SamplingParams,
  prompt: Sequence[int],
  outputs: Sequence[int],
  ends: Collection[int],
  constraint: Collection[int] | None = None,
) -> np.ndarray:
  """Steps 1 to 5: f64[V].

  Args:
    ends: end-of-sequence ids of the model.
    constraint: the tokens that an output constraint allows.
  """
  x = logits.astype(np.float64)
  tokens = np.arange(len(x))
  for allowed in (constraint, params.allowed_token_ids):
    if allowed is not None:
      x[~np.isin(tokens, list(allowed))] = -np.inf
  if len(outputs) < params.min_tokens:
    without = x.copy()
    without[[*params.stop_token_ids, *(() if params.ignore_eos else ends)]] = -np.inf
    x = without if without.max() > -np.inf else x
  for token, bias in params.logit_bias:
    x[token] += bias
  for token in {*prompt, *outputs}:
    x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
  for token in set(outputs):
    x[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
  return x


def truncate(x: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> np.ndarray:
  """Temperature and steps 7 to 9: the sampling weights, f64[V]; 0 for tokens below a threshold.

  Args:
    x: f64[V], the result of `adjust`.
    top_k: 0: no threshold. top_p: 1 or more: no threshold.
  """
  weights = np.exp(np.maximum((x.astype(np.float64) - x.max()) / temperature, -1e4))
  weights[weights < 1e-37] = 0.0
  weights[weights < min_p] = 0.0
  if 0 < top_k < len(weights):
    weights[weights < np.sort(weights)[-top_k]] = 0.0
  if top_p < 1.0:
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order]) >= top_p * weights.sum()
    weights[weights < weights[order[np.argmax(reached)]]] = 0.0
  return weights


def check_sample(weights: np.ndarray, number: float, token: int) -> None:
  """Asserts that `token` is the one at which the cumulative weight passes `number`, but for rounding."""
  assert weights[token] > 0, token
  share = np.cumsum(weights) / weights.sum()
  before = share[token] - weights[token] / weights.sum()
  assert before - 1e-5 <= number <= share[token] + 1e-5, token
