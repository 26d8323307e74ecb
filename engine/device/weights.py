"""Loads model folders to sharded parameters, one tensor at a time. May not choose shapes or shardings.

It reads two kinds of folder: Hugging Face's (config.json with safetensors or a GGUF file; engine/device/formats reads
quantized ones) and Sluice's (engine/device/orbax_folder.py).
It checks the folder before it makes the first array. It never opens pickled weights, or files outside the folder.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import itertools
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
from engine.device.formats.gguf_folder import open_gguf
from engine.device.formats.quantized_source import QuantizedSource, open_quantized
from engine.device.mesh import AXIS, num_shares, place_array, spread_params
from engine.device.safetensors_file import StoredTensor, read_header
from engine.device.weight_shares import Arrange, Load, ShareReader, parameter_axes, place_whole, run_loads
from engine.errors import CheckpointError, ConfigError
from engine.model_folder import INDEX, SINGLE, check_model_folder, find_gguf, leads_outside, name_of_model
from models.config import ModelConfig
from models.families.keys import unknown_keys
from models.families.tensor_map import Piece
from models.linear import arranger, stored_name
from models.registry import abstract, config_from_hf, refuse_uncomputed, tensors
from models.split import ModelSplit
from models.weight_form import BFLOAT16_MATRIX, PLAIN, PLAIN_MATRIX, UnsupportedForm, WeightForm

_MOST_NAMED = 20  # most unknown keys in one warning
_BACKBONE, _HEADS = "model.", ("lm_head.weight", "score.weight")  # names of tensors begin so, or are these
_EMBEDDING = "model.embed_tokens.weight"
_LOAD_THREADS = 2  # that pack parameters; more would hold more plain ones at a time
_RANDOM_WARNING = "config.json: quantization_config does not apply to random weights; --quantization sets their form"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A loaded model.

  Attributes:
    params: every leaf is an array with its sharding.
    eos_token_ids: from generation_config.json, else config.json, else ().
    warnings: warnings about the folder, a line each.
    num_bytes_read: bytes of tensors that this host read from safetensors files.
  """

  config: ModelConfig
  graphdef: nnx.GraphDef
  params: nnx.State
  eos_token_ids: tuple[int, ...]
  name: str
  warnings: tuple[str, ...] = ()
  num_bytes_read: int = 0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checked model folder whose weights are not read yet.

  Attributes:
    declared: the result of `load` with a jax.ShapeDtypeStruct and sharding for every leaf of params.
    kept: those leaves by parameter name, in the tree's order.
    stored_dtypes: JAX names of the weights' dtypes in the folder, sorted; () for random weights.
    num_parameters: number of parameters of the plain model.
    form: representation of the weights in memory.
    label: what a folder of low-precision weights holds; "" for another.
    is_requantizable: whether all its matrices become plain ones, which may take any other form.
    has_codes: whether it holds matrices of codes by group, which only the packed matmul multiplies as they are.
    load: reads the weights to their shardings and calls its optional argument with the bytes loaded so far. Besides the
      parameters it needs host memory for about one tensor (Hugging Face) or one gibibyte (Orbax). Raises
      CheckpointError.
  """

  declared: LoadedModel
  kept: dict[str, jax.ShapeDtypeStruct]
  stored_dtypes: tuple[str, ...]
  num_parameters: int
  load: Callable[..., LoadedModel]
  form: WeightForm
  label: str = ""
  is_requantizable: bool = True
  has_codes: bool = False


def open_checkpoint(
  path: str,
  mesh: jax.sharding.Mesh,
  dtype: DTypeLike,
  form: WeightForm = PLAIN,
  random_weights: bool = False,
  num_token_ids: int = 0,
) -> Checkpoint:
  """Opens and checks a model folder of either kind.

  Args:
    path: the folder.
    mesh: result of engine.device.mesh.make_mesh.
    dtype: dtype of the parameters on the device, bfloat16, float16 or float32; the file's may differ.
    form: representation of matrices; those of a low-precision folder have their own, unless all become plain. The
      loader converts each matrix before it reads the next (Sluice folder: after all).
    random_weights: generates fixed random weights on the devices; reads only config.json.
    num_token_ids: ids of the tokenizer; 0: there is no tokenizer.

  Raises:
    CheckpointError: with the file and, if any, the tensor.
    ConfigError: the dtype is not supported, or a matrix cannot have the form.
  """
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise ConfigError(f"dtype={dtype.name} is not supported; choose bfloat16, float16 or float32")
  folder = pathlib.Path(path)
  check_model_folder(folder, needs_weights=not random_weights)
  is_orbax = orbax_folder.is_orbax_folder(folder) and not random_weights
  marker = orbax_folder.verify_orbax_folder(folder) if is_orbax else {}
  raw = read_json_object(folder / "config.json")
  if is_orbax and raw.get("quantization_config"):
    raise CheckpointError(
      f"{folder / 'config.json'}: quantization_config is not supported in a Sluice folder, whose weights are plain; "
      "convert a plain checkpoint"
    )
  try:
    config = config_from_hf(raw)
    refuse_uncomputed(config)
  except ValueError as error:
    raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
  if num_token_ids > config.vocab_size:
    raise CheckpointError(
      f"{folder / 'config.json'}: vocab_size={config.vocab_size}, but tokenizer.json has ids up to "
      f"{num_token_ids - 1}; use files of one model"
    )
  eos_token_ids = _eos_token_ids(folder, raw, config.vocab_size)
  source: QuantizedSource | None = None
  stored: dict[str, StoredTensor] = {}
  if not is_orbax and not random_weights:
    verify_folder_sums(folder)
    if (gguf := find_gguf(folder)) is not None:
      refuse_outside(gguf)
      stored, source = open_gguf(gguf, config, tensors(config))
    else:
      stored, is_backbone = _found_tensors(folder)
      if is_backbone and not config.tie_embeddings and "lm_head.weight" not in stored:
        config = dataclasses.replace(config, has_token_head=False)
      source = open_quantized(folder / "config.json", raw, stored, tensors(config), form.keeps_fp8)
    _check_tensors(folder, stored, config, source)
    if source is not None and not source.reads:
      source = None  # a GGUF file of plain tensors
  stored_dtypes = {marker["dtype"]} if is_orbax else set()
  if stored:
    names = [piece.name for pieces in tensors(config).values() for piece in pieces if piece.name in stored]
    stored_dtypes = {stored[name].numpy_dtype.name for name in names}
  split = ModelSplit(config, num_shares(mesh))
  is_shared = split.num_devices > 1
  form = dataclasses.replace(form, axis=AXIS if is_shared else "")
  if source is not None:
    if source.forms:
      form = dataclasses.replace(form, matrix=PLAIN_MATRIX, forms=tuple(source.forms.items()))
    if not split.is_exact:
      raise ConfigError(
        f"num_devices={split.num_devices}: {folder} holds {source.label} weights, parts of which so many devices would "
        "pad or repeat; set --num_devices to a divisor of the KV heads and of the hidden and vocabulary sizes"
      )
  narrow: frozenset[str] = frozenset()
  if form.packed and not is_shared and dtype == jnp.float32:
    narrow = _bfloat16_matrices(stored, config, form)
    form = dataclasses.replace(form, forms=(*form.forms, *((name, BFLOAT16_MATRIX) for name in sorted(narrow))))
  whole = abstract(config, dtype)[1]
  plain = {parameter_name(key): leaf for key, leaf in jax.tree.leaves_with_path(whole)}
  share = whole if split.share == config else abstract(split.share, dtype)[1]  # each takes a tenth of a second
  wanted = declare_leaves(mesh, share)
  by_share = form.packed  # each device's share is made of its part alone, not of the arrays on all devices
  try:
    graphdef, state = abstract(split.share, dtype, form)
    arrange = arranger(nnx.merge(*((graphdef, state) if by_share else abstract(split.padded, dtype, form))))
  except UnsupportedForm as error:
    remedy = "--quantization_group_size or another --quantization" if source is None else "--matmul=xla"
    raise ConfigError(f"{folder}: {error}; set {remedy}") from error
  kept = declare_leaves(mesh, state)
  given = frozenset() if source is None else source.reads
  on_host = form.is_made_on_host
  declared = LoadedModel(
    config=config,
    graphdef=graphdef,
    params=jax.tree.unflatten(jax.tree.structure(state), list(kept.values())),
    eos_token_ids=eos_token_ids,
    name=marker["name"] if is_orbax else name_of_model(folder),
    warnings=(
      *_unknown_keys_warning(raw),
      *(source.warnings if source is not None else ()),
      *((_RANDOM_WARNING,) if random_weights and raw.get("quantization_config") else ()),
    ),
  )

  def load(on_bytes: Callable[[int], None] = lambda done: None) -> LoadedModel:
    num_read: list[int] = []  # bytes of each part
    loads: list[Load] = []  # that may run side by side
    made: Iterable[dict[str, Any]] = ()
    in_parts = is_shared and (on_host or not split.is_exact)
    others = {name: leaf for name, leaf in wanted.items() if name not in given}
    for name in narrow:
      others[name] = jax.ShapeDtypeStruct(others[name].shape, jnp.bfloat16, sharding=others[name].sharding)

    def arranged(arrays: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
      return (arrange(name, array) for name, array in arrays)

    if stored and not (on_host and not is_shared):
      read = functools.partial(_read_tensors, stored, config, plain, num_read.append)
    elif is_orbax and in_parts:
      restored = orbax_folder.load_orbax_arrays(folder, plain, on_host=True)
      read = functools.partial(_part_of, restored.__getitem__)
    elif random_weights and in_parts:
      read = functools.partial(_part_of, functools.lru_cache(1)(functools.partial(_generate_on_host, config, plain)))
    else:
      read = None
    if read is not None:
      reader = ShareReader(split, plain, parameter_axes(whole), read)
      if by_share:
        loads += reader.list_loads(others, kept, arrange, whole=not form.is_plain)
      elif on_host:
        made = arranged((name, reader.read_whole(name, leaf.shape)) for name, leaf in others.items())
      else:
        made = arranged(reader.load_plain(others))
    elif random_weights:
      made = arranged(_generate(config, others))
    elif is_orbax:
      made = arranged(_restored(folder, others))
    else:
      pieces_of = tensors(config)
      for name, leaf in others.items():
        map_own = functools.partial(_map_parameter, stored, pieces_of[name], leaf, num_read.append)
        loads.append(functools.partial(_arrange_read, arrange, name, map_own))
    if source is not None:
      reads = {name: functools.partial(source.read, name, plain[name].dtype) for name in wanted if name in given}
      if by_share:
        loads += [functools.partial(place_whole, *each, wanted[each[0]], kept, arrange) for each in reads.items()]
      else:
        made = itertools.chain(arranged((name, read()) for name, read in reads.items()), made)
    if loads:
      # Elsewhere one parameter at a time: threads ahead of the transfers would hold the whole model in host memory.
      placed = run_loads(loads, _LOAD_THREADS) if by_share and stored else (load() for load in loads)
      made = itertools.chain(placed, made)
    held: dict[str, jax.Array] = {}
    num_bytes = 0
    for values in made:
      for name, value in values.items():
        held[name] = place_array(value, kept[name].sharding).block_until_ready()
        num_bytes += held[name].nbytes
      on_bytes(num_bytes)
    leaves = [held[name] for name in kept]
    params = jax.tree.unflatten(jax.tree.structure(state), leaves)
    return dataclasses.replace(declared, params=params, num_bytes_read=sum(num_read))

  num_parameters = sum(leaf.size for leaf in plain.values())
  return Checkpoint(
    declared,
    kept,
    tuple(sorted(stored_dtypes)),
    num_parameters,
    load,
    form,
    label="" if source is None else source.label,
    is_requantizable=source is None or not source.forms,
    has_codes=source is not None and any(own.kind == "grouped" for own in source.forms.values()),
  )


def _bfloat16_matrices(stored: dict[str, StoredTensor], config: ModelConfig, form: WeightForm) -> frozenset[str]:
  """Returns which of the embedding and the head stay in memory as the file has them: plain, of bfloat16."""

  def stays(name: str) -> bool:
    is_product = name == "head" or (config.tie_embeddings and config.has_token_head)
    if name in dict(form.forms) or (is_product and form.matrix != PLAIN_MATRIX):
      return False
    found = [stored.get(piece.name) for piece in tensors(config).get(name, ())]
    return bool(found) and all(tensor is not None and tensor.dtype == "BF16" for tensor in found)

  return frozenset(name for name in ("embed", "head") if stays(name))


def declare_leaves(mesh: jax.sharding.Mesh, state: nnx.State) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the leaves of all devices together by name, with their shardings, in the tree's order."""
  return {parameter_name(key): leaf for key, leaf in jax.tree.leaves_with_path(spread_params(mesh, state))}


