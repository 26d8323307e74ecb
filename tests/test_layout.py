"""Rules of docs/architecture.md that a machine can check: import directions, purity, names inside this checkout."""

import ast
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "models", "pallas_kernels", "server", "extensions", "tools")
# What each room may import besides the standard library. The first match wins.
ROOMS = (
  (
    "engine/device/",
    {
      "engine",
      "models",
      "pallas_kernels",
      "jax",
      "jaxlib",
      "numpy",
      "flax",
      "orbax",
      "safetensors",
      "ml_dtypes",
      "xxhash",
    },
  ),
  ("engine/", {"engine"}),
  ("models/", {"models", "pallas_kernels", "jax", "flax", "numpy"}),
  ("pallas_kernels/", {"pallas_kernels", "jax", "numpy"}),
  ("server/main.py", None),
  ("sluice.py", None),
  ("extensions/", None),
  ("server/flags.py", {"absl", "engine", "server"}),
  (
    "server/model_source/",
    {"engine", "server", "boto3", "botocore", "google", "google_crc32c", "huggingface_hub", "requests"},
  ),
  ("server/page/", {"engine", "server", "prometheus_client", "starlette"}),
  (
    "server/router/",
    {"engine", "server", "grpc", "grpc_health", "h11", "msgspec", "prometheus_client", "starlette", "uvloop"},
  ),
  ("server/http/", {"engine", "server", "google", "h11", "msgspec", "python_multipart", "starlette", "uvicorn"}),
  (
    "server/",
    {
      "engine",
      "server",
      "grpc",
      "grpc_channelz",
      "grpc_health",
      "grpc_reflection",
      "grpc_status",
      "google",
      "jinja2",
      "llguidance",
      "msgspec",
      "opentelemetry",
      "tokenizers",
      "uvloop",
    },
  ),
  ("tools/", None),
)


def sources() -> list[str]:
  modules = (str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
  return sorted(("sluice.py", *modules))


def imports(path: str) -> set[str]:
  found = set()
  for node in ast.walk(ast.parse((ROOT / path).read_text())):
    if isinstance(node, ast.Import):
      found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import; import flat (from engine.scheduler import Scheduler)"
      found.add(node.module or "")
  return found


@pytest.mark.parametrize("path", sources())
def test_imports_run_one_way(path: str) -> None:
  allowed = next(allowed for prefix, allowed in ROOMS if path.startswith(prefix))
  for name in imports(path):
    top = name.split(".")[0]
    assert top != "tests", f"{path} imports tests"
    if not path.startswith(("tools/", "sluice.py")):
      assert top != "tools", f"{path} imports {name}: nothing imports tools"
    if not path.startswith(("tools/", "extensions/", "server/main.py", "sluice.py")):
      assert top != "extensions", f"{path} imports {name}: only server/main.py, sluice.py and tools import extensions"
    assert top != "sluice", f"{path} imports sluice: it is for users alone"
    if allowed is not None and top not in sys.stdlib_module_names:
      assert top in allowed, f"{path} may not import {name}"
    if path.startswith(("engine/", "server/")) and not path.startswith(("engine/device/", "server/main.py")):
      assert not name.startswith("engine.device"), f"{path} imports {name}: only the composition root may"


def test_pure_part_loads_neither_jax_nor_numpy() -> None:
  modules = [p[:-3].replace("/", ".") for p in sources() if p.startswith("engine/") and "device" not in p]
  code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
  code += "print([m for m in ('jax', 'numpy', 'flax', 'grpc') if m in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"


@pytest.mark.catalogue("H10")
@pytest.mark.parametrize("path", [path for path in sources() if not path.startswith("tools/")])
def test_nothing_runs_what_it_reads(path: str) -> None:
  """Neither from a client nor from a model's folder nor from another process."""
  forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "multiprocessing"}
  assert not forbidden & {name.split(".")[0] for name in imports(path)}
  calls = {
    ast.unparse(node.func) for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)
  }
  assert not calls & {"eval", "exec", "os.system", "os.fork", "np.load", "yaml.load"}


@pytest.mark.catalogue("H11")
def test_every_dependency_is_locked_with_its_hashes() -> None:
  """So that what is installed is what was tested. Whether any has a known hole is not looked up here."""
  entries = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
  entries = [entry for entry in entries if entry.strip() and not entry.lstrip().startswith("#")]
  assert len(entries) > 50
  for entry in entries:
    assert "==" in entry.split()[0] and "--hash=sha256:" in entry, entry


def test_names_resolve_to_this_checkout() -> None:
  for package in PACKAGES:
    assert Path(__import__(package).__file__).resolve().is_relative_to(ROOT)


def test_packages_are_listed_by_name() -> None:
  import tomllib

  listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
  present = {
    str(p.parent.relative_to(ROOT)).replace("/", ".") for pkg in PACKAGES for p in (ROOT / pkg).rglob("__init__.py")
  }
  assert set(listed) == present


def test_no_init_under_tests_and_engine_init_is_empty() -> None:
  assert not list((ROOT / "tests").rglob("__init__.py"))
  assert (ROOT / "engine/__init__.py").read_text() == ""
  assert (ROOT / "engine/device/__init__.py").read_text() == ""


