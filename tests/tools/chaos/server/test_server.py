"""The program: what it adds to the server, in one process and in several, and that the server alone has none of it."""

import grpc
import psutil
import pytest

from server.client import Client
from server.proto import admin_pb2, admin_pb2_grpc
from tests.commands import run_module
from tests.server.test_main import DEMO, start, wait_for_file
from tools.chaos.proto import chaos_pb2, chaos_pb2_grpc

SERVER = ("--fake_device", f"--model={DEMO}", "--port=0", "--admin_port=0", "--fake_step_ms=2")


def admin_address(process, log) -> str:
  """The admin port's address, which the server logs before it is ready."""
  lines = log.read_text().splitlines()
  return next(line.rpartition(" ")[2] for line in lines if line.startswith("admin "))


@pytest.mark.parametrize(
  ("module", "flags", "front_end"),
  [
    ("tools.chaos.server", ("--debug_invariants",), "tools.chaos.server.front_end_process"),
    ("tools.chaos.server", (), "server.lifecycle.front_end_process"),
    ("server.main", (), "server.lifecycle.front_end_process"),
  ],
)
def test_front_end_processes_and_the_books_of_all(tmp_path, module, flags, front_end):
  """Generations of every process are in the books; each process checks its own where books are checked."""
  log, port_file = tmp_path / "log", tmp_path / "port"
  with open(log, "w") as stderr:
    arguments = (*SERVER, f"--port_file={port_file}", "--frontend_processes=2", *flags)
    process = start(*arguments, module=module, stderr=stderr)
  try:
    address = f"127.0.0.1:{wait_for_file(port_file, process).strip()}"
    for _ in range(6):  # a connection each, which the kernel spreads
      with Client(address) as client:
        client.generate([5, 6], max_tokens=8, ignore_eos=True)
    children = [child.cmdline() for child in psutil.Process(process.pid).children()]
    assert len(children) == 2 and all(front_end in command for command in children)
    with grpc.insecure_channel(admin_address(process, log)) as channel:
      config = admin_pb2_grpc.AdminServiceStub(channel).GetConfig(admin_pb2.GetConfigRequest(), timeout=30)
      assert ("--debug_invariants" in config.flags) == bool(flags)
      ask = chaos_pb2_grpc.ChaosServiceStub(channel).GetInvariants
      if module == "server.main":
        with pytest.raises(grpc.RpcError) as refused:
          ask(chaos_pb2.GetInvariantsRequest(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
      else:
        books = ask(chaos_pb2.GetInvariantsRequest(), timeout=30)
        assert books.generations_started_total == books.requests_accepted_total == 6
        assert books.enabled == bool(flags) and (books.checks_total > 0) == bool(flags)
  finally:
    process.terminate()
    process.wait(180)
  assert process.returncode == 0


def test_the_server_alone_takes_no_plan(tmp_path):
  for flag in (f"--fault_plan={tmp_path}", "--debug_invariants"):
    done = run_module("server.main", flag)
    name = flag.strip("-").partition("=")[0]
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and f"flag '{name}'" in done.stderr, done.stderr
  helped = run_module("tools.chaos.server", "--help")
  assert helped.stdout.startswith("usage: python -m tools.chaos.server ") and "--fault_plan" in helped.stdout
  assert "--fault_plan" not in run_module("server.main", "--help").stdout
