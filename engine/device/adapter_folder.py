"""Reads LoRA adapters from folders in PEFT's format (https://github.com/huggingface/peft). May not know slots.

PEFT writes adapter_config.json and adapter_model.safetensors. The reader refuses by name what the device does not
compute. It never opens pickled weights, or files outside the folder.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import jax
import numpy as np

from engine.device.safetensors_file import StoredTensor, read_header
from engine.device.weights import refuse_outside
from engine.errors import CheckpointError
from models.adapters import AdapterSpec, adapter_specs, spread_adapter
from models.config import ModelConfig
from models.families.tensor_map import Piece
from models.registry import tensors
from models.split import ModelSplit

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERN = 500  # characters
_MOST_NAMED = 5
# Keys that change no result of a trained adapter; the reader reads the keys of the second set.
_WITHOUT_EFFECT = frozenset(
  "auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config lora_dropout "
  "lora_ga_config megatron_config megatron_core peft_version qalora_group_size revision runtime_config "
  "task_type".split()
)
_READ = frozenset(
  "alpha_pattern bias exclude_modules init_lora_weights layers_pattern layers_to_transform lora_alpha peft_type r "
  "rank_pattern target_modules use_rslora".split()
)
# Initial values that leave the base model's weights alone.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterArrays:
  """A read adapter.

  Attributes:
    rank: the largest rank of its matrices.
    path: the folder.
    leaves: an array for each of ProgramSpec.adapters, without the axis of slots.
  """

  rank: int
  path: str
  leaves: tuple[Any, ...]


class AdapterReader:
  """Reads adapters for one model. Safe on any thread."""

  def __init__(
    self,
    config: ModelConfig,
    max_rank: int,
    slot_rank: int,
    dtype: np.dtype,
    place: Callable[[Sequence[np.ndarray]], Sequence[Any]] = jax.device_put,
    num_devices: int = 1,
  ):
    """Args:
    config: of the decoder.
    max_rank: the largest rank that it takes.
    slot_rank: rank of a slot, at least that; adapters are padded with zeros.
    dtype: of the slots.
    place: moves the arrays to the devices; may not compile.
    num_devices: devices that share each layer.
    """
    self._split = ModelSplit(config, num_devices)
    self._config, self._max_rank, self._slot_rank = config, max_rank, slot_rank
    self._dtype, self._place = np.dtype(dtype), place
    pieces = tensors(config)
    # The checkpoint's matrices of each layer that takes adapters, in the order of its parts.
    self._parts: dict[tuple[int, str], tuple[AdapterSpec, tuple[Piece, ...]]] = {
      (index, name): (spec, pieces[f"layers.{index}.{name}"])
      for index, declared in enumerate(config.layers)
      for name, spec in adapter_specs(config, declared).items()
    }
    self._pieces = {_module_of(piece): piece for _, parts in self._parts.values() for piece in parts}

  def __call__(self, path: str) -> AdapterArrays:
    """Reads the adapter of a folder.

    Raises:
      CheckpointError: with the file, and the key or tensor.
    """
    folder = pathlib.Path(path)
    settings = _LoraSettings(folder / CONFIG, self._pieces)
    if settings.max_rank > self._max_rank:
      raise CheckpointError(
        f"{settings.file}: rank {settings.max_rank} is above max_lora_rank={self._max_rank}; serve with "
        f"--max_lora_rank={settings.max_rank}"
      )
    file = folder / WEIGHTS
    if not file.exists() and (folder / PICKLED).exists():
      raise CheckpointError(
        f"{folder / PICKLED}: pickled weights can run code, and Sluice does not open them; save the adapter with "
        "safe_serialization=True"
      )
    if not file.exists():
      raise CheckpointError(f"{file}: no such file; an adapter's folder needs one")
    refuse_outside(file)
    stored = self._find_tensors(file, settings)
    layers: list[dict[str, tuple[Any, Any]]] = [{} for _ in self._config.layers]
    for (index, name), (spec, parts) in self._parts.items():
      layers[index][name] = spread_adapter(self._split, index, name, *self._read_linear(spec, parts, stored, settings))
    return AdapterArrays(settings.max_rank, path, tuple(self._place(jax.tree.leaves(tuple(layers)))))

  def _find_tensors(
    self, file: pathlib.Path, settings: "_LoraSettings"
  ) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Returns A and B of each adapted module, after checking names, shapes and dtypes."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in read_header(file).items():
      module, side = _parse_key(file, key)
      if module not in self._pieces:
        raise CheckpointError(
          f"{file}: tensor {key:.200} adapts {module:.150}, which is not a layer of this model that takes adapters "
          f"(attention and MLP of {self._config.num_layers} layers); serve the model that the adapter was trained on, "
          "or merge it into the model"
        )
      if module not in settings.ranks:
        raise CheckpointError(
          f"{file}: tensor {key:.200} is there, but {CONFIG} does not target {module:.150}; use files of one adapter"
        )
      outputs, inputs = self._pieces[module].shape
      rank = settings.ranks[module]
      shape = (rank, inputs) if side == "A" else (outputs, rank)
      if tensor.shape != shape:
        raise CheckpointError(
          f"{file}: tensor {key:.200} has shape {list(tensor.shape)}, but the model and {CONFIG} require "
          f"{list(shape)}; use an adapter of this model"
        )
      tensor.check_dtype()
      found.setdefault(module, {})[side] = tensor
    for module in settings.ranks:
      missing = [side for side in "AB" if side not in found.get(module, {})]
      if missing:
        raise CheckpointError(
          f"{file}: tensor {_PREFIX}{module}.lora_{missing[0]}.weight is missing, though {CONFIG} targets it; copy the "
          "files again"
        )
    return {module: (sides["A"], sides["B"]) for module, sides in found.items()}

  def _read_linear(
    self,
    spec: AdapterSpec,
    parts: Sequence[Piece],
    stored: Mapping[str, tuple[StoredTensor, StoredTensor]],
    settings: "_LoraSettings",
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [inputs, parts * rank] and B [rank, outputs] of one linear layer, zeros where nothing is adapted."""
    max_rank = self._slot_rank
    a = np.zeros((spec.inputs, len(parts), max_rank), self._dtype)
    axes = _output_axes(parts[0])
    sizes = [max(box[axis].stop for box in (piece.box() for piece in parts)) for axis in axes]
    b = np.zeros((*sizes, max_rank), self._dtype)
    for part, piece in enumerate(parts):
      module = _module_of(piece)
      if module not in stored:
        continue
      down, up = stored[module]
      rank = settings.ranks[module]
      a[:, part, :rank] = _finite(down, down.map().astype(self._dtype)).T
      values = _finite(up, (up.map().astype(np.float32) * np.float32(settings.scale_of(module))).astype(self._dtype))
      place = tuple(piece.box()[axis] for axis in axes)
      b[(*place, slice(rank))] = values.reshape(*[piece.sizes[axis] for axis in axes], rank)
    return a.reshape(spec.inputs, -1), np.ascontiguousarray(b.reshape(spec.outputs, max_rank).T)


