"""Declares how a program finds and reads a model, once for the server and for LLM. Reads no flags; imports no JAX."""

import dataclasses

from engine.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
  """The settings of a model's files, prompts and executables, besides those of its engine."""

  revision: str = setting(
    "", "Branch, tag or commit of a model on the Hugging Face hub; empty: its main branch.", group="Model"
  )
  model_cache_dir: str = setting(
    "",
    "Folder for downloads; empty: the Hugging Face cache (HF_HOME), and ~/.cache/sluice/models for buckets.",
    group="Model",
  )
  chat_template: str = setting(
    "", "Jinja file with a chat template that replaces the model's own.", group="Model", common=True
  )
  generation_config: str = setting(
    "auto",
    "Defaults of temperature, top_k, top_p, min_p, repetition_penalty and max_tokens (max_new_tokens) for requests "
    "that omit them; auto: from the model's generation_config.json; none: Sluice's own.",
    group="Model",
    choices=("auto", "none"),
    common=True,
  )
  max_prompt_bytes: int = setting(
    1 << 20, "Longest text that the server tokenizes.", group="Limits of clients", unit="bytes", at_least=1
  )
  executable_bundle: str = setting(
    "",
    "Folder of executables from tools.bundle. The server loads them if they match the model, ladder, device and "
    "version; otherwise it prints the reason and compiles.",
    group="Devices and programs",
    common=True,
  )
