"""Cloud-only decoding over the wire: where it ends, and what is left when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from outrider.cloud.limits import Limits
from outrider.cloud.sessions import SessionEntry
from outrider.cloud.stream_handler import READ_AHEAD, StreamHandler
from outrider.protocol import schema
from tests.support.cloud_server import serving
from tests.support.cloud_service import EOS, HeldEngine, error_name, open_request, target_output, wait_until
from tests.support.processes import HANG_S
from tests.support.raw_stream import RawStream, generating, verifying


def generated(stream: RawStream, frame: schema.Request) -> list[int]:
    stream.send(frame)
    stream.finish()
    answers = [schema.Answer.FromString(data) for data in stream.call]
    assert all(answer.WhichOneof("frame") == "verdict" for answer in answers), answers[-1]
    return [answer.verdict.next_token for answer in answers]


def test_generate_goes_on_until_eos(stream: RawStream) -> None:
    prompt = (9,)
    output = target_output(200, prompt, eos=(EOS,))
    assert output[-1] == EOS  # or the test shows nothing
    stream.opened(open_request(prompt, max_new_tokens=200))
    assert tuple(generated(stream, generating(1, 1))) == output


def test_generate_goes_on_until_max_new_tokens(channel: grpc.Channel) -> None:
    with RawStream(channel) as stream:
        stream.opened(open_request(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.2))
        assert tuple(generated(stream, generating(1, 5))) == target_output(20, ignore_eos=True, repetition_penalty=1.2)


def test_generate_counts_what_was_there_before(channel: grpc.Channel) -> None:
    a = target_output(10, ignore_eos=True)
    with RawStream(channel) as stream:
        stream.opened(open_request(max_new_tokens=10, ignore_eos=True, committed=a[:3]))
        stream.verdict(verifying(1, 8))
        assert tuple(generated(stream, generating(2, 11, new=a[4:6]))) == a[6:]


def test_a_generate_that_is_repeated_begins_with_the_same_token(channel: grpc.Channel) -> None:
    with RawStream(channel) as stream:
        stream.opened(open_request(max_new_tokens=6, ignore_eos=True))
        first = stream.verdict(verifying(1, 5))
        assert generated(stream, generating(1, 5)) == list(target_output(6, ignore_eos=True))
        assert first.next_token == target_output(1)[0]


def test_generating_past_the_end_is_refused(channel: grpc.Channel) -> None:
    with RawStream(channel) as stream:
        stream.opened(open_request(max_new_tokens=2, ignore_eos=True))
        stream.verdict(verifying(1, 5, target_output(1)))
        error = stream.refused(generating(2, 7))
        assert (error_name(error.code), "reached its limit" in error.message) == ("INVALID", True)


@pytest.mark.parametrize(("base", "expected"), [(4, "BASE_LENGTH"), (200, "BASE_LENGTH"), (2**32 - 1, "PROMPT")])
def test_generating_from_a_wrong_base_is_refused(stream: RawStream, base: int, expected: str) -> None:
    """Far beyond the end, too: there is always an answer."""
    stream.opened(open_request())
    assert error_name(stream.refused(generating(1, base)).code) == expected


def test_a_client_that_does_not_read_holds_neither_slot_nor_session() -> None:
    """The engine runs ahead of it by a few tokens. Then its session is idle, and others get the slot."""
    engine = HeldEngine()
    with serving(engine, slots=1) as served:

        async def start() -> tuple[SessionEntry, AsyncIterator[schema.Answer], list[int]]:
            handler = StreamHandler(served.service, "slow")
            assert [answer async for answer in handler.handle(open_request(max_new_tokens=200, ignore_eos=True))]
            answers = handler.handle(generating(1, 5))
            (entry,) = served.service.sessions
            return entry, answers, await read(answers, 1)

        async def read(answers: AsyncIterator[schema.Answer], count: int) -> list[int]:
            return [(await anext(answers)).verdict.next_token for _ in range(count)]

        entry, answers, tokens = served.run(start())
        wait_until(lambda: entry.awaits_client)
        assert len(entry.session.ids) == 5 + READ_AHEAD
        assert not entry.busy
        with grpc.insecure_channel(served.address) as channel, RawStream(channel) as other:
            other.opened(open_request((1, 2)))
            other.verdict(verifying(1, 2))
        tokens += served.run(read(answers, 30))
        assert tuple(tokens) == target_output(31, ignore_eos=True)
        assert entry.busy or len(entry.session.ids) == 5 + 31 + READ_AHEAD - 1
        served.run(answers.aclose())  # type: ignore[attr-defined]
        wait_until(lambda: not entry.busy)


def test_a_rate_limit_delays_streamed_tokens_and_lets_the_engine_run_ahead_by_one() -> None:
    engine, clock = HeldEngine(), [0.0]
    with serving(engine, limits=Limits(max_rate=20, burst=3)) as served:
        served.service._rate._clock = lambda: clock[0]

        async def start() -> tuple[SessionEntry, list[int], asyncio.Task[int]]:
            handler = StreamHandler(served.service, "paced")
            assert [answer async for answer in handler.handle(open_request(max_new_tokens=9, ignore_eos=True))]
            answers, tokens = handler.handle(generating(1, 5)), []
            (entry,) = served.service.sessions

            async def read() -> int:
                async for answer in answers:
                    tokens.append(answer.verdict.next_token)
                return len(tokens)

            return entry, tokens, asyncio.create_task(read())

        entry, tokens, reading = served.run(start())
        wait_until(lambda: len(tokens) == 2 and entry.awaits_client)  # the opening counts as well
        assert len(entry.session.ids) == 5 + 4
        for more in (5, 8, 9):  # three at once whenever the burst is full again
            clock[0] += 100.0
            wait_until(lambda more=more: len(tokens) == more)  # type: ignore[misc]
        wait_until(reading.done)
        assert tuple(tokens) == target_output(9, ignore_eos=True)


def test_generation_ends_with_the_stream_and_the_slot_is_free_for_others() -> None:
    engine = HeldEngine()
    with serving(engine, slots=1) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel) as stream:
            stream.opened(open_request(max_new_tokens=200, ignore_eos=True))
            stream.send(generating(1, 5))
            for _ in range(3):
                stream.receive()
            engine.hold()
            assert engine.entered.wait(HANG_S)
        wait_until(lambda: served.service.streams == 0)
        forwards = engine.forwards
        engine.go.set()
        with RawStream(channel) as other:
            other.opened(open_request((1, 2)))
            other.verdict(verifying(1, 2))
            other.verdict(verifying(2, 3))  # the session that ended would have had a turn by then
        assert engine.forwards == forwards + 3  # the one that was held, and the other session's two
        assert len(engine.open_slots) == 1
