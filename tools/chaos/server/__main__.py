"""The server with what tests need around it; it takes all flags of server.main, and two of its own.

python -m tools.chaos.server --fake_device --model=models/demo --fault_plan=plan.json --debug_invariants --admin_port=0

Faults act at named points, as a plan says (tools/chaos/server/faults.py). Books of blocks, queues and counts are
checked after every step. The admin port has sluice.chaos.v1 beside the admin service (tools/chaos/proto/chaos.proto).
"""

import dataclasses

from engine.settings import setting
from server import flags
from server import main as server_main
from tools.chaos.server.composition import ChaosComposition
from tools.chaos.server.faults import Injector
from tools.chaos.server.front_end_faults import load_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosSettings:
  """The settings of this program besides those of server.main."""

  fault_plan: str = setting(
    "",
    "JSON of faults, whose format is in tools/chaos/server/faults.py; ChaosService/SetFaultPlan replaces them. Empty: "
    "there are no points for faults.",
    group="Tests",
    common=True,
  )
  debug_invariants: bool = setting(
    False,
    "Check blocks, queues and counts after every step, and end at the first that is wrong.",
    group="Tests",
    common=True,
  )


def _compose() -> ChaosComposition:
  settings = flags.read_settings(ChaosSettings)
  injector = Injector(load_plan(settings.fault_plan)) if settings.fault_plan else None
  return ChaosComposition(injector=injector, checks=settings.debug_invariants)


def main() -> None:
  """Entry point; ends the process."""
  flags.define_flags(ChaosSettings)
  server_main.main(_compose, "tools.chaos.server")


if __name__ == "__main__":
  main()