def parameter_name(key_path: tuple[Any, ...]) -> str:
  """Returns a leaf's stored name, such as `layers.0.attention.qkv`, from its path in the nnx state."""
  return stored_name(".".join(str(key.key) for key in key_path if isinstance(key, jax.tree_util.DictKey)))


def read_json_object(file: pathlib.Path) -> dict[str, Any]:
  """Returns a folder's JSON file; raises CheckpointError if it is missing, elsewhere or no object."""
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
  """Returns a warning with the unknown keys of config.json, or nothing."""
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
  """Raises CheckpointError unless the file is regular and in its folder, or links to the same download's blobs."""
  found = leads_outside(file)
  if found is not None:
    raise CheckpointError(
      f"{file}: is a link to {found}, outside of its folder; copy the file there, or set --model to its folder"
    )
  if not file.is_file():
    raise CheckpointError(f"{file}: is no regular file; copy it again")


def _eos_token_ids(folder: pathlib.Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
  file = folder / "generation_config.json"
  source = file if file.is_file() else folder / "config.json"
  value = read_json_object(file).get("eos_token_id") if file.is_file() else None
  if value is None:
    source, value = folder / "config.json", raw.get("eos_token_id")
  ids = value if isinstance(value, list) else [] if value is None else [value]
  if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
    raise CheckpointError(
      f"{source}: eos_token_id={value!r:.80} must be a token id or a list of them, from 0 to {vocab_size - 1}"
    )
  return tuple(ids)


def _generate(config: ModelConfig, wanted: dict[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
  """Generates random parameters for measurements; matrices keep the variance of their input, so no value overflows."""
  for number, name in enumerate(sorted(wanted, key=_name_order)):
    yield name, _generate_one(config, number, name, wanted[name])


def _generate_one(config: ModelConfig, number: int, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  if name.endswith(".scale"):
    return place_array(np.ones(leaf.shape, leaf.dtype), leaf.sharding)
  program = _normal(leaf.shape, leaf.dtype, leaf.sharding, config.model_dim**-0.5)
  return program(jax.random.key(number)).block_until_ready()


def _generate_on_host(config: ModelConfig, plain: dict[str, jax.ShapeDtypeStruct], name: str) -> np.ndarray:
  """Returns a parameter of `_generate`, in host memory."""
  device = jax.local_devices()[0]
  leaf = plain[name]
  alone = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
  return np.asarray(_generate_one(config, sorted(plain, key=_name_order).index(name), name, alone))


def _name_order(name: str) -> list[tuple[int, str]]:
  """Sorts stored names, with layers by number; only this order determines the random weights."""
  return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


@functools.cache
def _normal(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, scale: float) -> Any:
  """Returns the program for a shape, cached because layers repeat shapes."""
  return jax.jit(lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype), out_shardings=sharding)


def verify_folder_sums(folder: pathlib.Path) -> None:
  """Raises CheckpointError if a file differs from the folder's list of checksums, if there is one."""
  if (folder / SUMS).exists():
    for file, digest in read_sums(folder):
      verify_sum(folder, file, digest)


def _found_tensors(folder: pathlib.Path) -> tuple[dict[str, StoredTensor], bool]:
  """Returns the location of every stored tensor by the name that a whole model has, and whether it is a backbone.

  A backbone that was saved without its head, such as an embedding model, has names without `model.`, also where
  config.json names a whole model.
  """
  stored = find_tensors(folder)
  is_backbone = _EMBEDDING.removeprefix(_BACKBONE) in stored and _EMBEDDING not in stored
  if is_backbone:
    stored = {name if name in _HEADS else f"{_BACKBONE}{name}": tensor for name, tensor in stored.items()}
  return stored, is_backbone


def _check_tensors(
  folder: pathlib.Path, stored: dict[str, StoredTensor], config: ModelConfig, source: QuantizedSource | None
) -> None:
  """Rejects missing, extra and misshapen tensors. Allocates no array, because config.json may be wrong.

  Ignores only tensors that are known to be redundant. Args: source: has checked its own tensors.
  """
  pieces = {piece.name: piece for parts in tensors(config).values() for piece in parts}
  for name, piece in pieces.items():
    if source is not None and name in source.quantized:
      continue
    if name not in stored:
      raise CheckpointError(
        f"{folder}: tensor {name} of shape {list(piece.shape)} is missing from the checkpoint; "
        "use config.json and weights of one model, and copy all files"
      )
    tensor = stored[name]
    if tensor.shape != piece.shape:
      raise CheckpointError(
        f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, but config.json requires "
        f"{list(piece.shape)}; use files of one model"
      )
    tensor.check_dtype()
  extra = sorted(set(stored) - set(pieces) - (source.parts if source is not None else set()))
  # Old checkpoints store rotary frequencies, which follow from config.json.
  extra = [name for name in extra if not name.endswith(".rotary_emb.inv_freq")]
  if not config.has_token_head:
    extra = [name for name in extra if name != "lm_head.weight"]
  elif config.tie_embeddings and "lm_head.weight" in extra:
    head, embed = stored["lm_head.weight"], stored[_EMBEDDING]
    if head.shape != embed.shape or head.dtype != embed.dtype or not np.array_equal(head.map(), embed.map()):
      raise CheckpointError(
        f"{head.file}: tensor lm_head.weight differs from {embed.name}, but config.json says "
        "tie_word_embeddings=true; correct one of them"
      )
    extra.remove("lm_head.weight")
  if extra:
    raise CheckpointError(
      f"{stored[extra[0]].file}: tensor {extra[0]} is not part of a {config.family} model"
      f"{f', nor are {len(extra) - 1} others' if len(extra) > 1 else ''}; use config.json "
      "and weights of one model"
    )


def _restored(folder: pathlib.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
  arrays = orbax_folder.load_orbax_arrays(folder, wanted)
  while arrays:  # frees each array before it converts the next
    yield arrays.popitem()


def _read_tensors(
  stored: dict[str, StoredTensor],
  config: ModelConfig,
  plain: dict[str, jax.ShapeDtypeStruct],
  on_read: Callable[[int], None],
  name: str,
  part: tuple[slice, ...],
) -> np.ndarray:
  """Returns a part of a parameter; calls `on_read` with the bytes of each part of a file."""
  leaf = plain[name]
  return assemble_pieces(tensors(config)[name], stored, leaf.shape, leaf.dtype, part, on_read)


def _part_of(array_of: Callable[[str], np.ndarray], name: str, part: tuple[slice, ...]) -> np.ndarray:
  return array_of(name)[part]


def _arrange_read(arrange: Arrange, name: str, read: Callable[[], Any]) -> dict[str, Any]:
  return arrange(name, read())


def _map_parameter(
  stored: dict[str, StoredTensor], pieces: tuple[Piece, ...], leaf: jax.ShapeDtypeStruct, on_read: Callable[[int], None]
) -> np.ndarray:
  """Returns a parameter in host memory; if possible a read-only map of the file.

  Args: on_read: called with the bytes of each part of a file that this host reads.
  """
  if len(pieces) == 1 and (tensor := stored[pieces[0].name].map()).dtype == leaf.dtype:
    _check_finite(tensor, pieces, stored)
    on_read(tensor.nbytes)
    return _mapped(pieces[0], stored)
  return assemble_pieces(pieces, stored, leaf.shape, leaf.dtype, (slice(None),) * len(leaf.shape), on_read)


def find_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns every tensor of the safetensors files; prefers model.safetensors to an index, like transformers."""
  if (folder / SINGLE).exists():
    refuse_outside(folder / SINGLE)
    return read_header(folder / SINGLE)
  index = folder / INDEX
  weight_map = read_json_object(index).get("weight_map")
  if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
    raise CheckpointError(f"{index}: weight_map must map tensor names to file names; copy the file again")
  stored: dict[str, StoredTensor] = {}
  files = sorted(set(weight_map.values()))
  for file in files:
    if pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
      raise CheckpointError(f"{index}: weight_map names {file!r}; only safetensors files beside it are supported")
  for file in files:
    if (folder / file).exists():
      refuse_outside(folder / file)
    for name, tensor in read_header(folder / file).items():
      if weight_map.get(name) != file:
        raise CheckpointError(
          f"{folder / file}: tensor {name} is here, but {INDEX} has it in {weight_map.get(name)}; "
          "the shards are from different checkpoints; copy them again"
        )
      stored[name] = tensor
  for name, file in weight_map.items():
    if name not in stored:
      raise CheckpointError(f"{folder / file}: tensor {name} is missing, though {INDEX} lists it; copy the file again")
  return stored


def assemble_pieces(
  pieces: tuple[Piece, ...],
  stored: dict[str, StoredTensor],
  shape: tuple[int, ...],
  dtype: np.dtype,
  index: tuple[slice, ...] | None,
  on_read: Callable[[int], None] = lambda num_bytes: None,
) -> np.ndarray:
  """Returns one device's part of a parameter; reads only that part of the file.

  Args:
    pieces: the pieces of a parameter of `shape`, without gaps or overlaps, all with one axis order.
    index: the part.
    on_read: called with the bytes that are read.
  """
  assert index is not None  # JAX's type allows None
  order, parts = pieces[0].order, [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
  # In the file's order, so that rows are copied whole; a conversion to another order reads everything anyway.
  lines = np.empty([len(parts[order.index(axis)]) for axis in range(len(order))], dtype)
  out = lines.transpose(order)
  used = []
  for piece in pieces:
    boxes = [range(box.start, box.stop) for box in piece.box()]
    # The intersection of the piece's box and the device's part, in indices of the parameter.
    both = [range(max(box.start, part.start), min(box.stop, part.stop)) for box, part in zip(boxes, parts, strict=True)]
    if all(both):
      used.append(piece)
      part = _mapped(piece, stored)[_within(both, boxes)]
      with np.errstate(over="ignore"):  # _check_finite reports what float16 cannot hold
        out[_within(both, parts)] = part
      on_read(part.nbytes)
  _check_finite(lines, tuple(used), stored)
  return out


def _within(inner: list[range], outer: list[range]) -> tuple[slice, ...]:
  """Returns the slices of `inner` relative to the start of `outer`."""
  return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))


def _mapped(piece: Piece, stored: dict[str, StoredTensor]) -> np.ndarray:
  """Returns a piece in the parameter's axis order, as a map of the file."""
  return stored[piece.name].map().reshape(piece.split).transpose(piece.order)


def _check_finite(values: np.ndarray, pieces: tuple[Piece, ...], stored: dict[str, StoredTensor]) -> None:
  """Raises CheckpointError with tensor names if `values`, contiguous and made of the pieces, hold NaN or Inf.

  It tests for an exponent of ones in the bits, because ml_dtypes' own test of bfloat16 is many times slower.
  """
  kind = np.uint32 if values.dtype.itemsize == 4 else np.uint16
  mask = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}[values.dtype.name]
  bits, chunk = values.reshape(-1).view(kind), 1 << 20
  for start in range(0, bits.size, chunk):
    if ((bits[start : start + chunk] & kind(mask)) == kind(mask)).any():
      bad = [piece.name for piece in pieces if not np.isfinite(stored[piece.name].map().astype(np.float32)).all()]
      if not bad:
        raise CheckpointError(
          f"{stored[pieces[0].name].file}: tensor {' or '.join(piece.name for piece in pieces)} holds values beyond "
          f"65504, which {values.dtype.name} cannot hold; set --dtype=bfloat16 or float32"
        )
      raise CheckpointError(
        f"{stored[pieces[0].name].file}: tensor {' and '.join(bad)} holds NaN or Inf; the file is corrupt: copy it "
        "again"
      )
