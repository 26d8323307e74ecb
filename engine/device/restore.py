"""Serializes executables, and restores a program's executable from its bytes. Touches no file.

`jax.experimental.serialize_executable` pickles the description of arguments and results. Here both follow from the
Program, so only the backend that made the bytes parses them. The bytes are code: callers must trust their source.
"""

from typing import Any

import jax
from jax import stages
from jax._src import core
from jax._src.interpreters import pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
import numpy as np

from engine.device.programs import Program


class NotRestored(Exception):
  """The bytes are not an executable of this program, or no longer one; the text says why."""


def restore_program(program: Program, data: bytes, devices: tuple[Any, ...]) -> stages.Compiled:
  """Returns the executable that `program.compile` made and `to_bytes` serialized, for the same devices (jax.Device).

  Raises:
    NotRestored: the backend refuses the bytes, or they belong to another program.
  """
  client = devices[0].client
  arguments, in_tree = jax.tree.flatten((program.arguments, {}))
  results, out_tree = jax.tree.flatten(program.results)
  donated = [i in program.donated for i, argument in enumerate(program.arguments) for _ in jax.tree.leaves(argument)]
  in_avals = [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in arguments]
  out_avals = [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in results]
  device_list = xla_client.DeviceList(devices)
  try:
    executable = client.deserialize_executable(data, device_list)
    _check_executable(executable, program, arguments, results)
    # As pxla.UnloadedMeshExecutable.from_hlo ends; the shardings are those of the program's lowering.
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
      name=program.name,
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
  except Exception as error:  # errors of JAX or XLA, or names that another version lacks
    raise NotRestored(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
  info = [stages.ArgInfo(aval, donate) for aval, donate in zip(in_avals, donated, strict=True)]
  return stages.Compiled(loaded, [], jax.tree.unflatten(in_tree, info), out_tree, no_kwargs=False)


def _check_executable(executable: Any, program: Program, arguments: list[Any], results: list[Any]) -> None:
  """Refuses an executable with other arguments, results or donations."""
  found, wanted = len(executable.get_parameter_layouts()), len(arguments)
  if found != wanted:
    raise NotRestored(f"it takes {found} arrays, not {wanted}")
  stats = executable.get_compiled_memory_stats()
  donated = jax.tree.leaves([program.arguments[each] for each in program.donated])
  for what, found, wanted in (
    ("arguments", stats.argument_size_in_bytes, sum(map(_bytes_on_a_device, arguments))),
    ("donated arguments", stats.alias_size_in_bytes, sum(map(_bytes_on_a_device, donated))),
  ):
    if found != wanted:
      raise NotRestored(f"it has {found} bytes of {what}, not {wanted}")
  if len(executable.get_output_layouts()) != len(results):
    raise NotRestored(f"it gives {len(executable.get_output_layouts())} arrays, not {len(results)}")


def to_bytes(compiled: stages.Compiled) -> bytes:
  """Returns the executable as its backend serializes it.

  Raises:
    NotRestored: the backend cannot serialize it, or it holds constants of the process that made it.
  """
  try:
    if compiled._params.const_args:
      raise NotRestored("it has constants as arguments")
    executable: Any = compiled.runtime_executable()
    return executable.serialize()
  except jax.errors.JaxRuntimeError as error:
    raise NotRestored(" ".join(str(error).split())[:200]) from error


def _bytes_on_a_device(leaf: Any) -> int:
  return int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
