"""What docs/how-to/several-replicas.md says of gRPC: clients balance by themselves, and leave out who drains."""

import pathlib
import re

import grpc

from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tests.server.harness import running

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "how-to" / "several-replicas.md"


def test_the_pages_channel_balances_and_leaves_out_who_drains(tokenizer):
  [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  # Calls that reached the draining server within its delay would be served there.
  with running(tokenizer, host=HostOptions(drain_delay_s=60.0)) as first, running(tokenizer) as second:
    ports = [each.address.rpartition(":")[2] for each in (first, second)]
    scope: dict = {}
    exec(code.replace("50051", ports[0]).replace("50052", ports[1]), scope)
    channel: grpc.Channel = scope["channel"]
    with channel:
      stub = pb_grpc.GenerationServiceStub(channel)

      def count_served() -> list[int]:
        before = [each.generations.num_started for each in (first, second)]
        for _ in range(8):
          stub.GenerateUnary(
            pb.GenerateRequest(text="the cat", stopping={"max_tokens": 1}), timeout=60, wait_for_ready=True
          )
        return [each.generations.num_started - count for each, count in zip((first, second), before, strict=True)]

      first.wait_until(lambda: min(count_served()) > 0)  # both connections stand
      assert count_served() == [4, 4]
      first.stop()
      first.wait_until(lambda: count_served() == [0, 8])
      first.stop()  # ends the delay
