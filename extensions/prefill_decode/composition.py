"""Makes a server a prefill or a decode server, with --role. Without the flag it adds and loads nothing of that."""

from collections.abc import Callable, Iterable
import os
import pathlib
import socket
import stat
from typing import TYPE_CHECKING, Any

import grpc

from engine.engine import Engine
from engine.errors import ConfigError
from extensions.vllm_api.composition import VllmComposition
from server.generation.adapter_loader import AdapterLoader
from server.generation.engine_client import LocalEngine
from server.generation.serving_state import ServingState
from server.host_options import HostOptions, split_kv_address
from server.rpc.sluice_service import SluiceService
from server.telemetry.process_counts import Census

if TYPE_CHECKING:
  from extensions.prefill_decode.decode_client import DecodeClient
  from extensions.prefill_decode.transfer_counts import TransferCounts

_SECRET_CHARS = range(16, 257)
_METHODS = "/sluice.transfer.v1.TransferService/"


class RoleComposition(VllmComposition):
  """The composition of a server that supports --role and --enable_vllm_api."""

  def __init__(self) -> None:
    self._options: HostOptions | None = None
    self._secret = ""
    self._counts: TransferCounts | None = None
    self._client: DecodeClient | None = None

  def open_methods(self, options: HostOptions) -> tuple[str, ...]:
    return (_METHODS,) if options.role == "prefill" else ()

  def add_services(
    self,
    server: grpc.aio.Server,
    options: HostOptions,
    state: ServingState,
    service: SluiceService,
    census: Census,
  ) -> tuple[str, ...]:
    names = super().add_services(server, options, state, service, census)
    if options.role == "both":
      return names
    from extensions.prefill_decode.transfer_counts import TransferCounts

    self._options, self._counts = options, TransferCounts()
    self._secret = read_secret(options.transfer_secret_file)
    if options.kv_transport == "jax":
      check_kv_address(options.kv_transport_address)
    if options.role == "decode":
      return names
    from extensions.prefill_decode.prefill_service import TRANSFER_SERVICE, TransferService

    TransferService(state, options, self._secret, self._counts).register(server)
    return (*names, TRANSFER_SERVICE)

  def before_load(self) -> None:
    """Chooses the class of the engine, on the thread that loads JAX anyway."""
    if self._options is None:
      return
    self.engine_class: type[Engine]
    match self._options.role, self._options.kv_transport == "jax":
      case "prefill", True:
        from extensions.prefill_decode.piece_offers import OfferingEngine

        self.engine_class = OfferingEngine
      case "prefill", False:
        from extensions.prefill_decode.prefill_engine import PrefillEngine

        self.engine_class = PrefillEngine
      case _, True:
        from extensions.prefill_decode.piece_pulls import PullingEngine

        self.engine_class = PullingEngine
      case _:
        from extensions.prefill_decode.decode_engine import DecodeEngine

        self.engine_class = DecodeEngine

  def make_client(
    self, engine: Engine, compiles_after_ready: Callable[[], int], adapter_loader: AdapterLoader
  ) -> LocalEngine:
    options, counts = self._options, self._counts
    if options is None or counts is None:
      return super().make_client(engine, compiles_after_ready, adapter_loader)
    if options.role == "prefill":
      from extensions.prefill_decode.prefill_service import PrefillClient

      return PrefillClient(engine, compiles_after_ready, adapter_loader, options)
    from extensions.prefill_decode.decode_client import DecodeClient

    credentials = _make_credentials(options)
    self._client = DecodeClient(
      engine, compiles_after_ready, adapter_loader, options, self._secret, credentials, counts
    )
    return self._client

  def collect_metrics(self) -> Iterable[Any]:
    return () if self._counts is None else self._counts.collect_metrics()


def read_secret(path: str) -> str:
  """Returns the secret in a file. Raises ConfigError, which never shows it."""
  try:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
      mode = os.fstat(file.fileno()).st_mode
      if not stat.S_ISREG(mode) or mode & 0o007:
        raise ConfigError(
          f"transfer_secret_file={path} is no regular file, or its mode {stat.S_IMODE(mode):04o} opens it to every "
          f"user of this machine; chmod 600 {path}"
        )
      secret = file.read(2 * _SECRET_CHARS.stop).decode("ascii", "replace").strip()
  except OSError as error:
    raise ConfigError(f"transfer_secret_file={path} cannot be read: {error.strerror}") from None
  if len(secret) not in _SECRET_CHARS or not all("!" <= char <= "~" for char in secret):
    raise ConfigError(
      f"transfer_secret_file={path} has {len(secret)} characters, or others than printable ASCII; write one line of "
      f"{_SECRET_CHARS.start} to {_SECRET_CHARS.stop - 1}, for example with: openssl rand -hex 24"
    )
  return secret


def check_kv_address(address: str) -> None:
  """Raises ConfigError if one of the two ports is not free. JAX would share a port that another process has."""
  host, first = split_kv_address(address)
  for port in (first, first + 1) if first else (0,):
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        probe.bind((host.strip("[]"), port))
      except OSError as error:
        raise ConfigError(
          f"kv_transport_address={address}: port {port} cannot be bound: {error.strerror}; choose an address of this "
          "machine and a port that is free, as is the next one"
        ) from None


def _make_credentials(options: HostOptions) -> grpc.ChannelCredentials | None:
  """Returns the credentials of calls to prefill servers; None: plain text. Raises ConfigError."""
  if not options.transfer_ca_file:
    return None
  try:
    authorities = pathlib.Path(options.transfer_ca_file).read_bytes()
    key = pathlib.Path(options.tls_key_file).read_bytes() if options.tls_key_file else None
    certificate = pathlib.Path(options.tls_cert_file).read_bytes() if options.tls_cert_file else None
  except OSError as error:
    raise ConfigError(f"transfer_ca_file: {error.filename} cannot be read: {error.strerror}") from None
  return grpc.ssl_channel_credentials(authorities, key, certificate)