# Where the wall clock may be read: times that are told to people or other systems. All else is on a monotonic clock,
# or it would go wrong when the clock is set.
WALL_CLOCK = {
  "server/http/embeddings/embedding_endpoints.py",
  "server/telemetry/access_log.py",
  "server/text/chat_template.py",
  "server/http/batches/batch_store.py",
  "server/http/openai/completions.py",
  "server/http/openai/model_endpoints.py",
  "server/http/responses/response_reply.py",
  "server/page/prometheus_metrics.py",
  "server/telemetry/tracing.py",
  "extensions/kv_events/event_publisher.py",
  "extensions/prefill_decode/piece_offers.py",  # JAX's transfer server takes such times
  "extensions/vllm_api/service.py",
}


# The modules and packages of server/, each of which imports those before it alone.
SERVER_ORDER = (
  "server.errors",
  "server.host_options",
  "server.version",
  "server.model_source",
  "server.proto",
  "server.client",
  "server.probe",
  "server.security",
  "server.telemetry",
  "server.text",
  "server.generation",
  "server.ipc",
  "server.rpc",
  "server.http",
  "server.http.openai",
  "server.http.embeddings",
  "server.http.messages",
  "server.http.responses",
  "server.http.batches",
  "server.http.openai.openapi",
  "server.http.openai.app",
  "server.page",
  "server.lifecycle",
  "server.flag_spellings",
  "server.model_settings",
  "server.setting_text",
  "server.flags",
  "server.router",
  "server.main",
)
MOST_MODULES = 12


def module_of(path: str) -> str:
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(path: str, modules: set[str]) -> set[str]:
  """The modules among `modules` that a file imports anywhere, also under TYPE_CHECKING and within functions."""
  found = set()
  for node in ast.walk(ast.parse((ROOT / path).read_text())):
    if isinstance(node, ast.Import):
      found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      found.update(
        whole if (whole := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
      )
  return found & modules


def test_packages_of_the_server_are_small() -> None:
  for init in (ROOT / "server").rglob("__init__.py"):
    modules = list(init.parent.glob("*.py"))
    assert len(modules) <= MOST_MODULES, f"{init.parent.relative_to(ROOT)} has {len(modules)} modules"


def test_imports_of_the_server_run_one_way() -> None:
  paths = [path for path in sources() if path.startswith("server/") and path != "server/__init__.py"]
  modules = {module_of(path) for path in paths}

  def room_of(module: str) -> int:
    rooms = [room for room in SERVER_ORDER if module == room or module.startswith(f"{room}.")]
    assert rooms, f"{module} has no place in SERVER_ORDER"
    return SERVER_ORDER.index(max(rooms, key=len))

  graph = {}
  for path in paths:
    module = module_of(path)
    graph[module] = imported_modules(path, modules)
    for name in graph[module]:
      assert room_of(name) <= room_of(module), f"{module} imports {name}, which comes after it"
  # Within a package: whatever imports nothing that is left is taken away, until nothing is left.
  left = dict(graph)
  while free := [module for module, names in left.items() if not names & left.keys() - {module}]:
    for module in free:
      del left[module]
  assert not left, f"a circle among {sorted(left)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_classes_of_a_package_share_a_name(package: str) -> None:
  seen: dict[str, str] = {}
  for path in sources():
    if path.startswith(f"{package}/") and "/proto/" not in path:
      for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ClassDef):
          assert node.name not in seen, f"{path} and {seen[node.name]} have a class {node.name} each"
          seen[node.name] = path


def test_errors_keep_their_field_apart() -> None:
  """InvalidRequest("n=0 is not allowed") would tell nobody which field that is: it takes field="n"."""
  kinds = {"InvalidRequest", "UnsupportedField", "RequestTooLong", "NoTokenizer"}
  beginning = re.compile(r"(the )?([a-z_][a-z_0-9.]*(\[\d+\])*)?(=| has | is | of | entries|:)")
  for path in sources():
    if not path.startswith(("engine/", "server/")):
      continue
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
      if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") in kinds:
        first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
        if isinstance(first, ast.Constant) and beginning.match(str(first.value)):
          assert any(keyword.arg == "field" for keyword in node.keywords), f"{path}:{node.lineno} names no field"


@pytest.mark.catalogue("D9")
def test_the_wall_clock_is_read_to_be_told_alone() -> None:
  found = set()
  for path in sources():
    if not path.startswith("tools/") and re.search(
      r"\btime\.(time|time_ns|localtime|gmtime)\(|\b(date|datetime)\.(now|today|utcnow)\(", (ROOT / path).read_text()
    ):
      found.add(path)
  assert found == WALL_CLOCK


@pytest.mark.catalogue("D12")
def test_nothing_forks() -> None:
  """Neither JAX nor gRPC survives it; other processes are spawned."""
  for path in sources():
    text = (ROOT / path).read_text()
    assert not re.search(r"\bos\.(fork|forkpty)\b|get_context\(['\"]fork|set_start_method|preexec_fn", text), path
    if "multiprocessing" in text:
      assert 'get_context("spawn")' in text, f"{path}: multiprocessing without spawn"
