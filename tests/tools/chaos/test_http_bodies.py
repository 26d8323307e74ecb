"""The tool that sends bodies made from the OpenAPI document finds what is wrong, and nothing in the server."""

import http.server
import json
import threading

import pytest

from server.http.openai import openapi
from tools.chaos.http_bodies import Prober, probe


def test_no_body_harms_a_real_server():
  result = probe(64, number=7, hang_s=60)
  assert result["clean"], result
  assert result["bodies"] == sum(result["by_status"].values()) == 64
  paths = ("completions", "chat/completions", "embeddings", "score", "rerank", "batches")
  paths += ("messages", "messages/count_tokens", "responses", "responses/input_tokens")
  paths += ("load_lora_adapter", "unload_lora_adapter")
  assert set(result["by_operation"]) == {"/tokenize", "/detokenize", "/classify", *(f"/v1/{path}" for path in paths)}
  assert result["by_status"]["200"] > 5 and result["by_status"]["400"] > 5


class _Bad(http.server.BaseHTTPRequestHandler):
  """What a broken server would answer, by the first letter of the body."""

  def log_message(self, format, *args):
    pass

  def do_GET(self):
    said = openapi.document("1") if self.path == openapi.PATH else {"data": [{"id": "tiny"}]}
    self.answer(200, "application/json", json.dumps(said).encode())

  def do_POST(self):
    letter = self.rfile.read(int(self.headers["content-length"]))[:1]
    if letter == b"5":
      self.answer(500, "application/json", b'{"error": {}}')
    elif letter == b"c":
      self.close_connection = True
    elif letter == b"t":
      self.answer(400, "text/plain", b"no")
    elif letter == b"s":
      self.answer(200, "text/event-stream", b'data: {"choices": []}\n\n')
    elif letter == b"h":
      self.server.go.wait(180)
    else:
      self.answer(200, "application/json", b'{"prompt": "fine"}' if letter == b"f" else b'{"prompt": 1}')

  def answer(self, status, kind, body):
    self.send_response(status)
    self.send_header("content-type", kind)
    self.send_header("content-length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)


@pytest.mark.parametrize(
  "body, what",
  [
    (b"5", "server_errors"),
    (b"c", "crashes"),
    (b"t", "unlike_document"),
    (b"s", "unlike_document"),
    (b"?", "unlike_document"),
    (b"h", "hangs"),
    (b"f", ""),
  ],
)
def test_what_it_finds(body, what):
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Bad) as server:
    server.go = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    prober = Prober(f"http://127.0.0.1:{server.server_port}", 0.5 if what == "hangs" else 120)
    prober.send("/detokenize", body)
    prober.close()
    server.go.set()
    server.shutdown()
    thread.join()
  counts = {name: getattr(prober.tally, name) for name in ("server_errors", "crashes", "unlike_document", "hangs")}
  assert counts == {name: int(name == what) for name in counts}
  assert prober.tally.is_clean == (not what) and len(prober.tally.findings) == bool(what)
