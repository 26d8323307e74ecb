"""make audit: what it says of no hole, of one, of a lock that does not hold, and of a service that does not answer.

Each time of what pip-audit 2.10.1 was seen to print; and where `make audit` was set up, of pip-audit itself, which then
asks a service of ours.
"""

from collections.abc import Iterator
import contextlib
import http.server
import json
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from tools.repository import audit

LOCK = "".join(f"{pin} --hash=sha256:{64 * digit}\n" for pin, digit in (("first==1.0", "a"), ("second==2.0", "b")))
HOLE = {
  "id": "PYSEC-2026-1",
  "aliases": ["CVE-2026-0001"],
  "affected": [
    {
      "package": {"name": "second", "ecosystem": "PyPI"},
      "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.1"}]}],
    }
  ],
}


@contextlib.contextmanager
def osv(holes: dict[str, list], status: int = 200) -> Iterator[tuple[str, list[str]]]:
  """A vulnerability service that knows of these, by package; and the packages that it was asked about."""
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      query = json.loads(self.rfile.read(int(self.headers["content-length"])))
      name = query["package"]["name"]
      asked.append(f"{name}=={query['version']}")
      answer = json.dumps({"vulns": holes[name]} if name in holes else {}).encode()
      self.send_response(status)
      self.send_header("content-length", str(len(answer)))
      self.end_headers()
      self.wfile.write(answer)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


# By what the service does: what pip-audit printed last (on stdout a report, or on stderr), its exit code, ours, and the
# begin of what we say.
_FIRST = {"name": "first", "version": "1.0", "vulns": []}
_FOUND = {"id": "PYSEC-2026-1", "fix_versions": ["2.1"], "aliases": ["CVE-2026-0001"], "description": "N/A"}
NO_ANSWER = "audit: skipped: could not be audited, osv did not answer: "
SEEN = {
  "no hole": (
    [_FIRST, {"name": "second", "version": "2.0", "vulns": []}],
    0,
    0,
    "audit: audited 2 packages, none vulnerable as far as osv knows\n",
  ),
  "a hole": (
    [_FIRST, {"name": "second", "version": "2.0", "vulns": [_FOUND]}],
    1,
    1,
    "audit: of 2 packages, vulnerable are:\naudit:   second 2.0: PYSEC-2026-1 CVE-2026-0001: install 2.1\n",
  ),
  "nobody there": ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='127.0.0.1', port=", 1, 0, NO_ANSWER),
  "an error": ("pip_audit._service.interface.ServiceError", 1, 0, NO_ANSWER + "pip_audit._service.interface.Serv"),
  "no hash": (
    "ERROR:pip_audit._cli:requirement first==1.0 does not contain a hash",
    1,
    2,
    "audit: pip-audit ended with exit code 1: ERROR:pip_audit._cli:requirement first==1.0 does not contain a hash\n",
  ),
  "no lock": ("         ^", 1, 2, "audit: pip-audit ended with exit code 1:          ^\n"),
}


@pytest.mark.catalogue("H11")
@pytest.mark.parametrize("case", SEEN)
def test_what_is_said_of_what_pip_audit_printed(case, monkeypatch, capsys):
  printed, its_code, code, said = SEEN[case]
  out, err = ("", printed) if isinstance(printed, str) else (json.dumps({"dependencies": printed, "fixes": []}), "")
  done = subprocess.CompletedProcess([], its_code, out, f"WARNING:pip_audit._cli:Something.\n{err}\n\n")
  monkeypatch.setattr(audit, "TOOL", pathlib.Path(__file__))  # anything that is there
  monkeypatch.setattr(audit, "audit", lambda lock, service, osv_url: done)
  assert audit.main(["--service=osv"]) == code
  assert capsys.readouterr().out.startswith(said)


@pytest.mark.catalogue("H11")
@pytest.mark.parametrize("case", SEEN)
@pytest.mark.skipif(not (audit.TOOL.parents[1] / ".ready").exists(), reason="`make audit` sets up what this runs")
def test_pip_audit_prints_that(case, tmp_path):
  printed, its_code, _, _ = SEEN[case]
  lock = tmp_path / "requirements.lock"
  lock.write_text({"no hash": "first==1.0\n", "no lock": "first==\n"}.get(case, LOCK))
  with osv({"second": [HOLE]} if case == "a hole" else {}, 500 if case == "an error" else 200) as (url, asked):
    if case == "nobody there":
      with socket.create_server(("127.0.0.1", 0)) as taken:  # and not listening for HTTP once it is closed
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
    done = audit.audit(lock, "osv", url)
  assert done.returncode == its_code
  if isinstance(printed, str):
    assert not done.stdout and done.stderr.rstrip().splitlines()[-1].startswith(printed)
  else:
    assert json.loads(done.stdout)["dependencies"] == printed
    assert set(asked) == {"first==1.0", "second==2.0"}


@pytest.mark.catalogue("H11")
def test_without_its_environment_it_says_so(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(audit, "TOOL", tmp_path / "pip-audit")
  with pytest.raises(SystemExit) as ended:
    audit.main([])
  assert ended.value.code == 2 and "`make audit` installs it" in capsys.readouterr().err


@pytest.mark.catalogue("H11")
def test_packages_that_a_service_does_not_have_are_not_audited():
  """As pip-audit tells it of an index that does not have the packages' pages, with exit code 0."""
  skipped = [{"name": f"p{index}", "skip_reason": "Dependency not found on PyPI"} for index in range(7)]
  code, said = audit.verdict({"dependencies": skipped}, "pypi")
  assert (code, said) == (
    0,
    ["skipped: could not be audited, 7 of 7 packages (p0, p1, p2, p3, p4, ...): pypi has none"],
  )
  clean = {"name": "q", "version": "1", "vulns": []}
  code, said = audit.verdict({"dependencies": [*skipped[:1], clean]}, "pypi")
  assert (code, said) == (
    0,
    [
      "audited 1 packages, none vulnerable as far as pypi knows",
      "skipped: could not be audited, 1 of 2 packages (p0): pypi has none",
    ],
  )
  hole = {"id": "A", "aliases": [], "fix_versions": []}
  code, said = audit.verdict(
    {"dependencies": [skipped[0], clean | {"vulns": [hole, hole | {"fix_versions": ["2", "3"]}]}]}, "pypi"
  )
  assert code == 1 and said[1:3] == ["  q 1: A: no version without it", "  q 1: A: install 2 or 3"]


def test_it_runs_without_any_package() -> None:
  """As in its own environment, which has pip-audit and none of Sluice's packages."""
  command = [sys.executable, "-S", "-m", "tools.repository.audit", "--help"]
  done = subprocess.run(command, cwd=audit.ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "--service" in done.stdout
  done = subprocess.run([*command[:-1], "--lock"], cwd=audit.ROOT, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stderr.count("\n")) == (2, 1)
