"""Facts that a build reports as soon as it knows them. Values only; may not format or decide."""

from collections.abc import Callable
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFact:
  """The device, dtype and kernels of the model.

  Attributes:
    kind: the maker's name of the device.
    count: devices.
    dtype: of weights and activations.
    attention, matmul: names of the kernels.
    quantization: what the weights are: "none", a setting, or what a folder of low-precision weights holds.
    fallbacks: why a kernel is not the platform's best, a line each.
  """

  kind: str
  count: int
  dtype: str
  attention: str
  matmul: str
  quantization: str = "none"
  fallbacks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFact:
  """The model and the longest sequence.

  Attributes:
    name: name in the checkpoint.
    folder: folder of the model's files.
    num_parameters: 0 without a model.
    num_bytes: of the weights on the devices.
    max_model_len: tokens.
    own_length: the model's own limit, tokens.
    is_chosen: the user set max_model_len.
    lowered: why the default max_model_len is below own_length, a line; else "".
    is_random: the weights are random.
    draft_name: name of the draft model beside it; "": none.
    num_draft_parameters: of the draft model.
  """

  name: str
  folder: str
  num_parameters: int
  num_bytes: int
  max_model_len: int
  own_length: int
  is_chosen: bool
  lowered: str = ""
  is_random: bool = False
  draft_name: str = ""
  num_draft_parameters: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVFact:
  """The KV pool.

  Attributes:
    num_blocks: blocks.
    block_size: tokens a block.
    dtype: of keys and values; "": no model.
    num_bytes: on all devices.
    max_model_len: tokens of the longest sequence.
    num_host_blocks, num_host_bytes: evicted blocks that the host keeps, and their bytes; 0: none.
    host_dir: folder of the file that has them; "": memory.
  """

  num_blocks: int
  block_size: int
  num_bytes: int
  max_model_len: int
  dtype: str = ""
  num_host_blocks: int = 0
  num_host_bytes: int = 0
  host_dir: str = ""

  @property
  def num_full_sequences(self) -> int:
    """Sequences of max_model_len that the pool holds at once."""
    return self.num_blocks // -(-self.max_model_len // self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramsFact:
  """The programs that the build will make.

  Attributes:
    count: programs.
    token_budgets: of the ladder, one step program each.
    has_bundle: the build looks for them in an executable bundle first.
    cache_dir: folder of compiled programs; "": none.
    is_cache_empty: the folder is empty, so the build compiles all.
  """

  count: int
  token_budgets: tuple[int, ...]
  has_bundle: bool = False
  cache_dir: str = ""
  is_cache_empty: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramsMadeFact:
  """The programs are ready. Attributes: their number, and how many the build compiled."""

  count: int
  num_compiled: int


type BuildFact = DeviceFact | ModelFact | KVFact | ProgramsFact | ProgramsMadeFact
type FactReporter = Callable[[BuildFact], None]


def ignore_fact(fact: BuildFact) -> None:
  """Ignores a fact; for builds without an observer."""
