"""Says what an idle server still holds. Starts and prints nothing."""

import time

from server.client import Client

_SETTLES_S = 10.0  # requests that have just ended may hold blocks until the next step


def find_leaks(client: Client, compiles_elsewhere: float = 0) -> list[str]:
  """Returns texts such as "2 blocks" for what a server holds without a request, and for compiles after ready.

  Args:
    client: of the server.
    compiles_elsewhere: compiles of its other hosts, which its own count lacks.
  """
  load, until = client.load(), time.monotonic() + _SETTLES_S
  while load.running_requests + load.queued_requests + load.kv_blocks_in_use and time.monotonic() < until:
    time.sleep(0.1)
    load = client.load()
  held = {
    "running": load.running_requests,
    "queued": load.queued_requests,
    "blocks": load.kv_blocks_in_use,
    "compiles": load.compiles_after_ready + compiles_elsewhere,
  }
  return [f"{value:g} {key}" for key, value in held.items() if value]
