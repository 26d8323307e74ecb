"""The admin service: on a port of its own, with keys of its own, and not for others without TLS."""

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
import pytest

from engine.errors import ConfigError
from server.errors import NotConfigured
from server.lifecycle.host import HostOptions
from server.proto import admin_pb2, admin_pb2_grpc
from server.proto import sluice_pb2 as pb
from server.rpc.admin_service import AdminActions
from tests.commands import run_module
from tests.server.certificates import ADMIN_KEY, KEY, OTHER_KEY, served_serial, tls_options
from tests.server.harness import METHODS, generate, reason_of, running
from tools.certificates import replace_file

IDS = pb.TokenIds(ids=[7, 8, 9])
FEW = pb.StopParams(max_tokens=3, ignore_eos=True)
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


class Actions:
  """Stands for the composition root."""

  def __init__(self):
    self.traced: list[bool] = []
    self.actions = AdminActions(flags=lambda: ["--model=tiny", "--api_key_file=/etc/keys"], set_trace=self._set_trace)

  def _set_trace(self, on: bool) -> str:
    if self.traced == [True, False]:
      raise NotConfigured("no step trace without --trace_file")
    self.traced.append(on)
    return "/tmp/trace"


def admin_of(served, **options):
  return admin_pb2_grpc.AdminServiceStub(grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}", **options))


def test_the_admin_service(tokenizer):
  actions = Actions()
  options = HostOptions(admin_port=0, drain_timeout_s=60)
  with running(tokenizer, host=options, admin=actions.actions) as served:
    admin = admin_of(served)
    config = admin.GetConfig(admin_pb2.GetConfigRequest())
    assert list(config.flags) == ["--model=tiny", "--api_key_file=/etc/keys"] and config.server_version
    assert admin.SetTrace(admin_pb2.SetTraceRequest(on=True)).path == "/tmp/trace"
    admin.SetTrace(admin_pb2.SetTraceRequest(on=False))
    assert actions.traced == [True, False]
    with pytest.raises(grpc.RpcError, match="no step trace without --trace_file") as caught:
      admin.SetTrace(admin_pb2.SetTraceRequest(on=True))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION and reason_of(caught.value) == "NOT_CONFIGURED"
    with pytest.raises(grpc.RpcError, match="are no sluice.admin.v1.SetTraceRequest"):
      grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}").unary_unary(
        "/sluice.admin.v1.AdminService/SetTrace"
      )(b"\xff")
    # Neither is on the other's port.
    for channel, method in (
      (served.channel, "/sluice.admin.v1.AdminService/Drain"),
      (served.channel, "/grpc.channelz.v1.Channelz/GetServers"),
      (grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"), METHODS[0]),
      (grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}"), "/grpc.channelz.v1.Channelz/GetServers"),
    ):
      with pytest.raises(grpc.RpcError, match="is not served here") as caught:
        channel.unary_unary(method)(b"")
      assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    served.runner.seconds = 0.05
    call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    messages = [next(call)]
    assert [admin.Drain(admin_pb2.DrainRequest()).live_requests for _ in range(3)] == [1, 1, 1]
    served.runner.seconds = 0.0
    messages += list(call)
    assert sum(len(delta.token_ids) for message in messages for delta in message.deltas) == 400
    served.thread.join(180)
    assert served.exit_code == [0]


def test_the_admin_command(tokenizer, secrets):
  options = HostOptions(admin_port=0, admin_api_key_file=str(secrets / "admin_keys"))
  with running(tokenizer, host=options, admin=Actions().actions) as served:
    for command, key, code, said in (
      ("config", ADMIN_KEY, 0, "--model=tiny\n--api_key_file=/etc/keys\n"),
      ("trace_on", ADMIN_KEY, 0, "step trace: recording to /tmp/trace\n"),
      (
        "nonsense",
        ADMIN_KEY,
        2,
        "error: give one of config, trace_on, trace_off, drain, load_adapter, unload_adapter, list_adapters, with its "
        "arguments\n",
      ),
      ("list_adapters", ADMIN_KEY, 0, "\n"),
      (
        "drain",
        KEY,
        1,
        "UNAUTHENTICATED: the API key is not known here; check the key, and that it is for this server\n",
      ),
      ("drain", ADMIN_KEY, 0, "draining, 0 live requests\n"),
    ):
      target = f"--target=127.0.0.1:{served.host.admin_port}"
      done = run_module("tools.admin", target, command, SLUICE_ADMIN_API_KEY=key)
      assert (done.returncode, done.stdout + done.stderr) == (code, said)
    served.thread.join(180)
    assert served.exit_code == [0]


@pytest.mark.catalogue("H8")
def test_channelz_is_on_the_admin_port_where_wanted(tokenizer):
  with (
    running(tokenizer, host=HostOptions(admin_port=0, enable_channelz=True), admin=Actions().actions) as served,
    grpc.insecure_channel(f"127.0.0.1:{served.host.admin_port}") as channel,
  ):
    generate(served, token_ids=IDS, stopping=FEW)
    servers = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest()).server
    assert any(server.data.calls_succeeded >= 1 for server in servers)


