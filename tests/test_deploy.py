"""The files in deploy/ and what they name: tools that read them, flags that exist, numbers that agree, a real run."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib

from absl import flags
from absl.testing import flagsaver
import kubernetes_validate
import pytest
import yaml

from engine.accelerator import ACCELERATORS
from server import flags as server_flags
from server import main, probe
from server.lifecycle.host import LIVENESS, HostOptions
from server.rpc.sluice_service import GENERATION_SERVICE
from tests.server import certificates
from tests.server.harness import running
from tools.find_accelerator import lock_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
UNIT, CONTAINERFILE = ROOT / "deploy" / "sluice.service", ROOT / "deploy" / "Containerfile"
KUBERNETES = ROOT / "deploy" / "kubernetes"
VARIANTS = ("base", "nvidia", "tpu")
# What the server may take beyond its drain: two farewells, the engine's last turns, the interpreter's end.
FAREWELLS_S = 7.0


def values(arguments: list[str]) -> dict:
  """The server's flags after these arguments; fails where one is unknown or refused."""
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    rest = main._parse(["server", *arguments])
    assert rest == ["server"], rest
    return {name: flags.FLAGS[name].value for name in flags.FLAGS}


def seconds(text: str) -> float:
  number, unit = re.fullmatch(r"(\d+)(s|min)?", text).groups()
  return float(number) * (60 if unit == "min" else 1)


def unit() -> dict[str, str]:
  """The last value of each setting that may stand once."""
  lines = [line for line in UNIT.read_text().splitlines() if line and not line.startswith(("#", "["))]
  return dict(line.split("=", 1) for line in lines)


def unit_arguments() -> list[str]:
  program, dash_m, module, *arguments = shlex.split(unit()["ExecStart"])
  assert (program, dash_m, module) == ("/opt/sluice/.venv/bin/python", "-m", "server.main")
  flagfile = "--flagfile=/etc/sluice/flags"
  assert flagfile in arguments
  return [argument for argument in arguments if argument != flagfile]


def merged(whole, patch):
  """A strategic merge as kustomize does it, of what the patches here hold: containers by name, other lists replaced."""
  if isinstance(whole, dict) and isinstance(patch, dict):
    both = {key: merged(whole[key], value) if key in whole else value for key, value in patch.items()}
    return whole | both
  if isinstance(whole, list) and patch and all(isinstance(item, dict) and "name" in item for item in (*whole, *patch)):
    changes = {item["name"]: item for item in patch}
    return [merged(item, changes.get(item["name"], {})) for item in whole]
  return patch


