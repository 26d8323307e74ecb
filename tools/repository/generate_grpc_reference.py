"""Writes docs/reference/grpc-api.md from the .proto files and their comments. Holds no fact about a field itself.

python -m tools.repository.generate_grpc_reference
"""

import functools
import importlib.resources
import pathlib
import tempfile

from google.protobuf import descriptor_pb2

from tools.measure import ROOT
from tools.repository.markdown import make_table

PAGE = ROOT / "docs" / "reference" / "grpc-api.md"
_FILES = ("server/proto/sluice.proto", "server/proto/admin.proto")
_HEAD = """# gRPC API

`make docs` writes this page from the comments in `server/proto/sluice.proto` and `server/proto/admin.proto`; a test
compares. The Python client in `server/client.py` covers `sluice.v1`. [errors.md](errors.md) lists every status. The
server also answers gRPC health checks, reflection and, with `--enable_channelz`, channelz.
"""
_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {value: name.removeprefix("TYPE_").lower() for name, value in _Field.Type.items()}
# Field numbers in google.protobuf.FileDescriptorProto; comment paths consist of them.
_MESSAGE, _ENUM, _SERVICE, _SYNTAX = 4, 5, 6, 12
_IN_MESSAGE_FIELD, _IN_MESSAGE_ENUM, _ENUM_VALUE, _METHOD = 2, 4, 2, 2


@functools.cache
def read_protos() -> tuple[descriptor_pb2.FileDescriptorProto, ...]:
  """Returns the descriptors of the published protos, with comments.

  Raises:
    RuntimeError: protoc rejected a file; its message is on standard error.
  """
  from grpc_tools import protoc  # a development dependency: the server runs without it

  well_known = importlib.resources.files("grpc_tools") / "_proto"
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "set.binpb"
    command = ["protoc", f"-I{ROOT}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={out}"]
    if protoc.main([*command, *_FILES]) != 0:
      raise RuntimeError(f"protoc could not read {', '.join(_FILES)}; its message is above")
    found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
  return tuple(found.file)


def field_comments(message: str) -> dict[str, str]:
  """Returns the proto's comments by field, for a message of sluice.v1."""
  file = read_protos()[0]
  comments = _comments(file)
  index, found = next((index, found) for index, found in enumerate(file.message_type) if found.name == message)
  paths = {field.name: (_MESSAGE, index, _IN_MESSAGE_FIELD, number) for number, field in enumerate(found.field)}
  return {name: comments[path] for name, path in paths.items() if path in comments}


def _comments(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
  """Returns comments by the path of the element below them."""
  return {
    tuple(location.path): " ".join(location.leading_comments.split())
    for location in file.source_code_info.location
    if location.leading_comments
  }


def grpc_reference() -> str:
  """Returns the page's text."""
  return _HEAD + "".join(_show_file(file) for file in read_protos())


def _show_file(file: descriptor_pb2.FileDescriptorProto) -> str:
  comments = _comments(file)
  parts = [f"\n## {file.package}\n", comments.get((_SYNTAX,), "") + "\n"]
  for index, service in enumerate(file.service):
    path = (_SERVICE, index)
    rows = [
      (
        f"`{method.name}`",
        _link(method.input_type),
        ("stream of " if method.server_streaming else "") + _link(method.output_type),
        comments.get((*path, _METHOD, number), ""),
      )
      for number, method in enumerate(service.method)
    ]
    parts += [
      f"\n### {service.name}\n",
      _paragraph(comments, path),
      make_table(("method", "takes", "returns", ""), rows),
      "\n",
    ]
  for index, message in enumerate(file.message_type):
    parts.append(_show_message(message, comments, (_MESSAGE, index)))
  for index, enum in enumerate(file.enum_type):
    parts.append(_show_enum(enum, comments, (_ENUM, index)))
  return "\n".join(parts)


def _paragraph(comments: dict[tuple[int, ...], str], path: tuple[int, ...]) -> str:
  return comments[path] + "\n" if path in comments else ""


def _show_message(
  message: descriptor_pb2.DescriptorProto, comments: dict[tuple[int, ...], str], path: tuple[int, ...]
) -> str:
  if not message.field:
    return f"\n### {message.name}\n\nHas no fields.\n"
  rows = []
  for number, field in enumerate(message.field):
    text = comments.get((*path, _IN_MESSAGE_FIELD, number), "")
    if field.HasField("oneof_index") and not field.proto3_optional:
      text = f"One of `{message.oneof_decl[field.oneof_index].name}`. {text}"
    rows.append((f"`{field.name}`", str(field.number), _show_type(message, field), text))
  parts = [f"\n### {message.name}\n", _paragraph(comments, path), make_table(("field", "number", "type", ""), rows), ""]
  for number, enum in enumerate(message.enum_type):
    parts.append(_show_enum(enum, comments, (*path, _IN_MESSAGE_ENUM, number)))
  return "\n".join(part for part in parts if part) + "\n"


def _show_enum(
  enum: descriptor_pb2.EnumDescriptorProto, comments: dict[tuple[int, ...], str], path: tuple[int, ...]
) -> str:
  rows = [
    (f"`{value.name}`", str(value.number), comments.get((*path, _ENUM_VALUE, number), ""))
    for number, value in enumerate(enum.value)
  ]
  parts = (f"\n### {enum.name}\n", _paragraph(comments, path), make_table(("value", "number", ""), rows))
  return "\n".join(part for part in parts if part) + "\n"


def _show_type(message: descriptor_pb2.DescriptorProto, field: _Field) -> str:
  for nested in message.nested_type:
    if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
      key, value = nested.field
      return f"map of {_KINDS[key.type]} to {_KINDS[value.type]}"
  kind = _link(field.type_name) if field.type_name else _KINDS[field.type]
  if field.label == _Field.LABEL_REPEATED:
    return f"list of {kind}"
  return f"optional {kind}" if field.proto3_optional else kind


def _link(type_name: str) -> str:
  """Returns a link to a message or an enum on the page, or the plain name for one of another package."""
  name = type_name.rpartition(".")[2]
  return f"[{name}](#{name.lower()})" if type_name.startswith(".sluice.") else type_name.removeprefix(".")


def main() -> None:
  """Runs the command line."""
  PAGE.write_text(grpc_reference())


if __name__ == "__main__":
  main()
