"""Compiles all programs of a server and stores them, so that servers with the same flags start without compiling.

  python -m tools.bundle --model=DIR --executable_bundle=DIR [the server's other flags]

Run it where the image will run, on the same kind of device, and start `server.main` with the same flags. Stored
programs that fit are kept. Exit code 1: the bundle is incomplete; the last line gives the reason.
"""

from collections.abc import Sequence
import sys

from absl import app

from engine.errors import ConfigError
from server import flags


def main(argv: list[str]) -> int:
  """Runs the command line; returns the exit code."""
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; flags are written --name=value")
  from engine.device.build import build_engine  # imported here: JAX takes long to import, and flag errors come first
  from engine.device.options import BuildOptions
  from extensions.executable_bundle.bundle import Bundle

  try:
    program = flags.read_settings(flags.ProgramSettings)
    if not program.executable_bundle:
      raise ConfigError("executable_bundle='' is not a folder; set --executable_bundle to the folder to write")
    options = BuildOptions(program.model, **flags.engine_setting_values())
    bundle = Bundle(program.executable_bundle, options.batching, write=True)
    built = build_engine(options, _progress, lambda events: None, source=bundle)
  except ConfigError as error:
    sys.exit(str(error))
  for note in (built.lowered, *built.fallbacks):
    if note:
      print(note)
  if bundle.is_whole:
    print(f"{program.executable_bundle}: every program of {built.model_name}")
  return 0 if bundle.is_whole else 1


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    return flags.parse_flags(argv, "tools.bundle")
  except ConfigError as error:
    sys.exit(str(error))


def _progress(what: str, done: int, total: int) -> None:
  print(f"{what}: {done} of {total}", file=sys.stderr)


if __name__ == "__main__":
  app.run(main, flags_parser=_parse)
