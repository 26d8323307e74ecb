"""Talks to a running server from a terminal: one prompt, or a chat that streams. May not import the engine.

python -m tools.client --prompt="Once upon a time" --max_tokens=60
python -m tools.client --chat                      # interactive; /help lists its commands
python -m tools.client --chat --target=http://127.0.0.1:8000     # over the HTTP API instead of gRPC
echo "What is 2 plus 3?" | python -m tools.client --chat
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import os
import sys
from typing import Any

from absl import app, flags
import grpc
from rich.console import Console

from server.client import Client, Ending, SluiceError
from tools.arguments import parse_flags
from tools.http_client import HttpClient, speaks_http

try:
  import readline
except ImportError:  # Python was built without readline: the terminal edits no lines
  readline = None

_TARGET = flags.DEFINE_string(
  "target", "127.0.0.1:50051", "HOST:PORT of gRPC, or the URL of the HTTP port, such as http://127.0.0.1:8000."
)
_API_KEY = flags.DEFINE_string("api_key", None, "Better in the environment, as SLUICE_API_KEY: others see flags.")
_TLS = flags.DEFINE_bool("tls", False, "Encrypt; the files below imply it.")
_TLS_CA_FILE = flags.DEFINE_string("tls_ca_file", "", "PEM authorities of the server; empty: the usual ones.")
_TLS_CERT_FILE = flags.DEFINE_string("tls_cert_file", "", "PEM certificate, for a server that requires one.")
_TLS_KEY_FILE = flags.DEFINE_string("tls_key_file", "", "Its PEM key.")
_PROMPT = flags.DEFINE_string("prompt", None, "Raw text to continue.")
_CHAT = flags.DEFINE_bool("chat", False, "Chat messages: --prompt as the only one, else a conversation.")
_SYSTEM = flags.DEFINE_string("system", "", "System message of a chat.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Most tokens to generate.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy. Default: 0 with --chat, else the server's.")
_TOP_P = flags.DEFINE_float("top_p", None, "Nucleus sampling.")
_SEED = flags.DEFINE_integer("seed", None, "Seed that makes sampling repeatable.")
_STOP = flags.DEFINE_multi_string("stop", [], "Stop string; may be given several times.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", None, "Deadline of a request, in seconds.")
_STATS = flags.DEFINE_bool("stats", True, "Print a line of figures after each answer.")

# A model's output must not control the terminal.
_UNSAFE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_GRPC_PORT = 50051  # the server's default
_PROMPT_SIGN = "\001\x1b[1;36m\002> \001\x1b[0m\002"  # readline must know which bytes have no width
# Options of /set -> type.
_SETTABLE = {
  "max_tokens": int,
  "temperature": float,
  "top_p": float,
  "top_k": int,
  "min_p": float,
  "repetition_penalty": float,
  "seed": int,
}
_HELP = """/help                  this list
/quit                  leave; so does Ctrl-D
/clear                 forget the conversation
/system TEXT           begin anew with this system message; without TEXT: with none
/set temperature=0.5   set {names}
/set                   show what is set; /set NAME= takes the server's default
//text                 send a message that begins with a slash
Ctrl-C                 stop the answer""".format(names=", ".join(_SETTABLE))

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def _first_options() -> dict[str, Any]:
  options: dict[str, Any] = {"max_tokens": _MAX_TOKENS.value, "stop": _STOP.value}
  temperature = _TEMPERATURE.value if _TEMPERATURE.value is not None else 0.0 if _CHAT.value else None
  named = {"temperature": temperature, "top_p": _TOP_P.value, "seed": _SEED.value, "timeout_s": _TIMEOUT_S.value}
  return options | {name: value for name, value in named.items() if value is not None}


def _figures(ending: Ending) -> str:
  seconds = max(ending.total_s - ending.time_to_first_token_s, 1e-9)
  rate = (ending.completion_tokens - 1) / seconds if ending.completion_tokens > 1 else 0.0
  cached = f" ({ending.cached_tokens} cached)" if ending.cached_tokens else ""
  return (
    f"{ending.prompt_tokens} prompt tokens{cached}, {ending.completion_tokens} generated, first after "
    f"{1000 * ending.time_to_first_token_s:.0f} ms, then {rate:.0f} tokens/s, ended by {ending.reason}"
  )


def _answer(
  client: Client | HttpClient, prompt: str | Sequence[Mapping[str, str]], options: dict[str, Any]
) -> tuple[str, bool]:
  """Streams one answer to standard output; returns its text and whether it is complete.

  Ctrl-C stops the request on the server, but not this program.
  """
  text, complete = "", False
  try:
    with client.stream(prompt, **options) as stream:
      for piece in stream:
        text += piece.text
        _out.out(piece.text.translate(_UNSAFE) if _out.is_terminal else piece.text, end="", highlight=False)
        _out.file.flush()
        if piece.ending is not None:
          complete = True
          _out.print()
          if _STATS.value:
            _err.print(_figures(piece.ending), style="dim")
  except KeyboardInterrupt:
    _out.print()
    _err.print("stopped", style="yellow")
  except SluiceError:
    if text:
      _out.print()
    raise
  return text, complete


def _complain(error: SluiceError) -> None:
  wait = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s else ""
  text = str(error)
  if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason and "//" not in (target := _TARGET.value):
    if speaks_http(target):
      text = (
        f"{target} is an HTTP port: use the gRPC port ({_GRPC_PORT} unless the server's --port says otherwise), or "
        f"--target=http://{target}"
      )
    elif not error.request_id:
      text = f"no server answers at {target} ({text}); start one, or correct --target"
  _err.print(f"{error.code.name}{f' {error.reason}' if error.reason else ''}: {text}{wait}", style="red", markup=False)


class _Conversation:
  """A chat: its messages and options. Commands change it; only `answer` calls the server."""

  def __init__(self, client: Client | HttpClient, system: str, options: dict[str, Any]):
    self._client = client
    self._options = options
    self._messages: list[dict[str, str]] = []
    self._system = ""
    self._set_system(system)

  def _set_system(self, text: str) -> None:
    self._system = text
    self._messages = [{"role": "system", "content": text}] if text else []

  def answer(self, text: str) -> None:
    """Sends a message to the model; the chat keeps no refused message. Raises SluiceError."""
    self._messages.append({"role": "user", "content": text})
    said = ""
    try:
      said, _ = _answer(self._client, self._messages, self._options)
    finally:
      if said:
        self._messages.append({"role": "assistant", "content": said})
      else:
        self._messages.pop()

  def follow(self, line: str) -> bool:
    """Runs a command other than /quit; returns whether the command exists."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/help":
      _err.print(_HELP, markup=False)
    elif command in ("/clear", "/reset"):
      self._set_system(self._system)
      _err.print("The conversation is forgotten.", style="dim")
    elif command == "/system":
      self._set_system(rest)
      _err.print("A new conversation, with that system message." if rest else "A new conversation.", style="dim")
    elif command == "/set":
      return self._set_option(rest)
    else:
      _err.print(f"{command} is no command; /help lists them (// begins a message with a slash)", style="red")
      return False
    return True

  def _set_option(self, text: str) -> bool:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not text:
      shown = [f"{name}={self._options[name]}" for name in _SETTABLE if name in self._options]
      _err.print(f"{', '.join(shown)}{'; ' if shown else ''}else the server's defaults", style="dim")
      return True
    if name not in _SETTABLE or not equals:
      _err.print(f"/set {text}: write /set NAME=VALUE with one of {', '.join(_SETTABLE)}", style="red", markup=False)
      return False
    try:
      if value:
        self._options[name] = _SETTABLE[name](value)
      else:
        self._options.pop(name, None)
    except ValueError:
      kind = "a whole number" if _SETTABLE[name] is int else "a number"
      _err.print(f"/set {name}={value}: {name} must be {kind}", style="red", markup=False)
      return False
    _err.print(f"{name}: {value or 'as the server has it'}", style="dim")
    return True


