"""What an idle server holds."""

from server.client import Client
from tests.server.conftest import tokenizer as tokenizer
from tests.server.conftest import tokenizer_dir as tokenizer_dir
from tests.server.harness import running
from tools.fleet.idle_server import find_leaks


def test_an_idle_server_holds_nothing_after_requests(tokenizer):
  with running(tokenizer) as server, Client(server.address) as client:
    client.generate([7, 8, 9], max_tokens=4, ignore_eos=True)
    assert find_leaks(client) == []
    assert find_leaks(client, compiles_elsewhere=2) == ["2 compiles"]
