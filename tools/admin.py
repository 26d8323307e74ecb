"""Calls a running server's admin port: settings, step trace, drain, LoRA adapters. May not import the engine.

python -m tools.admin config                 # prints the settings as a --flagfile
python -m tools.admin trace_on               # trace_off
python -m tools.admin drain                  # the same as SIGTERM
python -m tools.admin load_adapter NAME FOLDER     # unload_adapter NAME, list_adapters
"""

import os
import pathlib
import sys

from absl import app, flags
import grpc

from server.proto import admin_pb2 as pb
from server.proto import admin_pb2_grpc as pb_grpc
from tools.arguments import parse_flags

_TARGET = flags.DEFINE_string("target", "127.0.0.1:50052", "HOST:PORT of the server's admin port (--admin_port).")
_TLS_CA_FILE = flags.DEFINE_string(
  "tls_ca_file", "", "PEM file of authorities that signed the server's certificate; enables TLS."
)
_TLS_CERT_FILE = flags.DEFINE_string(
  "tls_cert_file", "", "PEM file of the client's certificate, for a server that requires one."
)
_TLS_KEY_FILE = flags.DEFINE_string("tls_key_file", "", "Its PEM key.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 10.0, "Seconds to wait for the response.")
# Their numbers of arguments.
_COMMANDS = {
  "config": 0,
  "trace_on": 0,
  "trace_off": 0,
  "drain": 0,
  "load_adapter": 2,
  "unload_adapter": 1,
  "list_adapters": 0,
}


def _channel() -> grpc.Channel:
  paths = (_TLS_CA_FILE.value, _TLS_KEY_FILE.value, _TLS_CERT_FILE.value)
  if not any(paths):
    return grpc.insecure_channel(_TARGET.value)
  contents = (pathlib.Path(path).read_bytes() if path else None for path in paths)
  return grpc.secure_channel(_TARGET.value, grpc.ssl_channel_credentials(*contents))


def _ask(channel: grpc.Channel, command: str, values: list[str]) -> str:
  """Runs one command; returns the text to print."""
  stub = pb_grpc.AdminServiceStub(channel)
  key = os.environ.get("SLUICE_ADMIN_API_KEY")
  options = {"timeout": _TIMEOUT_S.value, "metadata": (("authorization", f"Bearer {key}"),) if key else ()}
  if command == "config":
    return "\n".join(stub.GetConfig(pb.GetConfigRequest(), **options).flags)
  if command == "drain":
    live = stub.Drain(pb.DrainRequest(), **options).live_requests
    return f"draining, {live} live requests"
  if command == "load_adapter":
    stub.LoadAdapter(pb.LoadAdapterRequest(lora_name=values[0], lora_path=values[1]), **options)
    return f"loaded {values[0]}"
  if command == "unload_adapter":
    live = stub.UnloadAdapter(pb.UnloadAdapterRequest(lora_name=values[0]), **options).live_requests
    return f"unloaded {values[0]}, {live} live requests"
  if command == "list_adapters":
    adapters = stub.ListAdapters(pb.ListAdaptersRequest(), **options).adapters
    return "\n".join(
      f"{each.name} {'draining' if each.draining else 'loaded'}, rank {each.rank}, {each.live_requests} live requests, "
      f"from {each.path}"
      for each in adapters
    )
  on = command == "trace_on"
  path = stub.SetTrace(pb.SetTraceRequest(on=on), **options).path
  return f"step trace: {'recording to' if on else 'closed'} {path}"


def main(argv: list[str]) -> int:
  """Runs the command line; returns 0, 1 if the server refused or is not reachable, 2 for a bad command line."""
  if len(argv) < 2 or _COMMANDS.get(argv[1]) != len(argv) - 2:
    print(f"error: give one of {', '.join(_COMMANDS)}, with its arguments", file=sys.stderr)
    return 2
  try:
    with _channel() as channel:
      print(_ask(channel, argv[1], argv[2:]))
  except OSError as error:
    print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2
  except grpc.RpcError as error:
    call = error if isinstance(error, grpc.Call) else None
    print(f"{call.code().name}: {call.details()}" if call else f"error: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
