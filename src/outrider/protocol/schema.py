"""The message classes of outrider.proto, built at import from its descriptor set (`make proto` compiles it).

Generated Python code would run only with the protobuf release that generated it and the next one. The type stubs in
outrider_pb2.pyi are generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from outrider.protocol.outrider_pb2 import *  # noqa: F403 - every message, as below
else:
    NONE, AUDIO, FEATURES, WITHHELD, KEPT = range(5)  # MediaKind
    _FILES = descriptor_pb2.FileDescriptorSet.FromString((Path(__file__).parent / "outrider.binpb").read_bytes())
    _POOL = descriptor_pool.DescriptorPool()
    for _file in _FILES.file:
        _POOL.AddSerializedFile(_file.SerializeToString())
        for _message in _file.message_type:
            _name = f"{_file.package}.{_message.name}"
            globals()[_message.name] = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(_name))

VERSION = 4
SERVICE = "outrider.v1.Verifier"
MAX_DRAFTS = 256