def _read_line(refused: str) -> str | None:
  """Reads a line from the terminal; returns None at the end of input.

  Args: refused: text that the line starts with, for the user to edit.
  """
  if readline is not None:
    readline.set_auto_history(False)
    readline.set_startup_hook(functools.partial(readline.insert_text, refused) if refused else None)
  try:
    return input(_PROMPT_SIGN)
  except EOFError:
    _err.print()
    return None
  finally:
    if readline is not None:
      readline.set_startup_hook(None)


def _chat_at_terminal(client: Client | HttpClient, conversation: _Conversation) -> int:
  name = client.model_name() if isinstance(client, HttpClient) else client.model_info().model
  _err.print(f"Talking to [bold]{name}[/bold]. Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.")
  refused = ""
  while True:
    try:
      line = _read_line(refused)
    except KeyboardInterrupt:
      _err.print()
      refused = ""
      continue
    if line is None or line.strip() in ("/quit", "/exit"):
      return 0
    line, refused = line.strip(), ""
    if not line:
      continue
    if not (line.startswith("/") and not line.startswith("//")):
      try:
        conversation.answer(line.removeprefix("/") if line.startswith("//") else line)
      except SluiceError as error:
        refused = line
        _complain(error)
    elif not conversation.follow(line):
      refused = line
    if readline is not None and not refused:
      readline.add_history(line)


