"""Weights as int8: the nearest of what can be held, for any shape and dtype, and nothing where there is nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.grouped_weight import quantize_by_group
from models.quantize import quantize, quantize_groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "num_inputs"), [((40, 30), 1), ((16, 3, 5, 4), 1), ((3, 4, 8, 20), 3)], ids=str)
def test_each_weight_is_within_half_a_step(shape, num_inputs, dtype):
  weight = jnp.asarray(np.random.default_rng(0).standard_normal(shape) * 3, dtype)
  values, scales = quantize(weight, num_inputs)
  assert (values.shape, values.dtype) == (shape, jnp.int8)
  assert (scales.shape, scales.dtype) == (shape[num_inputs:], jnp.float32)
  exact = np.asarray(weight, np.float64)
  error = np.abs(np.asarray(values, np.float64) * np.asarray(scales, np.float64) - exact)
  assert (error <= 0.5 * np.asarray(scales) * (1 + 1e-5)).all()
  axes = tuple(range(num_inputs))
  np.testing.assert_allclose(scales, np.abs(exact).max(axis=axes) / 127, rtol=1e-6)
  assert (np.abs(np.asarray(values, np.int32)).max(axis=axes) == 127).all()  # no step is wasted, and -128 is not used


def test_an_output_without_weights_is_zero():
  values, scales = quantize(jnp.zeros((4, 2)).at[1, 1].set(-3.0), 1)
  np.testing.assert_array_equal(values, [[0, 0], [0, -127], [0, 0], [0, 0]])
  np.testing.assert_allclose(scales, [1.0, 3 / 127], rtol=1e-6)


@pytest.mark.parametrize(("bits", "group"), [(4, 8), (8, 24)])
def test_groups_on_all_threads_are_those_of_the_reference(bits, group):
  """Random weights are never half-way between codes; an output of zeros has codes of zero."""
  weight = np.random.default_rng(bits).standard_normal((24, 40)).astype(np.float32)
  weight[:, 7] = 0
  expected = quantize_by_group(weight, 1, bits, group)
  codes, scales = quantize_groups(jnp.asarray(weight.T), bits, group)
  np.testing.assert_array_equal(codes, expected.codes.T)
  np.testing.assert_array_equal(scales, expected.scales.T)
  assert scales.dtype == expected.scales.dtype