def _module_of(piece: Piece) -> str:
  return piece.name.removesuffix(".weight")


def _output_axes(piece: Piece) -> list[int]:
  """Returns the axes of the parameter that are outputs. They keep the checkpoint's order, and so do the inputs."""
  product, count = 1, 0
  while product < piece.shape[0]:
    product *= piece.split[count]
    count += 1
  axes = [axis for axis, source in enumerate(piece.order) if source < count]
  assert product == piece.shape[0] and [piece.order[axis] for axis in axes] == list(range(count)), piece
  return axes


def _parse_key(file: pathlib.Path, key: str) -> tuple[str, str]:
  """Returns the module of a tensor and which of its matrices it is, A or B."""
  match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
  if match:
    return match[1], match[2]
  if "lora_magnitude_vector" in key:
    why = "DoRA is not served"
  elif "modules_to_save" in key or not re.search(r"\.lora_", key):
    why = "an adapter may change no other weights"
  elif "lora_embedding" in key:
    why = "adapters of embeddings are not served"
  elif key.endswith(".bias"):
    why = "adapters with a bias are not served"
  else:
    why = f"expected are names like {_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
  raise CheckpointError(f"{file}: tensor {key:.200} is not supported: {why}; merge the adapter into the model")


def _finite(tensor: StoredTensor, values: np.ndarray) -> np.ndarray:
  if not np.isfinite(values.astype(np.float32)).all():
    raise CheckpointError(
      f"{tensor.file}: tensor {tensor.name:.200} holds NaN or Inf; the file is corrupt: copy it again"
    )
  return values


