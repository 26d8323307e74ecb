"""Makes the keys of the prefix cache, which decide who shares blocks. May not know block ids."""

from collections.abc import Sequence

from engine.block_pool import adapter_root_key, block_key, root_key
from engine.config import EngineConfig
from engine.prefix_events import PrefixEventLog
from engine.request import Request


class PrefixKeys:
  """Makes prefix keys within the configured scope.

  Attributes:
    event_log: notes what each key stands for; None: nobody reads that.
  """

  def __init__(self, config: EngineConfig):
    self.event_log: PrefixEventLog | None = None
    self._scope, self._block_size = config.prefix_cache_scope, config.block_size

  def make_root_key(self, request: Request, serial: int) -> bytes:
    """Returns the parent of a request's first key, which separates requests by scope, salt and load of an adapter.

    Args:
      serial: unique among the scheduler's requests.
    """
    match self._scope:
      case "tenant":
        of_scope = request.tenant.encode()
      case "request":
        if request.leader is not None and request.leader.adapter_serial == request.adapter_serial:
          return request.leader.root_key
        of_scope = str(serial).encode()
      case _:
        of_scope = None
    salt = request.cache_salt if of_scope is None else len(of_scope).to_bytes(4, "big") + of_scope + request.cache_salt
    root = root_key(salt)
    return adapter_root_key(root, request.adapter_serial) if request.adapter_serial else root

  def first_keys(self, request: Request, num_blocks: int) -> Sequence[bytes]:
    """Returns the keys of the first `num_blocks` blocks, all full and with known tokens; computes each once."""
    keys, block_size = request.block_keys, self._block_size
    while len(keys) < num_blocks:
      parent = keys[-1] if keys else request.root_key
      start = len(keys) * block_size
      token_ids = request.known_tokens(start, start + block_size)
      keys.append(block_key(parent, token_ids))
      if self.event_log is not None:
        self.event_log.note_key(keys[-1], parent if start else None, token_ids, request.adapter)
    return keys if len(keys) == num_blocks else keys[:num_blocks]
