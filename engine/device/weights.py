"""Model folders to parameters on their shardings, one tensor at a time. Decides no shape and no sharding of its own.

Two kinds of folder are read: Hugging Face's (config.json and safetensors) and Sluice's (engine/device/orbax_folder.py).
Everything that can be wrong is looked for before the first array is made; pickled weights are never opened, nor files
that lie elsewhere than in the folder.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import json
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from engine.device import orbax_folder
from engine.device.file_checksums import SUMS, read_sums, verify_sum
from engine.device.mesh import shardings
from engine.device.safetensors_file import StoredTensor, read_header
from engine.errors import CheckpointError, ConfigError
from engine.model_folder import leads_outside
from models.config import ModelConfig
from models.families.keys import unknown_keys
from models.families.tensor_map import Piece
from models.linear import PLAIN, WeightForm, arranger, stored_name
from models.registry import abstract, config_from_hf, refuse_uncomputed, tensors

_MOST_NAMED = 20  # unknown keys in one line
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model ready to be merged and run.

  Attributes:
    params: every leaf is an array on its sharding.
    eos_token_ids: from generation_config.json, else config.json, else none.
    warnings: what the user should know about the folder, a line each.
  """

  config: ModelConfig
  graphdef: nnx.GraphDef
  params: nnx.State
  eos_token_ids: tuple[int, ...]
  name: str
  warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model folder that was looked through, of whose weights nothing has been read.

  Attributes:
    declared: what `load` will give, but every leaf of params is a jax.ShapeDtypeStruct with its sharding.
    kept: those leaves by parameter name, in the tree's order.
    stored_dtypes: in which the folder holds the weights, by their JAX names, sorted; () for random ones.
    load: reads them straight to their shardings. Host memory above the parameters themselves: about one tensor (Hugging
      Face) or a gibibyte in flight (Orbax). Raises CheckpointError.
  """

  declared: LoadedModel
  kept: dict[str, jax.ShapeDtypeStruct]
  stored_dtypes: tuple[str, ...]
  load: Callable[[], LoadedModel]


def open_checkpoint(
  path: str,
  mesh: jax.sharding.Mesh,
  dtype: DTypeLike,
  form: WeightForm = PLAIN,
  random_weights: bool = False,
  num_token_ids: int = 0,
) -> Checkpoint:
  """Looks through a model folder of either kind.

  Args:
    path: the folder.
    mesh: as made by engine.device.mesh.make_mesh.
    dtype: of the parameters on the device, bfloat16 or float32, whatever the file holds.
    form: how matrices are held; each is brought into it before the next is read (all before any, of a Sluice folder).
    random_weights: draw them on the devices, always the same ones; of the folder only config.json is read.
    num_token_ids: ids that the tokenizer makes; 0: there is none.

  Raises:
    CheckpointError: names the file, and the tensor where there is one.
    ConfigError: dtype is another.
  """
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.bfloat16, jnp.float32):
    raise ConfigError(f"dtype={dtype.name} is not supported; choose bfloat16 or float32")
  folder = pathlib.Path(path)
  if not folder.is_dir():
    raise CheckpointError(
      f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}; --model takes a "
      "Hugging Face or Sluice model folder"
    )
  is_orbax = orbax_folder.is_one(folder) and not random_weights
  marker = orbax_folder.verify(folder) if is_orbax else {}
  raw = _read_json(folder / "config.json")
  try:
    config = config_from_hf(raw)
    refuse_uncomputed(config)
  except ValueError as error:
    raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
  if num_token_ids > config.vocab_size:
    raise CheckpointError(
      f"{folder / 'config.json'}: vocab_size={config.vocab_size}, but tokenizer.json makes ids up to "
      f"{num_token_ids - 1}; they do not belong together"
    )
  eos_token_ids = _eos_token_ids(folder, raw, config.vocab_size)
  stored = {} if is_orbax or random_weights else _checked_tensors(folder, config)
  stored_dtypes = {marker["dtype"]} if is_orbax else set()
  if stored:
    stored_dtypes = {stored[piece.name].numpy_dtype.name for pieces in tensors(config).values() for piece in pieces}
  wanted = _declared(mesh, abstract(config, dtype)[1])
  graphdef, state = abstract(config, dtype, form)
  kept = _declared(mesh, state)
  arrange = arranger(nnx.merge(graphdef, state))
  declared = LoadedModel(
    config=config,
    graphdef=graphdef,
    params=jax.tree.unflatten(jax.tree.structure(state), list(kept.values())),
    eos_token_ids=eos_token_ids,
    name=marker["name"] if is_orbax else folder.resolve().name,
    warnings=_unknown_keys_warning(raw),
  )

  def load() -> LoadedModel:
    if random_weights:
      arrays = _draw(config, wanted)
    elif is_orbax:
      arrays = _restored(folder, wanted)
    else:
      arrays = _load_safetensors(stored, config, wanted, form.is_made_on_host)
    held: dict[str, jax.Array] = {}
    for name, array in arrays:
      for made, value in arrange(name, array).items():
        held[made] = jax.device_put(value, kept[made].sharding).block_until_ready()
    leaves = [held[name] for name in kept]
    return dataclasses.replace(declared, params=jax.tree.unflatten(jax.tree.structure(state), leaves))

  return Checkpoint(declared, kept, tuple(sorted(stored_dtypes)), load)


def _declared(mesh: jax.sharding.Mesh, state: nnx.State) -> dict[str, jax.ShapeDtypeStruct]:
  """The leaves by name, in the tree's order, each with its sharding."""
  return {
    parameter_name(key): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    for (key, leaf), sharding in zip(
      jax.tree.leaves_with_path(state), jax.tree.leaves(shardings(mesh, state)), strict=True
    )
  }