@pytest.mark.catalogue("H5")
def test_keys_of_users_are_not_good_for_the_admin_service(tokenizer, tmp_path):
  users, admins = tmp_path / "keys", tmp_path / "admin_keys"
  replace_file(users, f"{KEY} team-a\n{OTHER_KEY}\n".encode())
  replace_file(admins, f"{ADMIN_KEY}\n".encode())
  options = HostOptions(admin_port=0, api_key_file=str(users), admin_api_key_file=str(admins))
  denied = (
    PERMISSION_DENIED,
    "PERMISSION_DENIED",
    "this API key is for generating and may not administrate; send one of those of --admin_api_key_file",
  )
  unknown = (
    UNAUTHENTICATED,
    "UNAUTHENTICATED",
    "the API key is not known here; check the key, and that it is for this server",
  )
  with running(tokenizer, host=options, admin=Actions().actions) as served:
    admin = admin_of(served)

    def refused(*metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str, str]:
      with pytest.raises(grpc.RpcError) as caught:
        admin.Drain(admin_pb2.DrainRequest(), metadata=metadata)
      return caught.value.code(), reason_of(caught.value), caught.value.details()

    def allowed(*metadata: tuple[str, str]) -> bool:
      return bool(admin.GetConfig(admin_pb2.GetConfigRequest(), metadata=metadata).flags)

    for key in (KEY, OTHER_KEY):
      assert refused(("x-api-key", key)) == refused(("authorization", f"Bearer {key}")) == denied
      assert refused(("x-api-key", key), ("authorization", "Bearer of-nobody-at-all")) == denied
    for key in ("", KEY[:-1], KEY + "x", "of-nobody-at-all"):
      assert refused(("x-api-key", key)) == unknown
    assert refused()[:2] == unknown[:2]
    assert allowed(("x-api-key", ADMIN_KEY)) and allowed(("x-api-key", KEY), ("authorization", f"Bearer {ADMIN_KEY}"))
    with pytest.raises(grpc.RpcError, match="not known here"):
      served.model.GetModelInfo(pb.GetModelInfoRequest(), metadata=(("x-api-key", ADMIN_KEY),))
    # Both files are read again when they change.
    replace_file(users, f"{KEY} team-a\nthe-key-of-a-new-user\n".encode())
    assert refused(("x-api-key", OTHER_KEY)) == unknown and refused(("x-api-key", "the-key-of-a-new-user")) == denied
    replace_file(admins, f"{KEY}\n".encode())
    assert allowed(("x-api-key", KEY)), "a user who became an admin"
    assert refused(("x-api-key", ADMIN_KEY)) == unknown
    assert not served.host.stopping


@pytest.mark.catalogue("H5")
def test_without_keys_of_users_nobody_else_is_known(tokenizer, secrets):
  options = HostOptions(admin_port=0, admin_api_key_file=str(secrets / "admin_keys"))
  with running(tokenizer, host=options, admin=Actions().actions) as served, pytest.raises(grpc.RpcError) as caught:
    admin_of(served).Drain(admin_pb2.DrainRequest(), metadata=(("x-api-key", KEY),))
  assert caught.value.code() is UNAUTHENTICATED


@pytest.mark.catalogue("H8")
def test_an_admin_service_for_others_needs_tls_and_keys(secrets, authority):
  keys = {"admin_api_key_file": str(secrets / "admin_keys")}
  for options in (HostOptions(), tls_options(secrets), HostOptions(**keys)):
    fields = {name: getattr(options, name) for name in ("tls_cert_file", "tls_key_file", "admin_api_key_file")}
    with (
      pytest.raises(ConfigError, match="admin_host=0.0.0.0 can be reached by others, who could stop the server"),
      running(None, host=HostOptions(admin_port=0, admin_host="0.0.0.0", **fields), admin=Actions().actions),
    ):
      pass
  options = tls_options(secrets, admin_port=0, admin_host="0.0.0.0", **keys)
  with running(None, host=options, admin=Actions().actions) as served:
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{served.host.admin_port}", credentials) as channel:
      stub = admin_pb2_grpc.AdminServiceStub(channel)
      assert stub.GetConfig(admin_pb2.GetConfigRequest(), metadata=(("x-api-key", ADMIN_KEY),)).flags
    # One certificate for two ports, and both see the new one.
    authority.issue("server")
    admin_address = f"127.0.0.1:{served.host.admin_port}"
    serials = [served_serial(address, authority) for address in (served.address, admin_address)]
    authority.issue("server")
    newer = [served_serial(address, authority) for address in (served.address, admin_address)]
    assert serials[0] == serials[1] != newer[0] == newer[1]
