"""The draft model on the device: its proposals are its own greedy continuation, and it writes to no foreign block."""

import dataclasses
import functools
import json
from pathlib import Path
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import Admission, Batch, StepResult
from engine.device import kv_cache
from engine.device import mesh as mesh_lib
from engine.device.build import build_engine
from engine.device.draft_folder import DraftFolder, open_draft
from engine.device.draft_model import DraftModel
from engine.device.draft_programs import draft_programs
from engine.device.eagle_folder import EagleFolder
from engine.device.options import BuildOptions
from engine.device.runner import Making, ModelRunner
from engine.device.served_model import ServedModel
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from engine.shapes import ShapeLadder, StepShape
from models.registry import config_from_hf
from models.weight_form import WeightForm
from tests.device.drafts import DraftCounts, limits_of, serve_with_drafts
from tests.device.proposal_checker import ProposalChecker
from tests.device.tiny_model import MAX_LEN, TINY, dense_greedy, make_runner, random_params
from tools.check_device.programs import ModelCase, make_spec

pytestmark = pytest.mark.usefixtures("quick_steps")

DRAFT = dataclasses.replace(TINY, num_layers=1, num_heads=2, num_kv_heads=1)
NUM_PROPOSALS = 4
NUM_BLOCKS = 140
DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def draft_params():
  return random_params(DRAFT, jnp.float32, seed=5)


@pytest.fixture(scope="module")
def runner(draft_params) -> ModelRunner:
  made = make_runner(num_blocks=NUM_BLOCKS)
  graphdef, state = draft_params
  leaves, tree = jax.tree.flatten(state)
  spec = dataclasses.replace(
    made.spec,
    model=DRAFT,
    graphdef=graphdef,
    params_tree=tree,
    params=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=made.params[0].sharding) for leaf in leaves),
    kv=kv_cache.abstract(made.spec.mesh, DRAFT, NUM_BLOCKS, 4, jnp.dtype(jnp.float32), made.spec.attention),
  )
  with Making(draft_programs(spec, made.spec, tuple(made.steps), NUM_PROPOSALS)) as making:
    leaves = [jax.device_put(leaf, made.params[0].sharding) for leaf in leaves]
    made.draft = DraftModel(spec, tuple(leaves), ShapeLadder((8, 32), 8), making.wait(lambda *_: None))
  made.warm_up(lambda *_: None)
  dense_greedy(draft_params, [1], 1)  # compiles
  made.seal()
  return made


def test_proposals_continue_the_known_tokens(runner, draft_params):
  """Chunks of prompts, decodes, right and wrong drafts, tokens in flight and lost slots leave no hole in its KV."""
  continue_tokens = functools.partial(dense_greedy, draft_params)
  checker, counts = ProposalChecker(runner, continue_tokens, NUM_PROPOSALS, MAX_LEN, 1), DraftCounts()
  for seed in range(2):
    counts += serve_with_drafts(checker, limits_of(runner), seed, count=16)
  assert counts.accepted > 100 and counts.rejected > 50 and counts.in_flight > 20 and counts.preempted > 1, counts
  assert checker.num_checked > 100 and checker.num_after_drafts > 15
  assert runner.compiles_after_ready == 0


def test_steps_that_it_leaves_out_change_no_output(runner):
  """Nor do proposals and fills after them, whose KV has holes."""
  rng, kinds = random.Random(3), set()

  class LeavesOut:
    def launch(self, batch: Batch):
      kind = rng.choice(("left out", "left out", "fill", "propose"))
      launched = runner.launch(
        dataclasses.replace(batch, num_proposals=NUM_PROPOSALS * (kind == "propose"), fills_draft=kind == "fill")
      )

      class Checked:
        def result(self) -> StepResult:
          result = launched.result()
          assert (result.fill_seconds > 0) == (kind == "fill") and (kind == "propose" or not result.proposals)
          kinds.add((kind, bool(result.proposals)))
          return result

      return Checked()

  counts = serve_with_drafts(LeavesOut(), limits_of(runner), 5, count=16)
  assert counts.accepted > 20 and counts.in_flight > 5, counts
  assert {("left out", False), ("fill", False), ("propose", True)} <= kinds
  assert runner.compiles_after_ready == 0


