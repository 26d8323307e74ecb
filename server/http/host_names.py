"""Says which Host headers a server accepts, so that no web page reaches it through DNS rebinding."""

from server.http.http_options import HttpOptions

# The last is this machine in containers; no public DNS server has names under .internal.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "host.docker.internal")


def find_allowed_hosts(options: HttpOptions, *, has_keys: bool) -> frozenset[str] | None:
  """Returns the allowed names in lower case, without ports; None is any.

  Args:
    options: the address, and the operator's list.
    has_keys: whether callers need a key, which a foreign web page does not have.
  """
  if "*" in options.allowed_hosts:
    return None
  if options.allowed_hosts:
    return frozenset(host.lower() for host in options.allowed_hosts)
  local = options.host in ("localhost", "::1") or options.host.startswith("127.")
  return frozenset((*_LOCAL_HOSTS, options.host)) if local and not has_keys else None


def read_host_name(host: str) -> str:
  """Returns the name of a Host header in lower case, without its port."""
  name, colon, port = host.rpartition(":")
  return (name if colon and port.isdigit() else host).lower()
