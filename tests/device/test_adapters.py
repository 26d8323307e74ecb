"""LoRA adapters on real models: tokens are those of the merged model, whatever else is in the batch."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
from pathlib import Path
import random
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.device.adapter_folder import AdapterArrays
from engine.device.adapter_support import check_adapter_support
from engine.device.build import Built, build_engine
from engine.device.mesh import make_mesh
from engine.device.options import BuildOptions
from engine.device.weights import LoadedModel, open_checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.speculation.drafter import Draft
from extensions.disaggregated.build import build_any
from models.attention import dense_causal_attend
from models.registry import config_from_hf, tensors
from tools.bench.speculation import OracleDrafter
from tools.make_random_adapter import TARGETS, matrices, read_products, write_plain_adapter, write_random_adapter
from tools.make_random_model import family_config, write_model

pytestmark = pytest.mark.usefixtures("quick_steps")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
RNG = random.Random(5)
LONGEST = 128
FAMILY_SIZES = {
  "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rope_theta": 10000.0,
}  # fmt: skip


def make_options(model: Path = DEMO, **settings) -> BuildOptions:
  chosen: dict[str, Any] = {
    "token_budgets": (8, 64), "max_num_seqs": 8, "prefill_chunk": 24, "num_blocks": 128, "max_model_len": 128,
    "block_size": 16, "dtype": "float32", "enable_lora": True, "max_loras": 3, "max_lora_rank": 8,
  }  # fmt: skip
  return BuildOptions(str(model), **(chosen | settings))


class MergedModel:
  """The model with what an adapter adds to its weights, as a plain forward pass without a cache."""

  def __init__(self, loaded: LoadedModel):
    self._loaded = loaded

    @jax.jit
    def next_tokens(params, tokens):
      model = nnx.merge(loaded.graphdef, params)
      positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]
      hidden, _ = model.hidden(tokens, positions, (None,) * loaded.config.num_layers, None, dense_causal_attend)
      return jnp.argmax(model.logits(hidden)[0], axis=-1)

    self._next_tokens = next_tokens

  def add_products(self, products: Mapping[str, np.ndarray]) -> nnx.State:
    """Returns the parameters of the merged model; products: [outputs, inputs], by module name."""
    params = jax.tree.map(lambda leaf: leaf, self._loaded.params)
    for name, pieces in tensors(self._loaded.config).items():
      for piece in pieces:
        product = products.get(piece.name.removesuffix(".weight"))
        if product is not None:
          node = params
          for part in name.split("."):
            node = node[int(part) if part.isdigit() else part]
          array = node["matrix"]["array"]
          array[...] = array[...].at[piece.box()].add(product.reshape(piece.split).transpose(piece.order))
    return params

  def generate(self, params: nnx.State, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
      row = np.zeros((1, LONGEST), np.int32)
      row[0, : len(tokens)] = tokens
      tokens.append(int(self._next_tokens(params, row)[len(tokens) - 1]))
    return tokens[len(prompt) :]


def open_merged(model: Path) -> MergedModel:
  return MergedModel(open_checkpoint(str(model), make_mesh(jax.devices()[:1]), jnp.float32).load())


class EventLog:
  """Collects the tokens of an engine."""

  def __init__(self) -> None:
    self.events: list[TokenEvent] = []

  def serve(self, built: Built, requests: Sequence[Request]) -> list[list[int]]:
    self.events.clear()
    for request in requests:
      built.engine.submit(request)
    while built.engine.num_live:
      built.engine.step()
    found: dict[str, list[int]] = {}
    for event in self.events:
      assert not event.message, event
      found.setdefault(event.request_id, []).extend(event.token_ids)
    return [found[request.id] for request in requests]


def load(built: Built, name: str, folder: Path, **more) -> None:
  assert built.read_adapter is not None
  loaded = built.engine.load_adapter(name, built.read_adapter(str(folder)), **more)
  built.engine.step()
  loaded.result(timeout=0)


def make(request_id: str, prompt: Sequence[int], adapter: str = "", count: int = 12) -> Request:
  return Request(
    request_id, list(prompt), SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True), adapter=adapter
  )


def write_three(folder: Path, model: Path) -> dict[str, dict[str, np.ndarray]]:
  """Writes adapters of three kinds; returns what each adds to the weights, computed apart from the reader."""
  config = config_from_hf(json.loads((model / "config.json").read_text()))
  modules = list(matrices(config))
  write_plain_adapter(folder / "all", config, 8, 1, strength=0.3)
  two = [module for module in modules if module.endswith(("q_proj", "v_proj"))]
  settings = {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": r".*\.(q_proj|v_proj)"}
  write_random_adapter(folder / "rslora", config, dict.fromkeys(two, 4), 2, settings, 1.0)
  layer = [module for module in modules if ".layers.1." in module]
  ranks = {module: 7 if module.endswith("down_proj") else 2 for module in layer}
  settings = {
    "r": 2, "lora_alpha": 2, "target_modules": "all-linear", "layers_to_transform": [1],
    "rank_pattern": {"down_proj": 7}, "alpha_pattern": {r"layers\.1\.mlp\.gate_proj": 5, "o_proj": 1},
  }  # fmt: skip
  write_random_adapter(folder / "patterns", config, ranks, 3, settings, 1.0)
  alphas = {"gate_proj": 5.0, "o_proj": 1.0}
  scales = {module: alphas.get(module.rpartition(".")[2], 2.0) / ranks[module] for module in layer}
  return {
    "": {},
    "all": read_products(folder / "all", 1.0),
    "rslora": read_products(folder / "rslora", 6 / math.sqrt(4)),
    "patterns": read_products(folder / "patterns", scales),
  }


@dataclasses.dataclass(frozen=True)
class Served:
  """The demo model with three adapters, and the tokens of the merged models."""

  built: Built
  log: EventLog
  folder: Path
  prompts: list[list[int]]
  wanted: dict[tuple[str, int], list[int]]  # by adapter and index of the prompt


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
  folder, log = tmp_path_factory.mktemp("adapters"), EventLog()
  products, merged = write_three(folder, DEMO), open_merged(DEMO)
  prompts = [[RNG.randrange(3, 2048) for _ in range(length)] for length in (1, 16, 33, 70)]
  wanted = {
    (name, index): merged.generate(params, prompt, 12)
    for name, params in ((name, merged.add_products(each)) for name, each in products.items())
    for index, prompt in enumerate(prompts)
  }
  for index in range(len(prompts)):
    assert len({tuple(wanted[name, index]) for name in products}) > 2, "adapters too weak to tell apart"
  assert len({str([wanted[name, index] for index in range(len(prompts))]) for name in products}) == len(products)
  built = build_engine(make_options(), lambda *_: None, log.events.extend)
  for name in ("all", "rslora", "patterns"):
    load(built, name, folder / name)
  yield Served(built, log, folder, prompts, wanted)


def requests_of(served: Served, names: Sequence[str], tag: str = "") -> list[tuple[Request, list[int]]]:
  return [
    (make(f"{tag}{name}-{index}", prompt, name), served.wanted[name, index])
    for index, prompt in enumerate(served.prompts)
    for name in names
  ]


def check(served: Served, pairs: Sequence[tuple[Request, list[int]]]) -> None:
  found = served.log.serve(served.built, [request for request, _ in pairs])
  for (request, wanted), tokens in zip(pairs, found, strict=True):
    assert tokens == wanted, request.id


def test_tokens_are_those_of_the_merged_model_alone_and_mixed(served):
  """Alone, then all in one batch twice, so that the prefix cache serves the second time."""
  for pair in requests_of(served, ("", "all", "rslora", "patterns"), "alone-"):
    check(served, [pair])
  for turn in ("first-", "second-"):
    check(served, requests_of(served, ("", "all", "rslora", "patterns"), turn))
  assert any(event.num_cached_tokens for event in served.log.events)
  assert served.built.runner.compiles_after_ready == 0


def test_zero_adapter_changes_nothing(served):
  config = served.built.model
  folder = served.folder / "zero"
  write_plain_adapter(folder, config, 8, 4, strength=0.0)
  served.built.engine.unload_adapter("rslora").result(timeout=0)
  load(served.built, "zero", folder)
  pairs = requests_of(served, ("",), "base-")
  check(served, [(dataclasses.replace(request, adapter="zero"), wanted) for request, wanted in pairs])
  served.built.engine.unload_adapter("zero").result(timeout=0)
  load(served.built, "rslora", served.folder / "rslora")


@pytest.mark.parametrize("num_loads", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_loads_compile_nothing_and_leave_others_alone(served, num_loads: int):
  """A request of another adapter runs meanwhile; the last load serves its own tokens."""
  engine = served.built.engine
  running, wanted = make("running", served.prompts[2], "all", 12), served.wanted["all", 2]
  served.log.events.clear()
  engine.submit(running)
  reader = served.built.read_adapter
  arrays = {name: reader(str(served.folder / name)) for name in ("rslora", "patterns")}
  for number in range(num_loads):
    engine.unload_adapter("patterns").result(timeout=0)
    future = engine.load_adapter("patterns", arrays[("patterns", "rslora")[number % 2]])
    engine.step()
    future.result(timeout=0)
  while engine.num_live:
    engine.step()
  tokens = [token for event in served.log.events for token in event.token_ids if event.request_id == "running"]
  assert tokens == wanted
  pair = make("last", served.prompts[1], "patterns"), served.wanted["rslora", 1]
  check(served, [pair])
  assert served.built.runner.compiles_after_ready == 0
  load(served.built, "patterns", served.folder / "patterns", replaces=True)


def test_arrays_of_another_shape_fail_their_load_alone(served):
  read = served.built.read_adapter(str(served.folder / "all"))
  other = AdapterArrays(read.rank, read.path, read.leaves[:-1])
  engine = served.built.engine
  engine.unload_adapter("patterns").result(timeout=0)
  future = engine.load_adapter("other", other)
  engine.step()
  with pytest.raises(ValueError, match="not the shapes of this engine's slots"):
    future.result(timeout=0)
  load(served.built, "patterns", served.folder / "patterns")
  check(served, requests_of(served, ("patterns", ""), "after-"))


@pytest.mark.long
@pytest.mark.parametrize(
  "settings",
  [
    {"num_blocks": 36, "block_size": 4},
    {"prefix_cache_scope": "off", "overlap": "false", "prefill_chunk": 5},
    {"matmul": "xla", "attention": "reference"},
  ],
)
def test_tokens_under_preemption_and_other_kernels(served, settings: dict):
  log = EventLog()
  built = build_engine(make_options(**settings), lambda *_: None, log.events.extend)
  for name in ("all", "rslora", "patterns"):
    load(built, name, served.folder / name)
  again = dataclasses.replace(served, built=built, log=log)
  check(again, requests_of(again, ("", "all", "rslora", "patterns")))
  assert (built.engine.stats().num_preemptions > 0) == ("num_blocks" in settings)
  assert built.runner.compiles_after_ready == 0


@pytest.mark.long
def test_most_first_tokens_in_float16_are_those_of_float32(served):
  log = EventLog()
  built = build_engine(make_options(dtype="float16"), lambda *_: None, log.events.extend)
  for name in ("all", "rslora", "patterns"):
    load(built, name, served.folder / name)
  pairs = requests_of(served, ("", "all", "rslora", "patterns"))
  found = log.serve(built, [request for request, _ in pairs])
  same = [tokens[0] == wanted[0] for tokens, (_, wanted) in zip(found, pairs, strict=True)]
  assert sum(same) >= 0.9 * len(same)


class AdaptedOracle(OracleDrafter):
  """Proposes the tokens of the merged models, and another one at every fifth position."""

  def propose(self, request: Request, count: int) -> Draft:
    first = len(request.output_token_ids)
    truth = self.outputs[request.id][first : first + count]
    return Draft(tuple(token ^ ((first + place) % 5 == 4) for place, token in enumerate(truth)), "oracle")


@pytest.mark.long
def test_drafts_are_verified_with_the_adapter_of_their_row(served):
  log = EventLog()
  built = build_engine(make_options(speculation="ngram"), lambda *_: None, log.events.extend)
  for name in ("all", "rslora", "patterns"):
    load(built, name, served.folder / name)
  again = dataclasses.replace(served, built=built, log=log)
  pairs = requests_of(again, ("", "all", "rslora", "patterns"))
  oracle = AdaptedOracle(1.0)
  oracle.outputs = {request.id: tuple(wanted) for request, wanted in pairs}
  built.engine.replace_drafter(oracle)
  check(again, pairs)
  records = built.engine.stats(1000).steps
  assert sum(record.decode_tokens - record.decode_rows for record in records) > 5
  assert built.runner.compiles_after_ready == 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "granite"])
def test_tokens_of_other_families(family: str, tmp_path):
  """Biases, norms of heads, norms after a layer, factors of residuals, and gates by GELU."""
  raw = family_config(family, 64 if family == "gemma2" else None, **FAMILY_SIZES)
  raw |= {"residual_multiplier": 0.5} if family == "granite" else {}
  raw |= {"tie_word_embeddings": False} if family == "gemma2" else {}  # or each token would predict itself
  write_model(tmp_path / "model", raw, 7)
  products = write_three(tmp_path, tmp_path / "model")
  merged, log = open_merged(tmp_path / "model"), EventLog()
  built = build_engine(make_options(tmp_path / "model"), lambda *_: None, log.events.extend)
  prompts = [[RNG.randrange(3, 512) for _ in range(length)] for length in (3, 40)]
  pairs = []
  for name, each in products.items():
    if name:
      load(built, name, tmp_path / name)
    params = merged.add_products(each)
    pairs += [
      (make(f"{name}-{index}", prompt, name), merged.generate(params, prompt, 12))
      for index, prompt in enumerate(prompts)
    ]
  assert len({tuple(wanted) for _, wanted in pairs}) == len(pairs)
  for (request, wanted), tokens in zip(pairs, log.serve(built, [request for request, _ in pairs]), strict=True):
    assert tokens == wanted, request.id


def change(folder: Path, config: Mapping | None = None, values: Mapping[str, np.ndarray | None] | None = None) -> None:
  """Changes keys of an adapter's config, and tensors; None removes one."""
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
  if values:
    found: dict[str, np.ndarray | None] = {**load_file(folder / "adapter_model.safetensors"), **values}
    kept = {key: value for key, value in found.items() if value is not None}
    save_file(kept, folder / "adapter_model.safetensors")


