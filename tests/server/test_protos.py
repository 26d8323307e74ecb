"""The generated modules are those of the proto file."""

from server.proto import sluice_pb2 as pb
from tools.generate_protos import PROTOS, ROOT, generate


def test_committed_modules_are_what_the_proto_generates(tmp_path):
  made = generate(tmp_path)
  assert len(made) == 3 * len(PROTOS) > 3
  for path in made:
    committed = ROOT / path.relative_to(tmp_path)
    assert committed.read_text() == path.read_text(), f"{committed.name} is stale: python -m tools.generate_protos"


def test_sampling_scalars_have_presence_and_enums_start_unspecified():
  for message in (pb.SamplingParams, pb.StopParams, pb.OutputParams):
    for field in message.DESCRIPTOR.fields:
      if field.message_type is None and not field.is_repeated:
        assert field.has_presence, field.full_name
  for enum in (pb.FinishReason.DESCRIPTOR, pb.AbortResponse.Outcome.DESCRIPTOR):
    assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