def parameter_name(key_path: tuple[Any, ...]) -> str:
  """A leaf's stored name, such as `layers.0.attention.qkv`, from its path in the nnx state."""
  return stored_name(".".join(str(key.key) for key in key_path if isinstance(key, jax.tree_util.DictKey)))


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  try:
    if file.exists():
      refuse_outside(file)
    value = json.loads(file.read_text("utf-8"))
  except FileNotFoundError:
    raise CheckpointError(f"{file}: no such file; a model folder needs one") from None
  except (OSError, ValueError, RecursionError) as error:
    raise CheckpointError(f"{file}: cannot be read as JSON ({error}); copy it again") from error
  if not isinstance(value, dict):
    raise CheckpointError(f"{file}: holds no JSON object; copy it again")
  return value


def _unknown_keys_warning(raw: dict[str, Any]) -> tuple[str, ...]:
  """A line that names the keys of config.json which are on no list; none, where there are none."""
  unknown = unknown_keys(raw)
  if not unknown:
    return ()
  named = [key if key.replace(".", "_").isidentifier() else ascii(key) for key in unknown[:_MOST_NAMED]]
  more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
  return (
    f"config.json keys that Sluice does not know: {', '.join(f'{key:.60}' for key in named)}{more}; it does not read "
    "them, so if one changes what the model computes, the answers are wrong",
  )


def refuse_outside(file: pathlib.Path) -> None:
  """Raises CheckpointError unless the file is a regular one of its folder, or a link into the same download's blobs."""
  found = leads_outside(file)
  if found is not None:
    raise CheckpointError(
      f"{file}: is a link to {found}, outside of its folder; copy the file there, or give --model the folder where it "
      "lies"
    )
  if not file.is_file():
    raise CheckpointError(f"{file}: is no regular file; copy it again")


