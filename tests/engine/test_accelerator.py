"""What a machine has, read from fake /proc, /dev and /sys; what is installed for it, and what is refused and why."""

import os
import pathlib
import stat

import pytest

from engine import accelerator
from engine.accelerator import DriverReport, check_cpu_is_meant, choose_accelerator, read_machine
from engine.errors import ConfigError

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: 12.3.0\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb  1 01:35:36 UTC 2026\nGCC version: 12.3.0\n"


def write(root: pathlib.Path, path: str, text: str = "") -> None:
  file = root / path
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(text)


def add_pci(root: pathlib.Path, address: str, vendor: str, device: str, kind: str) -> None:
  for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
    write(root, f"sys/bus/pci/devices/{address}/{name}", f"{text}\n")


def nvidia(root: pathlib.Path, version: str, text: str = OPEN) -> pathlib.Path:
  add_pci(root, "0000:04:00.0", "0x10de", "0x2330", "0x030200")
  write(root, "proc/driver/nvidia/version", text.format(version))
  write(root, "dev/nvidia0")
  write(root, "dev/nvidiactl")
  return root


def tpu(root: pathlib.Path, node: str, device: str = "0x0063") -> pathlib.Path:
  add_pci(root, "0000:00:04.0", "0x1ae0", device, "0x088000")
  add_pci(root, "0000:00:05.0", "0x1ae0", "0x0042", "0x020000")  # Google's network card
  if node:
    write(root, node)
  return root


@pytest.mark.parametrize(
  ("version", "text", "chosen"),
  [
    ("580.82.07", OPEN, "cuda13"),
    ("595.10", CLOSED, "cuda13"),
    ("1000.1", OPEN, "cuda13"),
    ("579.99.1", OPEN, "cuda12"),
    ("535.129.03", CLOSED, "cuda12"),
    ("525.60.13", CLOSED, "cuda12"),
  ],
)
def test_the_drivers_version_decides(tmp_path, version, text, chosen):
  found = read_machine(nvidia(tmp_path, version, text))
  assert found.driver == version and choose_accelerator(found) == chosen


def test_a_driver_that_is_too_old_is_told_with_both_limits(tmp_path):
  with pytest.raises(ConfigError) as caught:
    choose_accelerator(read_machine(nvidia(tmp_path, "470.256.02", CLOSED)))
  said = str(caught.value)
  assert said.startswith("NVIDIA driver 470.256.02 is too old: CUDA 13 needs 580 or later, CUDA 12 needs 525 or later")
  assert "update the driver" in said and "ACCELERATOR=cpu" in said and "\n" not in said


def test_an_old_gpu_stays_with_cuda_12(tmp_path):
  root = nvidia(tmp_path, "580.82.07")
  assert choose_accelerator(read_machine(root, DriverReport("580.82.07", 7.0, "Tesla V100"))) == "cuda12"
  assert choose_accelerator(read_machine(root, DriverReport("580.82.07", 7.5, "Tesla T4"))) == "cuda13"


def test_a_card_without_a_driver(tmp_path):
  add_pci(tmp_path, "0000:04:00.0", "0x10de", "0x2330", "0x030200")
  with pytest.raises(ConfigError, match="1 NVIDIA cards are on the PCI bus, but NVIDIA's driver is not loaded"):
    choose_accelerator(read_machine(tmp_path))


def test_what_is_no_gpu_of_nvidias_counts_for_nothing(tmp_path):
  add_pci(tmp_path, "0000:04:00.1", "0x10de", "0x16fa", "0x040300")  # the sound of a card that was given away
  add_pci(tmp_path, "0000:05:00.0", "0x8086", "0x56c0", "0x030000")
  write(tmp_path, "dev/dxg")  # WSL with somebody else's GPU
  write(tmp_path, "dev/accel/accel0")  # Intel's and AMD's neural units
  write(tmp_path, "dev/vfio/12")
  found = read_machine(tmp_path)
  assert choose_accelerator(found) == "cpu" and found.describe() == ""


def test_a_container_without_the_hosts_gpu_is_a_cpu(tmp_path):
  root = nvidia(tmp_path, "580.82.07")
  (root / "dev/nvidia0").unlink()
  found = read_machine(root)
  assert choose_accelerator(found) == "cpu" and found.driver == "580.82.07" and not found.describe()


def test_a_container_may_have_a_gpu_of_another_number(tmp_path):
  root = nvidia(tmp_path, "580.82.07")
  (root / "dev/nvidia0").rename(root / "dev/nvidia5")
  assert choose_accelerator(read_machine(root)) == "cuda13"


def test_wsl_has_the_version_from_nvidia_smi(tmp_path):
  write(tmp_path, "dev/dxg")
  write(tmp_path, "usr/lib/wsl/lib/nvidia-smi")
  with pytest.raises(ConfigError, match="nor nvidia-smi says the driver's version; choose ACCELERATOR=cuda13"):
    choose_accelerator(read_machine(tmp_path))
  assert choose_accelerator(read_machine(tmp_path, DriverReport("581.10", 8.9, "RTX 4090"))) == "cuda13"


