"""Published clients against a server: the one that is always here, and what is said of a client that fails."""

import json

import pytest

from tests.documents import HOW_TO, ROOT, code_blocks
from tests.tools.conftest import run_module
from tools.clients import __main__ as check_clients
from tools.clients import environments, programs


@pytest.mark.long
def test_the_official_client_works_unchanged():
  done = run_module("tools.clients", "--only=openai,responses")
  assert done.returncode == 0, done.stdout + done.stderr
  assert [line.split()[0] for line in done.stdout.splitlines()] == ["openai", "responses", "2", "logs:"]
  assert "FAILED" not in done.stdout
  assert "2 clients work, 0 failed, 0 left out" in done.stdout


def test_a_client_that_fails_is_told_with_its_last_words(tmp_path):
  with pytest.raises(environments.Failed, match=r"exit code 3: the reason; see .*/some\.log"):
    environments.run(["sh", "-c", "echo before; echo the reason; exit 3"], tmp_path, "some")
  assert environments.run(["echo", "fine"], tmp_path, "other") == "fine\n"


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [(["--only=curl"], "curl is not one of openai, responses"), (["--only=grpcurl"], "grpcurl not found on PATH")],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, complaint, capsys, monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  with pytest.raises(SystemExit) as stop:
    check_clients.main(flags)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert complaint in error
  assert error.count("\n") == 1


def test_messages_of_grpcurl_and_buf_are_joined():
  first = json.dumps({"started": {"model": "m"}, "deltas": [{"text": "one "}]}, indent=2)
  second = json.dumps({"deltas": [{"text": "two"}, {"index": 1}]}, indent=2)
  assert programs.text_of_stream(first) == "one "
  assert programs.text_of_stream(f"{first}\n{second}\n") == "one two"


def test_an_environment_knows_versions_of_its_packages():
  assert environments.OWN.version("grpcio-health-checking")
  assert not environments.OWN.version("no-such-package")


def test_code_of_the_how_to_pages_is_that_of_the_programs():
  sources = [
    file.read_text("utf-8") for file in (ROOT / "tools" / "clients").rglob("*.*") if file.suffix in (".cjs", ".go")
  ]
  blocks = [block for page in HOW_TO for block in code_blocks(page) if block.language in ("js", "go")]
  assert {block.language for block in blocks} == {"js", "go"}
  for block in blocks:
    assert any(block.text in source for source in sources), f"{block}: no program of tools/clients has this"
