"""Queries a server's gRPC health service, for supervisors that can only run a command.

  python -m server.probe --target=127.0.0.1:50051                                          is it alive?
  python -m server.probe --target=127.0.0.1:50051 --service=sluice.v1.GenerationService    is it ready?

Exit codes: 0 SERVING; 1 anything else, and one line gives the reason; 2 bad arguments.
"""

import argparse
from collections.abc import Sequence
import pathlib
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def ask_health(target: str, service: str, timeout_s: float, credentials: grpc.ChannelCredentials | None = None) -> str:
  """Sends one health check. Returns "SERVING", or the reason if it is not."""
  # A proxy from the environment must not apply to this machine's own server.
  options = (("grpc.enable_http_proxy", 0),)
  channel = (
    grpc.insecure_channel(target, options) if credentials is None else grpc.secure_channel(target, credentials, options)
  )
  with channel:
    try:
      request = health_pb2.HealthCheckRequest(service=service)
      stub: Any = health_pb2_grpc.HealthStub(channel)
      status = stub.Check(request, timeout=timeout_s).status
    except grpc.RpcError as error:
      # The RpcError of a call is also a grpc.Call, which its type does not show.
      return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
  return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = argparse.ArgumentParser(prog="server.probe", description="Queries a server's gRPC health service.")
  parser.add_argument("--target", default="127.0.0.1:50051", help="host:port (default %(default)s)")
  parser.add_argument("--service", default="", help="empty: is it alive? sluice.v1.GenerationService: is it ready?")
  parser.add_argument("--timeout_s", type=float, default=2.0, help="for the whole check (default %(default)s)")
  parser.add_argument("--tls_ca_file", help="PEM authorities that verify the server's certificate; enables TLS")
  parser.add_argument("--tls_cert_file", help="with --tls_key_file: the probe's own certificate, for mutual TLS")
  parser.add_argument("--tls_key_file")
  args = parser.parse_args(argv)
  credentials = None
  if args.tls_ca_file:
    try:
      ca, cert, key = (
        pathlib.Path(file).read_bytes() if file else None
        for file in (args.tls_ca_file, args.tls_cert_file, args.tls_key_file)
      )
    except OSError as error:
      parser.error(f"{error.filename}: {error.strerror}")
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
  answer = ask_health(args.target, args.service, args.timeout_s, credentials)
  if answer != "SERVING":
    print(f"{args.service or 'server'} at {args.target}: {answer}", file=sys.stderr)
  return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
  sys.exit(main())
