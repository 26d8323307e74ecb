"""Files of a model's folder as a repository has them: shards and an index, and much that nobody needs."""

import json

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
WANTED = {
  "config.json": b'{"architectures": ["LlamaForCausalLM"], "vocab_size": 384, "max_position_embeddings": 128}',
  "tokenizer.json": b'{"version": "1.0"}',
  "tokenizer_config.json": b"{}",
  "chat_template.jinja": b"{{ messages }}",
  "LICENSE": b"do as you like",
  INDEX: json.dumps({"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}}).encode(),
  SHARDS[0]: bytes(range(256)) * 12_000,
  SHARDS[1]: bytes(range(255)) * 1_000,
}
UNWANTED = {
  "README.md": b"about",
  "modeling_own.py": b"raise SystemExit",
  "pytorch_model.bin": b"a pickle",
  "pytorch_model.bin.index.json": b"{}",
  "consolidated.safetensors": b"the same weights again",
  "original/consolidated.00.pth": b"and again",
  "onnx/model.onnx": b"and again",
}
