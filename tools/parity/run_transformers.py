"""Second step of `make parity`: writes transformers' results as golden files. Imports nothing of Sluice.

It runs in its own environment (tools/parity/run.sh makes it), in float32 with plain ("eager") attention. For every
position of prompt and greedy continuation it keeps the logits of every eighth entry of the vocabulary and the log
probability of the next token. It also keeps the log of the sum of all exponentials, which any wrong logit changes.
"""

import argparse
import hashlib
import importlib.metadata
import json
import pathlib

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

STRIDE = 8
# Below this gap between the two best logits f32 could choose either; choose another seed then.
LEAST_GAP = 1e-3


def load(folder: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
  )
  assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
  return model.eval()


def digest_weights(folder: pathlib.Path) -> str:
  digest = hashlib.sha256()
  for file in sorted(folder.glob("*.safetensors")):
    digest.update(file.read_bytes())
  return digest.hexdigest()


def golden(folder: pathlib.Path) -> dict[str, np.ndarray]:
  task = json.loads((folder / "prompts.json").read_text())
  model, rounded = load(folder, torch.float32), load(folder, torch.bfloat16)
  out = {
    "weights_sha256": np.array(digest_weights(folder)),
    "versions": np.array(f"torch {torch.__version__}, transformers {transformers.__version__}"),
  }
  squared_error, squared = 0.0, 0.0
  for number, prompt in enumerate(task["prompts"]):
    tokens = model.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
      max_new_tokens=task["new_tokens"],
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
    )
    assert tokens.shape[1] == len(prompt) + task["new_tokens"]
    logits = model(tokens, use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].topk(2)
    assert torch.equal(best.indices[:, 0], tokens[0, len(prompt) :]), "cached and uncached greedy differ"
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    assert gap > LEAST_GAP, f"{folder.name}: two best logits are {gap} apart"
    error = rounded(tokens, use_cache=False).logits[0].float() - logits
    squared_error, squared = squared_error + error.square().sum().item(), squared + logits.square().sum().item()
    out |= {
      f"tokens_{number}": tokens[0].numpy().astype(np.int32),
      f"prompt_len_{number}": np.array(len(prompt)),
      f"logits_{number}": logits[:, ::STRIDE].numpy(),
      f"logsumexp_{number}": logits.logsumexp(-1).numpy(),
      f"logprobs_{number}": logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy(),
    }
    print(f"{folder.name}: prompt of {len(prompt)}, least greedy gap {gap:.4f}, logit spread {logits.std().item():.2f}")
  out["bfloat16_error"] = np.array((squared_error / squared) ** 0.5)
  print(f"{folder.name}: transformers' own bfloat16 error {out['bfloat16_error']:.4f}")
  return out


def golden_heads(folders: list[pathlib.Path]) -> dict[str, np.ndarray]:
  """Returns what checkpoints without a head of tokens give: of each, f32[prompts, C] or f32[prompts, D].

  A head of classes decides itself which token is the last; of a backbone it is the very last one.
  """
  out = {"versions": np.array(f"torch {torch.__version__}, transformers {transformers.__version__}")}
  for folder in folders:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, architecture)
    model, info = kind.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model.eval()
    found = []
    for prompt in json.loads((folder / "inputs.json").read_text())["prompts"]:
      output = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64))
      found.append((output.logits if "logits" in output else output.last_hidden_state[:, -1])[0].numpy())
    out[folder.name] = np.stack(found)
    print(f"{folder.name}: {architecture}, {out[folder.name].shape}")
  return out


def golden_quantized(folders: list[pathlib.Path]) -> dict[str, np.ndarray]:
  """Returns the logits of quantized folders, every eighth entry, as transformers and compressed-tensors read them.

  Activations are not rounded, so only the weights decide.
  """
  versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
  out = {"versions": np.array(f"{versions}, compressed-tensors {importlib.metadata.version('compressed-tensors')}")}
  for folder in folders:
    task = json.loads((folder / "quantized.json").read_text())
    model = load(folder, torch.float32)
    for module in model.modules():
      module.quantization_enabled = False
    logits = model(torch.tensor([task["prompt"]]), use_cache=False).logits[0]
    out[f"{task['name']}_logits"] = logits[:, ::STRIDE].numpy()
    out[f"{task['name']}_sha256"] = np.array(digest_weights(folder))
    print(f"{folder.name}: logit spread {logits.std().item():.2f}")
  return out


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--checkpoints", type=pathlib.Path, required=True, help="as written by write_checkpoints")
  parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of the golden files")
  options = parser.parse_args()
  options.output.mkdir(parents=True, exist_ok=True)
  transformers.utils.logging.disable_progress_bar()
  with torch.inference_mode():
    for folder in sorted(path.parent for path in options.checkpoints.glob("*/prompts.json")):
      np.savez_compressed(options.output / f"{folder.name}.npz", allow_pickle=False, **golden(folder))
    folders = sorted(path.parent for path in options.checkpoints.glob("*/inputs.json"))
    np.savez_compressed(options.output / "heads.npz", allow_pickle=False, **golden_heads(folders))
    folders = sorted(path.parent for path in options.checkpoints.glob("*/quantized.json"))
    np.savez_compressed(options.output / "quantized.npz", allow_pickle=False, **golden_quantized(folders))


if __name__ == "__main__":
  main()
