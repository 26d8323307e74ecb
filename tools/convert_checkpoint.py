"""Converts a Hugging Face folder to Sluice's own (Orbax): smaller in files, checked by digests, ready to be sharded.

  python -m tools.convert_checkpoint --input=HF_FOLDER --output=NEW_FOLDER [--dtype=bfloat16]

Weights keep their dtype unless --dtype says otherwise. A Sluice folder has one dtype, bfloat16 or float32: a checkpoint
of several, or of float16, is stored in float32, which holds all of them exactly.
"""

import pathlib
import sys

from absl import app, flags
import jax

from engine.device import orbax_folder
from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint, parameter_name
from engine.errors import ConfigError
from tools.arguments import parse_flags

# Beside the weights: what tokenization, chat and stopping need, and what says where the model is from.
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
  """The dtype, bfloat16 or float32, that holds every weight of a model folder exactly; and why, if it is another."""
  found = open_checkpoint(str(source), make_mesh(jax.devices("cpu")[:1]), "float32").stored_dtypes
  if found == ("bfloat16",) or found == ("float32",):
    return found[0], ""
  return "float32", f"which holds the checkpoint's {' and '.join(found)} exactly"


def convert(source: pathlib.Path, output: pathlib.Path, dtype: str, name: str | None = None) -> None:
  """Writes `output`, which must not exist, from `source`, a model folder of either kind.

  Args:
    dtype: of the stored weights, bfloat16 or float32.
    name: of the model; none is the name it is loaded under.
  """
  model = open_checkpoint(str(source), make_mesh(jax.devices("cpu")[:1]), dtype).load()
  params = {parameter_name(path): leaf for path, leaf in jax.tree.leaves_with_path(model.params)}
  companions = tuple(source / file for file in COMPANIONS if (source / file).is_file())
  orbax_folder.save(output, params, name or model.name, companions)


def main(argv: list[str]) -> None:
  """The command line."""
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; flags are written --name=value")
  source, output = pathlib.Path(_INPUT.value), pathlib.Path(_OUTPUT.value)
  try:
    dtype, reason = (_DTYPE.value, "") if _DTYPE.value else lossless_dtype(source)
    convert(source, output, dtype, _NAME.value)
  except ConfigError as error:
    sys.exit(str(error))
  files = [file for file in output.rglob("*") if file.is_file()]
  size = sum(file.stat().st_size for file in files) / 1e6
  print(f"{output}: {size:.2f} MB in {len(files)} files, {dtype}{f', {reason}' if reason else ''}")


if __name__ == "__main__":
  _INPUT = flags.DEFINE_string("input", None, "model folder to read", required=True)
  _OUTPUT = flags.DEFINE_string("output", None, "folder to write; must not exist", required=True)
  _DTYPE = flags.DEFINE_enum(
    "dtype", None, ["bfloat16", "float32"], "of the stored weights; default: the checkpoint's, float32 for several"
  )
  _NAME = flags.DEFINE_string("name", None, "the model's name; default: the input folder's")
  jax.config.update("jax_platforms", "cpu")
  app.run(main, flags_parser=parse_flags)
