"""What an LLM returns, in plain values. Runs nothing."""

from collections.abc import Sequence
import dataclasses

from server.client import Completion, Ending, Prompt, read_ending
from server.generation.generations import Generation
from server.proto import sluice_pb2 as pb


@dataclasses.dataclass(frozen=True)
class RequestOutput:
  """All outputs of one prompt.

  Attributes:
    prompt: as it was given: text, token ids or chat messages.
    prompt_token_ids: what the model read.
    outputs: one for each of n.
    prompt_logprobs: where asked for, one entry for each token of the prompt from the second on.
  """

  prompt: Prompt
  prompt_token_ids: tuple[int, ...]
  outputs: tuple[Completion, ...]
  prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()

  @property
  def text(self) -> str:
    """Of the first output."""
    return self.outputs[0].text

  @property
  def token_ids(self) -> tuple[int, ...]:
    """Of the first output."""
    return self.outputs[0].token_ids

  @property
  def logprobs(self) -> tuple[pb.TokenLogprobs, ...]:
    """Of the first output, an entry a token, where asked for."""
    return self.outputs[0].logprobs

  @property
  def ending(self) -> Ending:
    """Of the first output."""
    return self.outputs[0].ending


@dataclasses.dataclass(frozen=True)
class Score:
  """How likely a model finds tokens, each after all before it.

  Attributes:
    token_ids: the tokens that are scored.
    logprobs: natural logarithms, one a token.
    is_greedy: each of them is the model's most likely token there.
  """

  token_ids: tuple[int, ...]
  logprobs: tuple[float, ...]
  is_greedy: bool

  @property
  def total(self) -> float:
    """The log likelihood of all of them together."""
    return sum(self.logprobs)


def read_outputs(prompt: Prompt, prompt_token_ids: Sequence[int], generation: Generation) -> RequestOutput:
  """Everything that a generation which has finished brought."""
  deltas = [output.delta for output in generation.outputs]
  completions = []
  for output, delta in zip(generation.outputs, deltas, strict=True):
    assert output.finished is not None, "an output that has no ending"
    completions.append(
      Completion(delta.text, tuple(delta.token_ids), tuple(delta.logprobs), read_ending(output.finished))
    )
  return RequestOutput(prompt, tuple(prompt_token_ids), tuple(completions), tuple(deltas[0].prompt_logprobs))


def read_score(output: RequestOutput, first: int) -> Score:
  """Of the prompt's tokens from `first` on, which is at least 1: nothing comes before the first token.

  The output must have been asked for with prompt_logprobs of at least 1.
  """
  entries = output.prompt_logprobs[first - 1 :]
  return Score(
    token_ids=tuple(entry.token_id for entry in entries),
    logprobs=tuple(entry.logprob for entry in entries),
    is_greedy=all(entry.top[0].token_id == entry.token_id for entry in entries),
  )
