from server.proto import sluice_pb2 as pb
from tests.server.conftest import generate
def test_smoke(served):
  m = generate(served, text="the cat", stopping=pb.StopParams(max_tokens=20))
  print(m)
  print(served.generation.GenerateUnary(pb.GenerateRequest(text="the cat", sampling=pb.SamplingParams(n=3, seed=1), stopping=pb.StopParams(max_tokens=20))))
  print(served.model.GetLoad(pb.GetLoadRequest()))
