"""A device program from its description: compiled here, or restored from the bytes of one that was. Touches no file.

The only place that knows how JAX wraps an executable. `jax.experimental.serialize_executable` would do this too, but
keeps what describes arguments and results as a pickle; here both follow from the Program, so bytes on a disk are only
ever handed to the backend that made them. Bytes are code: whoever restores them must know where they come from.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import stages
from jax._src import core
from jax._src.interpreters import pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
import numpy as np


class NotRestored(Exception):
  """Bytes that are not, or no longer, an executable of this program; the text says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A function on arrays, ready to be compiled.

  Attributes:
    name: unique among a runner's programs.
    function: pure; takes `arguments`, returns `results`.
    arguments: a tree of jax.ShapeDtypeStruct for each argument, with shardings.
    results: a tree of jax.ShapeDtypeStruct, with shardings.
    donated: which arguments are updated in place.
    compiler_options: see programs.py.
  """

  name: str
  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  results: Any
  donated: tuple[int, ...]
  compiler_options: dict[str, bool | int | str] | None

  @property
  def donated_bytes(self) -> int:
    """On one device; what the executable must report as aliased."""
    return sum(_bytes_on_a_device(leaf) for each in self.donated for leaf in jax.tree.leaves(self.arguments[each]))

  def compile(self) -> stages.Compiled:
    """Traces, lowers and compiles."""
    program = jax.jit(
      self.function,
      donate_argnums=self.donated,
      keep_unused=True,  # so that the executable takes what `arguments` says, whatever it reads
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.results),
    )
    return program.lower(*self.arguments).compile(self.compiler_options)

  def restore(self, data: bytes, devices: tuple[Any, ...]) -> stages.Compiled:
    """What `compile` gave where `to_bytes` made `data`, for the same devices (jax.Device).

    Raises:
      NotRestored: the backend does not take the bytes, or they are another program's.
    """
    client = devices[0].client
    arguments, in_tree = jax.tree.flatten((self.arguments, {}))
    results, out_tree = jax.tree.flatten(self.results)
    donated = [i in self.donated for i, argument in enumerate(self.arguments) for _ in jax.tree.leaves(argument)]
    in_avals = [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in arguments]
    out_avals = [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in results]
    device_list = xla_client.DeviceList(devices)
    try:
      executable = client.deserialize_executable(data, device_list)
      self._check(executable, arguments, results)
      # As pxla.UnloadedMeshExecutable.from_hlo ends; shardings are those the program was lowered with.
      none = (None,) * len(arguments), (None,) * len(results)
      in_layouts, out_layouts = pxla._get_layouts_from_executable(executable, *none, 0, in_avals, out_avals)
      in_shardings = [leaf.sharding for leaf in arguments]
      loaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=client,
        input_avals=in_avals,
        input_shardings=in_shardings,
        output_avals=out_avals,
        output_shardings=[leaf.sharding for leaf in results],
        committed=True,
        name=self.name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=(),
        host_callbacks=[],
        kept_var_idx=set(range(len(arguments))),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=pxla.get_dispatch_layouts(in_layouts, in_shardings, in_avals),
        xla_out_layouts=out_layouts,
        all_args_info=None,
        pgle_profiler=None,
      ).load()
    except NotRestored:
      raise
    except Exception as error:  # JAX's, XLA's, or of names that another version has not
      raise NotRestored(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    info = [stages.ArgInfo(aval, donate) for aval, donate in zip(in_avals, donated, strict=True)]
    return stages.Compiled(loaded, [], jax.tree.unflatten(in_tree, info), out_tree, no_kwargs=False)

  def _check(self, executable: Any, arguments: list[Any], results: list[Any]) -> None:
    """Refuses one that takes, gives or donates something else."""
    found, wanted = len(executable.get_parameter_layouts()), len(arguments)
    if found != wanted:
      raise NotRestored(f"it takes {found} arrays, not {wanted}")
    stats = executable.get_compiled_memory_stats()
    for what, found, wanted in (
      ("arguments", stats.argument_size_in_bytes, sum(map(_bytes_on_a_device, arguments))),
      ("donated arguments", stats.alias_size_in_bytes, self.donated_bytes),
    ):
      if found != wanted:
        raise NotRestored(f"it has {found} bytes of {what}, not {wanted}")
    if len(executable.get_output_layouts()) != len(results):
      raise NotRestored(f"it gives {len(executable.get_output_layouts())} arrays, not {len(results)}")


def to_bytes(compiled: stages.Compiled) -> bytes:
  """The executable, as its backend writes it.

  Raises:
    NotRestored: the backend cannot, or it holds constants of the process that made it.
  """
  try:
    if compiled._params.const_args:
      raise NotRestored("it has constants as arguments")
    executable: Any = compiled.runtime_executable()
    return executable.serialize()
  except jax.errors.JaxRuntimeError as error:
    raise NotRestored(" ".join(str(error).split())[:200]) from error


def has_effects(compiled: stages.Compiled) -> bool:
  """Whether its calls have an order of their own, which JAX hands on from call to call."""
  executable: Any = compiled._executable
  return bool(executable.unsafe_call.ordered_effects)


def flat_call(compiled: stages.Compiled) -> Callable[[list[jax.Array]], list[jax.Array]]:
  """The executable from the leaves of its arguments to those of its results, without looking at what it is given.

  Every leaf must be an array on the sharding that the Program says; one that was donated before is refused by XLA.
  """
  assert not compiled._params.const_args, "constants as arguments would have to go first"
  executable: Any = compiled._executable
  replicated: Any = executable.unsafe_call
  execute, handlers = replicated.xla_executable.execute_sharded, replicated.out_handler.handlers

  def call(arrays: list[jax.Array]) -> list[jax.Array]:
    return execute(arrays).consume_with_handlers(handlers)

  return call


def _bytes_on_a_device(leaf: Any) -> int:
  return int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
