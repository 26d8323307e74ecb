"""The generated modules are those of the proto files, and nothing that was published is gone."""

from google.protobuf import descriptor_pb2

from extensions.prefill_decode.proto import transfer_pb2
from extensions.vllm_api.proto import smg_common_pb2, vllm_engine_pb2
from server.proto import admin_pb2
from server.proto import sluice_pb2 as pb
from tools.repository.check_protos import PUBLISHED
from tools.repository.generate_protos import PROTOS, ROOT, generate


def test_committed_modules_are_what_the_proto_generates(tmp_path):
  made = generate(tmp_path)
  assert len(made) == 3 * len(PROTOS) > 3
  for path in made:
    committed = ROOT / path.relative_to(tmp_path)
    assert committed.read_text() == path.read_text(), (
      f"{committed.name} is stale: python -m tools.repository.generate_protos"
    )


def test_sampling_scalars_have_presence_and_enums_start_unspecified():
  for message in (pb.SamplingParams, pb.StopParams, pb.OutputParams):
    for field in message.DESCRIPTOR.fields:
      if field.message_type is None and not field.is_repeated:
        assert field.has_presence, field.full_name
  for enum in (pb.FinishReason.DESCRIPTOR, pb.AbortResponse.Outcome.DESCRIPTOR):
    assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_nothing_published_is_gone():
  """What `buf breaking` checks, for machines without buf: every published field, value and method is as it was."""
  published = descriptor_pb2.FileDescriptorSet.FromString((ROOT / PUBLISHED).read_bytes())
  modules = {
    module.DESCRIPTOR.name: module for module in (pb, admin_pb2, transfer_pb2, vllm_engine_pb2, smg_common_pb2)
  }
  assert modules.keys() == {proto for proto in PROTOS if not proto.startswith("tools/")}
  promised = [file for file in published.file if file.name in PROTOS and not file.name.startswith("tools/")]
  assert len(promised) >= 3
  for file in promised:
    now = descriptor_pb2.FileDescriptorProto()
    modules[file.name].DESCRIPTOR.CopyToProto(now)
    assert lines_of(file) and not lines_of(file) - lines_of(now), file.name


def lines_of(file) -> set[str]:
  """One line for each thing that a client may rely on."""
  lines = set()

  def add_message(message, path):
    path = f"{path}.{message.name}"
    lines.update(
      f"{path}.{field.name} = {field.number} {field.type} {field.label} {field.type_name} {field.proto3_optional}"
      for field in message.field
    )
    for nested in message.nested_type:
      add_message(nested, path)
    for enum in message.enum_type:
      add_enum(enum, path)

  def add_enum(enum, path):
    lines.update(f"{path}.{enum.name}.{value.name} = {value.number}" for value in enum.value)

  for message in file.message_type:
    add_message(message, file.package)
  for enum in file.enum_type:
    add_enum(enum, file.package)
  for service in file.service:
    lines.update(
      f"{service.name}.{method.name} {method.input_type} {method.output_type} {method.server_streaming}"
      for method in service.method
    )
  return lines
