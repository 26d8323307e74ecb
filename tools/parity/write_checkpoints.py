"""First step of `make parity`: writes the checkpoints and prompts for transformers."""

import json
import pathlib
import shutil

from absl import app, flags
import numpy as np

from tools.arguments import parse_flags
from tools.parity import cases


def main(argv: list[str]) -> None:
  """Runs the command line."""
  del argv
  root = pathlib.Path(_OUTPUT.value)
  for name in cases.CASES:
    shutil.rmtree(root / name, ignore_errors=True)
    cases.write_case(name, root / name)
    rng = np.random.default_rng(cases.seed(name))
    prompts = [rng.integers(cases.VOCAB_SIZE, size=length).tolist() for length in cases.PROMPT_LENGTHS]
    (root / name / "prompts.json").write_text(json.dumps({"prompts": prompts, "new_tokens": cases.NEW_TOKENS}))
    print(f"wrote {root / name}")
  for name in cases.HEAD_CASES:
    shutil.rmtree(root / name, ignore_errors=True)
    cases.write_case(name, root / name)
    (root / name / "inputs.json").write_text(json.dumps({"prompts": cases.head_prompts(name)}))
    print(f"wrote {root / name}")
  for name in cases.QUANTIZED_CASES:
    folder = root / f"quantized_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    cases.write_quantized_case(name, folder)
    (folder / "quantized.json").write_text(json.dumps({"name": name, "prompt": cases.quantized_prompt(name)}))
    print(f"wrote {folder}")


if __name__ == "__main__":
  _OUTPUT = flags.DEFINE_string("output", None, "folder for the checkpoints; replaced if it exists", required=True)
  app.run(main, flags_parser=parse_flags)
