"""Finds the machine's accelerator without JAX: before JAX is installed, and to notice when JAX misses it. Runs no code
of a device.

Runs under Python 3.9 and later, because the system's own Python may run `tools.find_accelerator`. It reads `/proc`,
`/dev` and `/sys`, and runs nvidia-smi if that is on PATH. It never uses the network.
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess

from engine.errors import ConfigError

ACCELERATORS = ("cpu", "cuda12", "cuda13", "tpu")
# The oldest driver that runs the wheels of each, the newest first; CUDA's own minimum for the major version.
DRIVER_MINIMUM = {"cuda13": 580, "cuda12": 525}
CUDA13_CAPABILITY = 7.5  # CUDA 13 compiles for no older GPU: a V100 (7.0) stays with CUDA 12
_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"
# PCI device ids of TPUs, as in jax/_src/hardware_utils.py. Google's network card has the same vendor.
_TPU_IDS = frozenset(
  ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")  # v2 to v8
)
_NVIDIA_SMI_S = 20.0  # a card without its persistence daemon may take seconds to answer
_CHOOSE = "or set ACCELERATOR=cpu to serve from the CPU"


@dataclasses.dataclass(frozen=True)
class MachineAccelerators:
  """What a machine has, from its files.

  Attributes:
    nvidia_nodes: device files of NVIDIA GPUs; programs reach a GPU only through them.
    tpu_nodes: likewise of TPU chips.
    driver: version of NVIDIA's driver, such as "580.82.07"; "" if none is loaded or its version is unknown.
    capability: the lowest compute capability of the GPUs; 0 if unknown.
    gpu_name: name of the first GPU; "" if unknown.
    nvidia_cards, tpu_chips: on the PCI bus, with or without a driver.
    forbidden: a device file that this user may not open, or "".
  """

  nvidia_nodes: tuple[str, ...] = ()
  tpu_nodes: tuple[str, ...] = ()
  driver: str = ""
  capability: float = 0.0
  gpu_name: str = ""
  nvidia_cards: int = 0
  tpu_chips: int = 0
  forbidden: str = ""

  def describe(self) -> str:
    """The accelerator in a few words, or ""."""
    if self.nvidia_nodes:
      name = self.gpu_name or f"NVIDIA GPU ({self.nvidia_nodes[0]})"
      return f"{name}, driver {self.driver or 'unknown'}"
    return f"TPU ({self.tpu_nodes[0]})" if self.tpu_nodes else ""


def may_open(path: pathlib.Path) -> bool:
  """Whether this user may read and write a device file."""
  return os.access(path, os.R_OK | os.W_OK)


@dataclasses.dataclass(frozen=True)
class DriverReport:
  """The output of nvidia-smi; attributes as in MachineAccelerators."""

  driver: str = ""
  capability: float = 0.0
  gpu_name: str = ""


def ask_nvidia_smi() -> DriverReport:
  """Runs nvidia-smi; returns an empty report if it is missing, fails or hangs.

  Only it knows the driver behind WSL and the GPUs' compute capability. It also makes the device files, which a machine
  without a display lacks until the first use of its GPU.
  """
  command = shutil.which("nvidia-smi")
  if command is None:
    return DriverReport()
  try:
    query = [command, "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_NVIDIA_SMI_S)
  except (OSError, subprocess.TimeoutExpired):
    return DriverReport()
  rows = [[cell.strip() for cell in line.split(",", 2)] for line in done.stdout.splitlines() if line.count(",") >= 2]
  rows = [row for row in rows if re.fullmatch(r"\d+(\.\d+)+", row[0])]
  if done.returncode or not rows:
    return DriverReport()
  known = [float(row[1]) for row in rows if re.fullmatch(r"\d+\.\d+", row[1])]
  return DriverReport(rows[0][0], min(known, default=0.0), rows[0][2])


def read_machine(
  root: pathlib.Path = pathlib.Path("/"),
  report: DriverReport = DriverReport(),
  allowed: Callable[[pathlib.Path], bool] = may_open,
) -> MachineAccelerators:
  """Reads what the machine has.

  Args:
    root: where `/proc`, `/dev` and `/sys` are.
    report: the output of nvidia-smi; the driver's own file also has the version.
    allowed: whether this user may open a device file.
  """
  nvidia = sorted((root / "dev").glob("nvidia[0-9]*"))
  wsl = root / "dev" / "dxg"  # Windows' own path to a GPU of any maker; NVIDIA's brings its tool
  if wsl.exists() and (root / "usr" / "lib" / "wsl" / "lib" / "nvidia-smi").exists():
    nvidia.append(wsl)
  nvidia_cards, tpu_chips = 0, 0
  for vendor in (root / "sys" / "bus" / "pci" / "devices").glob("*/vendor"):
    maker = _read_text(vendor)
    if maker == _NVIDIA and _read_text(vendor.with_name("class")).startswith("0x03"):  # no sound device, no switch
      nvidia_cards += 1
    elif maker == _GOOGLE and _read_text(vendor.with_name("device")) in _TPU_IDS:
      tpu_chips += 1
  tpu = sorted((root / "dev").glob("accel[0-9]*"))  # not the folder /dev/accel, which holds other makers' devices
  if tpu_chips:
    tpu += sorted((root / "dev" / "vfio").glob("[0-9]*"))
  version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _read_text(root / "proc" / "driver" / "nvidia" / "version"))
  refused = [str(path) for path in (*nvidia, *tpu) if not allowed(path)]
  return MachineAccelerators(
    nvidia_nodes=tuple(map(str, nvidia)),
    tpu_nodes=tuple(map(str, tpu)),
    driver=report.driver or (version.group() if version else ""),
    capability=report.capability,
    gpu_name=report.gpu_name,
    nvidia_cards=nvidia_cards,
    tpu_chips=tpu_chips,
    forbidden=refused[0] if refused else "",
  )


def choose_accelerator(found: MachineAccelerators) -> str:
  """The name in ACCELERATORS whose packages serve on the machine.

  Raises:
    ConfigError: the machine has an accelerator that cannot be used as it is.
  """
  newest = DRIVER_MINIMUM["cuda13"]
  if found.nvidia_nodes:
    if not found.driver:
      raise ConfigError(
        f"{found.nvidia_nodes[0]} is there, but neither /proc/driver/nvidia/version nor nvidia-smi says the driver's "
        f"version; choose ACCELERATOR=cuda13 for a driver of {newest} or later, ACCELERATOR=cuda12 for "
        f"{DRIVER_MINIMUM['cuda12']} or later, {_CHOOSE}"
      )
    _check_permission(found, "start the container with the GPU (docker run --gpus=all)")
    major = int(found.driver.split(".")[0])
    for name, minimum in DRIVER_MINIMUM.items():
      too_old_gpu = name == "cuda13" and 0 < found.capability < CUDA13_CAPABILITY
      if major >= minimum and not too_old_gpu:
        return name
    raise ConfigError(
      f"NVIDIA driver {found.driver} is too old: CUDA 13 needs {newest} or later, CUDA 12 needs "
      f"{DRIVER_MINIMUM['cuda12']} or later; update the driver, {_CHOOSE}"
    )
  if found.tpu_nodes:
    _check_permission(found, "start the container with --privileged")
    return "tpu"
  if found.tpu_chips:
    raise ConfigError(
      f"{found.tpu_chips} TPU chips are on the PCI bus, but there is no /dev/accel* and no /dev/vfio/*; start the "
      f"container with --privileged, or make the VM from a TPU image, {_CHOOSE}"
    )
  if found.nvidia_cards and not found.driver:
    raise ConfigError(
      f"{found.nvidia_cards} NVIDIA cards are on the PCI bus, but NVIDIA's driver is not loaded; install driver "
      f"{newest} or later and restart, {_CHOOSE}"
    )
  return "cpu"


def _check_permission(found: MachineAccelerators, in_container: str) -> None:
  if found.forbidden:
    raise ConfigError(
      f"{found.forbidden}: this user may not open it; run as a user who may (sudo chmod a+rw {found.forbidden}), "
      f"in a container {in_container}, {_CHOOSE}"
    )


def check_cpu_is_meant(found: MachineAccelerators, environment: Mapping[str, str], plugin: str = "") -> None:
  """Rejects serving from the CPU where an accelerator was meant, if JAX chose the CPU by itself.

  Args:
    found: result of `read_machine`.
    environment: of the process; an empty CUDA_VISIBLE_DEVICES hides every GPU and so selects the CPU.
    plugin: name of an installed package of JAX for an accelerator, or "".

  Raises:
    ConfigError: JAX missed the accelerator, or is installed for one that is not here.
  """
  is_hidden = environment.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1")
  if is_hidden and not found.tpu_nodes:
    return
  on_cpu = "or set JAX_PLATFORMS=cpu to serve from the CPU"
  if not found.describe():
    if plugin:
      device, flag = ("TPU", "--privileged") if plugin == "libtpu" else ("NVIDIA GPU", "--gpus=all")
      raise ConfigError(
        f"{plugin} is installed, but this machine shows no {device}; start a container with it (docker run {flag}), "
        f"install the driver, {on_cpu}"
      )
    return
  missed = f"JAX runs on the CPU, but this machine has an accelerator: {found.describe()}"
  try:
    name = choose_accelerator(found)
  except ConfigError as error:
    raise ConfigError(f"{missed}; {str(error).replace(_CHOOSE, on_cpu)}") from error
  if plugin:
    raise ConfigError(
      f"{missed}; {plugin} is installed but did not start, and JAX's own lines above say why; end other processes that "
      f"hold the device, install the packages for {name} (make setup ACCELERATOR={name}), {on_cpu}"
    )
  raise ConfigError(
    f"{missed}; install JAX for it (make setup ACCELERATOR={name}, or pip install 'sluice-serve[{name}]'), {on_cpu}"
  )


def _read_text(path: pathlib.Path) -> str:
  """Returns a file's stripped text, or "" if it is unreadable."""
  try:
    return path.read_text("utf-8", "replace").strip()
  except OSError:
    return ""
