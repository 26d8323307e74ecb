"""Checks the protos with buf: lint rules, and that every published field, number and method remains. Writes nothing.

python -m tools.repository.check_protos
python -m tools.repository.check_protos --publish    # at a release: publishes the current protos

The published API is `server/proto/published.binpb`, a descriptor set, so the check needs no git history and no network.
The package `buf-bin` (or npm's `@bufbuild/buf`) holds buf. Without it the tool prints a line and passes, since the
protos' own tests check the rest.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PUBLISHED = "server/proto/published.binpb"


def find_buf() -> str | None:
  """Returns the path of buf beside this Python, where pip installs it, or on PATH."""
  return shutil.which("buf", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("buf")


def main(argv: list[str] | None = None) -> int:
  """Runs the command line; returns buf's exit code. Its messages name file and line."""
  parser = argparse.ArgumentParser(description="Checks the protos with buf.")
  parser.add_argument("--publish", action="store_true", help=f"write {PUBLISHED} instead of comparing with it")
  publish = parser.parse_args(argv).publish
  buf = find_buf()
  if buf is None:
    print("protos: not checked, there is no buf (pip install buf-bin)")
    return int(publish)
  last = ("build", "--exclude-source-info", "--output", PUBLISHED) if publish else ("breaking", "--against", PUBLISHED)
  for arguments in (("lint",), last):
    code = subprocess.run([buf, *arguments], cwd=ROOT, check=False).returncode
    if code:
      return code
  print(f"protos: {'published' if publish else 'lint and compatibility are fine'}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
