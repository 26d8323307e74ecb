"""Defines the names that a Python program imports and the `sluice` command. Loads nothing before its use.

  from sluice import LLM, SamplingParams, Client

  sluice serve [MODEL] [--flag=value ...]

Each command runs a module that `python -m` can run as well.
"""

from collections.abc import Sequence
import difflib
import gc
import importlib
import importlib.util
import os
import runpy
import sys
from typing import TYPE_CHECKING, Any
import urllib.parse

if TYPE_CHECKING:
  from extensions.python_api.llm import LLM
  from extensions.python_api.outputs import RequestOutput, Score
  from extensions.python_api.sampling_params import SamplingParams
  from server.client import Client, SluiceError

  __version__: str

__all__ = ["LLM", "Client", "RequestOutput", "SamplingParams", "Score", "SluiceError", "__version__"]

_NAMES = {
  "LLM": "extensions.python_api.llm",
  "RequestOutput": "extensions.python_api.outputs",
  "SamplingParams": "extensions.python_api.sampling_params",
  "Score": "extensions.python_api.outputs",
  "Client": "server.client",
  "SluiceError": "server.client",
}

_COMMANDS = {
  "serve": "serve a model over gRPC and HTTP; the default MODEL is the demo model",
  "chat": "talk to a running server from the terminal",
  "bench": "measure a server, the engine, or a part of it",
  "demo": "run a server on the demo model under a mixed load and show it live",
  "lm-eval": "run EleutherAI's lm-eval with the model sluice, in one process",
}

_BENCHES = {
  "serving": ("tools.bench_serving", "load a running server over gRPC: TTFT, ITL, goodput"),
  "offline": ("tools.bench_offline", "run a file of requests through the engine in this process"),
  "python-api": ("tools.bench.python_api", "LLM.generate beside the bare engine"),
  "engine": ("tools.bench.engine", "the engine beside the machine's roofline"),
  "modes": ("tools.bench.modes", "every batching mode side by side, on real servers"),
  "startup": ("tools.bench.startup", "the time from a server's process start to ready"),
  "frontend": ("tools.bench.frontend", "gRPC streams and their cost, on a fake device"),
  "host": ("tools.bench.host", "the host time of a step"),
  "attention": ("tools.bench.attention", "one layer's paged attention"),
  "matmul": ("tools.bench.matmul", "the matmuls of a step on a CPU"),
  "deterministic": ("tools.bench.deterministic", "what --deterministic costs"),
}

_HELP = """usage: sluice COMMAND [ARGUMENT ...]

{commands}

sluice COMMAND --help lists a command's arguments; sluice --version prints the version.
"""

_CHAT_HELP = """usage: sluice chat [HOST:PORT | URL] [--flag=value ...]

Talks to a running server, by default on 127.0.0.1:50051. The flags are the client's:
"""


def __getattr__(name: str) -> Any:
  if name == "__version__":
    from server.version import server_version

    return server_version()
  if name in _NAMES:
    return getattr(importlib.import_module(_NAMES[name]), name)
  raise AttributeError(f"module 'sluice' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *_NAMES, "__version__"})


class _UsageError(Exception):
  """The command line is invalid; the message is for the user."""


def _table(rows: dict[str, str]) -> str:
  width = max(map(len, rows)) + 2
  return "\n".join(f"  {name:{width}}{help}" for name, help in rows.items())


def _find_named(name: str, known: Sequence[str], what: str, parent: str) -> str:
  """Returns `name` if it is known. Raises _UsageError with the closest known name."""
  if name in known:
    return name
  near = difflib.get_close_matches(name, known, 1)
  remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)};"
  raise _UsageError(f"{name!r} is not a {what}; {remedy} `{parent} --help` lists them")


def _is_flag(argument: str) -> bool:
  return argument.startswith("-")


def _asks_for_help(arguments: Sequence[str]) -> bool:
  return arguments[:1] in (["--help"], ["-h"], ["help"])


def _serve(arguments: list[str]) -> None:
  """Runs the server and ends the process, as `python -m server.main` does."""
  gc.disable()  # until the server is ready, as in server.main
  from server.main import main as serve

  sys.argv = ["sluice", *arguments]
  sys.path.append(os.getcwd())  # for --policy=MODULE:CLASS; last, so it shadows nothing
  serve(program="sluice serve")


def _chat(arguments: list[str]) -> None:
  if _asks_for_help(arguments):
    print(_CHAT_HELP, flush=True)
  if arguments and not _is_flag(arguments[0]):
    address, arguments = arguments[0], arguments[1:]
    url = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
    if url.scheme not in ("", "http", "https", "grpc", "grpcs") or not url.netloc:
      raise _UsageError(f"{address!r} is no address; give HOST:PORT, such as 127.0.0.1:50051")
    target = address if url.scheme in ("http", "https") else url.netloc
    arguments = [f"--target={target}", *(["--tls"] if url.scheme == "grpcs" else []), *arguments]
  _run_module("tools.client", ["--chat", *arguments])


def _bench(arguments: list[str]) -> None:
  if not arguments or _asks_for_help(arguments):
    table = _table({name: help for name, (_, help) in _BENCHES.items()})
    print(f"usage: sluice bench NAME [--flag=value ...]\n\n{table}\n\nsluice bench NAME --help lists its flags.")
    return
  module, _ = _BENCHES[_find_named(arguments[0], tuple(_BENCHES), "benchmark", "sluice bench")]
  _run_module(module, arguments[1:])


def _run_module(module: str, arguments: list[str]) -> None:
  """Runs `python -m module arguments`; usually ends the process."""
  sys.argv = [module, *arguments]
  runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_command(arguments: list[str]) -> None:
  if not arguments or _asks_for_help(arguments):
    print(_HELP.format(commands=_table(_COMMANDS)), end="")
    return
  if arguments[0] == "--version":
    print(f"sluice {__getattr__('__version__')}")
    return
  command, rest = _find_named(arguments[0], tuple(_COMMANDS), "command", "sluice"), arguments[1:]
  if command == "serve":
    _serve(rest)
  elif command == "chat":
    _chat(rest)
  elif command == "bench":
    _bench(rest)
  elif command == "lm-eval":
    if importlib.util.find_spec("lm_eval") is None:
      raise _UsageError("lm-eval needs the package lm-eval, which is not installed; pip install lm-eval")
    _run_module("extensions.python_api.lm_eval_adapter", rest)
  else:
    _run_module("tools.demo", rest)


def main() -> int:
  """Runs the `sluice` command. Returns 0, 2 if the command line is invalid, or 130 after Ctrl-C."""
  try:
    _run_command(sys.argv[1:])
  except _UsageError as error:
    print(f"sluice: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # as in `sluice --help | head`; Python's last flush at exit must not fail
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return 0


if __name__ == "__main__":
  sys.exit(main())
