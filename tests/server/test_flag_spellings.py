"""Flags as users of other servers type them."""

import pathlib
import subprocess
import sys

from absl.flags import FLAGS
from absl.testing import flagsaver
import pytest

from engine.errors import ConfigError
from server import flags
from server.flag_spellings import INSTEAD, SYNONYMS, translate_argument

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse(*arguments: str) -> list[str]:
  FLAGS.unparse_flags()
  return flags.parse_flags(["server", *arguments], "server.main")


@pytest.fixture(autouse=True)
def kept_flags():
  with flagsaver.flagsaver():
    yield


def test_a_pasted_command_of_vllm():
  line = "org/model --tensor-parallel-size 4 --max-model-len=4096 --served-model-name chat --max-num-seqs 8"
  line += " --dtype bfloat16 --host 0.0.0.0 --http-port 8001 --download-dir /models --no-deterministic --revision v1"
  assert parse(*line.split()) == ["server"]
  found = {name: FLAGS[name].value for name in ("model", "num_devices", "max_model_len", "served_model_name")}
  assert found == {"model": "org/model", "num_devices": 4, "max_model_len": 4096, "served_model_name": "chat"}
  assert FLAGS.model_cache_dir == "/models" and not FLAGS.deterministic
  assert FLAGS.host == "0.0.0.0" and FLAGS.http_port == 8001


def test_the_model_is_the_one_argument_without_a_flag():
  assert parse("--port=0", "org/model", "--num_blocks", "7") == ["server"]
  assert FLAGS.model == "org/model" and FLAGS.num_blocks == 7
  assert "--model=org/model" in flags.configuration_lines()
  assert parse("--model=a", "b") == ["server", "b"]  # which the program refuses
  assert parse("a", "b") == ["server", "b"]


def test_dashes_in_a_flagfile(tmp_path):
  (tmp_path / "flags").write_text("--max-num-seqs=3\n-tp=2\n")
  parse(f"--flagfile={tmp_path / 'flags'}")
  assert FLAGS.max_num_seqs == 3 and FLAGS.num_devices == 2


@pytest.mark.parametrize("name", INSTEAD)
def test_flags_without_an_equivalent(name):
  assert name not in FLAGS
  with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is a flag of vLLM that Sluice does not have; "):
    parse(f"--{name.replace('_', '-')}", "1")


def test_named_flags_exist():
  """Those that a synonym stands for, and those that an answer names."""
  for name in SYNONYMS.values():
    assert name in FLAGS
  for text in INSTEAD.values():
    for word in text.replace(",", " ").replace(";", " ").split():
      if word.startswith("--"):
        assert word[2:] in FLAGS, text


def test_what_is_no_flag_stays():
  for argument in ("org/model-name", "-", "--", "--no-such-flag=1", "-1", "a=b-c"):
    assert translate_argument(argument, ["port"], []) == argument
  assert translate_argument("--no-x-y", ["x_y"], ["x_y"]) == "--nox_y"
  with pytest.raises(ConfigError, match="Unknown command line flag 'no-such-flag'"):
    parse("--no-such-flag=1")


def test_one_port_for_two():
  with pytest.raises(ConfigError, match="port=8000 is that of gRPC, and http_port=8000 that of HTTP"):
    parse("--port=8000")
  parse("--port=8000", "--http_port=-1")
  assert flags.host_options().port == 8000


def test_the_core_needs_none_of_the_libraries():
  """Neither a folder nor the flags import what only downloads need, nor JAX."""
  code = (
    "import sys; from server import main; from server.model_source.resolve_model import resolve_model_folder; "
    "resolve_model_folder('models/demo'); "
    "print([name for name in ('boto3', 'google.cloud', 'jax', 'httpx2', 'requests') if name in sys.modules])"
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"
