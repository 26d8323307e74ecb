"""Checks how a checkpoint pools hidden states into an embedding; Sluice takes the last token's."""

import json
import pathlib

from engine.errors import CheckpointError, ConfigError

_FILE = "1_Pooling/config.json"  # of sentence-transformers
_PREFIX, _LAST_TOKEN = "pooling_mode_", "pooling_mode_lasttoken"


def check_pooling(folder: str) -> None:
  """Accepts a folder that names no pooling, or that of the last token.

  Raises:
    ConfigError: it names another.
    CheckpointError: its file of pooling is broken.
  """
  path = pathlib.Path(folder) / _FILE
  if not path.is_file():
    return
  try:
    modes = json.loads(path.read_text("utf-8"))
    named = sorted(name for name, value in modes.items() if name.startswith(_PREFIX) and value is True)
  except (OSError, ValueError, AttributeError) as error:
    raise CheckpointError(f"{path}: {error}; download the file again") from None
  if named not in ([], [_LAST_TOKEN]):
    modes = ", ".join(name.removeprefix(_PREFIX) for name in named)
    raise ConfigError(
      f"enable_embeddings: {path} names pooling by {modes}, and Sluice has lasttoken alone; serve another model, or "
      "without --enable_embeddings"
    )