PREFIX = "base_model.model.model.layers.0."
A = f"{PREFIX}self_attn.q_proj.lora_A.weight"
BAD_CONFIGS = [
  ({"use_dora": True}, "use_dora=True is not supported"),
  ({"bias": "all"}, "bias='all' is not supported; supported is 'none'"),
  ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not supported"),
  ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not supported"),
  ({"target_parameters": ["x"]}, "target_parameters=.* is not supported"),
  ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
  ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
  ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; supported is 'LORA'"),
  ({"target_modules": ["q_proj", "lm_head"]}, "target_modules=.* is not supported; supported is layers of attention"),
  ({"target_modules": ["c_attn"]}, "name no layer of this model"),
  ({"target_modules": "("}, r"target_modules has an invalid pattern '\('"),
  ({"target_modules": "x" * 501}, "a pattern of 501 characters; supported are at most 500"),
  ({"target_modules": 3}, "target_modules=3 is not supported"),
  ({"r": 0}, "r=0 must be a whole number of 1 or more"),
  ({"r": 9}, "rank 9 is above max_lora_rank=8; serve with --max_lora_rank=9"),
  ({"rank_pattern": {"q_proj": 64}}, "rank 64 is above max_lora_rank=8"),
  ({"rank_pattern": {"q_proj": 4}}, r"shape \[8, 256\], but .* require \[4, 256\]"),
  ({"lora_alpha": "8"}, "lora_alpha='8' must be a finite number"),
  ({"use_rslora": 1}, "use_rslora=1 is not supported; supported is true or false"),
  ({"layers_to_transform": [0]}, "adapter_config.json does not target model.layers.1"),
  ({"layers_to_transform": ["0"]}, "layers_to_transform=.* is not supported"),
]
BAD_TENSORS = [
  ({A: None}, "q_proj.lora_A.weight is missing, though"),
  ({A: np.zeros((8, 128), np.float32)}, r"has shape \[8, 128\], but .* require \[8, 256\]"),
  ({A: np.full((8, 256), np.nan, np.float32)}, "holds NaN or Inf"),
  ({A: np.zeros((8, 256), np.int32)}, "has dtype I32; supported are"),
  ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": np.zeros((8, 256), np.float32)}, "4 layers"),
  ({f"{PREFIX}self_attn.q_proj.lora_magnitude_vector": np.zeros(4, np.float32)}, "DoRA is not served"),
  ({f"{PREFIX}self_attn.q_proj.lora_B.bias": np.zeros(4, np.float32)}, "adapters with a bias are not served"),
  ({"base_model.model.lm_head.weight": np.zeros(4, np.float32)}, "an adapter may change no other weights"),
  ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros(4, np.float32)}, "adapters of embeddings"),
  ({"base_model.model.lm_head.lora_A.weight": np.zeros((8, 256), np.float32)}, "adapts lm_head, which is not a layer"),
]


