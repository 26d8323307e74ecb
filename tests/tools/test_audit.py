"""make audit, asking a service of ours: what it says of no hole, of one, and of a service that does not answer."""

from collections.abc import Iterator
import contextlib
import http.server
import json
import pathlib
import socket
import threading

import pytest

from tools.audit import TOOL, main, verdict

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


@pytest.fixture
def ask(tmp_path, capsys):
  """Runs the tool on a lock file; returns its exit code and what it printed."""
  if not TOOL.exists():
    pytest.skip(f"{TOOL} is not there: `make audit` installs it")

  def run(url: str, lock: str = LOCK) -> tuple[int, str]:
    path: pathlib.Path = tmp_path / "requirements.lock"
    path.write_text(lock)
    code = main(["--service=osv", f"--osv_url={url}", f"--lock={path}"])
    return code, capsys.readouterr().out

  return run


@pytest.mark.catalogue("H11")
def test_packages_without_a_known_hole(ask):
  with osv({}) as (url, asked):
    assert ask(url) == (0, "audit: audited 2 packages, none vulnerable as far as osv knows\n")
  assert sorted(asked) == ["first==1.0", "second==2.0"]


@pytest.mark.catalogue("H11")
def test_a_package_with_a_hole_is_named_and_fails(ask):
  with osv({"second": [HOLE]}) as (url, _):
    assert ask(url) == (
      1,
      "audit: of 2 packages, vulnerable are:\naudit:   second 2.0: PYSEC-2026-1 CVE-2026-0001: install 2.1\n",
    )


@pytest.mark.catalogue("H11")
def test_a_service_that_does_not_answer_leaves_nothing_known(ask):
  with socket.create_server(("127.0.0.1", 0)) as taken:  # and not listening for HTTP once it is closed
    url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
  code, said = ask(url)
  assert code == 0 and said.startswith("audit: skipped: could not be audited, osv did not answer: requests.exceptions.")
  with osv({"second": [HOLE]}, 500) as (url, _):
    code, said = ask(url)
  assert code == 0 and said.startswith("audit: skipped: could not be audited, osv did not answer: ")


@pytest.mark.catalogue("H11")
def test_a_lock_that_does_not_hold_fails(ask):
  with osv({}) as (url, asked):
    for lock in ("first==1.0\n", "first==\n"):
      code, said = ask(url, lock)
      assert code == 2 and said.startswith("audit: pip-audit ended with exit code 1: ") and "none" not in said
  assert not asked


@pytest.mark.catalogue("H11")
def test_packages_that_a_service_does_not_have_are_not_audited():
  """As pip-audit tells it of an index that does not have the packages' pages, with exit code 0."""
  skipped = [{"name": f"p{index}", "skip_reason": "Dependency not found on PyPI"} for index in range(7)]
  code, said = verdict({"dependencies": skipped}, "pypi")
  assert (code, said) == (
    0,
    ["skipped: could not be audited, 7 of 7 packages (p0, p1, p2, p3, p4, ...): pypi has none"],
  )
  clean = {"name": "q", "version": "1", "vulns": []}
  code, said = verdict({"dependencies": [*skipped[:1], clean]}, "pypi")
  assert (code, said) == (
    0,
    [
      "audited 1 packages, none vulnerable as far as pypi knows",
      "skipped: could not be audited, 1 of 2 packages (p0): pypi has none",
    ],
  )
  hole = {"id": "A", "aliases": [], "fix_versions": []}
  code, said = verdict(
    {"dependencies": [skipped[0], clean | {"vulns": [hole, hole | {"fix_versions": ["2", "3"]}]}]}, "pypi"
  )
  assert code == 1 and said[1:3] == ["  q 1: A: no version without it", "  q 1: A: install 2 or 3"]