def _eos_token_ids(folder: pathlib.Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
  file = folder / "generation_config.json"
  source = file if file.is_file() else folder / "config.json"
  value = _read_json(file).get("eos_token_id") if file.is_file() else None
  if value is None:
    source, value = folder / "config.json", raw.get("eos_token_id")
  ids = value if isinstance(value, list) else [] if value is None else [value]
  if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
    raise CheckpointError(
      f"{source}: eos_token_id={value!r:.80} must be a token id or a list of them, from 0 to {vocab_size - 1}"
    )
  return tuple(ids)


def _draw(config: ModelConfig, wanted: dict[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
  """Random parameters, for measuring shapes: matrices keep the variance of their input, so nothing overflows."""
  for number, name in enumerate(sorted(wanted, key=_name_order)):
    leaf = wanted[name]
    if name.endswith(".scale"):
      yield name, jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding)
    else:
      draw = _normal(leaf.shape, leaf.dtype, leaf.sharding, config.model_dim**-0.5)
      yield name, draw(jax.random.key(number)).block_until_ready()


def _name_order(name: str) -> list[tuple[int, str]]:
  """Stored names in an order of their own, layers by number: what is drawn depends on nothing else."""
  return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


@functools.cache
def _normal(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, scale: float) -> Any:
  """A program for each shape, as layers repeat theirs."""
  return jax.jit(lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype), out_shardings=sharding)


def _checked_tensors(folder: pathlib.Path, config: ModelConfig) -> dict[str, StoredTensor]:
  """Where every tensor that the model needs lies. No array is made before: a config may lie.

  Refuses missing, extra and misshapen tensors, and drops nothing but what is known to be redundant.
  """
  if (folder / SUMS).exists():
    for file, digest in read_sums(folder):
      verify_sum(folder, file, digest)
  stored = _find_tensors(folder)
  pieces = {piece.name: piece for parts in tensors(config).values() for piece in parts}
  for name, piece in pieces.items():
    if name not in stored:
      raise CheckpointError(
        f"{folder}: tensor {name} of shape {list(piece.shape)} is missing from the checkpoint; "
        "config.json and the weights do not belong together, or a file was left out"
      )
    tensor = stored[name]
    if tensor.shape != piece.shape:
      raise CheckpointError(
        f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, but config.json asks for "
        f"{list(piece.shape)}; they do not belong together"
      )
    tensor.check_dtype()
  extra = sorted(set(stored) - set(pieces))
  # Old checkpoints store rope's frequencies, which follow from config.json.
  extra = [name for name in extra if not name.endswith(".rotary_emb.inv_freq")]
  if config.tie_embeddings and "lm_head.weight" in extra:
    head, embed = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    if head.shape != embed.shape or head.dtype != embed.dtype or not np.array_equal(head.map(), embed.map()):
      raise CheckpointError(
        f"{head.file}: tensor lm_head.weight differs from {embed.name}, but config.json says "
        "tie_word_embeddings=true; correct one of them"
      )
    extra.remove("lm_head.weight")
  if extra:
    raise CheckpointError(
      f"{stored[extra[0]].file}: tensor {extra[0]} is not part of a {config.family} model"
      f"{f', nor are {len(extra) - 1} others' if len(extra) > 1 else ''}; config.json and the "
      "weights do not belong together"
    )
  return stored


def _restored(folder: pathlib.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
  arrays = orbax_folder.load(folder, wanted)
  while arrays:  # one goes before the next is brought into its form
    yield arrays.popitem()


def _load_safetensors(
  stored: dict[str, StoredTensor], config: ModelConfig, wanted: dict[str, jax.ShapeDtypeStruct], on_host: bool
) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
  """on_host: what is given need not be the device's yet; if it can, it stays mapped, read-only, in the file."""
  pieces_of = tensors(config)
  for name, leaf in wanted.items():
    pieces = pieces_of[name]
    read = functools.partial(_assemble, pieces, stored, leaf.shape, leaf.dtype)
    if not on_host:
      # Waiting keeps one tensor in flight: a queue of transfers would hold the whole model in host memory.
      yield name, jax.make_array_from_callback(leaf.shape, leaf.sharding, read).block_until_ready()
    elif len(pieces) == 1 and (tensor := stored[pieces[0].name].map()).dtype == leaf.dtype:
      _check_finite(tensor, pieces, stored)
      yield name, _mapped(pieces[0], stored)
    else:
      yield name, read((slice(None),) * len(leaf.shape))


def _find_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Every tensor of the folder's safetensors files; model.safetensors goes before an index, as in transformers."""
  if (folder / _SINGLE).exists():
    refuse_outside(folder / _SINGLE)
    return read_header(folder / _SINGLE)
  index = folder / _INDEX
  if not index.exists():
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt") for file in folder.glob(kind))
    if pickles:
      raise CheckpointError(
        f"{folder / pickles[0]}: a pickled checkpoint can run code when it is opened, so Sluice "
        "never does; save the model again as safetensors"
      )
    raise CheckpointError(
      f"{folder}: holds neither {_SINGLE} nor {_INDEX} nor {orbax_folder.MARKER}; it is no model folder"
    )
  weight_map = _read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
    raise CheckpointError(f"{index}: weight_map must map tensor names to file names; copy the file again")
  stored: dict[str, StoredTensor] = {}
  files = sorted(set(weight_map.values()))
  for file in files:
    if pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
      raise CheckpointError(f"{index}: weight_map names {file!r}; only safetensors files beside the index are read")
  for file in files:
    if (folder / file).exists():
      refuse_outside(folder / file)
    for name, tensor in read_header(folder / file).items():
      if weight_map.get(name) != file:
        raise CheckpointError(
          f"{folder / file}: tensor {name} is here, but {_INDEX} has it in {weight_map.get(name)}; "
          "the shards are of different checkpoints: copy them again"
        )
      stored[name] = tensor
  for name, file in weight_map.items():
    if name not in stored:
      raise CheckpointError(f"{folder / file}: tensor {name} is missing, though {_INDEX} lists it; copy the file again")
  return stored


def _assemble(
  pieces: tuple[Piece, ...],
  stored: dict[str, StoredTensor],
  shape: tuple[int, ...],
  dtype: np.dtype,
  index: tuple[slice, ...] | None,
) -> np.ndarray:
  """One device's part of a parameter; reads only that part of the file.

  Args:
    pieces: what the parameter of `shape` is made of, without gaps or overlaps, all in one order.
  """
  assert index is not None  # JAX's type allows it, for arrays that are none
  order, parts = pieces[0].order, [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
  # In memory as the file has it: lines are copied whole, and who needs another order has to go over it all anyway.
  lines = np.empty([len(parts[order.index(axis)]) for axis in range(len(order))], dtype)
  out = lines.transpose(order)
  used = []
  for piece in pieces:
    boxes = [range(box.start, box.stop) for box in piece.box()]
    # What lies both in the piece's box and in the device's part, in the parameter's own indices.
    both = [range(max(box.start, part.start), min(box.stop, part.stop)) for box, part in zip(boxes, parts, strict=True)]
    if all(both):
      used.append(piece)
      out[_within(both, parts)] = _mapped(piece, stored)[_within(both, boxes)]
  _check_finite(lines, tuple(used), stored)
  return out


def _within(inner: list[range], outer: list[range]) -> tuple[slice, ...]:
  """Where `inner` lies, counted from the start of `outer`."""
  return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))


def _mapped(piece: Piece, stored: dict[str, StoredTensor]) -> np.ndarray:
  """A piece in the parameter's order, where it lies in the file."""
  return stored[piece.name].map().reshape(piece.split).transpose(piece.order)


def _check_finite(values: np.ndarray, pieces: tuple[Piece, ...], stored: dict[str, StoredTensor]) -> None:
  """Raises CheckpointError, with names, where `values`, contiguous and made of the pieces, hold NaN or Inf.

  Such a number has an exponent of ones. By bits, since ml_dtypes' own test of bfloat16 is many times slower.
  """
  kind, mask = (np.uint32, 0x7F80_0000) if values.dtype.itemsize == 4 else (np.uint16, 0x7F80)
  bits, chunk = values.reshape(-1).view(kind), 1 << 20
  for start in range(0, bits.size, chunk):
    if ((bits[start : start + chunk] & kind(mask)) == kind(mask)).any():
      bad = [piece.name for piece in pieces if not np.isfinite(stored[piece.name].map().astype(np.float32)).all()]
      raise CheckpointError(
        f"{stored[pieces[0].name].file}: tensor {' and '.join(bad)} holds NaN or Inf; the file is corrupt: copy it "
        "again"
      )
