"""An edge that speaks the protocol by hand: frames in, frames out, over plain gRPC. It can misbehave."""

from __future__ import annotations

import queue
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import grpc

from outrider.config import GenerationSettings
from outrider.protocol import schema
from outrider.protocol.messages import digest, pack_ids, pack_settings

METHOD = f"/{schema.SERVICE}/Session"
TIMEOUT = 120.0  # s; only a hang takes that long


class RawStream:
    """One Session stream."""

    def __init__(self, channel: grpc.Channel, metadata: Seq[tuple[str, str]] = ()) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call = channel.stream_stream(METHOD)(iter(self._outbox.get, None), metadata=metadata, timeout=TIMEOUT)

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def send(self, *frames: schema.Request | bytes) -> None:
        for frame in frames:
            self._outbox.put(frame if isinstance(frame, bytes) else frame.SerializeToString())

    def receive(self) -> schema.Answer:
        return schema.Answer.FromString(next(self.call))

    def ask(self, *frames: schema.Request | bytes) -> schema.Answer:
        self.send(*frames)
        return self.receive()

    def verdict(self, frame: schema.Request) -> schema.Verdict:
        answer = self.ask(frame)
        assert answer.WhichOneof("frame") == "verdict", answer
        return answer.verdict

    def opened(self, *frames: schema.Request) -> bytes:
        answer = self.ask(*frames)
        assert answer.WhichOneof("frame") == "opened", answer
        return answer.opened.session

    def refused(self, *frames: schema.Request | bytes) -> schema.Error:
        """The error that frames get, which must be the stream's last word."""
        answer = self.ask(*frames)
        assert answer.WhichOneof("frame") == "error", answer
        assert next(self.call, None) is None
        assert self.call.code() is grpc.StatusCode.OK
        self.finish()
        return answer.error

    def finish(self) -> None:
        """Say that nothing more will come."""
        self._outbox.put(None)

    def cancel(self) -> None:
        """Go away without a word."""
        self.call.cancel()
        self._outbox.put(None)


def opening(
    prompt: Seq[int],
    vocab_size: int,
    *,
    media: bytes = b"",
    change: Callable[[schema.Open], object] = lambda _: None,
    committed: Seq[int] = (),
    accept: str = "",
    name: str = "scripted",
    **settings: Any,
) -> schema.Request:
    """An Open for a ScriptedEngine. change: what to spoil about it."""
    frame = schema.Open(
        protocol=schema.VERSION,
        fingerprint=f"scripted-{vocab_size}".encode(),
        model=f"{name}-weights".encode(),
        settings=pack_settings(GenerationSettings(**settings)),
        accept=accept,
        vocab_size=vocab_size,
        prompt=pack_ids(prompt),
        committed=pack_ids(committed),
        conditioning=digest(prompt, media),
    )
    change(frame)
    return schema.Request(open=frame)


def verifying(round_: int, base: int, drafts: Seq[int] = (), new: Seq[int] = ()) -> schema.Request:
    return schema.Request(verify=schema.Verify(round=round_, base_length=base, new_ids=new, draft_ids=drafts))


def generating(round_: int, base: int, new: Seq[int] = ()) -> schema.Request:
    return schema.Request(generate=schema.Generate(round=round_, base_length=base, new_ids=new))


def resuming(session: bytes, ids: Seq[int]) -> schema.Request:
    return schema.Request(resume=schema.Resume(session=session, length=len(ids), digest=digest(ids)))


def carrying(data: bytes, part: int = 1000) -> list[schema.Request]:
    """Media frames."""
    parts = [data[i : i + part] for i in range(0, len(data), part)] or [b""]
    return [schema.Request(media=schema.Media(data=p, more=n + 1 < len(parts))) for n, p in enumerate(parts)]


CLOSE = schema.Request(close=schema.Close())
