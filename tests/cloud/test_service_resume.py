"""Sessions outlive their streams: resuming, taking over, and what ends a session for good."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.support.cloud_server import Served
from tests.support.cloud_service import PROMPT, error_name, open_request, target_output, wait_until, wrong_token
from tests.support.processes import HANG_S
from tests.support.raw_stream import CLOSE, RawStream, generating, resuming, verifying


def test_a_session_is_resumed_on_a_new_stream_after_the_old_one_broke(shared: Served, channel: grpc.Channel) -> None:
    a = target_output(8)
    with RawStream(channel) as one:
        id_ = one.opened(open_request())
        one.verdict(verifying(1, 5, a[:2]))
    wait_until(lambda: shared.service.streams == 0)
    with RawStream(channel) as other:
        assert other.opened(resuming(id_, (*PROMPT, *a[:3]))) == id_
        assert other.verdict(verifying(2, 8, a[3:5])).next_token == a[5]
    assert len(shared.service.engine.open_slots) == 1  # type: ignore[attr-defined]
    assert shared.service.engine.refed == 0  # type: ignore[attr-defined]


def test_resuming_rewinds_to_what_the_edge_has(channel: grpc.Channel) -> None:
    """The verdict was lost on its way: the same round is asked again, be it with other drafts."""
    a = target_output(8)
    with RawStream(channel) as one:
        id_ = one.opened(open_request())
        one.verdict(verifying(1, 5, a[:4]))
    with RawStream(channel) as other:
        other.opened(resuming(id_, PROMPT))
        verdict = other.verdict(verifying(1, 5, (a[0], wrong_token(a[1]))))
        assert (verdict.accepted, verdict.next_token) == (1, a[1])


def test_a_resume_waits_for_the_verdict_that_is_being_computed(shared: Served, channel: grpc.Channel) -> None:
    engine: Any = shared.service.engine
    a = target_output(8)
    with RawStream(channel) as one, RawStream(channel) as other:
        id_ = one.opened(open_request())
        engine.hold()
        one.send(verifying(1, 5, a[:3]))
        assert engine.entered.wait(HANG_S)
        one.cancel()
        other.send(resuming(id_, PROMPT), verifying(1, 5, a[:3]))
        (entry,) = list(shared.service.sessions)
        wait_until(lambda: entry.stream is not None and shared.service.streams == 1)
        assert entry.busy
        engine.go.set()
        assert other.receive().opened.session == id_
        verdict = other.receive().verdict
        assert (verdict.accepted, verdict.next_token) == (3, a[3])


def test_of_two_streams_that_resume_at_once_the_last_has_it(shared: Served, channel: grpc.Channel) -> None:
    """Both wait for the verdict; the first must not rewind what the second is about to use."""
    engine: Any = shared.service.engine
    a = target_output(8)
    with RawStream(channel) as one, RawStream(channel) as two, RawStream(channel) as three:
        id_ = one.opened(open_request())
        first = one.verdict(verifying(1, 5, a[:1]))
        assert first.next_token == a[1]
        (entry,) = list(shared.service.sessions)
        engine.hold()
        one.send(verifying(2, 7, a[2:4]))
        assert engine.entered.wait(HANG_S)
        before = entry.stream
        two.send(resuming(id_, PROMPT))
        wait_until(lambda: entry.stream is not before)
        before = entry.stream
        three.send(resuming(id_, (*PROMPT, *a[:2])))
        wait_until(lambda: entry.stream is not before)
        engine.go.set()
        assert error_name(two.receive().error.code) == "UNKNOWN_SESSION"
        assert three.receive().opened.session == id_
        assert three.verdict(verifying(2, 7, a[2:4])).accepted == 2


def test_the_old_stream_is_out_when_another_resumes(shared: Served, channel: grpc.Channel) -> None:
    for last_word in (verifying(1, 5), generating(1, 5), CLOSE):
        with RawStream(channel) as one, RawStream(channel) as other:
            id_ = one.opened(open_request())
            other.opened(resuming(id_, PROMPT))
            assert error_name(one.refused(last_word).code) == "UNKNOWN_SESSION"
            assert other.verdict(verifying(1, 5)).next_token == target_output(1)[0]
            other.send(CLOSE)
            wait_until(lambda: len(shared.service.sessions) == 0)


@pytest.mark.parametrize("tokens", [(3, 1, 4, 1, 6), PROMPT[:4], (*PROMPT, 1), ()])
def test_other_tokens_than_the_sessions_end_it(shared: Served, channel: grpc.Channel, tokens: tuple[int, ...]) -> None:
    with RawStream(channel) as one, RawStream(channel) as other:
        id_ = one.opened(open_request())
        assert error_name(other.refused(resuming(id_, tokens)).code) == "UNKNOWN_SESSION"
        assert len(shared.service.sessions) == 0
        assert error_name(one.refused(verifying(1, 5)).code) == "UNKNOWN_SESSION"


def test_a_session_that_never_was(stream: RawStream) -> None:
    assert error_name(stream.refused(resuming(b"x" * 16, PROMPT)).code) == "UNKNOWN_SESSION"


def test_an_expired_session_is_unknown_on_its_own_stream_too(shared: Served, stream: RawStream) -> None:
    stream.opened(open_request())
    stream.verdict(verifying(1, 5))
    (entry,) = list(shared.service.sessions)
    entry.last_used -= 601

    async def expire() -> int:
        return shared.service.sessions.expire()

    assert shared.run(expire()) == 1
    assert error_name(stream.refused(verifying(2, 6)).code) == "UNKNOWN_SESSION"
    assert len(shared.service.sessions) == 0
