"""What a service tells of itself: logs without anybody's words, figures that are true."""

from __future__ import annotations

import logging
import re
from io import StringIO

import grpc
import pytest

from outrider.cloud.limits import Limits
from outrider.protocol import schema
from outrider.serving import logs
from tests.support.cloud_server import Served
from tests.support.cloud_service import (
    HeldEngine,
    clear,
    error_name,
    metric_total,
    open_request,
    reached,
    target_output,
    wait_until,
)
from tests.support.fakes import HashRows, ScriptedEngine
from tests.support.raw_stream import CLOSE, RawStream, generating, opening, resuming, verifying

BIG = 60_000
SECRET = (48_213, 51_904, 57_331)  # no other figure of a log looks like these


@pytest.fixture
def told() -> list[logging.LogRecord]:
    """Every record of every logger of ours."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("outrider")
    logger.addHandler(Keep(logging.DEBUG))
    logger.setLevel(logging.DEBUG)
    return records


def talk(served: Served, channel: grpc.Channel) -> bytes:
    """A session with everything in it, and a few that are refused."""
    rows = served.service.engine.rows  # type: ignore[attr-defined]
    first = int(rows(SECRET).argmax())
    with RawStream(channel) as stream:
        id_ = stream.opened(opening(SECRET, BIG, repetition_penalty=1.5))
        stream.verdict(verifying(1, 3, (first, SECRET[0])))
    with RawStream(channel) as stream:
        stream.opened(resuming(id_, SECRET))
        stream.verdict(verifying(2, 4, (), new=(SECRET[1],)))
        stream.send(generating(3, 5))
        for _ in range(3):
            stream.receive()
        stream.cancel()
    for frames in (
        [opening(SECRET, BIG), verifying(1, SECRET[0])],
        [opening(SECRET, BIG), verifying(1, 3, (BIG + SECRET[0],))],
        [opening((*SECRET, BIG + SECRET[1]), BIG)],
        [opening(SECRET, BIG, change=lambda frame: setattr(frame, "accept", "秘密"))],
    ):
        with RawStream(channel) as stream:
            stream.send(*frames)
            assert [schema.Answer.FromString(data) for data in stream.call][-1].error.code
    return id_


def test_the_log_holds_no_token_and_no_text(told: list[logging.LogRecord]) -> None:
    stream = StringIO()
    logs.configure("debug", json=True, stream=stream)
    logs.log.propagate = True
    with reached(ScriptedEngine(HashRows(1, BIG), BIG)) as (served, channel):
        id_ = talk(served, channel)
        with RawStream(channel) as other:
            other.opened(opening((1,), BIG))
            other.send(CLOSE)
            other.finish()
            assert next(other.call, None) is None
        wait_until(lambda: served.service.streams == 0)
    events = {record.getMessage() for record in told}
    assert {"session opened", "session resumed", "session closed", "refused", "stopped"} <= events
    standard = vars(logging.makeLogRecord({}))  # times and thread numbers may hold any digits
    extras = [value for record in told for name, value in vars(record).items() if name not in standard]
    written = stream.getvalue() + str([(record.getMessage(), record.args) for record in told]) + str(extras)
    for secret in (*map(str, SECRET), "秘密", str(BIG + SECRET[0]), str(BIG + SECRET[1]), id_.hex(), str(id_)):
        assert not re.search(rf"\b{re.escape(secret)}\b", written)
    assert "withheld" not in stream.getvalue()
    closed = next(record for record in told if record.getMessage() == "session closed")
    assert closed.session != "-"  # type: ignore[attr-defined]


def test_metrics_after_a_session() -> None:
    with reached(HeldEngine()) as (served, channel):
        a = target_output(9, ignore_eos=True)
        with RawStream(channel) as stream:
            stream.opened(open_request(max_new_tokens=9, ignore_eos=True))
            stream.verdict(verifying(1, 5, a[:3]))
            stream.send(generating(2, 9))
            for _ in range(5):
                stream.receive()
            stream.refused(verifying(9, 99))
        clear(served)
        sent = {name: metric_total(served, f"outrider_{name}_total") for name in ("verdicts", "drafts", "accepted")}
        assert sent == {"verdicts": 6, "drafts": 3, "accepted": 3}
        assert metric_total(served, "outrider_generated_total") == 5
        assert metric_total(served, "outrider_sessions_opened_total") == 1
        assert metric_total(served, "outrider_errors_total") == 1
        assert metric_total(served, "outrider_forward_seconds_count") == 6
        assert metric_total(served, "outrider_bytes_total") > 50


def test_upkeep_reports_and_expires() -> None:
    with reached(HeldEngine(), limits=Limits(idle_seconds=0.2)) as (served, channel), RawStream(channel) as stream:
        stream.opened(open_request())
        stream.verdict(verifying(1, 5))
        wait_until(lambda: metric_total(served, "outrider_sessions_expired_total") == 1)
        assert len(served.service.sessions) == 0
        wait_until(lambda: metric_total(served, "outrider_slots_total") == 8)
        assert error_name(stream.refused(verifying(2, 6)).code) == "UNKNOWN_SESSION"
