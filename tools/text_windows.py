"""Cuts a text into windows of token ids, for perplexity and for calibration. Loads no model."""

from collections.abc import Callable, Sequence

from engine.errors import ConfigError


def cut_windows(encode: Callable[..., Sequence[int]], text: str, num_tokens: int, window: int) -> list[list[int]]:
  """Returns at most `num_tokens` tokens of a text in windows that do not overlap; the last may be short.

  Args:
    encode: a tokenizer's, with `add_special_tokens`. Each window begins with what it adds, such as BOS.
    window: tokens of a window, with those.

  Raises:
    ConfigError: the text has fewer than two tokens, or a window holds none.
  """
  begin = list(encode("", add_special_tokens=True))
  ids = list(encode(text, add_special_tokens=False))[:num_tokens]
  size = window - len(begin)
  if size < 1:
    raise ConfigError(f"window={window} is too short: it must hold more than the {len(begin)} tokens before each text")
  windows = [begin + ids[start : start + size] for start in range(0, len(ids), size)]
  windows = [each for each in windows if len(each) > 1]
  if not windows:
    raise ConfigError(f"the text has {len(ids)} tokens; give a text of at least 2")
  return windows
