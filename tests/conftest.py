"""Settings for every test: silent promotion of types and ranks becomes an error."""

from collections.abc import Iterator
import gc
import os
import shutil
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA's pool: the GPU interpreter blocks one for each warpgroup that waits, and with only as many as there
# are cores it can wait for ever.
os.environ.setdefault("NPROC", "8")

from hypothesis import HealthCheck, settings
import jax
import pytest

gc.disable()  # until all tests are collected: imports leave no garbage, and collections among them take seconds
# A shell that starts programs in the background has them ignore SIGINT, which tests send, also to their own processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples every time, so that a failure is somebody's change, not luck; others are for `make test-long`. And
# no example has to be quick.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
settings.register_profile("repeated", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("drawn", deadline=None, derandomize=False, suppress_health_check=_SLOW, print_blob=True)
settings.load_profile("repeated")


@pytest.fixture(autouse=True, scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> None:
  """Tests build the same engines again and again: what takes long to compile is compiled once for all processes."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent
  jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  jax.config.update("jax_compilation_cache_max_size", 16 << 30)  # with a limit JAX locks the files, by filelock


@pytest.fixture
def quick_compilation() -> Iterator[None]:
  """For programs that run once, and whose bits nobody compares: nearly all the time goes into compiling them."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def quick_steps() -> Iterator[None]:
  """For modules that compare no bits: engines, too, compile without LLVM's optimizations, in two thirds of the time."""
  with pytest.MonkeyPatch.context() as patch:
    for module in ("programs", "draft_programs"):
      patch.setattr(f"engine.device.{module}.step_options", lambda spec: None)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def chromium() -> Iterator:
  """A browser for the live page; see tests/server/page/browser.py."""
  path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
  if path is None:
    pytest.skip("no Chromium on the path (Debian's package chromium)")
  api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
  with api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=180_000)
    yield browser
    browser.close()


def pytest_collection_finish() -> None:
  """Later collections of garbage skip the objects of modules and of ten thousand tests."""
  gc.collect()
  gc.freeze()
  gc.enable()


def pytest_configure(config):
  config.addinivalue_line("markers", "compares_bits: compiled as in serving, since optimization could change them")
  config.addinivalue_line(
    "markers", "catalogue(row, ...): shows that a row of the catalogue of faults and abuse holds; see test_catalogue.py"
  )
