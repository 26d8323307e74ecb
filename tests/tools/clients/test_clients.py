"""Published clients against a server: the one that is always here, and what is said of a client that fails."""

import pytest

from tests.tools.conftest import run_module
from tools.clients import __main__ as check_clients


def test_the_official_client_works_unchanged():
  done = run_module("tools.clients", "--only=openai,responses")
  assert done.returncode == 0, done.stdout + done.stderr
  assert [line.split()[0] for line in done.stdout.splitlines()] == ["openai", "responses", "logs:"]
  assert "FAILED" not in done.stdout


def test_a_client_that_fails_is_told_with_its_last_words(tmp_path):
  with pytest.raises(check_clients.Failed, match=r"exit code 3: the reason; see .*/some\.log"):
    check_clients.run(["sh", "-c", "echo before; echo the reason; exit 3"], tmp_path, "some")
  assert check_clients.run(["echo", "fine"], tmp_path, "other") == "fine\n"


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [(["--only=curl"], "curl is not one of openai, responses"), (["--python=/nowhere"], "/nowhere does not exist")],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, complaint, capsys):
  with pytest.raises(SystemExit) as stop:
    check_clients.main(flags)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert complaint in error
  assert error.count("\n") == 1
