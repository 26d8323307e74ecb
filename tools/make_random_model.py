"""Writes a Hugging Face folder with random weights from a seed: for tests, parity and benchmarks. No tokenizer.

  python -m tools.make_random_model --output=/tmp/llama-125m --family=llama --num_layers=12 --model_dim=768 \
    --num_heads=12 --num_kv_heads=4 --hidden_dim=2048 --vocab_size=32000 --dtype=float32
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
import json
import multiprocessing
import pathlib
import sys
from typing import Any
import zlib

from absl import app, flags
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from engine.errors import ConfigError
from models.config import ModelConfig
from models.families.tensor_map import Piece
from models.registry import FAMILIES, config_from_hf, tensors
from tools.arguments import parse_flags

SHAPES = pathlib.Path(__file__).resolve().parent.parent / "models" / "shapes"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def read_shape(name: str) -> dict[str, Any]:
  """Returns the config.json of a folder of models/shapes. Raises ConfigError for an unknown name."""
  names = sorted(path.name for path in SHAPES.iterdir() if (path / "config.json").is_file())
  if name not in names:
    raise ConfigError(f"shape={name!r} is unknown; use one of {', '.join(names)}")
  return json.loads((SHAPES / name / "config.json").read_text("utf-8"))


def find_bench_model(name: str) -> tuple[pathlib.Path, bool]:
  """Returns the folder of a model to measure, and whether it has only a shape, so that its weights must be random.

  Args: name: a folder of models/shapes, demo or demo_draft.

  Raises:
    ConfigError: the name is unknown.
  """
  if name in ("demo", "demo_draft"):
    return SHAPES.parent / name, False
  read_shape(name)
  return SHAPES / name, True


def random_tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  """Returns one float32 tensor, scaled so that activations keep their size over layers and no two logits nearly tie.

  The values depend on seed, name and shape alone, not on the order of tensors or the number of files. A matrix keeps
  the variance of its input. The head, on a normed input, spreads logits by about 4, so greedy gaps (a few hundredths
  and more) are far above float32 noise. Norm weights lie around one and biases around zero, so that a test notices a
  swapped or missing one.
  """
  values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
  if name.endswith("norm.weight"):
    return 1.0 + 0.2 * values
  if name.endswith(".bias"):
    return 0.5 * values
  if name == "model.embed_tokens.weight":
    return values * (4.0 * config.model_dim**-0.5 if config.tie_embeddings else 1.0)
  return values * (shape[-1] ** -0.5 * (4.0 if name == "lm_head.weight" else 1.0))


def _write_shard(file: pathlib.Path, config: ModelConfig, pieces: Sequence[Piece], seed: int, dtype: str) -> int:
  """Writes a shard; returns its size in bytes."""
  values = {
    _stored_name(config, piece): random_tensor(config, piece.name, piece.shape, seed).astype(DTYPES[dtype])
    for piece in pieces
  }
  save_file(values, file, metadata={"format": "pt"})
  return sum(value.nbytes for value in values.values())


def _stored_name(config: ModelConfig, piece: Piece) -> str:
  """Returns a tensor's name in the file; transformers leaves out `model.` where there is no head."""
  is_backbone = not config.has_token_head and config.class_head is None
  return piece.name.removeprefix("model.") if is_backbone else piece.name


def write_model(
  output: pathlib.Path,
  raw: dict[str, Any],
  seed: int,
  dtype: str = "float32",
  num_shards: int = 1,
  num_processes: int = 1,
) -> None:
  """Writes config.json and the weights.

  Args:
    output: a new or empty folder.
    raw: config.json, with Hugging Face's keys.
    seed: seed of all values. The same seed and config give the same bytes.
    dtype: a key of DTYPES.
    num_shards: files of weights; above 1, an index is added.
    num_processes: shards generated at a time.
  """
  config = config_from_hf(raw)
  if output.exists() and any(output.iterdir()):
    raise ConfigError(f"{output}: is not empty; set --output to a new or empty folder")
  output.mkdir(parents=True, exist_ok=True)
  pieces = [piece for parts in tensors(config).values() for piece in parts]
  shards = [pieces[start::num_shards] for start in range(num_shards)]
  single = num_shards == 1
  files = [
    "model.safetensors" if single else f"model-{n:05d}-of-{num_shards:05d}.safetensors"
    for n in range(1, num_shards + 1)
  ]
  write = [(output / file, config, shard, seed, dtype) for file, shard in zip(files, shards, strict=True)]
  if num_processes > 1:
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
      total = sum(pool.map(_write_shard, *zip(*write, strict=True)))
  else:
    total = sum(_write_shard(*each) for each in write)
  weight_map = {_stored_name(config, piece): file for file, shard in zip(files, shards, strict=True) for piece in shard}
  if num_shards > 1:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
  (output / "config.json").write_text(json.dumps({**raw, "torch_dtype": dtype}, indent=1) + "\n", "utf-8")


