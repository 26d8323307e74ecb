"""Where clients are installed, and how one runs: its output in a log, its last words in an error. Knows no client."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess

from tools.measure import ROOT
from tools.peers.__main__ import ENVIRONMENTS

DEMO = ROOT / "models" / "demo"
_SCRIPTS = ROOT / "tools" / "clients"
_PATIENCE_S = 240.0
# No access to a hub or to a list of prices, and no usage reports.
_OFFLINE = {
  "HF_HUB_OFFLINE": "1",
  "HF_DATASETS_OFFLINE": "1",
  "TRANSFORMERS_OFFLINE": "1",
  "HF_DATASETS_DISABLE_TELEMETRY": "1",
  "HAYSTACK_TELEMETRY_ENABLED": "False",
  "CONTINUE_TELEMETRY_ENABLED": "0",
  "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@dataclasses.dataclass(frozen=True)
class Place:
  """A server and a folder.

  Attributes:
    url: of HTTP.
    target: HOST:PORT of gRPC.
    model: name of the served model.
    folder: for logs and settings of clients.
  """

  url: str
  target: str
  model: str
  folder: pathlib.Path


class Failed(Exception):
  """A client did not do what its users expect; the text names the log."""


def run(command: Sequence[str], folder: pathlib.Path, name: str, variables: Mapping[str, str] | None = None) -> str:
  """Runs a client with extra environment variables until it ends; returns its output. Raises Failed."""
  log = folder / f"{name}.log"
  environment = {**os.environ, **_OFFLINE, "HF_HOME": str(folder / "hf"), **(variables or {})}
  with open(log, "w", encoding="utf-8") as file:
    try:
      code = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        timeout=_PATIENCE_S,
        check=False,
      ).returncode
    except subprocess.TimeoutExpired:
      raise Failed(f"did not end within {_PATIENCE_S:g} s; see {log}") from None
  text = log.read_text("utf-8", errors="replace")
  if code:
    raise Failed(f"exit code {code}: {(text.strip().splitlines() or ['no output'])[-1]}; see {log}")
  return text


@dataclasses.dataclass(frozen=True)
class PythonEnvironment:
  """A virtual environment of the checkout.

  Attributes:
    folder: in the checkout.
    target: the make target that sets it up.
  """

  folder: str
  target: str = "clients"
  language = "Python"

  def program(self, name: str) -> str:
    """The path of a program in it."""
    return str(ROOT / self.folder / "bin" / name)

  def missing(self) -> str:
    """What keeps its clients from running; empty if nothing does."""
    python = self.program("python")
    return "" if pathlib.Path(python).exists() else f"{python} does not exist; make {self.target} sets it up"

  def version(self, package: str) -> str:
    """The installed version of a package."""
    name = re.sub(r"[-_.]+", "_", package)
    found = sorted((ROOT / self.folder).glob(f"lib/python*/site-packages/{name}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""

  def run_script(self, name: str, place: Place, *arguments: str) -> str:
    """Runs a script of this folder; returns its last line."""
    said = run([self.program("python"), str(_SCRIPTS / name), *arguments], place.folder, name.partition(".")[0])
    return said.strip().splitlines()[-1]


class NodeEnvironment:
  """The folder where make clients installs tools/clients/package.json."""

  language = "Node"
  _modules = ROOT / ".node-clients" / "node_modules"

  def program(self, name: str) -> str:
    """The path of a program in it."""
    return str(self._modules / ".bin" / name)

  def missing(self) -> str:
    """What keeps its clients from running; empty if nothing does."""
    return "" if self._modules.exists() else f"{self._modules} does not exist; make clients sets it up where npm is"

  def version(self, package: str) -> str:
    """The installed version of a package."""
    return json.loads((self._modules / package / "package.json").read_text("utf-8"))["version"]

  def run_script(self, name: str, place: Place, *arguments: str) -> str:
    """Runs a script of this folder; returns its last line."""
    variables = {"NODE_PATH": str(self._modules)}
    said = run(["node", str(_SCRIPTS / name), *arguments], place.folder, name.partition(".")[0], variables)
    return said.strip().splitlines()[-1]


@dataclasses.dataclass(frozen=True)
class ProgramsOnPath:
  """Programs that a package manager of the machine installs; make clients leaves them to the user.

  Attributes:
    language: in which they are written.
    names: all programs that a client needs; the first one has `show_version`.
    show_version: its arguments that print the version.
  """

  language: str
  names: tuple[str, ...]
  show_version: tuple[str, ...]

  def missing(self) -> str:
    """What keeps its clients from running; empty if nothing does."""
    lacking = [name for name in self.names if not shutil.which(name)]
    return f"{', '.join(lacking)} not found on PATH; install with the package manager" if lacking else ""

  def version(self, package: str) -> str:
    """What the program itself says."""
    del package
    done = subprocess.run([self.names[0], *self.show_version], capture_output=True, text=True, check=False)
    found = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
    return found[0] if found else ""


Environment = PythonEnvironment | NodeEnvironment | ProgramsOnPath

OWN = PythonEnvironment(".venv", "setup")
PYTHON = PythonEnvironment(".venv-clients")
PYTHON_OPENAI2 = PythonEnvironment(".venv-clients-openai2")
PYTHON_VLLM = PythonEnvironment(ENVIRONMENTS["vllm"], "peers")
NODE = NodeEnvironment()
GO = ProgramsOnPath("Go", ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"), ("version",))
GRPCURL = ProgramsOnPath("Go", ("grpcurl",), ("-version",))