@pytest.mark.parametrize(
  ("node", "device"), [("dev/accel0", "0x005e"), ("dev/vfio/0", "0x0063"), ("dev/vfio/3", "0x006f")]
)
def test_a_tpu(tmp_path, node, device):
  found = read_machine(tpu(tmp_path, node, device))
  assert choose_accelerator(found) == "tpu" and found.describe() == f"TPU ({tmp_path / node})"


def test_a_tpu_that_nobody_can_open(tmp_path):
  with pytest.raises(ConfigError, match="1 TPU chips are on the PCI bus, but there is no /dev/accel"):
    choose_accelerator(read_machine(tpu(tmp_path, "")))
  found = read_machine(tpu(tmp_path / "shut", "dev/vfio/0"), allowed=lambda path: False)
  with pytest.raises(ConfigError, match="vfio/0: this user may not open it; run as a user who may .sudo chmod a.rw"):
    choose_accelerator(found)


@pytest.mark.skipif(os.getuid() == 0, reason="root may open everything")
def test_permission_is_the_files(tmp_path):
  root = nvidia(tmp_path, "580.82.07")
  (root / "dev/nvidia0").chmod(stat.S_IWUSR)
  assert read_machine(root).forbidden == str(root / "dev/nvidia0")


def test_an_empty_machine(tmp_path):
  assert read_machine(tmp_path / "nothing") == accelerator.MachineAccelerators()
  assert choose_accelerator(read_machine(tmp_path)) == "cpu"


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("script", "report"),
  [
    ("echo '580.82.07, 9.0, NVIDIA H100 80GB HBM3'; echo '580.82.07, 8.9, NVIDIA L4'",
     DriverReport("580.82.07", 8.9, "NVIDIA H100 80GB HBM3")),
    ("echo '470.1, [N/A], Tesla K80'", DriverReport("470.1", 0.0, "Tesla K80")),
    ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver, at, all'; exit 9", DriverReport()),
    ("echo 'No devices were found'", DriverReport()),
  ],
)  # fmt: skip
def test_what_nvidia_smi_says(tmp_path, monkeypatch, script, report):
  tool = tmp_path / "nvidia-smi"
  tool.write_text(f"#!/bin/sh\n{script}\n")
  tool.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
  assert accelerator.ask_nvidia_smi() == report


def test_without_nvidia_smi_or_where_it_hangs(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  assert accelerator.ask_nvidia_smi() == DriverReport()
  tool = tmp_path / "nvidia-smi"
  tool.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
  tool.chmod(0o755)
  monkeypatch.setattr(accelerator, "_NVIDIA_SMI_S", 0.2)
  assert accelerator.ask_nvidia_smi() == DriverReport()


# --- A server that JAX put on the CPU ---------------------------------------------------------------------------------


def refused(found: accelerator.MachineAccelerators, environment: dict[str, str] | None = None, plugin: str = "") -> str:
  with pytest.raises(ConfigError) as caught:
    check_cpu_is_meant(found, environment or {}, plugin)
  said = str(caught.value)
  assert "\n" not in said and "set JAX_PLATFORMS=cpu" in said and "ACCELERATOR=cpu" not in said
  return said


def test_a_server_does_not_take_the_cpu_in_silence(tmp_path):
  gpu = read_machine(nvidia(tmp_path / "gpu", "580.82.07"))
  said = refused(gpu)
  assert "JAX runs on the CPU, but this machine has an accelerator: NVIDIA GPU" in said and "driver 580.82.07" in said
  assert "make setup ACCELERATOR=cuda13" in said and "pip install 'sluice-serve[cuda13]'" in said
  assert "jax_cuda12_plugin is installed but did not start" in refused(gpu, plugin="jax_cuda12_plugin")
  assert "sluice-serve[tpu]" in refused(read_machine(tpu(tmp_path / "tpu", "dev/vfio/0")))
  assert "is too old" in refused(read_machine(nvidia(tmp_path / "old", "470.1")))


def test_packages_for_a_device_that_is_not_there(tmp_path):
  empty = read_machine(tmp_path)
  said = refused(empty, plugin="jax_cuda13_plugin")
  assert said.startswith("jax_cuda13_plugin is installed, but this machine shows no NVIDIA GPU; start a container with")
  assert "shows no TPU; start a container with it (docker run --privileged)" in refused(empty, plugin="libtpu")
  check_cpu_is_meant(empty, {"CUDA_VISIBLE_DEVICES": ""}, "jax_cuda13_plugin")


def test_the_cpu_may_be_taken_where_nothing_else_is_seen(tmp_path):
  check_cpu_is_meant(read_machine(tmp_path), {})
  gpu = read_machine(nvidia(tmp_path / "gpu", "580.82.07"))
  for hidden in ("", "-1", " "):
    check_cpu_is_meant(gpu, {"CUDA_VISIBLE_DEVICES": hidden})
  assert refused(gpu, {"CUDA_VISIBLE_DEVICES": "0"})
  chip = read_machine(tpu(tmp_path / "tpu", "dev/accel0"))
  assert refused(chip, {"CUDA_VISIBLE_DEVICES": ""}), "it hides no TPU"
  add_pci(tmp_path / "card", "0000:04:00.0", "0x10de", "0x2330", "0x030200")
  check_cpu_is_meant(read_machine(tmp_path / "card"), {})  # without a driver there is nothing to be missed
