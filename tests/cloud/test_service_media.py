"""Recordings and features over the wire: in parts, within limits, heard again after an eviction; nothing is trusted."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import grpc
import numpy as np
import pytest

from outrider.cloud.limits import Limits
from outrider.prompts.media import pack_audio, pack_features
from outrider.protocol import schema
from outrider.protocol.messages import digest
from tests.support.cloud_server import Served, serving
from tests.support.cloud_service import (
    TARGET,
    V,
    change_open,
    clear,
    error_name,
    metric_total,
    open_request,
    target_output,
    wait_until,
)
from tests.support.fakes import ScriptedAudioEncoder, ScriptedEngine
from tests.support.raw_stream import CLOSE, RawStream, carrying, verifying

AUDIO_TOKENS = 3


@pytest.fixture(scope="module")
def hearing() -> Iterator[Served]:
    engine = ScriptedEngine(TARGET, V)
    engine.audio = ScriptedAudioEncoder()
    limits = Limits(max_media_bytes=20_000, max_media_total=40_000, max_message_bytes=2**17)
    with serving(engine, slots=2, limits=limits) as served:
        yield served


@pytest.fixture
def ear(hearing: Served) -> Iterator[RawStream]:
    with grpc.insecure_channel(hearing.address) as channel, RawStream(channel) as stream:
        yield stream
    clear(hearing)


WAVE = (np.round(np.sin(np.arange(1600 * AUDIO_TOKENS) / 9.0) * 9000) / 32768).astype(np.float32)
FEATURES = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, AUDIO_TOKENS)
HEARD = (5, *[1] * AUDIO_TOKENS, 6)


def listen(media: bytes, kind: int, prompt: Seq[int] = HEARD, **options: Any) -> schema.Request:
    options.setdefault("media", media)
    return open_request(prompt, change=change_open(media=kind), **options)


@pytest.mark.parametrize(
    ("kind", "data"), [(schema.AUDIO, pack_audio(WAVE)), (schema.FEATURES, pack_features(FEATURES))]
)
@pytest.mark.parametrize("part", [50, 10**6])
def test_media_arrives_in_parts(hearing: Served, ear: RawStream, kind: int, data: bytes, part: int) -> None:
    ear.opened(listen(data, kind), *carrying(data, part))
    assert ear.verdict(verifying(1, 5)).next_token == target_output(1, HEARD)[0]
    prompt = hearing.service.engine.opened[-1]  # type: ignore[attr-defined]
    heard = prompt.audio if kind == schema.AUDIO else prompt.features
    assert np.array_equal(heard, WAVE if kind == schema.AUDIO else FEATURES)
    ear.send(CLOSE)
    wait_until(lambda: len(hearing.service.sessions) == 0)


def test_withheld_media_needs_none(ear: RawStream) -> None:
    ear.opened(listen(b"", schema.WITHHELD))
    assert ear.verdict(verifying(1, 5)).next_token == target_output(1, HEARD)[0]


GOOD = pack_audio(WAVE)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([listen(GOOD, schema.AUDIO), *carrying(b"x" * 20_001)], "TOO_LARGE"),
        ([listen(GOOD, schema.AUDIO), *carrying(b"x" * 20_001, 10**6)], "TOO_LARGE"),
        ([listen(GOOD, schema.AUDIO), verifying(1, 5)], "INVALID"),
        ([listen(GOOD, schema.AUDIO), CLOSE], "INVALID"),
        ([listen(GOOD, schema.AUDIO), listen(GOOD, schema.AUDIO)], "INVALID"),
        ([listen(b"", schema.AUDIO), *carrying(b"")], "PROMPT"),
        ([listen(b"\x00fLaC" + b"x" * 99, schema.AUDIO), *carrying(b"\x00fLaC" + b"x" * 99)], "PROMPT"),
        ([listen(b"\x09" + GOOD[1:], schema.AUDIO), *carrying(b"\x09" + GOOD[1:])], "PROMPT"),
        ([listen(GOOD[:-20], schema.AUDIO), *carrying(GOOD[:-20])], "PROMPT"),
        ([listen(GOOD, schema.AUDIO), *carrying(GOOD[:-1] + b"x")], "CONDITIONING"),
        ([listen(GOOD, schema.AUDIO, (5, 1, 1, 6)), *carrying(GOOD)], "PROMPT"),
        ([listen(GOOD, schema.FEATURES), *carrying(GOOD)], "PROMPT"),
        ([listen(b"abc", schema.FEATURES), *carrying(b"abc")], "PROMPT"),
        ([listen(p := pack_features(FEATURES[:3]), schema.FEATURES), *carrying(p)], "PROMPT"),
        ([listen(p := pack_features(np.zeros((4, 21), "f4")), schema.FEATURES), *carrying(p)], "PROMPT"),
        ([listen(p := pack_features(np.full((4, 3), np.nan, "f4")), schema.FEATURES), *carrying(p)], "PROMPT"),
        ([listen(b"", 9)], "PROMPT"),
    ],
)
def test_media_that_is_refused(hearing: Served, ear: RawStream, frames: list[Any], expected: str) -> None:
    error = ear.refused(*frames)
    assert error_name(error.code) == expected, error.message
    assert not any(entry.media_bytes for entry in hearing.service.sessions)


def test_media_that_was_announced_and_never_comes_leaves_nothing(hearing: Served, ear: RawStream) -> None:
    ear.send(listen(GOOD, schema.AUDIO), schema.Request(media=schema.Media(data=b"x" * 500, more=True)))
    wait_until(lambda: hearing.service._pending_media == 500)
    ear.finish()
    assert next(ear.call, None) is None


def test_media_on_its_way_is_limited_in_all(hearing: Served) -> None:
    """It is held before any session is there to count it."""
    half = schema.Request(media=schema.Media(data=b"x" * 15_000, more=True))
    with grpc.insecure_channel(hearing.address) as channel:
        streams = [RawStream(channel) for _ in range(3)]
        for n, stream in enumerate(streams[:2]):
            stream.send(listen(GOOD, schema.AUDIO), half)
            wait_until(lambda n=n: hearing.service._pending_media == 15_000 * (n + 1))  # type: ignore[misc]
        error = streams[2].refused(listen(GOOD, schema.AUDIO), half)
        assert error_name(error.code) == "LIMIT"
        assert error.retry_after_ms > 0
        for stream in streams:
            stream.cancel()
    wait_until(lambda: hearing.service.streams == 0)
    assert hearing.service._pending_media == 0


def test_media_is_heard_again_where_a_slot_was_taken_away(hearing: Served) -> None:
    with grpc.insecure_channel(hearing.address) as channel:
        streams = [RawStream(channel) for _ in range(3)]
        for stream in streams:
            stream.opened(listen(GOOD, schema.AUDIO), *carrying(GOOD))
        a = target_output(4, HEARD)
        for round_ in (1, 2, 3):
            for stream in streams:
                assert stream.verdict(verifying(round_, 4 + round_)).next_token == a[round_ - 1]
        for stream in streams:
            stream.send(CLOSE)
            stream.finish()
        wait_until(lambda: len(hearing.service.sessions) == 0)
    assert metric_total(hearing, "outrider_sessions_rebuilt_total") >= 6


def test_the_digest_covers_prompt_and_media() -> None:
    assert digest(HEARD, GOOD) != digest(HEARD) != digest(HEARD[:-1], GOOD)
