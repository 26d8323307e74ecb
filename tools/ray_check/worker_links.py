"""A network of this process's own, in which a link stands in every connection between Ray's processes. Linux only.

Ray's processes choose their ports, and name them to each other. A rule of the network sends whatever they connect to
through one link, which reads the real target from the connection. Other processes of the machine notice nothing.
"""

from collections.abc import Sequence
import contextlib
import multiprocessing
from multiprocessing.connection import Connection
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
from typing import Self

import psutil

from engine.errors import ConfigError
from tools.certificates import Authority
from tools.faulty_link import FaultyLink
from tools.server_process import find_free_port

_MARK = 7
# Of Ray's node: Ray takes the address with which it would reach the internet, and no loopback address.
_ADDRESS = "192.0.2.1"
_SO_ORIGINAL_DST = 80  # <linux/netfilter_ipv4.h>
_PORT_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")


def enter_own_network(module: str, arguments: Sequence[str]) -> None:
  """Starts this program anew in a network namespace of its own, unless it is in one already; needs no root.

  Args:
    module, arguments: its command line.

  Raises:
    ConfigError: a program is missing.
  """
  missing = [name for name in ("unshare", "ip", "iptables") if shutil.which(name) is None]
  if missing:
    raise ConfigError(f"{missing[0]} is missing; install the packages util-linux, iproute2 and iptables")
  if [name for _, name in socket.if_nameindex()] == ["lo"]:
    return
  sys.stdout.flush()
  command = ["unshare", "--map-root-user", "--net", sys.executable, "-m", module, *arguments]
  os.execvp(command[0], command)


def encrypt_ray(folder: pathlib.Path) -> None:
  """Lets a Ray that this process starts use TLS between its processes. It must be called before Ray is imported."""
  authority = Authority(folder, "ray-ca")
  certificate, key = authority.issue("ray", host=_ADDRESS)
  os.environ |= {
    "RAY_USE_TLS": "1",
    "RAY_TLS_CA_CERT": str(authority.file),
    "RAY_TLS_SERVER_CERT": str(certificate),
    "RAY_TLS_SERVER_KEY": str(key),
  }


class WorkerLinks:
  """A link in every connection to a port that the system assigns, if the connection is made within the block.

  The link has a process of its own: Ray holds Python's lock while it waits for its own connections.
  """

  def __enter__(self) -> Self:
    """Returns once connections go through the link. Raises ConfigError if the network cannot be set up."""
    context = multiprocessing.get_context("spawn")
    self._pipe, far = context.Pipe()
    self._process = context.Process(target=_run_link, args=(far,), daemon=True)
    self._process.start()
    if error := self._pipe.recv():
      self._process.join()
      raise ConfigError(error)
    return self

  def __exit__(self, *_: object) -> None:
    self._process.terminate()
    self._process.join()
    self._pipe.close()

  def corrupt(self, rng: random.Random, for_s: float, most_wait_s: float) -> int:
    """Does what FaultyLink.corrupt does, on connections to Ray's workers."""
    self._pipe.send(("corrupt", (random.Random(rng.random()), for_s, most_wait_s, find_worker_ports())))
    return self._pipe.recv()

  def delay(self, each_s: float, for_s: float) -> int:
    """Does what FaultyLink.delay does, on connections to Ray's workers."""
    self._pipe.send(("delay", (each_s, for_s, find_worker_ports())))
    return self._pipe.recv()


def _run_link(pipe: Connection) -> None:
  """Runs a link until the process is ended. `pipe` says what it does."""
  try:
    link = _link_all_ports()
  except ConfigError as error:
    pipe.send(str(error))
    return
  pipe.send("")
  while True:
    name, arguments = pipe.recv()
    pipe.send(getattr(link, name)(*arguments))


def _link_all_ports() -> FaultyLink:
  """Returns a link in every connection to a port that the system assigns, from now on. Raises ConfigError."""
  link = FaultyLink(_find_target, find_free_port(), _MARK)
  ports = ":".join(_PORT_RANGE.read_text("ascii").split())
  rule = f"OUTPUT -p tcp -o lo --dport {ports} -m mark ! --mark {_MARK} -j REDIRECT --to-ports {link.port}"
  for command in (
    "ip link set lo up",
    f"ip address add {_ADDRESS}/32 dev lo",
    f"ip route add default dev lo src {_ADDRESS}",
    f"iptables -t nat -A {rule}",
  ):
    ended = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if ended.returncode:
      raise ConfigError(f"{command}: {ended.stderr.strip().splitlines()[-1]}; run as root, or without links")
  return link


def find_worker_ports() -> frozenset[int]:
  """Returns the ports of Ray's workers: replicas, proxies and the controller."""
  ports = set()
  for process in psutil.process_iter(("cmdline",)):
    if (process.info["cmdline"] or ("",))[0].startswith("ray::"):
      # One may have ended, or be outside of this namespace.
      with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        ports |= {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
  return frozenset(ports)


def _find_target(near: socket.socket) -> tuple[str, int]:
  """Returns where a client wanted to connect to."""
  address = near.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
  return socket.inet_ntoa(address[4:8]), int.from_bytes(address[2:4], "big")
