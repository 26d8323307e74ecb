"""Servers in the test's process, as the tests of the server have them."""

from tests.server.conftest import no_test_hangs as no_test_hangs
from tests.server.conftest import served as served
from tests.server.conftest import tokenizer as tokenizer
from tests.server.conftest import tokenizer_dir as tokenizer_dir
