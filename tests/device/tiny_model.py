"""A tiny random decoder and what a runner needs to serve it; shared by the tests of this folder."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from engine.device import kv_cache
from engine.device import mesh as mesh_lib
from engine.device.programs import ProgramSpec, all_programs
from engine.device.runner import Making, ModelRunner
from engine.device.weight_shares import ShareReader, parameter_axes
from engine.device.weights import parameter_name
from engine.shapes import ShapeLadder
from models.attention import dense_causal_attend
from models.config import ModelConfig
from models.registry import abstract
from models.split import ModelSplit
from models.weight_form import WeightForm
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.plan import Geometry

TINY = ModelConfig(
  family="llama",
  vocab_size=96,
  num_layers=2,
  model_dim=32,
  hidden_dim=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  max_position=128,
)
EOS = (1,)
MAX_LEN = 64  # of a sequence


def random_params(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> tuple[nnx.GraphDef, nnx.State]:
  """Weights wide enough that the most likely token is not a matter of rounding."""
  graphdef, state = abstract(config, dtype)
  rng = np.random.default_rng(seed)

  def fill(leaf):
    if len(leaf.shape) == 1:
      return jnp.ones(leaf.shape, leaf.dtype)
    fan_in = leaf.shape[0] if leaf.ndim < 4 or leaf.shape[-1] != config.model_dim else int(np.prod(leaf.shape[:-1]))
    return jax.device_put((rng.normal(size=leaf.shape) * fan_in**-0.5).astype(leaf.dtype))  # compiles nothing

  state = jax.tree.map(fill, state)
  embed = state["embed"]["matrix"]["array"]
  embed[...] = jnp.asarray(rng.normal(size=embed.shape), dtype)
  return graphdef, state


def share_params(
  mesh: jax.sharding.Mesh, config: ModelConfig, dtype: jnp.dtype, model: tuple[nnx.GraphDef, nnx.State]
) -> tuple[nnx.GraphDef, nnx.State]:
  """The plain weights of a model, as each device's share of them."""
  if mesh.size == 1:
    return model[0], jax.device_put(model[1], mesh_lib.replicated(mesh))
  split = ModelSplit(config, mesh_lib.num_shares(mesh))
  graphdef, state = abstract(split.share, dtype, WeightForm(axis=mesh_lib.AXIS))
  plain = {parameter_name(key): leaf for key, leaf in jax.tree.leaves_with_path(model[1])}
  wanted = {parameter_name(key): leaf for key, leaf in jax.tree.leaves_with_path(mesh_lib.spread_params(mesh, state))}
  reader = ShareReader(split, plain, parameter_axes(model[1]), lambda name, part: np.asarray(plain[name])[part])
  return graphdef, jax.tree.unflatten(jax.tree.structure(state), [leaf for _, leaf in reader.load_plain(wanted)])


def make_runner(
  config: ModelConfig = TINY,
  *,
  dtype: jnp.dtype = jnp.float32,
  kv_dtype: jnp.dtype | None = None,
  num_blocks: int = 64,
  block_size: int = 4,
  token_budgets: tuple[int, ...] = (8, 32),
  max_num_seqs: int = 8,
  max_model_len: int = MAX_LEN,
  eos: tuple[int, ...] = EOS,
  devices=None,
  attention: str = "auto",
  model: tuple[nnx.GraphDef, nnx.State] | None = None,
  progress=lambda *_: None,
  ladder: ShapeLadder | None = None,
  num_host_blocks: int = 0,
  spec_settings: Mapping[str, Any] | None = None,
) -> ModelRunner:
  """A runner over random weights (or `model`), on one device unless `devices` says more. `ladder` outranks budgets."""
  mesh = mesh_lib.make_mesh(jax.devices()[:1] if devices is None else devices)
  graphdef, state = share_params(mesh, config, dtype, model or random_params(config, dtype))
  leaves, tree = jax.tree.flatten(state)
  geometry = Geometry(
    token_budgets[-1], max_num_seqs, 1, block_size, config.num_heads, config.num_kv_heads, config.head_dim
  )
  if attention == "auto":  # as an engine takes it: the C++ kernel, which also compiles in half the time
    attention, _ = api.choose_attention(
      api.candidates("auto", "cpu"), lambda name: api.check_supported(name, geometry, dtype, kv_dtype)
    )
  spec = ProgramSpec(
    mesh=mesh,
    model=config,
    graphdef=graphdef,
    params_tree=tree,
    params=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves),
    dtype=jnp.dtype(dtype),
    kv=kv_cache.abstract(mesh, config, num_blocks, block_size, jnp.dtype(kv_dtype or dtype), attention),
    block_size=block_size,
    table_width=-(-max_model_len // block_size),
    num_slots=max_num_seqs,
    num_eos=len(eos),
    attention=attention,
    **(spec_settings or {}),
  )
  ladder = ladder or ShapeLadder(token_budgets, max_num_seqs)
  with Making(all_programs(spec, ladder.rungs())) as making:
    return ModelRunner(spec, tuple(leaves), ladder, eos, making.wait(progress), num_host_blocks=num_host_blocks)


@partial(jax.jit, static_argnums=0)
def _dense(graphdef, state, ids):
  decoder = nnx.merge(graphdef, state)
  positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  hidden, _ = decoder.hidden(ids, positions, (None,) * len(decoder.layers), None, dense_causal_attend)
  return decoder.logits(hidden)[0]


def dense_logits(model: tuple[nnx.GraphDef, nnx.State], tokens: list[int]) -> np.ndarray:
  """f32[T, V] of a plain causal forward without a cache, of at most MAX_LEN tokens."""
  ids = np.zeros((1, MAX_LEN), np.int32)
  ids[0, : len(tokens)] = tokens
  return np.asarray(_dense(*model, ids))[: len(tokens)]


def dense_greedy(model: tuple[nnx.GraphDef, nnx.State], prompt: list[int], count: int) -> list[int]:
  """The greedy continuation by `dense_logits`."""
  tokens = list(prompt)
  for _ in range(count):
    tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
  return tokens[len(prompt) :]
