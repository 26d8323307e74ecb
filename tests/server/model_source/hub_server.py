"""A small Hugging Face hub on this machine: the endpoints by which models are read, and faults on demand."""

from collections.abc import Iterator
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading

_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/?]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+?)/tree/([^/?]+)")
_LARGE = (".safetensors", ".bin", ".gguf")  # Git LFS has them: known by their SHA-256


class Hub:
  """What the server holds and what it has seen.

  Attributes:
    repositories: ORG/NAME -> file -> bytes; all at one commit, named by their content.
    tokens: ORG/NAME -> the only token that may read its files; the name alone is known to all, as of a gated one.
    lies: file -> bytes that are sent instead, under the digest of the true ones.
    cuts: file -> how many times its body ends early.
    stalls: file -> set once half of its body is sent; the rest never is.
    refused: files whose connection is dropped before any byte.
    requests: "METHOD PATH", with the range where there is one.
    url: of the server.
  """

  def __init__(self):
    self.repositories: dict[str, dict[str, bytes]] = {}
    self.tokens: dict[str, str] = {}
    self.lies: dict[str, bytes] = {}
    self.cuts: dict[str, int] = {}
    self.stalls: dict[str, threading.Event] = {}
    self.refused: set[str] = set()
    self.requests: list[str] = []
    self.url = ""

  def add_folder(self, name: str, folder: pathlib.Path) -> None:
    """Publishes a folder's files."""
    self.repositories[name] = {
      path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }

  def commit_of(self, name: str) -> str:
    """The repository's one commit."""
    return hashlib.sha1(b"".join(self.repositories[name].values())).hexdigest()

  def downloads(self) -> list[str]:
    """Files whose bytes were asked for, in order."""
    return [
      request.rsplit("/", 1)[1] for request in self.requests if request.startswith("GET /") and "/resolve/" in request
    ]


def git_sha1(content: bytes) -> str:
  """As Git names a file's content."""
  return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  hub: Hub

  def do_HEAD(self) -> None:
    self._answer()

  def do_GET(self) -> None:
    self._answer()

  def _answer(self) -> None:
    path = self.path.partition("?")[0]
    range_ = self.headers.get("Range", "")
    self.hub.requests.append(f"{self.command} {path}{f' {range_}' if range_ else ''}")
    if found := _TREE.fullmatch(path):
      self._send_tree(found[1], found[2])
    elif found := _RESOLVE.fullmatch(path):
      self._send_file(found[1], found[2], found[3], range_)
    elif found := _INFO.fullmatch(path):
      self._send_info(found[1], found[2])
    else:
      self._send(404, b"")

  def _send_info(self, name: str, revision: str | None) -> None:
    if name not in self.hub.repositories:  # as the hub does: who may not see a private one shall not learn of it
      self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
    elif revision not in (None, "main", "v1", self.hub.commit_of(name)):
      self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
    else:
      self._send(200, json.dumps({"id": name, "sha": self.hub.commit_of(name), "siblings": []}).encode())

  def _send_tree(self, name: str, revision: str) -> None:
    entries = []
    for file, content in self.hub.repositories[name].items():
      entry = {"type": "file", "path": file, "size": len(content), "oid": git_sha1(content)}
      if file.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
      entries.append(entry)
    self._send(200, json.dumps(entries).encode())

  def _send_file(self, name: str, revision: str, file: str, range_: str) -> None:
    token = self.hub.tokens.get(name)
    if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
      self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted."})
      return
    content = self.hub.repositories[name].get(file)
    if content is None:
      self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
      return
    if file in self.hub.refused and self.command == "GET":
      self.close_connection = True
      return
    digest = hashlib.sha256(content).hexdigest() if file.endswith(_LARGE) else git_sha1(content)
    headers = {"X-Repo-Commit": self.hub.commit_of(name), "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
    if file.endswith(_LARGE):
      headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
    sent = self.hub.lies.get(file, content)
    start = int(range_.removeprefix("bytes=").removesuffix("-")) if range_ else 0
    if start:
      headers["Content-Range"] = f"bytes {start}-{len(sent) - 1}/{len(sent)}"
    keep = len(sent) - start
    if self.command == "GET" and self.hub.cuts.get(file, 0):
      self.hub.cuts[file] -= 1
      keep //= 2
      self.close_connection = True
    if self.command == "GET" and file in self.hub.stalls:
      self._send(200, sent, headers, keep=keep // 2)
      self.hub.stalls[file].set()
      self.rfile.read(1)  # until the client goes
      self.close_connection = True
      return
    self._send(206 if start else 200, sent[start:], headers, keep=keep)

  def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, keep: int | None = None) -> None:
    self.send_response(status)
    for key, value in (headers or {}).items():
      self.send_header(key, value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body[:keep])

  def log_message(self, format: str, *args: object) -> None:
    """Says nothing."""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
  """A hub on a free port."""
  hub = Hub()
  handler = type("Handler", (_Handler,), {"hub": hub})
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield hub
    server.shutdown()
