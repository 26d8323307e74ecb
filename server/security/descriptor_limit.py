"""Descriptors that the system allows a process: raised as far as it lets us, and enough for the connections a server
may have. Opens and closes nothing.

A server that has none left cannot accept, cannot read a file and cannot even end in order; so connections are limited
below that, and limits that do not fit are refused at the start.
"""

import resource

from engine.errors import ConfigError
from server.host_options import HostOptions

# Beside connections: files, libraries, event loops, links to front ends (about 100 are open), with as many again spare.
_OWN = 256


def raise_descriptor_limit() -> int:
  """Raises this process's limit to the hardest it may have, for its children too; returns what it is then."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != hard:
    try:
      resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # not every system takes its own word for "unlimited"
      return soft
  return hard


def check_descriptor_limit(options: HostOptions, limit: int) -> None:
  """Sees whether all connections that a process may have fit.

  Args:
    options: of the process; of one of several front ends, its share.
    limit: descriptors that it may have; resource.RLIM_INFINITY is any number.

  Raises:
    ConfigError: they do not.
  """
  connections = options.max_grpc_connections
  asked = f"max_grpc_connections={options.max_grpc_connections}"
  if options.http_port >= 0:
    connections += options.max_http_connections
    asked += f" and max_http_connections={options.max_http_connections}"
  if limit != resource.RLIM_INFINITY and connections + _OWN > limit:
    raise ConfigError(
      f"{asked} (of each process) may need {connections + _OWN} descriptors, but the system allows {limit}; lower "
      "--max_grpc_connections and --max_http_connections, or raise the limit (ulimit -Hn, LimitNOFILE= of systemd)"
    )