def family_config(family: str, sliding_window: int | None, **sizes: Any) -> dict[str, Any]:
  """Returns a family's config.json. `sizes` has its keys; `window` is in tokens, None for the family's own."""
  config = {
    "architectures": [FAMILIES[family].architecture],
    "model_type": family,
    **sizes,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_pytorch_tanh" if family.startswith("gemma") else "silu",
    "bos_token_id": None,
    "eos_token_id": None,
  }
  # Null means no window, which some layers of a Gemma must have; without the key, they have the family's own.
  if sliding_window is not None or not family.startswith("gemma"):
    config["sliding_window"] = sliding_window
  if family.startswith("qwen"):
    config["use_sliding_window"] = False
  return config


def main(argv: list[str]) -> None:
  """Runs the command line."""
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; flags are written --name=value")
  output, family = pathlib.Path(_OUTPUT.value), _FAMILY.value
  raw = family_config(
    family,
    _SLIDING_WINDOW.value,
    vocab_size=_VOCAB_SIZE.value,
    hidden_size=_MODEL_DIM.value,
    intermediate_size=_HIDDEN_DIM.value,
    num_hidden_layers=_NUM_LAYERS.value,
    num_attention_heads=_NUM_HEADS.value,
    num_key_value_heads=_NUM_KV_HEADS.value,
    head_dim=_HEAD_DIM.value or _MODEL_DIM.value // _NUM_HEADS.value,
    max_position_embeddings=_MAX_POSITION.value,
    rope_theta=_ROPE_THETA.value,
    tie_word_embeddings=_TIE_EMBEDDINGS.value,
  )
  try:
    write_model(output, raw, _SEED.value, _DTYPE.value, _NUM_SHARDS.value)
  except (ConfigError, ValueError) as error:
    sys.exit(str(error))
  size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
  print(
    f"{output}: {family}, {size / 1e6:.1f} MB of {_DTYPE.value} weights in {_NUM_SHARDS.value} file(s), "
    f"seed {_SEED.value}"
  )


if __name__ == "__main__":
  _OUTPUT = flags.DEFINE_string("output", None, "folder to write; must be new or empty", required=True)
  _FAMILY = flags.DEFINE_enum("family", "llama", sorted(FAMILIES), "model family")
  _SEED = flags.DEFINE_integer("seed", 0, "of the weights", lower_bound=0)
  _DTYPE = flags.DEFINE_enum("dtype", "float32", sorted(DTYPES), "of the weights")
  _NUM_SHARDS = flags.DEFINE_integer("num_shards", 1, "safetensors files", lower_bound=1)
  _VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 32_000, "entries", lower_bound=1)
  _NUM_LAYERS = flags.DEFINE_integer("num_layers", 12, "layers", lower_bound=1)
  _MODEL_DIM = flags.DEFINE_integer("model_dim", 768, "width", lower_bound=1)
  _HIDDEN_DIM = flags.DEFINE_integer("hidden_dim", 2048, "width of the feed-forward layer", lower_bound=1)
  _NUM_HEADS = flags.DEFINE_integer("num_heads", 12, "query heads", lower_bound=1)
  _NUM_KV_HEADS = flags.DEFINE_integer("num_kv_heads", 4, "key and value heads", lower_bound=1)
  _HEAD_DIM = flags.DEFINE_integer("head_dim", 0, "head size; 0: width / query heads", lower_bound=0)
  _MAX_POSITION = flags.DEFINE_integer("max_position", 4096, "longest sequence, tokens", lower_bound=1)
  _ROPE_THETA = flags.DEFINE_float("rope_theta", 10_000.0, "base of the rotary frequencies")
  _TIE_EMBEDDINGS = flags.DEFINE_bool("tie_embeddings", False, "share the embedding's weights with the head")
  _SLIDING_WINDOW = flags.DEFINE_integer("sliding_window", None, "tokens in the sliding window; none: the family's own")
  app.run(main, flags_parser=parse_flags)
