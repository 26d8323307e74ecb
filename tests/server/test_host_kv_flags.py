"""--host_kv_mb: what it does not go with is refused by name, before anything is loaded."""

from absl.testing import flagsaver
import pytest

from engine.device.options import BuildOptions
from engine.errors import ConfigError
from server import flags


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--host_kv_mb=0", "--host_kv_dir=/tmp"], "host_kv_dir=/tmp is for blocks that the host keeps; set --host_kv_mb"),
    (["--host_kv_mb=-1"], "host_kv_mb=-1 must be at least 0; set --host_kv_mb"),
    (["--fake_device"], "host_kv_mb=64 does not go with --fake_device=true; leave out one of them"),
    (["--executable_bundle=/tmp/bundle"], "does not go with --executable_bundle=/tmp/bundle; leave out one of them"),
    (["--trace_file=/tmp/steps"], "does not go with --trace_file=/tmp/steps; leave out one of them"),
    (["--role=prefill", "--transfer_secret_file=/tmp/secret"], "does not go with --role=prefill; leave out one"),
    (
      ["--num_hosts=2", "--host_id=0", "--coordinator_address=h:1", "--cluster_secret_file=/tmp/secret"],
      "host_kv_mb=64 does not go with --num_hosts=2",
    ),
    (
      ["--prefix_cache_scope=off"],
      "does not go with prefix_cache_scope=off: the host keeps blocks of the prefix cache",
    ),
    (["--batching=disaggregated"], "does not go with batching=disaggregated: two engines share no host pool"),
  ],
)
def test_what_excludes_a_host_pool_is_refused(arguments: list[str], said: str) -> None:
  with flagsaver.flagsaver(), pytest.raises(ConfigError, match=said):
    flags.parse_flags(["server", "--host_kv_mb=64", *arguments], "server.main")


def test_a_program_is_refused_the_same() -> None:
  with pytest.raises(ConfigError, match="leave out --host_kv_mb, or set another --prefix_cache_scope"):
    BuildOptions("models/demo", host_kv_mb=64, prefix_cache_scope="off")


def test_without_a_host_pool_nothing_is_refused() -> None:
  with flagsaver.flagsaver():
    flags.parse_flags(["server", "--trace_file=/tmp/steps"], "server.main")
