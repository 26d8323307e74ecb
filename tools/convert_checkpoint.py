"""Converts a Hugging Face folder to Sluice's own (Orbax): smaller in files, checked by digests, ready to be sharded.

python -m tools.convert_checkpoint --input=HF_FOLDER --output=NEW_FOLDER --dtype=bfloat16
"""

import pathlib
import sys

from absl import app, flags
import jax

from engine.device import orbax_folder
from engine.device.mesh import make_mesh
from engine.device.weights import load_checkpoint, parameter_name
from engine.errors import ConfigError

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


def convert(source: pathlib.Path, output: pathlib.Path, dtype: str, name: str | None = None) -> None:
  """Writes `output`, which must not exist, from `source`, a model folder of either kind.

  Args:
    dtype: of the stored weights, bfloat16 or float32.
    name: of the model; none is the name it is loaded under.
  """
  model = load_checkpoint(str(source), make_mesh(jax.devices("cpu")[:1]), dtype)
  params = {parameter_name(path): leaf for path, leaf in jax.tree.leaves_with_path(model.params)}
  companions = tuple(source / file for file in COMPANIONS if (source / file).is_file())
  orbax_folder.save(output, params, name or model.name, companions)


def main(argv: list[str]) -> None:
  """The command line."""
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; flags are written --name=value")
  output = pathlib.Path(_OUTPUT.value)
  try:
    convert(pathlib.Path(_INPUT.value), output, _DTYPE.value, _NAME.value)
  except ConfigError as error:
    sys.exit(str(error))
  files = [file for file in output.rglob("*") if file.is_file()]
  print(f"{output}: {sum(file.stat().st_size for file in files) / 1e6:.2f} MB in {len(files)} files, {_DTYPE.value}")


if __name__ == "__main__":
  _INPUT = flags.DEFINE_string("input", None, "model folder to read", required=True)
  _OUTPUT = flags.DEFINE_string("output", None, "folder to write; must not exist", required=True)
  _DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of the stored weights")
  _NAME = flags.DEFINE_string("name", None, "the model's name; default: the input folder's")
  jax.config.update("jax_platforms", "cpu")
  app.run(main)