@pytest.mark.parametrize(
  ("config", "values", "words"), [(c, {}, w) for c, w in BAD_CONFIGS] + [({}, v, w) for v, w in BAD_TENSORS]
)
def test_reader_refuses_by_name_what_is_not_served(served, tmp_path, config, values, words: str):
  write_plain_adapter(tmp_path, served.built.model, 8, 1)
  change(tmp_path, config, values)
  with pytest.raises(CheckpointError, match=words):
    served.built.read_adapter(str(tmp_path))


def test_reader_refuses_broken_folders(served, tmp_path):
  read = served.built.read_adapter
  with pytest.raises(CheckpointError, match="adapter_config.json: no such file; an adapter's folder needs one"):
    read(str(tmp_path))
  write_plain_adapter(tmp_path, served.built.model, 8, 1)
  weights = tmp_path / "adapter_model.safetensors"
  content = weights.read_bytes()
  weights.write_bytes(content[:-5])
  with pytest.raises(CheckpointError, match="is truncated, corrupt or no safetensors file"):
    read(str(tmp_path))
  weights.unlink()
  with pytest.raises(CheckpointError, match="adapter_model.safetensors: no such file"):
    read(str(tmp_path))
  (tmp_path / "adapter_model.bin").write_bytes(b"x")
  with pytest.raises(CheckpointError, match="pickled weights can run code.*safe_serialization=True"):
    read(str(tmp_path))
  (tmp_path / "elsewhere").write_bytes(content)
  weights.symlink_to(DEMO / "config.json")
  with pytest.raises(CheckpointError, match="is a link to"):
    read(str(tmp_path))
  (tmp_path / "adapter_config.json").write_text("[]")
  with pytest.raises(CheckpointError, match="holds no JSON object"):
    read(str(tmp_path))


