"""--lora_modules and --lora_dir: read before anything loads, and adapters that cannot be served end the start."""

import json
import pathlib

from absl.testing import flagsaver
import pytest

from engine.errors import ConfigError
from server import flags
from server.generation.adapter_loader import parse_lora_modules
from tests.commands import run_module


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--lora_modules=a=/adapters/a"], r"lora_modules=a=/adapters/a needs slots for adapters; set --enable_lora"),
    (["--lora_dir=/"], "lora_dir=/ needs slots for adapters; set --enable_lora, or leave out --lora_dir"),
    (["--enable-lora", "--lora-dir=/nowhere"], "lora_dir=/nowhere is not a folder; make it"),
    (["--enable_lora", "--lora_modules=a"], "lora_modules='a' is not NAME=FOLDER"),
    (["--enable_lora", "--lora_modules=a="], "lora_modules='a=' is not NAME=FOLDER"),
    (["--enable_lora", "--lora_modules=two words=/a"], "lora_modules='two words=/a' is not NAME=FOLDER"),
    (["--enable_lora", '--lora_modules={"name": "a"}'], "is not NAME=FOLDER"),
    (["--enable_lora", "--lora_modules=a=/a,a=/b"], "lora_modules='a=/b' has the name of an earlier one"),
    (
      ["--enable_lora", "--max_loras=1", "--lora_modules=a=/a,b=/b"],
      "has 2 adapters, the limit is 1; raise --max_loras",
    ),
    (["--max-cpu-loras=4"], "set --max_loras; every loaded adapter holds a slot"),
  ],
)
def test_flags_that_cannot_be_served_are_refused(arguments: list[str], said: str) -> None:
  with flagsaver.flagsaver(), pytest.raises(ConfigError, match=said):
    flags.parse_flags(["server", *arguments], "server.main")


def test_modules_are_names_and_folders() -> None:
  assert parse_lora_modules(["sql=/adapters/sql", "org/chat=relative=path"]) == [
    ("sql", "/adapters/sql"),
    ("org/chat", "relative=path"),
  ]


def test_an_adapter_that_cannot_be_read_ends_the_start(tmp_path: pathlib.Path) -> None:
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"r": 4}))
  common = ("--fake_device", "--port=0", "--http_port=-1", "--enable_lora")
  for module, said in (
    (f"a={tmp_path / 'none'}", f"error: {tmp_path / 'none'}/adapter_config.json: No such file or directory"),
    (f"sluice-demo={tmp_path / 'a'}", "error: lora_modules: lora_name='sluice-demo' is the served model's name"),
  ):
    done = run_module("server.main", *common, f"--lora_modules={module}")
    assert done.returncode == 1 and said in done.stderr, done.stderr
