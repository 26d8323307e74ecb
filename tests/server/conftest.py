"""Fixtures of the server's tests; the machinery is in harness.py."""

from collections.abc import Iterator
import pathlib

import pytest

from server.tokenizer import Tokenizer
from tests.server.harness import Served, running, write_tokenizer


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
