"""The blocks of the documents that are marked `<!-- test: ... -->` run as they stand there, but for ports and folders.

server   beside a server on the demo model
admin    the same, with its admin port
python   in a process of its own
offline  commands that need no server

Blocks of programs that a machine may lack (grpcurl, Go, protoc) are skipped there.
tests/tools/simulate/test_how_to.py runs those of policies and ladders.
"""

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import pytest

from tests.documents import DOCUMENTS, ROOT, RUN_HERE, Block, code_blocks
from tools import make_random_adapter
from tools.server_process import RunningServer, find_free_port

pytestmark = pytest.mark.long

# Neither `make setup` nor every machine has these.
MAY_LACK = ("go", "grpcurl", "protoc")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
BLOCKS = [block for document in DOCUMENTS for block in code_blocks(document) if block.test in RUN_HERE]


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
  """What stands in the documents, and the same of a running server."""
  folder = tmp_path_factory.mktemp("server")
  http_port_file, admin_port = folder / "http_port", find_free_port()
  flags = ["--http_port=0", f"--http_port_file={http_port_file}", f"--admin_port={admin_port}"]
  flags += [f"--batch_dir={folder}/batches", "--enable_embeddings"]
  adapters = folder / "adapters"
  if make_random_adapter.main(["--model", str(ROOT / "models" / "demo"), "--output", str(adapters / "random")]):
    raise AssertionError("no adapter was written")
  flags += ["--enable_lora", f"--lora_dir={adapters}", f"--lora_modules=random={adapters / 'random'}"]
  with RunningServer(flags, folder / "log", {"JAX_PLATFORMS": "cpu"}) as server:
    http = f"localhost:{http_port_file.read_text().strip()}"
    grpc = f"localhost:{server.target.rpartition(':')[2]}"
    yield {
      r"localhost:8000": http,
      r"(localhost|127\.0\.0\.1):50051": grpc,
      r"localhost:50052": f"localhost:{admin_port}",
    }


def run_block(text: str, language: str) -> subprocess.CompletedProcess[str]:
  """As pasted into a shell, or into a file of its own."""
  command = [sys.executable, "-"] if language == "python" else ["bash", "-euo", "pipefail"]
  return subprocess.run(
    command,
    input=text,
    cwd=ROOT,
    env=os.environ | {"PATH": PATH, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"},
    capture_output=True,
    text=True,
    timeout=400,
    check=False,
  )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
  lacking = [
    name for name in MAY_LACK if re.search(rf"(^|\s){name} ", block.text) and not shutil.which(name, path=PATH)
  ]
  if lacking:
    pytest.skip(f"no {', '.join(lacking)} on PATH")
  text = block.text.replace("/tmp/sluice_", f"{tmp_path}/sluice_")
  if block.test == "python" and "/sluice_adapters/random" in text:  # which an earlier page makes
    adapter = str(tmp_path / "sluice_adapters" / "random")
    assert not make_random_adapter.main(["--model", str(ROOT / "models" / "demo"), "--output", adapter])
  if block.test in ("server", "admin"):
    for pattern, address in request.getfixturevalue("ports").items():
      text = re.sub(pattern, address, text)
  done = run_block(text, block.language)
  assert done.returncode == 0, f"{block}: {done.stderr[-2000:]}"
  assert done.stdout.strip() and '"error"' not in done.stdout, f"{block}: {done.stdout[-2000:]}"
  assert block.prints in done.stdout, f"{block}: {done.stdout[-2000:]}"
