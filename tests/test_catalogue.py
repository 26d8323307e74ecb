"""The catalogue of faults and abuse, and which tests show each of its rows: those marked `catalogue("E1")`.

A mark stands at the test, so that the map cannot name what is no longer there. Here are the rows, and what fails for a
row that no test shows and for a mark that is no row. `git grep 'catalogue(.*"E1"' tests` lists the tests of a row.
"""

import ast
from collections import defaultdict
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROWS = {
  # A server's life.
  "A1": "SIGTERM with streams in flight: they finish, token-exact, and nobody else comes in",
  "A2": "a drain that takes too long: what is left is told",
  "A3": "a second signal ends at once",
  "A4": "SIGKILL anywhere, and a restart on the same files",
  "A5": "the engine's process or a front end's dies",
  "A6": "a bad flag, a missing model, a busy port: one line and an exit code",
  "A7": "calls while the model loads",
  "A8": "a signal while it loads or compiles",
  "A9": "idle connections hold up no end",
  "A10": "starts and stops in one process leave nothing behind",
  # Clients.
  "B1": "a client vanishes in the middle of a stream",
  "B2": "a cancel in every state",
  "B3": "Abort: live, queued, ended, unknown, twice, another's",
  "B4": "a peer that is dead but never said so",
  "B5": "a reader that is slow, or stands still",
  "B6": "a deadline that passes in the queue: never scheduled",
  "B7": "a deadline in the middle of decoding",
  "B8": "deadlines of 0, past, far away, and none",
  "B9": "a request id that is in use",
  "B10": "connections that are idle or too many",
  "B11": "many streams at once, all exact",
  "B12": "heads and bodies that come slowly or never",
  "B13": "retries against overload",
  "B14": "junk on the gRPC port",
  # Overload, memory, fairness.
  "C1": "the queue is full",
  "C2": "the backlog of prompt tokens is full",
  "C3": "what can never fit is refused, and holds nobody up",
  "C4": "a pool that runs out: preempted, and the same tokens",
  "C5": "preemption that never ends",
  "C6": "races of sharing, aborts and eviction",
  "C8": "a process that grows too large",
  "C9": "a device that runs out of memory",
  "C10": "low priority is not starved",
  "C11": "prompts that are not cached are not starved by those that are",
  "C12": "a long prompt among decodes",
  "C13": "the most of everything at once",
  "C14": "one tenant floods",
  "C15": "nothing compiles after ready",
  # The engine.
  "D1": "a step that fails: everybody is told, and the process ends",
  "D2": "one request on which our code fails, at any point",
  "D3": "an engine, an event loop or an interpreter that stands: stacks, and a hard end",
  "D4": "NaN in one row, and in pages",
  "D5": "events that come late, or twice",
  "D6": "a device that samples what is no token",
  "D7": "tokens to text, however they are split",
  "D8": "long texts keep nobody from the event loop",
  "D9": "a wall clock that jumps",
  "D10": "seeds: the same draws in any company",
  "D11": "a thread or a callback that dies",
  "D12": "nothing forks",
  "D14": "a disk that is full",
  # Fields.
  "E1": "numbers beyond their limits, NaN, infinities, denormals",
  "E2": "whole numbers beyond their limits, and of too many bits",
  "E3": "prompts of nothing, of blanks, of two kinds",
  "E4": "token ids outside the vocabulary, wherever ids are taken",
  "E5": "stop strings: too many, empty, too long, no text, overlapping",
  "E6": "schemas, expressions and grammars that are wrong or bombs",
  "E7": "another model; fields that nobody knows",
  "E8": "JSON at its worst",
  "E9": "all pairs of parameters, on a real model",
  # Text.
  "F1": "text that takes a tokenizer long",
  "F2": "special tokens spelled in a message",
  "F3": "templates from requests, and templates as attacks",
  "F4": "grammars that take long",
  "F5": "stop strings across any borders",
  "F6": "calls of tools in output that was made to hurt",
  "F7": "Unicode there and back",
  # Files.
  "G1": "headers of safetensors that lie",
  "G2": "no pickle, no code of a model's",
  "G3": "indexes and links that lead out of the folder",
  "G4": "configurations that lie, refused before anything is allocated",
  "G5": "flipped bits, NaN",
  "G6": "a save that was interrupted",
  "G7": "a disk without room while converting",
  "G8": "a tokenizer.json of somebody else's",
  "G9": "a folder of compiled programs that others may write to",
  # Wire and access.
  "H1": "messages too large, packed or not",
  "H2": "too many headers, or too large ones",
  "H3": "floods of HTTP/2 frames",
  "H4": "TLS: what is refused, and certificates that change",
  "H5": "keys: on every method, compared in constant time",
  "H6": "no prompt, output, key or text of an exception in any status, log, metric or trace",
  "H7": "logs that cannot be forged or flooded",
  "H8": "what is exposed, and where",
  "H9": "web pages of others",
  "H10": "no pickle",
  "H11": "dependencies by hash",
  # Between users.
  "I1": "the prefix cache as an oracle",
  "I2": "pages of others",
  "I3": "keys of blocks that collide",
  "I5": "log probabilities tell nothing of biases",
  "I6": "ids that cannot be guessed",
}
# Shown by programs that run for long, or words in SECURITY.md alone.
NOT_TESTS = {
  "C7": "tools/chaos: the soak",
  "D13": "no server spreads over several machines",
  "I4": "sizes of packets show lengths of tokens; SECURITY.md says so",
}


@functools.cache
def marks() -> dict[str, list[str]]:
  """Row -> the tests that are marked with it, by reading the sources: none of them has to run for it."""
  found = defaultdict(list)
  for path in sorted(TESTS.rglob("test_*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.FunctionDef):
        continue
      for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.catalogue":
          assert node.name.startswith("test_"), f"{path.name}: {node.name} is marked and is no test"
          for row in mark.args:
            assert isinstance(row, ast.Constant), f"{path.name}: {node.name} has a mark that is no name of a row"
            found[row.value].append(f"{path.relative_to(TESTS)}::{node.name}")
  return found


@pytest.mark.parametrize("row", ROWS)
def test_a_test_shows_it(row):
  assert marks()[row], f"no test is marked with {row}: {ROWS[row]}"


def test_every_mark_is_a_row():
  assert not [row for row in marks() if row not in ROWS and row not in NOT_TESTS]
