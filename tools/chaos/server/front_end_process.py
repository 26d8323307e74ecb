"""A front end process whose books are checked; see server/lifecycle/front_end_process.py, which it is otherwise."""

from server.lifecycle import front_end_process
from tools.chaos.server.composition import ChaosComposition

if __name__ == "__main__":
  front_end_process.main(lambda: ChaosComposition(checks=True))
