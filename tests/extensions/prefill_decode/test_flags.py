"""--role and the flags beside it: what cannot be served is refused by name, before anything loads."""

import pathlib
import socket

from absl.testing import flagsaver
import pytest

from engine.errors import ConfigError
from extensions.prefill_decode.composition import check_kv_address, read_secret
from server import flags
from tests.commands import run_module

_SECRET = "--transfer_secret_file=/secret"
_PEER = "--prefill_servers=10.0.0.7:50051"


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--role=prefill"], "role=prefill needs a secret that its peers share; set --transfer_secret_file"),
    (["--role=decode", _SECRET], "role=decode has no prefill server; set --prefill_servers=HOST:PORT, or --trust_pre"),
    (
      ["--role=decode", _SECRET, "--prefill_servers=host"],
      "prefill_servers='host' is not HOST:PORT; write for example",
    ),
    (["--role=decode", _SECRET, "--prefill_servers=a:70000"], "prefill_servers='a:70000' is not HOST:PORT"),
    (["--role=all"], "role='all'"),
    ([_PEER], "prefill_servers needs --role=decode, and role is both; leave out --prefill_servers"),
    (["--role=decode", _SECRET, _PEER, "--max_lease_mb=8"], "max_lease_mb needs --role=prefill, and role is decode"),
    ([_SECRET], "transfer_secret_file needs --role=prefill or --role=decode; leave it out"),
    (["--role=prefill", _SECRET, "--fake_device"], "role=prefill does not go with --fake_device=true; leave out one"),
    (["--role=prefill", _SECRET, "--batching=static"], "role=prefill does not go with --batching=static"),
    (["--role=prefill", _SECRET, "--enable_embeddings"], "role=prefill does not go with --enable_embeddings=true"),
    (["--role=prefill", _SECRET, "--enable_lora"], "role=prefill does not go with --enable_lora=true"),
    (
      ["--role=decode", _SECRET, _PEER, "--frontend_processes=2"],
      "role=decode does not go with --frontend_processes=2",
    ),
    (
      ["--role=decode", _SECRET, _PEER, "--prefix_cache_scope=off"],
      "role=decode does not go with --prefix_cache_scope",
    ),
    (["--role=decode", _SECRET, _PEER, "--remote_prefill_timeout_s=0"], "remote_prefill_timeout_s=0"),
    (["--kv_transport=jax"], "kv_transport needs --role=prefill or --role=decode; leave it out"),
    (["--role=prefill", _SECRET, "--kv_transport=nccl"], "kv_transport='nccl'"),
    (
      ["--role=prefill", _SECRET, "--kv_transport_address=10.0.0.7:1"],
      "kv_transport_address needs --kv_transport=jax, and it is auto; leave it out",
    ),
    (
      ["--role=prefill", _SECRET, "--kv_transport=jax", "--kv_transport_address=host:7000"],
      "kv_transport_address='host:7000' is not IP:PORT with an address of this machine",
    ),
    (
      ["--role=prefill", _SECRET, "--kv_transport=jax", "--kv_transport_address=0.0.0.0:7000"],
      "kv_transport_address='0.0.0.0:7000' is not IP:PORT",
    ),
    (
      ["--role=prefill", _SECRET, "--kv_transport=jax", "--kv_transport_address=[::1]:70000"],
      r"kv_transport_address='\[::1\]:70000' is not IP:PORT",
    ),
    (
      ["--role=decode", _SECRET, _PEER, "--kv_transport=jax", "--kv_transport_address=10.0.0.8:7000"],
      "kv_transport_address=10.0.0.8:7000: a prefill server also needs the next port, and a decode server needs none",
    ),
    (
      ["--role=decode", _SECRET, _PEER, "--kv_transport=jax", "--transfer_ca_file=/ca.pem"],
      "kv_transport=jax has no TLS, so it does not go with --transfer_ca_file; leave out one of them",
    ),
  ],
)
def test_roles_that_cannot_be_served_are_refused(arguments: list[str], said: str) -> None:
  with flagsaver.flagsaver(), pytest.raises(ConfigError, match=said):
    flags.parse_flags(["server", *arguments], "server.main")


@pytest.mark.parametrize("role", [["--role=prefill"], ["--role=decode", _PEER]])
def test_roles_are_accepted(role: list[str]) -> None:
  with flagsaver.flagsaver():
    flags.parse_flags(["server", *role, _SECRET], "server.main")


def test_a_secret_is_one_good_line(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "secret"
  for text, mode, said in (
    ("short\n", 0o600, "has 5 characters, or others than printable ASCII; write one line of 16 to 256"),
    ("two words of a secret", 0o600, "or others than printable ASCII"),
    ("x" * 300, 0o600, "has 300 characters"),
    ("x" * 20, 0o644, "its mode 0644 opens it to every user of this machine; chmod 600"),
  ):
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as error:
      read_secret(str(path))
    assert text.strip() not in str(error.value)
  path.chmod(0o600)
  path.write_text(f"{'x' * 20}\n")
  assert read_secret(str(path)) == "x" * 20
  with pytest.raises(ConfigError, match="transfer_secret_file=/nowhere cannot be read: No such file"):
    read_secret("/nowhere")


def test_a_port_of_another_process_is_refused() -> None:
  """JAX's transfer server would bind it too, and get a part of its connections."""
  with socket.create_server(("127.0.0.1", 0)) as other:
    taken = other.getsockname()[1]
    for port in (taken, taken - 1):  # the next one is for data
      said = f"kv_transport_address=127.0.0.1:{port}: port {taken} cannot be bound: Address already in use; choose an"
      with pytest.raises(ConfigError, match=said):
        check_kv_address(f"127.0.0.1:{port}")
  check_kv_address("127.0.0.1:0")
  with pytest.raises(ConfigError, match="192.0.2.1:7000: port 7000 cannot be bound: Cannot assign requested address"):
    check_kv_address("192.0.2.1:7000")


@pytest.mark.long
def test_a_bad_secret_ends_the_start_in_one_line(tmp_path: pathlib.Path) -> None:
  done = run_module("server.main", "--role=prefill", f"--transfer_secret_file={tmp_path / 'none'}", "--port=0")
  last = done.stderr.splitlines()[-1]
  assert done.returncode == 1
  assert last == f"error: transfer_secret_file={tmp_path / 'none'} cannot be read: No such file or directory"
