"""Scenario: bodies of every kind over HTTP, by tools.chaos.http_bodies in its own process."""

import json
import subprocess
import sys

from engine.errors import ConfigError
from tools.chaos.report import Row
from tools.chaos.rig import Rig
from tools.measure import ROOT


def http(rig: Rig, count: int = 1_000, asked: int = 20_000) -> list[Row]:
  """Sends bodies that schemathesis makes from the OpenAPI document; making one takes longer than serving it."""
  command = [sys.executable, "-m", "tools.chaos.http_bodies", f"--count={count}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  try:
    found = json.loads(done.stdout)
  except ValueError:
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise ConfigError(f"{' '.join(command[1:])} ended with exit code {done.returncode}: {last}") from None
  statuses = ", ".join(f"{status} {number:,}" for status, number in sorted(found["by_status"].items()))
  counts = f"{found['bodies']:,}: {statuses}; slowest {1000 * found['slowest_s']:.0f} ms"
  if found["findings"]:
    counts += f"; {found['findings'][0]['what']:.200}"
  target = "0 crashes, 0 hangs, 0 of 500 and more, all as documented"
  return [
    Row(
      "bodies by schemathesis over HTTP",
      target,
      counts,
      found["clean"] and done.returncode == 0,
      asked,
      found["bodies"],
    )
  ]
