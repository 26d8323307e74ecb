"""Placement by logical axes, and the KV pool's arithmetic."""

import ctypes
import math

import jax
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from engine import free_memory
from engine.device import kv_cache
from engine.device import mesh as mesh_lib
from models.config import ModelConfig
from models.registry import abstract
from pallas_kernels import native
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
  local_hardware_id = 1

  def __init__(self, stats, platform="cpu"):
    self._stats, self.platform = stats, platform

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


# A driver with two GPUs, which answers only as CUDA does: initialized, and with the GPU's own context current.
_DRIVER = """
static int ready, device = -1; static void *current, *contexts[2] = {&ready, &device};
int cuInit(unsigned flags) { ready = !flags; return 0; }
int cuDeviceGet(int *found, int ordinal) { *found = 70 + ordinal; return !ready || ordinal < 0 || ordinal > 1; }
int cuDevicePrimaryCtxRetain(void **context, int found) { *context = contexts[device = found - 70]; return 0; }
int cuCtxPushCurrent_v2(void *context) { current = context; return context != contexts[device]; }
int cuMemGetInfo_v2(size_t *left, size_t *total) {
  *left = 60000000000 + device; *total = 80000000000; return !current;
}
int cuCtxPopCurrent_v2(void **context) { *context = current; current = NULL; return 0; }
int cuDevicePrimaryCtxRelease_v2(int found) { return found != device + 70; }
"""


def test_the_driver_counts_memory_that_jax_does_not_count(tmp_path, monkeypatch):
  source, library = tmp_path / "driver.cc", tmp_path / "libcuda.so.1"
  source.write_text(f'#include <stddef.h>\nextern "C" {{ {_DRIVER} }}')
  native.compile_library(source, library)
  real = ctypes.CDLL
  monkeypatch.setattr(free_memory.ctypes, "CDLL", lambda name: real(str(library)))
  assert free_memory.read_gpu_bytes(0) == (60_000_000_000, 80_000_000_000)
  assert free_memory.read_gpu_bytes(1) == (60_000_000_001, 80_000_000_000)
  assert free_memory.read_gpu_bytes(2) is None, "no such GPU"

  mesh = FakeMesh(1)
  mesh.local_devices = [FakeDevice(None, "gpu")]
  # JAX would have taken 76 GB; 20 are used, and a tenth stays free.
  assert kv_cache.free_bytes(mesh, step_bytes=50, reserve_share=0.1) == int(0.9 * 76e9) - 19_999_999_999 - 50

  def find_no_library(name):
    raise OSError(f"{name}: cannot open shared object file")

  monkeypatch.setattr(free_memory.ctypes, "CDLL", find_no_library)
  assert free_memory.read_gpu_bytes(0) is None and kv_cache.free_bytes(mesh, step_bytes=50) is None
