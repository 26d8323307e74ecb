"""Talks to a running server from a terminal: one prompt, or a chat that streams. May not import the engine.

python -m tools.client --prompt="Once upon a time" --max_tokens=60
python -m tools.client --chat                      # interactive; Ctrl-C stops an answer, Ctrl-D leaves
echo "What is 2 plus 3?" | python -m tools.client --chat
"""

import sys

from absl import app, flags
from rich.console import Console

from server.client import Client, Ending, Options, Prompt, SluiceError
from tools.arguments import parse_flags

_TARGET = flags.DEFINE_string("target", "127.0.0.1:50051", "HOST:PORT of the server.")
_API_KEY = flags.DEFINE_string("api_key", None, "Better in the environment, as SLUICE_API_KEY: others see flags.")
_TLS = flags.DEFINE_bool("tls", False, "Encrypt; the files below imply it.")
_TLS_CA_FILE = flags.DEFINE_string("tls_ca_file", "", "PEM authorities of the server; empty: the usual ones.")
_TLS_CERT_FILE = flags.DEFINE_string("tls_cert_file", "", "PEM certificate, for a server that asks for one.")
_TLS_KEY_FILE = flags.DEFINE_string("tls_key_file", "", "Its PEM key.")
_PROMPT = flags.DEFINE_string("prompt", None, "Raw text to continue.")
_CHAT = flags.DEFINE_bool("chat", False, "Chat messages: --prompt as the only one, else a conversation.")
_SYSTEM = flags.DEFINE_string("system", "", "System message of a chat.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Most tokens to generate.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy. Default: 0 with --chat, else the server's.")
_TOP_P = flags.DEFINE_float("top_p", None, "Nucleus sampling.")
_SEED = flags.DEFINE_integer("seed", None, "Makes draws repeatable.")
_STOP = flags.DEFINE_multi_string("stop", [], "Stop string; may be given several times.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", None, "Deadline of a request, in seconds.")
_STATS = flags.DEFINE_bool("stats", True, "Print a line of figures after each answer.")

# What a model writes must not steer the terminal.
_UNSAFE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def _options() -> Options:
  options: Options = {"max_tokens": _MAX_TOKENS.value, "stop": _STOP.value}
  temperature = _TEMPERATURE.value if _TEMPERATURE.value is not None else 0.0 if _CHAT.value else None
  if temperature is not None:
    options["temperature"] = temperature
  if _TOP_P.value is not None:
    options["top_p"] = _TOP_P.value
  if _SEED.value is not None:
    options["seed"] = _SEED.value
  if _TIMEOUT_S.value is not None:
    options["timeout_s"] = _TIMEOUT_S.value
  return options


def _figures(ending: Ending) -> str:
  seconds = max(ending.total_s - ending.time_to_first_token_s, 1e-9)
  rate = (ending.completion_tokens - 1) / seconds if ending.completion_tokens > 1 else 0.0
  cached = f" ({ending.cached_tokens} cached)" if ending.cached_tokens else ""
  return (
    f"{ending.prompt_tokens} prompt tokens{cached}, {ending.completion_tokens} generated, first after "
    f"{1000 * ending.time_to_first_token_s:.0f} ms, then {rate:.0f} tokens/s, ended by {ending.reason}"
  )


def _answer(client: Client, prompt: Prompt) -> tuple[str, bool]:
  """Streams one answer to standard output; returns its text and whether it came to its end.

  Ctrl-C stops the request on the server, and not this program.
  """
  text, complete = "", False
  with client.stream(prompt, **_options()) as stream:
    try:
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
      stream.cancel()
      _out.print()
      _err.print("stopped", style="yellow")
    except SluiceError:
      if text:
        _out.print()
      raise
  return text, complete


def _complain(error: SluiceError) -> None:
  wait = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s else ""
  _err.print(f"{error.code.name}{f' {error.reason}' if error.reason else ''}: {error}{wait}", style="red", markup=False)


def _chat(client: Client, first: str | None) -> int:
  """A conversation; returns the exit code."""
  messages = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
  interactive = sys.stdin.isatty() and first is None
  if interactive:
    _err.print(
      f"Talking to [bold]{client.model_info().model}[/bold]. Ctrl-C stops an answer, Ctrl-D leaves, /reset "
      "forgets the conversation."
    )
  failed = False
  while True:
    if first is None:
      try:
        line = _err.input("[bold cyan]> [/bold cyan]") if interactive else sys.stdin.readline()
      except KeyboardInterrupt:
        _err.print()
        continue
      except EOFError:
        line = ""
      if not line and not interactive:
        return int(failed)
      if not line:
        _err.print()
        return 0
    else:
      line = first
    line = line.strip()
    if line == "/reset":
      del messages[int(bool(_SYSTEM.value)) :]
    elif line:
      messages.append({"role": "user", "content": line})
      try:
        text, _ = _answer(client, messages)
        messages.append({"role": "assistant", "content": text})
      except SluiceError as error:
        failed = True
        messages.pop()
        _complain(error)
    if first is not None:
      return int(failed)


def main(argv: list[str]) -> int:
  """Returns 0; 1 when the server refused or failed, 2 for bad flags, 130 after Ctrl-C."""
  if len(argv) > 1:
    _err.print(f"error: unexpected argument {argv[1]!r}; send the text as --prompt=TEXT", style="red", markup=False)
    return 2
  if not _PROMPT.value and not _CHAT.value:
    _err.print("error: nothing to do; give --prompt=TEXT, or --chat for a conversation", style="red")
    return 2
  try:
    client = Client(
      _TARGET.value,
      api_key=_API_KEY.value,
      tls=_TLS.value,
      tls_ca_file=_TLS_CA_FILE.value,
      tls_cert_file=_TLS_CERT_FILE.value,
      tls_key_file=_TLS_KEY_FILE.value,
    )
  except OSError as error:
    _err.print(f"error: {error.filename}: {error.strerror}", style="red", markup=False)
    return 2
  with client:
    try:
      if _CHAT.value:
        return _chat(client, _PROMPT.value)
      _, complete = _answer(client, _PROMPT.value or "")
      return 0 if complete else 130
    except SluiceError as error:
      _complain(error)
      return 1


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
