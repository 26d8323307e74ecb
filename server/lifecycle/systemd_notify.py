"""Tells systemd how the server is (sd_notify(3)): one datagram a message. Without systemd it does nothing.

The unit needs Type=notify; with WatchdogSec= systemd wants to hear WATCHDOG=1 now and then; else it ignores it.
"""

import contextlib
import os
import socket


def notify_systemd(state: str) -> None:
  """Sends lines such as READY=1. What cannot be sent is lost: no service should fail for it."""
  address = os.environ.get("NOTIFY_SOCKET", "")
  if not address.startswith(("/", "@")):
    return
  if address[0] == "@":  # the abstract namespace
    address = "\0" + address[1:]
  with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
    sender.setblocking(False)
    sender.sendto(state.encode(), address)
