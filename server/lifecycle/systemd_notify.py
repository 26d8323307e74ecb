"""Reports the server's state to systemd (sd_notify(3)): one datagram a message. Does nothing without systemd.

The unit needs Type=notify; with WatchdogSec=, systemd expects a regular WATCHDOG=1, and otherwise ignores it.
"""

import contextlib
import os
import socket


def notify_systemd(state: str) -> None:
  """Sends lines such as READY=1. Drops what cannot be sent: no service should fail for it."""
  address = os.environ.get("NOTIFY_SOCKET", "")
  if not address.startswith(("/", "@")):
    return
  if address[0] == "@":  # abstract namespace
    address = "\0" + address[1:]
  with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
    sender.setblocking(False)
    sender.sendto(state.encode(), address)
