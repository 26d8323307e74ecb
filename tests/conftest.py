"""Settings for every test: silent promotion of types and ranks becomes an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA's pool: the GPU interpreter blocks one for each warpgroup that waits, and with only as many as there
# are cores it can wait for ever.
os.environ.setdefault("NPROC", "8")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
  config.addinivalue_line(
    "markers", "catalogue(row, ...): shows that a row of the catalogue of faults and abuse holds; see test_catalogue.py"
  )
