"""Runs the server with a planted leak, to prove that a soak finds one. Otherwise the same as tools.chaos.server."""

from server.generation.generations import Generation, Generations
from tools.chaos.server.__main__ import main

_KEPT: list[bytes] = []
_close = Generations.close_generation


def _close_and_keep(self: Generations, generation: Generation) -> None:
  """Keeps a reference to a closed request."""
  _KEPT.append(bytes(20_000))
  _close(self, generation)


if __name__ == "__main__":
  Generations.close_generation = _close_and_keep
  main()
