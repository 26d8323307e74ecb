"""What weights of 8 and 4 bits change: the demo model's answers stay right, and its logits near those of f32."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.build import build_engine
from engine.device.mesh import make_mesh
from engine.device.options import BuildOptions
from engine.device.weights import open_checkpoint
from models.weight_form import INT8, PLAIN, MatrixForm, WeightForm
from pallas_kernels import native
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer
from tests.device.tiny_model import MAX_LEN, dense_logits
from tests.e2e.test_skills import serve
from tools.demo_model.skills import SKILLS, is_correct, make_instances

pytestmark = pytest.mark.usefixtures("quick_steps")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PER_SKILL = 25
W8A8 = MatrixForm("grouped", 8, scale_dtype="float32")
INT4 = MatrixForm("grouped", 4, 32, scale_dtype="float16")


# The least part of right answers.
@pytest.mark.parametrize(
  ("quantization", "least"),
  [*(pytest.param(name, 0.99, marks=pytest.mark.long) for name in ("int8", "w8a8")), ("int4", 0.98)],
)
def test_answers_stay_right(quantization, least):
  options = BuildOptions(
    str(DEMO), quantization=quantization, token_budgets=(32, 128), max_num_seqs=32, prefill_chunk=128
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  assert built.quantization == quantization
  tokenizer = Tokenizer(DEMO)
  instances = [instance for skill in SKILLS for instance in make_instances(skill, PER_SKILL, 78)]
  prompts = [tokenizer.encode_chat([Message(**message) for message in instance.messages]) for instance in instances]
  answers, _, _ = serve(built, prompts, at_once=32)
  texts = [tokenizer.decode(answer) for answer in answers]
  right = sum(is_correct(instance, text) for instance, text in zip(instances, texts, strict=True))
  print(f"{right} of {len(instances)} answers right with {quantization} weights")
  assert right >= least * len(instances)


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler: x is not quantized")


# Bounds are twice what was measured.
@pytest.mark.parametrize(
  ("form", "bound"),
  [
    (WeightForm(matrix=INT8), 0.016),
    (WeightForm(matrix=W8A8), 0.016),
    pytest.param(WeightForm(packed=True, matrix=W8A8), 0.027, marks=needs_compiler),
    pytest.param(WeightForm(packed=True, matrix=INT4), 0.2, marks=needs_compiler),
  ],
)
def test_logits_stay_near(form, bound):
  """By the root mean square, of the demo model's own logits."""
  tokenizer = Tokenizer(DEMO)
  mesh = make_mesh(jax.devices()[:1])
  models = []
  for each in (PLAIN, form):
    loaded = open_checkpoint(str(DEMO), mesh, jnp.dtype("float32"), each).load()
    models.append((loaded.graphdef, loaded.params))
  errors, sizes = [], []
  for skill in SKILLS:
    for instance in make_instances(skill, 3, 79):
      tokens = tokenizer.encode_chat([Message(**message) for message in instance.messages])[:MAX_LEN]
      exact, near = (dense_logits(model, tokens) for model in models)
      errors.append(np.mean(np.square(near - exact)))
      sizes.append(np.mean(np.square(exact - exact.mean(axis=-1, keepdims=True))))
  error = float(np.sqrt(np.mean(errors) / np.mean(sizes)))
  print(f"{form.matrix}: logits are off by {error:.5f} of their spread")
  assert error < bound
