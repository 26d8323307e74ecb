"""Uses a server's gRPC API through stubs made of its published proto alone; any fault is an exception.

python use_grpc.py HOST:PORT server/proto/sluice.proto
"""

import importlib
import pathlib
import sys
import tempfile

from google.rpc import error_details_pb2
import grpc
from grpc_status import rpc_status
from grpc_tools import protoc  # pyright: ignore[reportMissingImports]


def _make_stubs(proto: pathlib.Path, folder: str) -> None:
  """Writes sluice_pb2.py and sluice_pb2_grpc.py."""
  well_known = str(pathlib.Path(protoc.__file__).parent / "_proto")
  flags = [f"-I{proto.parent}", f"-I{well_known}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
  assert protoc.main(["protoc", *flags, proto.name]) == 0


def main(target: str, proto: str) -> None:
  """Streams a generation, gets one whole, embeds, cancels one, meets a deadline and an error with its details."""
  with tempfile.TemporaryDirectory() as folder:
    _make_stubs(pathlib.Path(proto), folder)
    sys.path.insert(0, folder)
    pb, pb_grpc = (importlib.import_module(name) for name in ("sluice_pb2", "sluice_pb2_grpc"))
  with grpc.insecure_channel(target) as channel:
    service, models = pb_grpc.GenerationServiceStub(channel), pb_grpc.ModelServiceStub(channel)
    info = models.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    request = pb.GenerateRequest(
      text="Once upon a time",
      sampling=pb.SamplingParams(temperature=0),
      stopping=pb.StopParams(max_tokens=12, ignore_eos=True),
    )
    messages = list(service.Generate(request, timeout=60))
    text = "".join(delta.text for message in messages for delta in message.deltas)
    [finished] = [each for message in messages for each in message.finished]
    assert messages[0].started.model == info.model and finished.last and finished.usage.completion_tokens == 12
    assert service.GenerateUnary(request, timeout=60).completions[0].text == text
    ids = service.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False), timeout=30).token_ids
    assert service.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=30).text == text, (ids, text)
    inputs = [pb.EmbedInput(text=text), pb.EmbedInput(token_ids=pb.TokenIds(ids=ids))]
    one, other = service.Embed(pb.EmbedRequest(inputs=inputs, add_special_tokens=False), timeout=30).embeddings
    assert one.values == other.values and one.num_tokens == len(ids), (one, other)

    request.stopping.max_tokens = 2000
    cancelled = service.Generate(request)
    next(cancelled)
    cancelled.cancel()
    try:
      list(service.Generate(request, timeout=0.2))
    except grpc.RpcError as error:
      late = error.code()  # pyright: ignore[reportAttributeAccessIssue]
    else:
      raise AssertionError("a generation of 2000 tokens ended within 0.2 s")
    assert late is grpc.StatusCode.DEADLINE_EXCEEDED, late
    request.sampling.top_p = 3
    try:
      service.GenerateUnary(request, timeout=30)
    except grpc.RpcError as error:
      details = rpc_status.from_call(error).details  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
    else:
      raise AssertionError("top_p=3 was served")
    reason = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(reason) or details[1].Unpack(reason), details
  print(f"{text!r}, cancelled one, {late.name}, {reason.reason}")


if __name__ == "__main__":
  main(*sys.argv[1:])
