"""Tests that the last layer skips tokens without logits, and that the others get the same results."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.attention import dense_causal_attend
from tests.device.tiny_model import TINY, random_params

_TOKENS = np.asarray([3, 23, 7, 7, 0], np.int32)


def wanted() -> tuple[jax.Array, jax.Array]:
  return jnp.asarray(_TOKENS), jnp.asarray([len(_TOKENS)], jnp.int32)


def attend(declared, qkv, cos, sin, cache, meta):
  """Of one sequence."""
  out, cache = dense_causal_attend(declared, qkv[None], cos[None], sin[None], cache, meta)
  return out[0], cache


def test_only_what_is_wanted_comes_out():
  decoder = nnx.merge(*random_params(TINY, jnp.float32))
  ids = jnp.asarray(np.random.default_rng(0).integers(TINY.vocab_size, size=24), jnp.int32)
  arguments = ids, jnp.arange(24, dtype=jnp.int32), (None,) * TINY.num_layers, None, attend
  whole, _ = decoder.hidden(*arguments)
  some, _ = decoder.hidden(*arguments, wanted=wanted())
  np.testing.assert_allclose(some, whole[_TOKENS], rtol=1e-5, atol=1e-5)


def test_the_last_layer_does_no_more():
  """What is multiplied behind its attention has as many rows as are wanted."""
  decoder = nnx.merge(*random_params(TINY, jnp.float32))

  def flops(asked) -> float:
    def forward(ids, positions):
      return decoder.hidden(ids, positions, (None,) * TINY.num_layers, None, attend, wanted=asked)[0]

    numbers = jax.ShapeDtypeStruct((24,), jnp.int32)
    analysis = jax.jit(forward).lower(numbers, numbers).cost_analysis()
    assert analysis is not None
    return analysis["flops"]

  saved = flops(None) - flops(wanted())
  matrices = TINY.num_heads * TINY.head_dim * TINY.model_dim + 3 * TINY.model_dim * TINY.hidden_dim
  assert saved > 2 * matrices * (24 - len(_TOKENS))
