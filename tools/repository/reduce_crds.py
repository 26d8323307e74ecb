"""Writes the schemas that tests/deploy holds manifests against, from published CustomResourceDefinitions.

    python -m tools.repository.reduce_crds --source=URL@COMMIT CRD.yaml [CRD.yaml ...]

Keeps the stored version's structure. Descriptions go, and so do pod specs, which tests check with Kubernetes' own
schema: with both, KubeRay's alone is megabytes.
"""

from collections.abc import Sequence
import json
import pathlib
import sys
from typing import Any

import yaml

from tools.arguments import CommandParser
from tools.measure import ROOT

FOLDER = ROOT / "tests" / "deploy" / "crds"
POD_SPEC = "x-sluice-pod-spec"  # stands for Kubernetes' PodSpec
_DROPPED = ("description", "x-kubernetes-validations", "default")


def reduce_schema(node: Any, is_field_map: bool = False) -> Any:
  """Returns a schema without descriptions and pod specs.

  Args:
    node: a part of an openAPIV3Schema.
    is_field_map: whether its keys are names of fields rather than keywords.
  """
  if isinstance(node, list):
    return [reduce_schema(item) for item in node]
  if not isinstance(node, dict):
    return node
  if not is_field_map and {"containers", "initContainers"} <= node.get("properties", {}).keys():
    return {"type": "object", POD_SPEC: True}
  return {
    key: reduce_schema(value, key == "properties" and not is_field_map)
    for key, value in node.items()
    if is_field_map or key not in _DROPPED
  }


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.repository.reduce_crds", __doc__)
  parser.add_argument("--source", required=True, help="where the files are from: repository and commit")
  parser.add_argument("files", nargs="+", type=pathlib.Path, help="CustomResourceDefinitions")
  args = parser.parse_args(arguments)
  for file in args.files:
    spec = yaml.safe_load(file.read_text("utf-8"))["spec"]
    (version,) = (version for version in spec["versions"] if version["storage"])
    kept = {
      "source": args.source,
      "apiVersion": f"{spec['group']}/{version['name']}",
      "kind": spec["names"]["kind"],
      "schema": reduce_schema(version["schema"]["openAPIV3Schema"]),
    }
    target = FOLDER / f"{kept['kind']}.json"
    target.write_text(json.dumps(kept, sort_keys=True, separators=(",", ":")) + "\n", "utf-8")
    print(target.relative_to(ROOT))
  return 0


if __name__ == "__main__":
  sys.exit(main())
