"""Converts a Hugging Face Llama folder to a GGUF file, f32 as it is, for llama.cpp's server. Reads no tokenizer.

llama.cpp's own converter needs a tokenizer, and its server a vocabulary. The file gets a vocabulary whose token i is
`<i>`, of the only kind (RWKV's) without special tokens, so that no id ends a sequence or is held back.
"""

import json
import pathlib

import numpy as np

LAYER = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
  """Returns GGUF's name of a tensor of a Llama checkpoint; raises KeyError for any other."""
  stem, _, kind = name.rpartition(".")
  if stem in WHOLE:
    return f"{WHOLE[stem]}.{kind}"
  _, _, number, part = stem.split(".", 3)
  return f"blk.{number}.{LAYER[part]}.{kind}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Returns the rows of a query or key projection [N * H, D] in llama.cpp's order, which rotates adjacent pairs."""
  rows, width = weight.shape
  return weight.reshape(num_heads, 2, rows // num_heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(model: str, path: str) -> None:
  """Writes `path` from the folder `model`."""
  import gguf  # pyright: ignore[reportMissingImports]
  from safetensors.numpy import load_file

  raw = json.loads((pathlib.Path(model) / "config.json").read_text("utf-8"))
  heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_vocab_size(raw["vocab_size"])
  writer.add_context_length(raw["max_position_embeddings"])
  writer.add_embedding_length(raw["hidden_size"])
  writer.add_block_count(raw["num_hidden_layers"])
  writer.add_feed_forward_length(raw["intermediate_size"])
  writer.add_head_count(heads)
  writer.add_head_count_kv(kv_heads)
  writer.add_key_length(raw["head_dim"])
  writer.add_value_length(raw["head_dim"])
  writer.add_rope_dimension_count(raw["head_dim"])
  writer.add_rope_freq_base(raw["rope_theta"])
  writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
  writer.add_file_type(gguf.LlamaFileType.ALL_F32)
  writer.add_tokenizer_model("rwkv")
  writer.add_token_list([f"<{token}>" for token in range(raw["vocab_size"])])
  writer.add_token_types([int(gguf.TokenType.NORMAL)] * raw["vocab_size"])
  for file in sorted(pathlib.Path(model).glob("*.safetensors")):
    for name, weight in load_file(file).items():
      if name.endswith(("q_proj.weight", "k_proj.weight")):
        weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
      writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
