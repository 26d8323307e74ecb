"""Accepts the flag spellings of other servers: dashes for underscores, and vLLM's names. Decides no value.

vLLM's flags: https://docs.vllm.ai/en/stable/cli/serve.html
"""

from collections.abc import Collection

from engine.errors import ConfigError

# Synonyms of Sluice's own flags.
SYNONYMS = {
  "tensor_parallel_size": "num_devices",
  "tp": "num_devices",
  "download_dir": "model_cache_dir",
  "kv_cache_dtype": "kv_dtype",
}
# vLLM's flags that Sluice does not have, and what to do instead.
INSTEAD = {
  "api_key": "write the key into a file and set --api_key_file",
  "data_parallel_size": "start one server for each replica, behind a load balancer",
  "enable_auto_tool_choice": "leave it out; --tool_call_parser alone says how the model writes tool calls",
  "enable_chunked_prefill": "leave it out; prompts are prefilled in chunks of --prefill_chunk tokens",
  "enable_prefix_caching": "leave it out; --prefix_cache_scope says who shares prefixes",
  "enable_tower_connector_lora": "leave it out; adapters of the language model's linear layers are served",
  "enforce_eager": "leave it out; every program is compiled before the server is ready",
  "fully_sharded_loras": "leave it out; devices share adapters as they share the layers",
  "gpu_memory_utilization": "set --kv_cache_mb, or the environment variable XLA_CLIENT_MEM_FRACTION",
  "kv_offloading_size": "set --host_kv_mb, which is in MiB",
  "load_format": "leave it out; weights are read from safetensors",
  "lora_dtype": "leave it out; adapters have the type of --dtype",
  "max_cpu_loras": "set --max_loras; every loaded adapter holds a slot",
  "max_num_batched_tokens": "set --token_budgets, whose last number is the largest step, or --prefill_chunk",
  "pipeline_parallel_size": "set --num_devices; each layer is spread over all devices",
  "seed": "send a seed with each request",
  "swap_space": "set --host_kv_mb, which is in MiB",
  "tokenizer": "put tokenizer.json into the model's folder",
  "trust_remote_code": "leave it out; code of a repository is never run",
  "uvicorn_log_level": "leave it out; --access_log names a file for a line a request",
}


def translate_argument(argument: str, flags: Collection[str], bools: Collection[str]) -> str:
  """Returns one argument in Sluice's own spelling; leaves unknown flags unchanged.

  Args:
    argument: for example "--max-model-len=4096", "--max-model-len" before its value, or a value.
    flags: names of all flags.
    bools: names of the boolean flags, which may have the prefix "no".

  Raises:
    ConfigError: Sluice lacks this flag of vLLM; the message says what to do instead.
  """
  name, equals, value = argument.lstrip("-").partition("=")
  if not argument.startswith("-") or not name:
    return argument
  spelled = name.replace("-", "_")
  spelled = SYNONYMS.get(spelled, spelled)
  positive = spelled.removeprefix("no").removeprefix("_")
  if spelled in flags:
    return f"--{spelled}{equals}{value}"
  if spelled.startswith("no") and positive in bools:
    return f"--no{positive}{equals}{value}"
  for known in (spelled, positive):
    if known in INSTEAD:
      raise ConfigError(f"--{name} is a flag of vLLM that Sluice does not have; {INSTEAD[known]}")
  return argument
