"""Placement by logical axes, and the KV pool's arithmetic."""

import math

import jax
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from engine.device import kv_cache
from engine.device import mesh as mesh_lib
from models.config import ModelConfig
from models.registry import abstract
from tests.device.tiny_model import TINY


class FakeMesh:
  """The part of a mesh of many devices that placement needs."""

  def __init__(self, size: int):
    self.shape, self.size = {mesh_lib.AXIS: size}, size


def test_every_parameter_has_a_place_in_a_tree_of_the_same_structure():
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  _, state = abstract(TINY, np.dtype(np.float32))
  placed = mesh_lib.spread_params(mesh, state)
  assert jax.tree.structure(placed) == jax.tree.structure(state)
  layer = placed["layers"][0]
  spec_of = lambda variable: variable.get_value().sharding.spec  # noqa: E731
  assert spec_of(layer["attention"]["qkv"]["matrix"]["array"]) == PartitionSpec(None, "model", None, None)
  assert spec_of(layer["mlp"]["down"]["matrix"]["array"]) == PartitionSpec("model", None)
  assert spec_of(placed["embed"]["matrix"]["array"]) == PartitionSpec("model", None)
  assert spec_of(layer["attention_norm"]["scale"]) == PartitionSpec(None)


def test_a_mesh_has_the_axis_of_shares_last():
  mesh = mesh_lib.make_mesh(jax.devices())
  assert isinstance(mesh, Mesh) and mesh.axis_names == ("model",) and mesh_lib.num_shares(mesh) == len(jax.devices())


def test_bytes_of_a_block():
  # 2 layers, K and V, 4 tokens, 2 heads of 8, f32
  assert kv_cache.bytes_per_block(TINY, 4, np.dtype(np.float32)) == 2 * 2 * 4 * 2 * 8 * 4
  assert kv_cache.bytes_per_block(TINY, 4, jax.numpy.bfloat16) == 2 * 2 * 4 * 2 * 8 * 2
  # On 8 devices each of the 2 heads is on 4 of them, and on 3 devices a head of zeros pads.
  assert kv_cache.bytes_per_block(TINY, 4, jax.numpy.bfloat16, num_devices=8) == 2 * 2 * 4 * 8 * 8 * 2
  assert kv_cache.bytes_per_block(TINY, 4, jax.numpy.bfloat16, num_devices=3) == 2 * 2 * 4 * 3 * 8 * 2


def test_buffers_have_a_padding_block():
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  buffers = kv_cache.abstract(mesh, TINY, 5, 4, np.dtype(np.float32))
  assert len(buffers) == TINY.num_layers
  sizes = [math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers]
  assert sum(sizes) == 6 * kv_cache.bytes_per_block(TINY, 4, np.dtype(np.float32))


def test_the_head_axis_is_found_whatever_the_layout():
  for heads in (1, 2, 3, 16):
    config = ModelConfig("llama", 64, 1, 32, 32, 2 * heads, heads, 16, 64)
    shape = kv_cache.api.kv_shape(3, 16, heads, 16)
    assert shape[kv_cache.head_axis(16, config.layers[0])] == heads


class FakeDevice:
  def __init__(self, stats):
    self._stats = stats

  def memory_stats(self):
    return self._stats


def test_free_memory_is_of_the_fullest_device():
  mesh = FakeMesh(2)
  mesh.local_devices = [
    FakeDevice({"bytes_limit": 1000, "bytes_in_use": 100}),
    FakeDevice({"bytes_limit": 1000, "bytes_in_use": 300}),
  ]
  assert kv_cache.free_bytes(mesh, step_bytes=50, reserve_share=0.1) == 2 * (900 - 300 - 50)
  assert kv_cache.free_bytes(mesh, step_bytes=5000) == 0
  mesh.local_devices = [FakeDevice(None)]
  assert kv_cache.free_bytes(mesh, step_bytes=50) is None
