"""Which files are a model folder's own: a download's links are, links of anybody's making are not. Opens none."""

import pathlib


def leads_outside(file: pathlib.Path) -> pathlib.Path | None:
  """Where a file of a folder really lies, if that is neither in the folder nor among the same download's blobs.

  Those are how huggingface_hub keeps what it loads: models--X/snapshots/REVISION/FILE -> models--X/blobs/DIGEST.
  """
  folder, found = file.parent.resolve(), file.resolve()
  home = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
  return None if found.is_relative_to(folder) or found.is_relative_to(home) else found
