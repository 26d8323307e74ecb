"""Quantizes a model folder to a new folder in the form of compressed-tensors, which Sluice and transformers read.

  python -m tools.quantize --model=DIR --output=NEW_DIR --scheme=int4 [--group_size=32] [--calibration=FILE]

Weights are rounded to the nearest code, by group, a tensor at a time. With a calibration text int4 loses less: channels
with large inputs are scaled first, and the scale of each group is searched by its output error (AWQ, arXiv:2306.00978).
Embeddings, norms and heads keep their dtype. The output appears only when it is complete.
"""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
import sys

import jax
import numpy as np

from engine.errors import ConfigError, EngineError
from server.model_source.download_watch import DownloadWatch
from server.model_source.resolve_model import resolve_model_folder
from server.text.tokenizer import load_tokenizer
from tools.arguments import CommandParser, positive_int
from tools.convert_checkpoint import COMPANIONS
from tools.quantize.calibration import Calibration, calibrate
from tools.quantize.compressed_folder import FolderDraft, PlannedTensor, Scheme
from tools.quantize.rounding import round_matrix
from tools.quantize.source_model import SourceModel, open_source
from tools.text_windows import cut_windows

_GROUP = 32
_WINDOW = 512  # tokens of calibration text that attend to each other


def choose_scheme(name: str, group_size: int | None, has_calibration: bool) -> Scheme:
  """Returns a scheme; raises ConfigError for settings that it does not have."""
  if name == "int4":
    return Scheme(4, group_size or _GROUP)
  if group_size:
    raise ConfigError(f"group_size={group_size} is for int4; {name} has one scale an output: leave out --group_size")
  if has_calibration:
    raise ConfigError(f"--calibration is for int4; 8 bits round without it: leave it out with --scheme={name}")
  return Scheme(8, quantizes_activations=name == "w8a8")


def check_groups(source: SourceModel, scheme: Scheme) -> None:
  """Raises ConfigError with the first matrix whose inputs the group size does not divide."""
  for name in source.linear_names():
    _, inputs = source.tensors[name].shape
    if inputs % scheme.group_of(inputs):
      fits = [str(size) for size in (16, 32, 64, 128, 256) if not inputs % size]
      remedy = f", such as {', '.join(fits)}" if fits else ""
      raise ConfigError(
        f"group_size={scheme.group} does not divide the {inputs} inputs of tensor {name}; set --group_size to a "
        f"divisor of {inputs}{remedy}"
      )


def read_windows(folder: pathlib.Path, file: str, num_tokens: int) -> list[list[int]]:
  """Returns the calibration text as token ids in windows; raises ConfigError if there is no tokenizer or no text."""
  try:
    text = pathlib.Path(file).read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"calibration={file} cannot be read ({error}); give a file of UTF-8 text") from error
  tokenizer = load_tokenizer(folder, max_prompt_bytes=len(text.encode()) + 1)
  if tokenizer is None:
    raise ConfigError(f"{folder}: holds no tokenizer.json, which --calibration needs; copy it from the model's source")
  return cut_windows(tokenizer.encode, text, num_tokens, _WINDOW)


def plan_files(source: SourceModel, scheme: Scheme) -> dict[str, list[PlannedTensor]]:
  """Returns the tensors to write, in files of the source's names."""
  files: dict[str, list[PlannedTensor]] = {}
  linear = set(source.linear_names())
  for name, tensor in source.tensors.items():
    planned = files.setdefault(tensor.file, [])
    if name not in linear:
      planned.append(PlannedTensor(tensor.stored_name, tensor.dtype, tensor.shape))
      continue
    layer = tensor.stored_name.removesuffix("weight")
    planned += [
      PlannedTensor(layer + suffix, dtype, shape)
      for suffix, dtype, shape in scheme.stored_shapes(tensor.shape, tensor.dtype)
    ]
  return files


def make_values(source: SourceModel, scheme: Scheme, calibration: Calibration) -> Iterator[np.ndarray]:
  """Yields the values of `plan_files`, one source tensor after the other."""
  linear = set(source.linear_names())
  for name, tensor in source.tensors.items():
    value = tensor.read()
    if name in linear:
      exact = calibration.change(name, value.astype(np.float32))
      group, dtype = scheme.group_of(value.shape[1]), scheme.scale_dtype(tensor.dtype)
      yield from scheme.store(*round_matrix(exact, scheme.bits, group, dtype, calibration.moments.get(name)))
    elif name in calibration.norms or name in calibration.outputs:
      yield calibration.change(name, value.astype(np.float32)).astype(tensor.dtype)
    else:
      yield value


def quantize_folder(
  folder: pathlib.Path, output: pathlib.Path, scheme: Scheme, calibration_file: str = "", num_tokens: int = 8192
) -> int:
  """Writes the quantized model; returns the bytes of its tensors.

  Raises:
    ConfigError: the output exists or cannot be written, the model is quantized, or the group size does not fit.
    CheckpointError: Sluice cannot serve the model, or writing failed. Nothing is left under the output's name.
  """
  with FolderDraft(output) as draft:
    source = open_source(folder)
    check_groups(source, scheme)
    calibration = Calibration()
    if calibration_file:
      calibration = calibrate(source, read_windows(folder, calibration_file, num_tokens), scheme)
    heads = ["score"] if source.config.class_head is not None else ["lm_head"]
    companions = [folder / file for file in COMPANIONS[1:] if (folder / file).is_file()]
    draft.write_config(source.raw | {"quantization_config": scheme.describe(heads)}, companions)
    num_bytes = draft.write_weights(plan_files(source, scheme), make_values(source, scheme, calibration))
    draft.publish()
  return num_bytes


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 after one line about a model or setting that does not fit."""
  parser = CommandParser("tools.quantize", __doc__)
  parser.add_argument("--model", required=True, help="plain model: a folder, ORG/NAME, gs://... or s3://...")
  parser.add_argument("--output", required=True, help="folder to write; must not exist")
  parser.add_argument("--scheme", required=True, choices=("int4", "int8", "w8a8"), help="form of the weights")
  parser.add_argument("--group_size", type=positive_int, help=f"inputs that share a scale, of int4 ({_GROUP})")
  parser.add_argument("--calibration", default="", help="file of text like the model's use, for int4; empty: none")
  parser.add_argument("--calibration_tokens", type=positive_int, default=8192, help="most tokens of it to use")
  args = parser.parse_args(argv)
  try:
    with contextlib.redirect_stdout(sys.stderr):
      scheme = choose_scheme(args.scheme, args.group_size, bool(args.calibration))
      folder = resolve_model_folder(args.model, watch=DownloadWatch(lambda line: print(line, file=sys.stderr)))
      output = pathlib.Path(args.output)
      num_bytes = quantize_folder(folder, output, scheme, args.calibration, args.calibration_tokens)
  except EngineError as error:
    return parser.failed(error, 1)
  grouping = f" by groups of {scheme.group}" if scheme.group else ""
  print(f"{output}: {num_bytes / 1e6:.2f} MB of tensors, {args.scheme}{grouping}")
  return 0


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  sys.exit(main())