def _chat_in_pipe(conversation: _Conversation, lines: Iterable[str]) -> int:
  """Reads one message or command a line; returns the exit code."""
  failed = False
  for line in map(str.strip, lines):
    if line in ("/quit", "/exit"):
      break
    if line.startswith("/") and not line.startswith("//"):
      failed |= not conversation.follow(line)
    elif line:
      try:
        conversation.answer(line.removeprefix("/") if line.startswith("//") else line)
      except SluiceError as error:
        failed = True
        _complain(error)
  return int(failed)


def _connect() -> Client | HttpClient:
  """Returns a client. Raises OSError for a TLS file that cannot be read."""
  target = _TARGET.value
  ca_file, cert_file, key_file = _TLS_CA_FILE.value, _TLS_CERT_FILE.value, _TLS_KEY_FILE.value
  if target.startswith(("http://", "https://")):
    return HttpClient(target, _API_KEY.value or os.environ.get("SLUICE_API_KEY", ""), ca_file, cert_file, key_file)
  return Client(
    target,
    api_key=_API_KEY.value,
    tls=_TLS.value,
    tls_ca_file=ca_file,
    tls_cert_file=cert_file,
    tls_key_file=key_file,
  )


def main(argv: list[str]) -> int:
  """Runs the command line. Returns 0, 1 if the server refuses or fails, 2 for bad flags, or 130 after Ctrl-C."""
  if len(argv) > 1:
    _err.print(f"error: unexpected argument {argv[1]!r}; send the text as --prompt=TEXT", style="red", markup=False)
    return 2
  if not _PROMPT.value and not _CHAT.value:
    _err.print("error: nothing to do; give --prompt=TEXT, or --chat for a conversation", style="red")
    return 2
  try:
    connected = _connect()
  except OSError as error:
    _err.print(f"error: {error.filename}: {error.strerror}", style="red", markup=False)
    return 2
  options = _first_options()
  with connected as client:
    try:
      if not _CHAT.value:
        _, complete = _answer(client, _PROMPT.value or "", options)
        return 0 if complete else 130
      conversation = _Conversation(client, _SYSTEM.value, options)
      if _PROMPT.value is not None:
        conversation.answer(_PROMPT.value)
        return 0
      if sys.stdin.isatty():
        return _chat_at_terminal(client, conversation)
      return _chat_in_pipe(conversation, iter(sys.stdin.readline, ""))
    except SluiceError as error:
      _complain(error)
      return 1


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