def manifests(variant: str = "base") -> dict[str, dict]:
  """The documents by kind that `kubectl apply -k` would make of a folder of deploy/kubernetes."""
  folder = KUBERNETES / variant
  kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
  assert kustomization.keys() <= {"apiVersion", "kind", "resources", "images", "patches"}
  if variant == "base":
    (resource,) = kustomization["resources"]
    documents = {document["kind"]: document for document in yaml.safe_load_all((folder / resource).read_text())}
  else:
    assert kustomization["resources"] == ["../base"]
    documents = manifests()
  for change in kustomization.get("patches", ()):
    patch = yaml.safe_load((folder / change["path"]).read_text())
    assert patch["metadata"]["name"] == documents[patch["kind"]]["metadata"]["name"]
    documents[patch["kind"]] = merged(documents[patch["kind"]], patch)
  (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
  for image in kustomization.get("images", ()):
    assert container["image"].rpartition(":")[0] == image["name"]
    container["image"] = f"{image['name']}:{image['newTag']}"
  assert documents.keys() == {"Deployment", "Service", "PodDisruptionBudget"}
  return documents


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


@needs_systemd
def test_systemd_takes_the_unit(tmp_path):
  file = tmp_path / "sluice.service"
  file.write_text(UNIT.read_text().replace("/opt/sluice/.venv/bin/python", sys.executable))
  done = subprocess.run(
    ["systemd-analyze", "verify", "--man=no", str(file)], text=True, capture_output=True, timeout=180, check=False
  )
  assert (done.returncode, done.stderr) == (0, "")
  file.write_text(file.read_text().replace("KillMode=mixed", "KillMode=mixt"))
  done = subprocess.run(
    ["systemd-analyze", "verify", "--man=no", str(file)], text=True, capture_output=True, timeout=180, check=False
  )
  assert "mixt" in done.stderr, "the tool sees nothing"


@needs_systemd
def test_the_unit_is_confined(tmp_path):
  """systemd's own measure, 0 to 100; a service as most are has 96."""

  def check(file: pathlib.Path) -> int:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", str(file)]
    return subprocess.run(command, capture_output=True, timeout=180, check=False).returncode

  assert check(UNIT) == 0
  loose = tmp_path / "loose.service"
  loose.write_text(re.sub(r"(?m)^(Protect|Restrict|Private|Capab|System|NoNew|Dynamic).*\n", "", UNIT.read_text()))
  assert check(loose) != 0


def test_the_units_numbers_agree():
  settings, known = unit(), values(unit_arguments())
  assert settings["Type"] == "notify" and settings["KillMode"] == "mixed" and settings["Restart"] == "on-failure"
  assert seconds(settings["TimeoutStopSec"]) >= known["drain_delay_s"] + known["drain_timeout_s"] + FAREWELLS_S
  assert seconds(settings["WatchdogSec"]) > known["step_timeout_s"] + known["watchdog_grace_s"] + 1
  folders = {"/var/cache/": settings["CacheDirectory"], "/var/log/": settings["LogsDirectory"]}
  for flag in ("compile_cache_dir", "access_log"):
    assert any(known[flag].startswith(f"{root}{name}/") for root, name in folders.items()), flag
  assert settings["CacheDirectoryMode"] == "0700"


def instructions() -> list[tuple[str, str]]:
  """(instruction, its text) of each, with lines joined."""
  text = re.sub(r"(?m)^#.*\n", "", CONTAINERFILE.read_text())
  lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
  return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.mark.parametrize("file", [CONTAINERFILE, ROOT / "deploy" / "ray" / "Containerfile"], ids=["server", "ray"])
def test_hadolint_finds_nothing(file):
  found = shutil.which("hadolint", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
  if found is None:
    pytest.skip("hadolint is not here")
  done = subprocess.run([found, str(file)], text=True, capture_output=True, timeout=180, check=False)
  assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_what_the_server_needs():
  found = instructions()
  stages = [index for index, (name, _) in enumerate(found) if name == "FROM"]
  assert len(stages) == 2 and all(re.search(r"python:3\.12-slim( AS build)?$", found[index][1]) for index in stages)
  copied = [text.split() for name, text in found[: stages[1]] if name == "COPY"]
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  sources = {source for *names, _ in copied for source in names}
  tops = {package.split(".")[0] for package in project["tool"]["setuptools"]["packages"]} - {"tools"}
  locks = {lock_file(accelerator) for accelerator in ACCELERATORS}
  assert sources == tops | locks | {"pyproject.toml"} and all((ROOT / source).exists() for source in sources)
  ignored = (ROOT / "deploy" / "Containerfile.dockerignore").read_text().splitlines()
  assert {line[1:] for line in ignored if line.startswith("!")} == sources and ignored[0] == "**"
  last = dict(found[stages[1] :])
  assert last["STOPSIGNAL"] == "SIGTERM" and re.fullmatch(r"[1-9]\d+:[1-9]\d+", last["USER"])
  assert "g++" not in " ".join(text for _, text in found[stages[1] :])
  program, dash_m, module, *arguments = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
  assert program == last["WORKDIR"] + "/.venv/bin/python" and (dash_m, module) == ("-m", "server.main")
  known = values(arguments)
  assert known["host"] == "0.0.0.0" and known["compile_cache_dir"].startswith(json.loads(last["VOLUME"])[0] + "/")
  assert set(last["EXPOSE"].split()) == {str(known["port"]), str(server_flags.DEFAULT_HTTP_PORT)}
  options, command = last["HEALTHCHECK"].split(" CMD ")
  assert all(name in options for name in ("--interval", "--timeout", "--start-period", "--retries"))
  program, dash_m, module, target = json.loads(command)
  assert (dash_m, module, target) == ("-m", "server.probe", f"--target=127.0.0.1:{known['port']}")
  assert (ROOT / "server" / "probe.py").is_file()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_the_image_gets_the_locks_versions(accelerator):
  """The very commands of the image, short of the download."""
  (text,) = (text for name, text in instructions() if name == "RUN" and "requirements" in text)
  wanted, lock, versions, *_ = text.split("&& ")
  run = {"cwd": ROOT, "text": True, "check": True, "stdout": subprocess.PIPE}
  run["env"] = os.environ | {"ACCELERATOR": accelerator}
  asked = subprocess.run(["bash", "-c", wanted.replace("> /tmp/wanted.txt", "")], **run).stdout.split("\n")[:-1]
  command = f"{lock} && {versions.replace('> /tmp/versions.txt', '')}"
  pinned = subprocess.run(["bash", "-c", command], **run).stdout.splitlines()
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert asked == project["dependencies"] + project["optional-dependencies"].get(accelerator, [])
  names = {re.fullmatch(r"([A-Za-z0-9._-]+)==[^ \\]+( ; .*[^\\])?", line)[1] for line in pinned}
  assert {re.match(r"[A-Za-z0-9._-]+", line)[0] for line in asked} <= names
  plugin = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}
  assert {name for name in plugin.values() if name in names} == {plugin[key] for key in plugin if key == accelerator}


def test_an_image_takes_an_accelerator_and_is_for_cpus_by_itself():
  found = instructions()
  assert [text for name, text in found if name == "ARG"] == ["ACCELERATOR=cpu"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_manifests_are_valid(variant):
  for document in manifests(variant).values():
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
  wrong = manifests(variant)["Deployment"]
  wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
  with pytest.raises(kubernetes_validate.ValidationError):
    kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_manifests_numbers_agree(variant):
  documents = manifests(variant)
  pod = documents["Deployment"]["spec"]["template"]
  spec = pod["spec"]
  (server,) = spec["containers"]
  known = values(server["args"])
  assert spec["terminationGracePeriodSeconds"] >= known["drain_delay_s"] + known["drain_timeout_s"] + FAREWELLS_S
  ports = {port["name"]: port["containerPort"] for port in server["ports"]}
  assert ports == {"grpc": known["port"], "http": known["http_port"]}
  for name, service in (
    ("startupProbe", GENERATION_SERVICE),
    ("readinessProbe", GENERATION_SERVICE),
    ("livenessProbe", LIVENESS),
  ):
    asked = server[name]
    assert asked["grpc"]["port"] == ports["grpc"] and asked["grpc"].get("service", "") == service, name
    assert asked["timeoutSeconds"] < asked["periodSeconds"]
  # The endpoint is gone from the balancers before the server refuses.
  ready = server["readinessProbe"]
  assert known["drain_delay_s"] >= ready["periodSeconds"] * ready["failureThreshold"]
  assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
  for port in documents["Service"]["spec"]["ports"]:
    assert port["targetPort"] in ports
  assert documents["Service"]["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"
  labels = pod["metadata"]["labels"]
  assert documents["Deployment"]["spec"]["selector"]["matchLabels"] == labels
  assert documents["Service"]["spec"]["selector"] == labels
  assert documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
  mounts = {mount["mountPath"]: mount for mount in server["volumeMounts"]}
  assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in spec["volumes"]}
  assert mounts[known["model"]]["readOnly"] is True
  assert str(pathlib.Path(known["compile_cache_dir"]).parent) in mounts and "/tmp" in mounts
  user = dict(instructions())["USER"]
  assert user == f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
  confined = server["securityContext"]
  assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
  assert confined["capabilities"]["drop"] == ["ALL"] and spec["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_manifests_name_this_versions_image(variant):
  (server,) = manifests(variant)["Deployment"]["spec"]["template"]["spec"]["containers"]
  version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
  assert server["image"].rpartition(":")[2].partition("-")[0] == version


@pytest.mark.parametrize(("variant", "resource"), [("nvidia", "nvidia.com/gpu"), ("tpu", "google.com/tpu")])
def test_a_pod_for_an_accelerator_asks_for_one_and_gets_its_image(variant, resource):
  deployment = manifests(variant)["Deployment"]["spec"]
  spec = deployment["template"]["spec"]
  (server,) = spec["containers"]
  assert server["resources"]["limits"][resource] == 1
  assert resource in {toleration["key"] for toleration in spec["tolerations"]}
  tag = server["image"].rpartition("-")[2]
  assert tag in ACCELERATORS and tag.startswith("cuda" if variant == "nvidia" else "tpu")
  # A rollout must not wait for an accelerator that nobody has.
  assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
  assert server["args"] == manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]


# A real run.


def test_a_life_under_a_supervisor(tmp_path):
  """As the unit starts it, with a fake device; the probe asks at every turn."""
  arguments = [argument.replace("/var/", f"{tmp_path}/var/") for argument in unit_arguments()]
  arguments = [argument for argument in arguments if not argument.startswith("--drain_delay_s")]
  (tmp_path / "var" / "log" / "sluice").mkdir(parents=True)
  port_file = tmp_path / "port"
  program = [sys.executable, "-m", "server.main", "--fake_device", "--port=0", f"--port_file={port_file}"]
  with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
    systemd.bind(str(tmp_path / "notify"))
    systemd.settimeout(120)
    with subprocess.Popen(
      [*program, *arguments, "--drain_delay_s=600"],
      cwd=ROOT,
      env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "90000000"},
      stderr=subprocess.PIPE,
      text=True,
    ) as process:
      try:
        assert systemd.recv(1000) == b"READY=1\nSTATUS=serving"
        assert systemd.recv(1000) == b"WATCHDOG=1"
        target = f"--target=127.0.0.1:{port_file.read_text().strip()}"
        ready = f"--service={GENERATION_SERVICE}"
        assert [probe.main([target]), probe.main([target, ready])] == [0, 0]
        process.send_signal(signal.SIGTERM)
        while systemd.recv(1000) != b"STOPPING=1\nSTATUS=draining":
          pass
        while probe.main([target, ready]) == 0:
          pass
        command = [sys.executable, "-m", "server.probe", target]
        assert subprocess.run(command, cwd=ROOT, timeout=180, check=False).returncode == 0, "what drains is alive"
        done = subprocess.run([*command, ready], cwd=ROOT, text=True, capture_output=True, timeout=180, check=False)
        name = target.removeprefix("--target=")
        assert (done.returncode, done.stderr) == (1, f"{GENERATION_SERVICE} at {name}: NOT_SERVING\n")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=180)[1]
      finally:
        process.kill()
  assert process.returncode == 0 and said.endswith("stopped, exit code 0\n"), said
  assert probe.ask_health(name, "", 5.0).startswith("UNAVAILABLE: ")


def test_the_probe_of_a_server_that_starts():
  with running(None, serve=False) as served:
    assert probe.ask_health(served.address, LIVENESS, 10) == "SERVING"
    assert probe.ask_health(served.address, GENERATION_SERVICE, 10) == "NOT_SERVING"
    assert probe.ask_health(served.address, "nonsense", 10).startswith("NOT_FOUND: ")


def test_the_probe_speaks_tls(tmp_path, capfd):
  authority = certificates.Authority(tmp_path)
  cert, key = authority.issue("server")
  own_cert, own_key = authority.issue("probe")
  host = HostOptions(tls_cert_file=str(cert), tls_key_file=str(key), tls_client_ca_file=str(authority.file))
  with running(None, host=host) as served:
    asked = [f"--target={served.address}", "--timeout_s=10", f"--tls_ca_file={authority.file}"]
    assert probe.main([*asked, f"--tls_cert_file={own_cert}", f"--tls_key_file={own_key}"]) == 0
    assert probe.main(asked) == 1 and "UNAVAILABLE" in capfd.readouterr().err
  with pytest.raises(SystemExit, match="2"):
    probe.main(["--tls_ca_file=/does/not/exist"])
  assert "/does/not/exist: No such file or directory" in capfd.readouterr().err
