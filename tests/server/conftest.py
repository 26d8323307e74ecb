"""Fixtures of the server's tests; the machinery is in harness.py."""

from collections.abc import Iterator
import logging
import pathlib
import threading

import pytest

from server.text.tokenizer import Tokenizer
from tests.server.certificates import ADMIN_KEY, KEY, OTHER_KEY
from tests.server.harness import Served, give_up, running, write_tokenizer
from tools.certificates import Authority, replace_file

# Of one test, on the most loaded machine. Every wait of a test has an end of its own; this is for the one that has not.
_LIMIT_S = 420.0


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
  """Shows where a hanging test stands, and ends what it waits for."""
  timer = threading.Timer(_LIMIT_S, give_up)
  timer.daemon = True
  timer.start()
  yield
  timer.cancel()


@pytest.fixture(autouse=True)
def log_filters_end_with_their_test() -> Iterator[None]:
  """Takes away the limit of equal lines that a program in this process puts on pytest's own handlers."""
  before = [(handler, handler.filters[:]) for handler in logging.getLogger().handlers]
  yield
  for handler, filters in before:
    handler.filters[:] = filters


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> pathlib.Path:
  """A model folder's tokenizer files."""
  folder = tmp_path_factory.mktemp("tokenizer")
  write_tokenizer(folder)
  return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir) -> Tokenizer:
  return Tokenizer(tokenizer_dir)


@pytest.fixture
def served(tokenizer) -> Iterator[Served]:
  """A server with a tokenizer, and a fake device that takes no time."""
  with running(tokenizer) as server:
    yield server


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> pathlib.Path:
  """A folder with files of keys: of users, one with a tenant, and of the operator."""
  folder = tmp_path_factory.mktemp("secrets")
  replace_file(folder / "keys", f"{KEY} team-a\n{OTHER_KEY}\n".encode())
  replace_file(folder / "admin_keys", f"{ADMIN_KEY}\n".encode())
  return folder


@pytest.fixture(scope="module")
def authority(secrets) -> Authority:
  """In the same folder, with a certificate for a server and one for a client."""
  authority = Authority(secrets)
  authority.issue("server")
  authority.issue("client")
  return authority
