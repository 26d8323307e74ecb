"""Serves request files with llama.cpp's server, built in its own environment, over HTTP. Imports nothing of Sluice.

It has its fastest settings for a CPU: f16 KV, flash attention, one KV buffer for all slots. Weights are f32, or one of
llama-quantize's types. Clients are waiting threads; an answer comes whole offline, and token by token in real time.
"""

import http.client
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

from tools.peers import face, write_gguf

READY_S = 120.0
TYPES = {"f32": "F32", "int8": "Q8_0", "int4": "Q4_0"}


def convert(model, folder, kind):
  """Writes the model as GGUF with weights of llama-quantize's type `kind`, once; returns the file."""
  target = pathlib.Path(folder) / f"model_{kind}.gguf"
  if not target.exists():
    part = f"{target}.part"
    if kind == "F32":
      write_gguf.write(model, part)
    else:
      program = pathlib.Path(sys.prefix) / "llama.cpp" / "llama-quantize"
      subprocess.run([str(program), str(convert(model, folder, "F32")), part, kind], check=True, stdout=sys.stderr)
    os.replace(part, target)
  return target


def start_server(args, gguf):
  """Starts the server of this environment; returns (process, port) once it answers."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  command = [
    str(pathlib.Path(sys.prefix) / "llama.cpp" / "llama-server"),
    *("--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
    *("--threads", str(args.threads), "--threads-batch", str(args.threads), "--threads-http", "2"),
    *("--parallel", str(args.max_requests), "--ctx-size", str(args.context), "--kv-unified", "--flash-attn", "on"),
    *("--cache-type-k", args.kv, "--cache-type-v", args.kv, "--batch-size", "2048", "--ubatch-size", str(args.ubatch)),
    *("--cache-ram", "0", "--no-cache-prompt", "--slot-prompt-similarity", "0", "--no-ui", "--log-disable"),
  ]
  process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
  end = time.monotonic() + READY_S
  while time.monotonic() < end and process.poll() is None:
    try:
      connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
      connection.request("GET", "/health")
      if connection.getresponse().status == 200:
        return process, port
    except OSError:
      pass
    time.sleep(0.2)
  process.kill()
  raise SystemExit(f"llama-server did not get ready within {READY_S:.0f} s (exit code {process.wait()})")


def complete(port, request, log, stream):
  """Sends one request and records its tokens in the log."""
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
  body = {
    "prompt": request["prompt"],
    "n_predict": request["output_len"],
    "temperature": 0.0,
    "samplers": ["temperature"],
    "cache_prompt": False,
    "return_tokens": True,
    "stream": stream,
  }
  log.sent(request["id"])
  connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
  response = connection.getresponse()
  if response.status != 200:
    raise ConnectionError(f"llama-server answered {response.status}: {response.read(300)!r}")
  if not stream:
    log.got(request["id"], json.loads(response.read())["tokens"])
    return
  for line in response:
    if line.startswith(b"data: "):
      log.got(request["id"], json.loads(line[6:]).get("tokens", []))


def main():
  """See face."""
  parser = face.parser(__doc__)
  parser.add_argument("--context", type=int, default=24_576, help="tokens in the shared KV buffer")
  parser.add_argument("--kv", choices=("f16", "f32"), default="f16", help="type of the KV cache")
  parser.add_argument("--type", help="type of the weights for llama-quantize, such as Q4_K_M; default: by --precision")
  parser.add_argument("--ubatch", type=int, default=512, help="tokens a step")
  args = parser.parse_args()
  kind = args.type or TYPES[args.precision]
  servers = []

  def begin():
    process, port = start_server(args, convert(args.model, args.work, kind))
    servers.append(process)

    def one(request, log, at, realtime, failures):
      try:
        time.sleep(max(0.0, at - time.monotonic()))
        complete(port, request, log, realtime)
      except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        failures.append(f"request {request['id']!r}: {error}")

    def run(requests, log, start_s, realtime):
      failures = []
      threads = [
        threading.Thread(
          target=one,
          args=(request, log, start_s + (request["arrival_s"] if realtime else 0.0), realtime, failures),
        )
        for request in requests
      ]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      if failures:
        raise SystemExit(failures[0])

    about = {"threads": args.threads, "context": args.context, "ubatch": args.ubatch, "weights": kind, "kv": args.kv}
    return face.Peer(about | {"flash_attention": True, "kv_unified": True}, run)

  try:
    face.serve(begin)
  finally:
    for process in servers:
      process.terminate()
      process.wait()


if __name__ == "__main__":
  main()
