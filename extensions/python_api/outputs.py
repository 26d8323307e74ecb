"""Defines the results of LLM calls as plain values. Runs nothing."""

from collections.abc import Sequence
import dataclasses

from server.client import Completion, Ending, Prompt, read_ending
from server.generation.generations import Generation
from server.proto import sluice_pb2 as pb


@dataclasses.dataclass(frozen=True)
class RequestOutput:
  """All outputs of one prompt.

  Attributes:
    prompt: the caller's text, token ids or chat messages.
    prompt_token_ids: the prompt's token ids, as the model reads them.
    outputs: the n outputs.
    prompt_logprobs: one entry for each prompt token from the second on, if requested.
  """

  prompt: Prompt
  prompt_token_ids: tuple[int, ...]
  outputs: tuple[Completion, ...]
  prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()

  @property
  def text(self) -> str:
    """The text of the first output."""
    return self.outputs[0].text

  @property
  def token_ids(self) -> tuple[int, ...]:
    """The token ids of the first output."""
    return self.outputs[0].token_ids

  @property
  def logprobs(self) -> tuple[pb.TokenLogprobs, ...]:
    """The log probabilities of the first output, one entry for each token, if requested."""
    return self.outputs[0].logprobs

  @property
  def ending(self) -> Ending:
    """The ending of the first output."""
    return self.outputs[0].ending


@dataclasses.dataclass(frozen=True)
class Score:
  """The model's log probabilities of given tokens, each after all tokens before it.

  Attributes:
    token_ids: the scored tokens.
    logprobs: natural log probabilities, one for each token.
    is_greedy: whether each token is the model's most likely one at its position.
  """

  token_ids: tuple[int, ...]
  logprobs: tuple[float, ...]
  is_greedy: bool

  @property
  def total(self) -> float:
    """The log likelihood of the whole sequence."""
    return sum(self.logprobs)


def read_outputs(prompt: Prompt, prompt_token_ids: Sequence[int], generation: Generation) -> RequestOutput:
  """Returns all outputs of a finished generation."""
  deltas = [output.delta for output in generation.outputs]
  completions = []
  for output, delta in zip(generation.outputs, deltas, strict=True):
    assert output.finished is not None, "an output that has no ending"
    completions.append(
      Completion(delta.text, tuple(delta.token_ids), tuple(delta.logprobs), read_ending(output.finished))
    )
  return RequestOutput(prompt, tuple(prompt_token_ids), tuple(completions), tuple(deltas[0].prompt_logprobs))


def read_score(output: RequestOutput, first: int) -> Score:
  """Returns the score of the prompt's tokens from `first` on; `first` is at least 1, since token 0 has no context.

  The request must set prompt_logprobs to at least 1.
  """
  entries = output.prompt_logprobs[first - 1 :]
  return Score(
    token_ids=tuple(entry.token_id for entry in entries),
    logprobs=tuple(entry.logprob for entry in entries),
    is_greedy=all(entry.top[0].token_id == entry.token_id for entry in entries),
  )