def test_reader_takes_what_peft_writes_by_default(served, tmp_path):
  """All keys of LoraConfig.to_dict() of PEFT 0.18, with their defaults."""
  write_plain_adapter(tmp_path, served.built.model, 8, 1, ("q_proj", "v_proj"))
  defaults = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "demo", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.18.0", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": None, "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
  }  # fmt: skip
  change(tmp_path, defaults)
  assert served.built.read_adapter(str(tmp_path)).rank == 8


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ({"deterministic": True}, "enable_lora: .* serve without --deterministic"),
    ({"batching": "disaggregated"}, "enable_lora: two engines share no adapters"),
  ],
)
def test_build_refuses_settings_that_exclude_adapters(settings: dict, words: str):
  with pytest.raises(ConfigError, match=words):
    build_any(make_options(**settings), lambda *_: None, lambda _: None)


def test_a_bundle_excludes_adapters():
  with pytest.raises(ConfigError, match="serve without --executable_bundle"):
    check_adapter_support(make_options(), has_bundle=True)


def test_engine_without_adapters_has_no_reader_and_no_programs():
  built = build_engine(make_options(enable_lora=False), lambda *_: None, lambda _: None)
  assert built.read_adapter is None and not built.runner.adapted_calls and not built.runner.spec.adapters
  assert set(TARGETS) == {module.rpartition(".")[2] for module in matrices(built.model)}