class _LoraSettings:
  """The checked adapter_config.json.

  Attributes:
    file: its path.
    ranks: the rank of each adapted module.
  """

  def __init__(self, file: pathlib.Path, modules: Mapping[str, Any]):
    """Args: modules: names of all modules that take adapters."""
    self.file = file
    raw = self._raw = self._read()
    if raw.get("peft_type") != "LORA":
      self._refuse("peft_type", "'LORA'")
    self._refuse_other_methods()
    self._uses_rslora = self._flag("use_rslora")
    self._alphas, ranks = self._pattern("alpha_pattern"), self._pattern("rank_pattern")
    self._alpha = self._number("lora_alpha", raw.get("lora_alpha"))
    rank = raw.get("r")
    for name, value in (("r", rank), *((f"rank_pattern[{key!r:.80}]", value) for key, value in ranks.items())):
      if type(value) is not int or value < 1:
        raise CheckpointError(f"{file}: {name}={value!r:.80} must be a whole number of 1 or more; copy the file again")
    self.ranks: dict[str, int] = {
      module: _by_pattern(ranks, module, rank) for module in modules if self._is_targeted(module)
    }
    if not self.ranks:
      raise CheckpointError(
        f"{file}: target_modules={raw.get('target_modules')!r:.200} name no layer of this model that takes adapters "
        "(q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj); serve the model that it was trained on"
      )

  @property
  def max_rank(self) -> int:
    """The largest rank of a module."""
    return max(self.ranks.values())

  def scale_of(self, module: str) -> float:
    """Returns the factor of a module's product."""
    rank = self.ranks[module]
    return _by_pattern(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._uses_rslora else rank)

  def _read(self) -> dict[str, Any]:
    file = self.file
    if not file.exists():
      raise CheckpointError(f"{file}: no such file; an adapter's folder needs one")
    refuse_outside(file)
    try:
      if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
      value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
      raise CheckpointError(f"{file}: cannot be read as JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
      raise CheckpointError(f"{file}: holds no JSON object; copy it again")
    return value

  def _refuse(self, key: str, supported: str) -> None:
    raise CheckpointError(
      f"{self.file}: {key}={self._raw.get(key)!r:.200} is not supported; supported is {supported}; merge the adapter "
      "into the model"
    )

  def _refuse_other_methods(self) -> None:
    """Refuses every key that would change what the adapter computes, in a way that is not built."""
    raw = self._raw
    if raw.get("bias", "none") != "none":
      self._refuse("bias", "'none'")
    init = raw.get("init_lora_weights")
    if not any(init is each or init == each and isinstance(init, str) for each in _INITS):
      self._refuse("init_lora_weights", "an initial value that does not change the base model's weights")
    for key, value in raw.items():
      if key not in _READ and key not in _WITHOUT_EFFECT and value not in (None, False, [], {}, "", 0):
        self._refuse(key, "an adapter without it")

  def _flag(self, key: str) -> bool:
    value = self._raw.get(key)
    if value is not None and not isinstance(value, bool):
      self._refuse(key, "true or false")
    return bool(value)

  def _number(self, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
      raise CheckpointError(f"{self.file}: {name}={value!r:.80} must be a finite number; copy the file again")
    return float(value)

  def _pattern(self, key: str) -> dict[str, Any]:
    """Returns rank_pattern or alpha_pattern, with checked regular expressions and finite numbers."""
    found = self._raw.get(key) or {}
    if not isinstance(found, dict):
      self._refuse(key, "an object from names to numbers")
    for pattern, value in found.items():
      self._compile(key, rf"(.*\.)?({pattern})$")
      self._number(f"{key}[{pattern!r:.80}]", value)
    return found

  def _compile(self, key: str, pattern: str) -> re.Pattern[str]:
    if len(pattern) > _MAX_PATTERN:
      raise CheckpointError(
        f"{self.file}: {key} has a pattern of {len(pattern)} characters; supported are at most {_MAX_PATTERN}"
      )
    try:
      return re.compile(pattern)
    except (re.error, RecursionError) as error:
      raise CheckpointError(
        f"{self.file}: {key} has an invalid pattern {pattern!r:.80} ({error}); correct it"
      ) from error

  def _is_targeted(self, module: str) -> bool:
    raw = self._raw
    excluded = raw.get("exclude_modules")
    if excluded and self._matches("exclude_modules", excluded, module):
      return False
    if not self._matches("target_modules", raw.get("target_modules"), module):
      return False
    layers = raw.get("layers_to_transform")
    if layers is None:
      return True
    layers = [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
      self._refuse("layers_to_transform", "a number or a list of them")
    if raw.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
      self._refuse("layers_pattern", "'layers'")
    return int(module.split(".")[2]) in layers

  def _matches(self, key: str, wanted: Any, module: str) -> bool:
    """Whether a list of suffixes, a regular expression or "all-linear" names a module, as in PEFT."""
    if wanted == "all-linear":
      return True
    if isinstance(wanted, str):
      return self._compile(key, wanted).fullmatch(module) is not None
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
      self._refuse(key, "a list of names, a regular expression or 'all-linear'")
    for name in wanted:
      if name.split(".")[-1] in ("lm_head", "embed_tokens"):
        self._refuse(key, "layers of attention and MLP")
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
  """Returns the value of the first pattern that matches the end of a module's name, as PEFT does."""
  for pattern, value in patterns.items():
    if re.match(rf"(.*\.)?({pattern})$", module):
      return value
  return default
