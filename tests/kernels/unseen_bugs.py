"""Bugs in the GPU kernels' sources that Pallas' interpreter does not notice; tests run each on both machines.

A bug is the subject of tools/ptx_emulator/subjects.py that meets it, a text that occurs once in its module, and what
takes its place.
"""

BUGS = {
  # Heads of 128: single rows are sliced out of swizzled tiles, where threads XOR relative to the slice.
  "warpgroup_lowering": (
    "write_bf16",
    "lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True",
    "lowering_semantics=plgpu.LoweringSemantics.Warpgroup",
  ),
  # A row of queries begins within a tile of 8 rows, of which TMA then fills only a part.
  "queries_copied_into_tiles": (
    "decode_bf16",
    "smem(q_shape, transforms=(_SWIZZLED,))",
    "smem(q_shape, transforms=_TILED)",
  ),
  # A bulk copy knows no bounds: the last tile's rows go into the next head, or behind the array.
  "no_whole_tiles": ("write_bf16", "(heads, tiles * tokens, group, head_dim)", "(heads, num_tokens, group, head_dim)"),
}
