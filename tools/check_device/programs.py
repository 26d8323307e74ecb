"""Describes the programs to compile: models by name, as the engine describes them, without arrays. Compiles nothing."""

import dataclasses
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from engine.batch import MAX_DRAFTS
from engine.device import kv_cache
from engine.device import mesh as mesh_lib
from engine.device.draft_programs import (
  choose_draft_attention,
  draft_programs,
  fill_key,
  make_following_spec,
  propose_key,
)
from engine.device.eagle_folder import EagleFolder
from engine.device.kernel_choice import matrix_form
from engine.device.options import BuildOptions
from engine.device.programs import Program, ProgramSpec, step_program
from engine.device.sampler import num_alternatives
from engine.shapes import StepShape
from models.config import ModelConfig
from models.eagle_head import EagleConfig
from models.registry import abstract, config_from_hf
from models.split import ModelSplit
from models.weight_form import WeightForm
from pallas_kernels.paged_attention import api

_MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
_SHAPES = _MODELS / "shapes"


@dataclasses.dataclass(frozen=True)
class ModelCase:
  """A model and its serving sizes.

  Attributes:
    model: numbers of the decoder.
    max_model_len: tokens of a sequence.
    pool_tokens: tokens of the KV pool.
    max_num_seqs: rows of the largest steps.
  """

  model: ModelConfig
  max_model_len: int
  pool_tokens: int
  max_num_seqs: int = 64


def names() -> list[str]:
  """Returns the names of all cases."""
  return ["tiny", "demo", *sorted(path.name for path in _SHAPES.iterdir())]


def case(name: str) -> ModelCase:
  """Returns a model by name: tiny, demo, or a folder of models/shapes (`names`).

  No array of tiny's steps has the size of a weight or of a KV buffer.
  """
  if name == "tiny":
    model = ModelConfig(
      family="llama",
      vocab_size=3072,
      num_layers=3,
      model_dim=384,
      hidden_dim=896,
      num_heads=16,
      num_kv_heads=4,
      head_dim=128,
      max_position=1024,
    )
    return ModelCase(model, max_model_len=1024, pool_tokens=16_384)
  folder = _MODELS if name == "demo" else _SHAPES
  model = config_from_hf(json.loads((folder / name / "config.json").read_text("utf-8")))
  return ModelCase(model, max_model_len=min(4096 if name == "demo" else 8192, model.max_position), pool_tokens=65_536)


