"""Regenerates the *_pb2*.py of FOLDERS from the .proto files beside them; run from the root. Touches nothing else.

python -m tools.repository.generate_protos
"""

import argparse
import importlib.resources
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("server/proto", "extensions/vllm_api/proto", "extensions/prefill_decode/proto", "tools/chaos/proto")
PROTOS = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.proto"))


def generate(out: pathlib.Path) -> list[pathlib.Path]:
  """Writes the generated modules below `out`, at their import paths; returns the files.

  Paths in the generated code follow the include root, so it must be the repository's.

  Raises:
    RuntimeError: protoc rejected the file; its message is on standard error.
  """
  from grpc_tools import protoc  # a development dependency: the server runs without it

  well_known = importlib.resources.files("grpc_tools") / "_proto"
  arguments = [
    "protoc",
    f"-I{ROOT}",
    f"-I{well_known}",
    f"--python_out={out}",
    f"--pyi_out={out}",
    f"--grpc_python_out={out}",
    *PROTOS,
  ]
  if protoc.main(arguments) != 0:
    raise RuntimeError(f"protoc could not compile {', '.join(PROTOS)}; its message is above")
  return sorted(path for folder in FOLDERS for path in (out / folder).glob("*_pb2*"))


def main() -> int:
  """Writes the modules into the repository."""
  argparse.ArgumentParser(description="Regenerates the modules of the protos.").parse_args()
  for path in generate(ROOT):
    print(path.relative_to(ROOT))
  return 0


if __name__ == "__main__":
  sys.exit(main())
