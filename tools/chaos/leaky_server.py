"""The server with a leak planted: proof that a soak finds one. Everything else is server.main's."""

from server import main as server_main
from server.generation import Generation, Generations

_KEPT: list[bytes] = []
_close = Generations.close


def _close_and_keep(self: Generations, generation: Generation) -> None:
  """What a forgotten reference would keep of a request."""
  _KEPT.append(bytes(20_000))
  _close(self, generation)


if __name__ == "__main__":
  Generations.close = _close_and_keep
  server_main.main()
