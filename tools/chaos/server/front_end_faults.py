"""The front end's points of fault injection, and the plan's way in; see tools/chaos/server/faults.py."""

from collections.abc import Awaitable, Callable
import functools
import pathlib
from typing import Any

from engine.errors import ConfigError
from server.generation.generations import Generation, Generations
from server.generation.request_validation import GenerationCall
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer
from tools.chaos.server.faults import FaultPlan, Injector


def load_plan(path: str) -> FaultPlan:
  """The plan in a file. Raises ConfigError."""
  try:
    text = pathlib.Path(path).read_text("utf-8")
  except (OSError, UnicodeError) as error:
    why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
    raise ConfigError(f"fault_plan={path} cannot be read: {why}; set --fault_plan to a file") from None
  return FaultPlan.parse(text, f"fault_plan={path}")


def inject_front_end(generations: Generations, tokenizer: Tokenizer | None, injector: Injector) -> None:
  """Puts the points of a front end in place. Before it serves."""
  start = generations.start_generation

  def faulty_start(call: GenerationCall, *arguments: Any, **more: Any) -> Awaitable[Generation]:
    injector.request_id = call.request_id  # start() makes its outputs before it first waits
    return start(call, *arguments, **more)

  generations.start_generation = faulty_start  # type: ignore[method-assign]
  if tokenizer is None:
    return
  encode, encode_chat, detokenizer = tokenizer.encode, tokenizer.encode_chat, tokenizer.detokenizer

  def faulty_detokenizer(**options: Any) -> Detokenizer:
    made = detokenizer(**options)
    made.push = _before(made.push, functools.partial(injector.hit_point, "detokenize", injector.request_id))
    return made

  tokenize = functools.partial(injector.hit_point, "tokenize")
  tokenizer.encode = _before(encode, tokenize)
  tokenizer.encode_chat = _before(encode_chat, tokenize)
  tokenizer.detokenizer = faulty_detokenizer


def _before(work: Callable[..., Any], first: Callable[[], Any]) -> Callable[..., Any]:
  @functools.wraps(work)
  def both(*arguments: Any, **more: Any) -> Any:
    first()
    return work(*arguments, **more)

  return both
