"""Raises the process's descriptor limit and checks that the server's connections fit in it. Opens and closes nothing.

A server without free descriptors cannot accept, read a file, or stop in order. So Sluice limits connections below that,
and refuses limits that do not fit at the start.
"""

import resource

from engine.errors import ConfigError
from server.host_options import HostOptions

# Descriptors besides connections: files, libraries, event loops, links to front ends. About 100 are open; twice that.
_OWN = 256


def raise_descriptor_limit() -> int:
  """Raises the soft limit of this process and its children to the hard limit; returns the new limit."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != hard:
    try:
      resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # not every system accepts its own value for "unlimited"
      return soft
  return hard


def check_descriptor_limit(options: HostOptions, limit: int) -> None:
  """Checks that all connections that a process may have fit into its descriptor limit.

  Args:
    options: the options of the process; for one of several front ends, its share of them.
    limit: its descriptor limit; resource.RLIM_INFINITY is no limit.

  Raises:
    ConfigError: they do not fit.
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
