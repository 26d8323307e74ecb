"""A cheap client: many gRPC streams in one thread, directly on gRPC's completion queue. For tools.bench.frontend.

    python -m tools.bench.frontend_streams < request.json     (one JSON object; see `main`)

The public client needs a thread and several wakes a stream, so on one machine it would mostly measure itself. This one
uses the private module beneath it (grpc._cython), which may change with grpcio.
"""

from collections.abc import Sequence
import json
import sys
import time
from typing import Any

from grpc._cython import cygrpc

from server.proto import sluice_pb2 as pb

_METHOD = b"/sluice.v1.GenerationService/Generate"
_NO_FLAGS = 0
_SLICE_S = 0.1


class BenchStream:
  """One call.

  Attributes:
    tokens: tokens received.
    is_ended: whether a status has arrived.
    status: gRPC's code, once ended.
  """

  def __init__(self, channel: cygrpc.Channel, request: pb.GenerateRequest):
    self.tokens: list[int] = []
    self.is_ended = False
    self.status: Any = None
    operations = (
      (
        cygrpc.SendInitialMetadataOperation((), _NO_FLAGS),
        cygrpc.SendMessageOperation(request.SerializeToString(), _NO_FLAGS),
        cygrpc.SendCloseFromClientOperation(_NO_FLAGS),
        cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),
      ),
      (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),),
      _reading(),
    )
    self._call = channel.integrated_call(
      cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
      _METHOD,
      *(None, None, (), None),
      tuple((batch, self) for batch in operations),
      None,
      None,
    )

  def take(self, event: Any) -> int:
    """Takes an event of this call; returns the number of tokens in it."""
    for operation in event.batch_operations:
      kind = operation.type()
      if kind == cygrpc.OperationType.receive_message:
        raw = operation.message()
        if raw is None:
          return 0
        self._call.operate(_reading(), self)
        count = 0
        for delta in pb.GenerateResponse.FromString(raw).deltas:
          count += len(delta.token_ids)
          self.tokens += delta.token_ids
        return count
      if kind == cygrpc.OperationType.receive_status_on_client:
        self.is_ended, self.status = True, operation.code()
    return 0


def _reading() -> tuple[Any, ...]:
  """Returns the operations of one read; each operation serves once."""
  return (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)


def run(
  target: str, requests: Sequence[pb.GenerateRequest], num_channels: int
) -> tuple[list[BenchStream], list[list[float]]]:
  """Runs all streams until they end.

  Returns:
    The streams, and [monotonic second, tokens, messages] of each time slice with tokens.
  """
  channels = [
    cygrpc.Channel(target.encode(), ((b"grpc.use_local_subchannel_pool", 1),), None) for _ in range(num_channels)
  ]
  # One queue a channel, and one thread, so a process has one channel to stay cheap.
  streams = [BenchStream(channels[index % num_channels], request) for index, request in enumerate(requests)]
  left = [sum(1 for index in range(len(requests)) if index % num_channels == place) for place in range(num_channels)]
  slices: list[list[float]] = []
  until = 0.0
  while any(left):
    for place, channel in enumerate(channels):
      if not left[place]:
        continue
      event = channel.next_call_event()
      if event.completion_type == cygrpc.CompletionType.queue_timeout:
        continue
      stream = event.tag
      count = stream.take(event)
      if stream.is_ended:
        left[place] -= 1
        stream.is_ended = False  # counted
      if count:
        now = time.monotonic()
        if now > until:
          until = now + _SLICE_S
          slices.append([now, 0, 0])
        slices[-1][1] += count
        slices[-1][2] += 1
  return streams, slices


def main() -> None:
  """Reads {target, streams: [[request id, prompt ids]], max_tokens, text}; prints {slices, tokens, failed}."""
  asked = json.load(sys.stdin)
  requests = [
    pb.GenerateRequest(
      request_id=request_id,
      token_ids=pb.TokenIds(ids=prompt),
      sampling=pb.SamplingParams(temperature=0.0),
      stopping=pb.StopParams(max_tokens=asked["max_tokens"], ignore_eos=True),
      output=pb.OutputParams(return_text=asked["text"]),
    )
    for request_id, prompt in asked["streams"]
  ]
  streams, slices = run(asked["target"], requests, asked.get("channels", 1))
  failed = sum(stream.status != 0 for stream in streams)
  json.dump({"slices": slices, "tokens": [stream.tokens for stream in streams], "failed": failed}, sys.stdout)


if __name__ == "__main__":
  main()
