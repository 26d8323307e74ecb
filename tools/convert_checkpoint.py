"""Converts a Hugging Face folder to Sluice's own format (Orbax): smaller files, digests, shardable weights.

  python -m tools.convert_checkpoint --input=HF_FOLDER --output=NEW_FOLDER [--dtype=bfloat16]

Weights keep their dtype unless --dtype sets another. A Sluice folder has one dtype, bfloat16 or float32. The tool
stores a checkpoint of float16, or of several dtypes, in float32, which holds every value exactly.
"""

import pathlib
import sys

from absl import app, flags
import jax

from engine.device import orbax_folder
from engine.device.mesh import make_mesh
from engine.device.weights import Checkpoint, open_checkpoint, parameter_name
from engine.errors import ConfigError
from server.model_source.download_watch import DownloadWatch
from server.model_source.resolve_model import resolve_model_folder
from tools.arguments import parse_flags

# Copied beside the weights: files for tokenization, chat and stopping, and the model's origin.
COMPANIONS = (
  "config.json",
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
  "chat_template.json",
  "LICENSE",
  "README.md",
)


def lossless_dtype(source: pathlib.Path) -> tuple[str, str]:
  """Returns the dtype (bfloat16 or float32) that holds every weight exactly, and the reason for a change."""
  found = _open_plain(source, "float32").stored_dtypes
  if found == ("bfloat16",) or found == ("float32",):
    return found[0], ""
  return "float32", f"which holds the checkpoint's {' and '.join(found)} exactly"


def _open_plain(source: pathlib.Path, dtype: str) -> Checkpoint:
  checkpoint = open_checkpoint(str(source), make_mesh(jax.devices("cpu")[:1]), dtype)
  if checkpoint.label:
    raise ConfigError(
      f"{source}: holds quantized weights ({checkpoint.label}), and a Sluice folder holds plain ones; serve the folder "
      "as it is, or convert the plain checkpoint"
    )
  return checkpoint


def convert(source: pathlib.Path, output: pathlib.Path, dtype: str, name: str | None = None) -> None:
  """Writes the model folder `source`, of either kind, to `output`, which must not exist.

  Args:
    dtype: dtype of the stored weights, bfloat16 or float32.
    name: the model's name; empty keeps the name it is loaded under.

  Raises:
    ConfigError: the weights are quantized, or the output exists.
  """
  model = _open_plain(source, dtype).load()
  params = {parameter_name(path): leaf for path, leaf in jax.tree.leaves_with_path(model.params)}
  companions = tuple(source / file for file in COMPANIONS if (source / file).is_file())
  orbax_folder.save_orbax_folder(output, params, name or model.name, companions)


def main(argv: list[str]) -> None:
  """Runs the command line."""
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; flags are written --name=value")
  output = pathlib.Path(_OUTPUT.value)
  try:
    source = resolve_model_folder(_INPUT.value, watch=DownloadWatch(lambda line: print(line, file=sys.stderr)))
    dtype, reason = (_DTYPE.value, "") if _DTYPE.value else lossless_dtype(source)
    convert(source, output, dtype, _NAME.value)
  except ConfigError as error:
    sys.exit(str(error))
  files = [file for file in output.rglob("*") if file.is_file()]
  size = sum(file.stat().st_size for file in files) / 1e6
  print(f"{output}: {size:.2f} MB in {len(files)} files, {dtype}{f', {reason}' if reason else ''}")


if __name__ == "__main__":
  _INPUT = flags.DEFINE_string(
    "input", None, "model to convert: a folder, ORG/NAME, gs://... or s3://...", required=True
  )
  _OUTPUT = flags.DEFINE_string("output", None, "folder to write; must not exist", required=True)
  _DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["bfloat16", "float32"],
    "dtype of the stored weights; default: the checkpoint's, or float32 for several",
  )
  _NAME = flags.DEFINE_string("name", None, "the model's name; default: the input folder's")
  jax.config.update("jax_platforms", "cpu")
  app.run(main, flags_parser=parse_flags)
