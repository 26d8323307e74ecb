"""Uses a server's vllm.grpc.engine through the stubs of smg-grpc-proto, as its router does. Knows nothing of Sluice.

python use_smg.py HOST:PORT http://127.0.0.1:8000
"""

import hashlib
import io
import json
import sys
import urllib.request
import zipfile

import grpc
from smg_grpc_proto.generated import (  # pyright: ignore[reportMissingImports]
  common_pb2,
  vllm_engine_pb2,
  vllm_engine_pb2_grpc,
)
import tokenizers

_TEXT = "37 + 5 = ? naïve café 😀"


def _tokenizer(stub: vllm_engine_pb2_grpc.VllmEngineStub) -> tokenizers.Tokenizer:
  """Reads the tokenizer as the router does without a model folder: the stream's zip, checked by its digest."""
  chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=30))
  data = b"".join(chunk.data for chunk in chunks)
  assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest(), chunks[-1].sha256
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    assert "tokenizer_config.json" in archive.namelist(), archive.namelist()
    return tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())


def _of_http(url: str, path: str, body: dict) -> dict:
  request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
  with urllib.request.urlopen(request, timeout=30) as answer:
    return json.load(answer)


def main(target: str, url: str) -> None:
  """Gets its tokenizer, sends and receives ids, and calls every method."""
  with grpc.insecure_channel(target) as channel:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=30).healthy
    tokenizer = _tokenizer(stub)
    ids = tokenizer.encode(_TEXT).ids
    assert ids == _of_http(url, "/tokenize", {"prompt": _TEXT})["tokens"], ids
    request = vllm_engine_pb2.GenerateRequest(
      request_id="smg-1",
      tokenized=vllm_engine_pb2.TokenizedInput(original_text=_TEXT, input_ids=ids),
      sampling_params=vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
      stream=True,
    )
    answers = list(stub.Generate(request, timeout=60))
    tokens = [token for answer in answers for token in answer.chunk.token_ids]
    assert len(tokens) == 12 and answers[-1].complete.finish_reason == "length", answers
    wanted = _of_http(url, "/v1/completions", {"prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True})
    assert tokenizer.decode(tokens) == wanted["choices"][0]["text"], (tokens, wanted)
    info = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=30)
    assert info.is_generation and info.vocab_size >= tokenizer.get_vocab_size(), info
    assert stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=30).server_type == "vllm-grpc"
    assert len(stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=30).loads) == 1
    stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["smg-1"]), timeout=30)
    # Unsupported methods must return the status that lets a router do without them.
    for name, call in {
      "Embed": lambda: stub.Embed(vllm_engine_pb2.EmbedRequest(request_id="e"), timeout=30),
      "FlushCache": lambda: stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=1), timeout=30),
      "StartProfile": lambda: stub.StartProfile(common_pb2.StartProfileRequest(num_steps=3), timeout=30),
      "StopProfile": lambda: stub.StopProfile(common_pb2.StopProfileRequest(), timeout=30),
      "SubscribeKvEvents": lambda: next(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=30)),
    }.items():
      try:
        call()
      except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED, f"{name}: {error}"
      else:
        raise AssertionError(f"{name} is answered")
    print(f"{len(ids)} ids by the server's tokenizer, {len(tokens)} tokens, 5 methods UNIMPLEMENTED")


if __name__ == "__main__":
  main(*sys.argv[1:])