@pytest.mark.parametrize("num_tokens", [8, 7, MAX_LEN - 1, MAX_LEN - 3])
def test_proposals_past_the_table_touch_padding_alone(runner, num_tokens):
  """A request whose blocks are full, or almost; and one at the end of the longest table."""
  draft = runner.draft
  assert draft is not None
  rng = np.random.default_rng(1)
  draft.kv = tuple(jnp.array(rng.normal(size=each.shape), each.dtype) for each in draft.kv)
  blocks, tokens = tuple(range(3, 3 + -(-num_tokens // 4))), tuple(range(5, 5 + num_tokens))
  params, shape = SamplingParams(max_tokens=1, temperature=0.0), list(runner.steps)[-1]
  batch = Batch(0, shape, ("a",), (0,), (0,), (0,), (1,), (False,), ((),))
  for start in range(0, num_tokens, shape.tokens):
    piece = tokens[start : start + shape.tokens]
    is_last = start + len(piece) == num_tokens
    admission = Admission(0, tokens, num_tokens, blocks, params, 0)
    batch = dataclasses.replace(
      batch,
      step=start,
      starts=(start,),
      counts=(len(piece),),
      samples=(is_last,),
      token_ids=(piece,),
      admissions=() if start else (admission,),
      num_proposals=NUM_PROPOSALS * is_last,
      fills_draft=True,
    )
    before = [np.array(each) for each in draft.kv]
    result = runner.launch(batch).result()
  assert len(result.proposals[0]) == NUM_PROPOSALS
  foreign = [block for block in range(NUM_BLOCKS) if block != 0 and block not in blocks]
  for old, new in zip(before, map(np.asarray, draft.kv), strict=True):
    np.testing.assert_array_equal(old[foreign], new[foreign])
    assert not np.array_equal(old[0], new[0])  # those past the table are here


def write_folder(path: Path, tokens: dict[str, int], **changes) -> str:
  """A model folder without weights."""
  path.mkdir()
  config = json.loads((DEMO / "config.json").read_text())
  (path / "config.json").write_text(json.dumps(config | changes))
  (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
  return str(path)


@pytest.mark.parametrize(
  ("changes", "tokens", "settings", "message"),
  [
    ({"vocab_size": 1024}, {"a": 0}, {}, "has vocab_size=1024, but the model's is 2048; set --draft_model"),
    ({}, {"b": 0}, {}, "tokenizer.json has other tokens than the model's; set --draft_model"),
    (
      {"max_position_embeddings": 512},
      {"a": 0},
      {},
      "has 512 positions, but max_model_len is 4096; set --max_model_len=512, or",
    ),
    ({"max_position_embeddings": 512}, {"a": 0}, {"max_model_len": 513}, "512 positions, but max_model_len is 513"),
    ({"architectures": ["LlamaModel"]}, {"a": 0}, {}, "two models with a head of tokens; leave out --draft_model"),
  ],
)
def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path, changes, tokens, settings, message):
  model, draft = write_folder(tmp_path / "model", {"a": 0}), write_folder(tmp_path / "draft", tokens, **changes)
  options = BuildOptions(model, random_weights=True, speculation="draft", draft_model=draft, **settings)
  with pytest.raises(ConfigError, match=message) as error:
    build_engine(options, lambda *_: None, lambda _: None)
  assert draft in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("attention", "own"), [("gpu", "portable"), ("tpu", "tpu"), ("reference", "reference")])
@pytest.mark.parametrize("name", ["demo", "demo_eagle"])
def test_a_draft_model_has_attention_that_needs_no_plan(name: str, attention: str, own: str):
  """The host plans for lengths that it knows, but passes ahead change them on the device."""
  dtype, model = jnp.dtype("bfloat16"), config_from_hf(json.loads((DEMO / "config.json").read_text()))
  served = ServedModel(
    folder=str(DEMO),
    config=model,
    mesh=mesh_lib.make_mesh(jax.devices()[:1]),
    dtype=dtype,
    form=WeightForm(),
    kv_dtype=dtype,
    block_size=64,
    attention=attention,
  )
  folder = open_draft(name, served)
  assert isinstance(folder, DraftFolder | EagleFolder) and folder.attention == own
  target = make_spec(ModelCase(model, max_model_len=256, pool_tokens=1024), jax.devices()[:1], attention, 2)
  spec = folder.make_spec(target, 16)
  groups = [each for rows in (8, 16) for _, each in spec.attention_groups(StepShape(16, rows, rows))]
  assert all(each.implementation == own and each.plan is None for each in groups)
  own_shape = kv_cache.abstract(spec.mesh, spec.model, 16, spec.block_size, dtype, own)[0].shape
  assert spec.kv[0].shape == own_shape, "its KV has the layout of its own attention"


@pytest.mark.long
def test_memory_of_both_models_sizes_the_pool():
  """The draft model has as many blocks, and its KV counts in --kv_cache_mb."""
  blocks = {}
  for speculation, draft in (("none", ""), ("draft", str(DEMO))):
    options = BuildOptions(
      str(DEMO),
      speculation=speculation,
      draft_model=draft,
      kv_cache_mb=8,
      token_budgets=(16,),
      max_model_len=64,
      max_num_seqs=16,
      prefill_chunk=16,
    )
    built = build_engine(options, lambda *_: None, lambda _: None)
    blocks[speculation] = built.config.num_blocks
    if built.runner.draft is not None:
      assert [each.shape for each in built.runner.draft.kv] == [each.shape for each in built.runner.kv]
      assert built.config.num_proposals == 8 and built.runner.compiles_after_ready == 0
  assert blocks["draft"] == (blocks["none"] + 1) // 2 - 1