def make_spec(
  case: ModelCase,
  devices: list[Any],
  attention: str,
  num_layers: int,
  deterministic: bool = False,
  quantization: str = "none",
  adapters: bool = False,
  kv_dtype: str = "auto",
  dtype: str = "bfloat16",
) -> ProgramSpec:
  """Returns the spec that engine.device.build makes of a checkpoint, without a checkpoint.

  Args:
    case: the model.
    devices: to compile for.
    attention: name of the implementation.
    num_layers: replaces the model's own.
    deterministic: as in ProgramSpec.
    quantization: the setting.
    adapters: whether it has slots for LoRA adapters, as many as the settings' default.
    kv_dtype: the setting.
    dtype: of weights and activations.
  """
  layers = case.model.layer_attention[:num_layers]
  model = dataclasses.replace(case.model, num_layers=num_layers, layer_attention=layers)
  mesh = mesh_lib.make_mesh(devices)
  stored = api.EIGHT_BIT_KV.get(kv_dtype, jnp.dtype(dtype))
  block_size = api.preferred_block_size(attention, stored)
  axis = mesh_lib.AXIS if len(devices) > 1 else ""
  form = WeightForm(
    matrix=matrix_form(quantization, devices[0].platform),
    ordered=deterministic,
    flat=devices[0].platform == "tpu",
    axis=axis,
  )
  graphdef, state = abstract(ModelSplit(model, len(devices)).share, jnp.dtype(dtype), form)
  leaves, tree = jax.tree.flatten(mesh_lib.spread_params(mesh, state))
  return ProgramSpec(
    mesh=mesh,
    model=model,
    graphdef=graphdef,
    params_tree=tree,
    params=tuple(leaves),
    dtype=jnp.dtype(dtype),
    kv=kv_cache.abstract(mesh, model, case.pool_tokens // block_size, block_size, stored, attention),
    block_size=block_size,
    table_width=-(-case.max_model_len // block_size),
    num_slots=case.max_num_seqs,
    num_eos=1,
    attention=attention,
    device_kind=devices[0].device_kind,
    deterministic=deterministic,
    max_loras=BuildOptions.max_loras if adapters else 0,
    max_lora_rank=BuildOptions.max_lora_rank if adapters else 0,
  )


class FollowingProgram(NamedTuple):
  """A program that drafts need besides steps. Attributes: name: what it does. spec: its own. program: to compile."""

  name: str
  spec: ProgramSpec
  program: Program


def make_draft_programs(case: ModelCase, served: ProgramSpec, shape: StepShape) -> list[FollowingProgram]:
  """Returns the programs at a rung of the model as its own draft model.

  Args: case: the model. served: of `make_spec`.
  """
  spec = make_following_spec(
    served,
    model=served.model,
    graphdef=served.graphdef,
    params_tree=served.params_tree,
    params=served.params,
    num_blocks=case.pool_tokens // served.block_size,
    attention=choose_draft_attention(served.attention),
  )
  made = draft_programs(spec, served, [shape], MAX_DRAFTS + 1)
  return [
    FollowingProgram("draft model's KV", spec, made[fill_key(shape)]),
    FollowingProgram("draft model's proposals", spec, made[propose_key(shape)]),
  ]


def make_head_programs(case: ModelCase, served: ProgramSpec, shape: StepShape) -> list[FollowingProgram]:
  """Returns the programs at a rung of an EAGLE-3 head of the model's width, and the step whose states it reads.

  Args: as in make_draft_programs.
  """
  model = served.model
  layer = dataclasses.replace(
    model, num_layers=1, layer_attention=model.layer_attention[:1], vocab_size=model.vocab_size // 4
  )
  head = EagleFolder(
    path="",
    folder=_MODELS,
    config=EagleConfig(
      model=layer,
      target_dim=model.model_dim,
      feature_layers=(0, model.num_layers // 2, model.num_layers - 1),
      target_vocab_size=model.vocab_size,
      has_embedding=False,
      norm_before_residual=False,
    ),
    dtype=served.dtype,
    form=WeightForm(flat=served.platform == "tpu"),
    kept={},
    stored={},
    target_ids=np.zeros(layer.vocab_size, np.int32),
    attention=choose_draft_attention(served.attention),
    block_bytes=0,
  )
  read = dataclasses.replace(served, feature_layers=head.feature_layers)
  spec = head.make_spec(read, case.pool_tokens // served.block_size)
  made = head.make_programs(spec, read, [shape], MAX_DRAFTS + 1)
  return [
    FollowingProgram("step with states", read, step_program(read, shape)),
    FollowingProgram("head's KV", spec, made[fill_key(shape)]),
    FollowingProgram("head's proposals", spec, made[propose_key(shape)]),
  ]


def shard_sizes(leaves: Any) -> list[int]:
  """Returns the elements of each abstract array on one device."""
  return [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(leaves)]


def shard_bytes(leaves: Any) -> int:
  """Returns the bytes of abstract arrays on one device."""
  leaves = jax.tree.leaves(leaves)
  return sum(size * leaf.dtype.itemsize for size, leaf in zip(shard_sizes(leaves), leaves, strict=True))


def gather_limit(spec: ProgramSpec, shape: StepShape) -> int:
  """Returns the most numbers that a step gathers from all devices: the most likely tokens and their logits.

  It is far below the logits of one row.
  """
  return spec.mesh.size * 2 * num_alternatives(spec.model.vocab_size) * shape.logits


def temp_limit(spec: ProgramSpec, shape: StepShape) -> int:
  """Returns the bytes that a step may need for temporaries on one device; a copy of a large weight or of KV exceeds it.

  The limit is the sum of these parts:

  - twice everything between two of a layer's kernels
  - for the sampler, eight arrays of the logits' size in f32, since several stages of filtering are alive together
  - on several devices, twelve arrays of a share of the rows with the whole vocabulary: eight as above, and four of the
    exchange that makes them
  - for attention, its partial results in f32
  - 5 MiB for small arrays and alignment
  """
  share = spec.split.share
  heads = (share.num_heads + 2 * share.num_kv_heads) * share.head_dim
  layer = 2 * share.model_dim + heads + share.num_heads * share.head_dim + 3 * share.hidden_dim
  partials = max((plan.partial_bytes for plan in spec.layout(shape).plans), default=0)
  logits = 8 * shape.logits * share.vocab_size * 4
  if spec.mesh.size > 1:  # the sampler's share of the rows, padded to the rows of a TPU's tile
    logits += 12 * -(-shape.logits // (8 * spec.mesh.size)) * 8 * spec.model.vocab_size * 4
  return 2 * shape.tokens * layer * spec.dtype.itemsize + logits + partials + 5 * 2**20
