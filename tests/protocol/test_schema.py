"""The committed descriptors are those of the committed .proto; the stub and the module know the same messages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from outrider.protocol import schema

PROTOCOL = Path(schema.__file__).parent
SOURCE = PROTOCOL.parent.parent


def committed() -> descriptor_pb2.FileDescriptorProto:
    files = descriptor_pb2.FileDescriptorSet.FromString((PROTOCOL / "outrider.binpb").read_bytes())
    (file,) = files.file
    return file


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    out = tmp_path_factory.mktemp("proto") / "now.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={out}"]
    subprocess.run([*command, "outrider/protocol/outrider.proto"], cwd=SOURCE, check=True, capture_output=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def stub() -> dict[str, ast.ClassDef]:
    tree = ast.parse((PROTOCOL / "outrider_pb2.pyi").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def test_the_committed_descriptors_are_the_protos(compiled: descriptor_pb2.FileDescriptorProto) -> None:
    assert committed() == compiled, "run `make proto`, and commit what it makes"


def test_the_stub_has_every_message_with_its_fields() -> None:
    classes = stub()
    for message in committed().message_type:
        slots = next(node for node in classes[message.name].body if isinstance(node, ast.Assign))
        assert set(ast.literal_eval(slots.value)) == {field.name for field in message.field}, message.name


def test_the_stub_has_no_message_more() -> None:
    file = committed()
    assert set(stub()) == {m.name for m in file.message_type} | {e.name for e in file.enum_type}


def test_the_module_has_every_message() -> None:
    names = [message.name for message in committed().message_type]
    assert set(names) <= vars(schema).keys()
    assert all(getattr(schema, name).DESCRIPTOR.name == name for name in names)


def test_the_modules_constants_are_the_protos() -> None:
    file = committed()
    (kinds,) = (enum for enum in file.enum_type if enum.name == "MediaKind")
    assert {value.name: value.number for value in kinds.value} == {
        name: getattr(schema, name) for name in ("NONE", "AUDIO", "FEATURES", "WITHHELD", "KEPT")
    }
    (service,) = file.service
    assert f"{file.package}.{service.name}" == schema.SERVICE
    assert [method.name for method in service.method] == ["Describe", "Vocabulary", "Tokenizer", "Session"]


def test_field_numbers_are_never_used_twice_and_names_never_reused() -> None:
    for message in committed().message_type:
        numbers = [field.number for field in message.field]
        assert len(set(numbers)) == len(numbers)
