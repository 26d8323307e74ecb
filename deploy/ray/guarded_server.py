"""Runs server.main as a child that cannot outlive its parent. Adds nothing else to the server.

    python -m deploy.ray.guarded_server PARENT_PID FLAGS

Linux kills the server with its parent, even a stopped server, and so frees its devices. Its streams are gone by then.
"""

import ctypes
import os
import signal
import sys

from server import main as server_main

_PR_SET_PDEATHSIG = 1


def main() -> None:
  """Entry point; ends the process."""
  parent = int(sys.argv.pop(1))
  if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
    raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
  if os.getppid() != parent:
    sys.exit("the parent ended before its server began")
  server_main.main(program="deploy.ray.guarded_server")


if __name__ == "__main__":
  main()
