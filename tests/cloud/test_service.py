"""The protocol, row by row, against a real service over a real socket, with frames made by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cloud import service
from outrider.engines.load import load_tokenizer
from outrider.protocol import schema
from outrider.protocol.tokenizer_files import unpack_tokenizer
from tests.support.cloud_server import Served, serving
from tests.support.cloud_service import (
    EOS,
    PROMPT,
    TARGET,
    HeldEngine,
    V,
    change_open,
    error_name,
    open_request,
    target_output,
    wrong_token,
)
from tests.support.fakes import reference_output
from tests.support.processes import HANG_S
from tests.support.raw_stream import CLOSE, RawStream, generating, resuming, verifying
from tests.support.tokenized_models import model_of

# Unary ----------------------------------------------------------------------------------------------------------


def test_the_description_names_model_and_limits(shared: Served, channel: grpc.Channel) -> None:
    data = channel.unary_unary(f"/{schema.SERVICE}/Describe")(b"", timeout=HANG_S)
    answer = schema.DescribeAnswer.FromString(data)
    assert answer == schema.DescribeAnswer(
        protocol=schema.VERSION,
        name="scripted",
        vocab_size=V,
        row_count=V + 4,
        eos_ids=[EOS],
        fingerprint=b"scripted-32",
        model=b"scripted-weights",
        max_length=256,
        max_drafts=schema.MAX_DRAFTS,
    )


def test_the_vocabulary_in_parts() -> None:
    engine = HeldEngine()
    engine.vocabulary = [f"词{n}" for n in range(9000)]  # type: ignore[attr-defined]
    with serving(engine) as served, grpc.insecure_channel(served.address) as channel:
        parts = list(channel.unary_stream(f"/{schema.SERVICE}/Vocabulary")(b"", timeout=HANG_S))
        tokens = [token for part in parts for token in schema.VocabularyPart.FromString(part).tokens]
        assert len(parts) == 3
        assert tokens == engine.vocabulary  # type: ignore[attr-defined]


def read_tokenizer(channel: grpc.Channel) -> list[bytes]:
    parts = channel.unary_stream(f"/{schema.SERVICE}/Tokenizer")(b"", timeout=HANG_S)
    return [schema.TokenizerPart.FromString(part).data for part in parts]


def test_the_tokenizer_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(service, "TOKENIZER_CHUNK", 1000)
    engine = model_of("llama", "the", " dog")
    with serving(engine) as served, grpc.insecure_channel(served.address) as channel:
        parts = read_tokenizer(channel)
        answer = schema.DescribeAnswer.FromString(
            channel.unary_unary(f"/{schema.SERVICE}/Describe")(b"", timeout=HANG_S)
        )
    assert len(parts) > 2
    assert max(map(len, parts)) == 1000
    assert hashlib.sha256(b"".join(parts)).digest() == answer.tokenizer
    unpack_tokenizer(b"".join(parts), tmp_path)
    assert load_tokenizer(str(tmp_path)).get_vocab() == engine.tokenizer.get_vocab()


def test_a_model_without_a_tokenizer_sends_none(channel: grpc.Channel) -> None:
    assert read_tokenizer(channel) == []


def test_health_check_serves(channel: grpc.Channel) -> None:
    for name in ("", schema.SERVICE):
        asked = health_pb2.HealthCheckRequest(service=name)
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=HANG_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# Verdicts -------------------------------------------------------------------------------------------------------


def test_open_verify_close(shared: Served, stream: RawStream) -> None:
    a = target_output(8)
    assert len(stream.opened(open_request())) == 16
    verdict = stream.verdict(verifying(1, 5, (a[0], a[1], wrong_token(a[2]), 7)))
    assert (verdict.round, verdict.accepted, verdict.next_token, verdict.reason) == (1, 2, a[2], 1)
    verdict = stream.verdict(verifying(2, 9, a[4:6], new=a[3:4]))
    assert (verdict.accepted, verdict.next_token, verdict.reason, verdict.audited) == (2, a[6], 0, 1)
    stream.send(CLOSE)
    stream.finish()
    assert next(stream.call, None) is None
    assert len(shared.service.sessions) == 0


def test_opening_and_first_block_in_one_go(stream: RawStream) -> None:
    stream.send(open_request(), verifying(1, 5, target_output(2)))
    assert stream.receive().opened.session
    assert stream.receive().verdict.accepted == 2


def test_a_repeat_is_answered_and_not_applied_again(shared: Served, stream: RawStream) -> None:
    stream.opened(open_request())
    first = stream.verdict(verifying(1, 5, (1, 2)))
    forwards = shared.service.engine.forwards  # type: ignore[attr-defined]
    again = stream.verdict(verifying(1, 5, (1, 2)))
    assert (again.accepted, again.next_token, again.reason) == (first.accepted, first.next_token, first.reason)
    assert shared.service.engine.forwards == forwards  # type: ignore[attr-defined]
    assert stream.verdict(verifying(2, 6 + first.accepted)).next_token == target_output(first.accepted + 2)[-1]


def test_a_wrong_base_length_names_both(stream: RawStream) -> None:
    stream.opened(open_request())
    error = stream.refused(verifying(1, 7, (1,)))
    assert error_name(error.code) == "BASE_LENGTH"
    assert "base length is 7" in error.message
    assert "has 5 tokens" in error.message


def test_the_session_survives_an_error(channel: grpc.Channel) -> None:
    with RawStream(channel) as one, RawStream(channel) as other:
        id_ = one.opened(open_request())
        one.refused(verifying(1, 7))
        other.opened(resuming(id_, PROMPT))
        assert other.verdict(verifying(1, 5)).next_token == target_output(1)[0]


def test_output_that_is_settled_comes_with_the_opening(stream: RawStream) -> None:
    a = target_output(6)
    stream.opened(open_request(committed=a[:4], min_new_tokens=20, repetition_penalty=1.4))
    verdict = stream.verdict(verifying(5, 9))
    expected = reference_output(TARGET, (*PROMPT, *a[:4]), V, max_new_tokens=1, repetition_penalty=1.4)
    assert verdict.next_token == expected[0]


@pytest.mark.parametrize("accept", ["", "exact", "rank:3", "margin:0.5", "typical:0.09"])
def test_acceptance_rules(stream: RawStream, accept: str) -> None:
    stream.opened(open_request(accept=accept))
    assert stream.verdict(verifying(1, 5, target_output(3))).accepted == 3


def test_residual_needs_q(channel: grpc.Channel) -> None:
    with RawStream(channel) as stream:
        id_ = stream.opened(open_request(accept="residual", temperature=1.0))
        assert error_name(stream.refused(verifying(1, 5, (1,))).code) == "SETTINGS"
    with RawStream(channel) as stream:
        stream.opened(resuming(id_, PROMPT))
        frame = verifying(1, 5, (1,))
        frame.verify.q.add(ids=[1], logp=[0.0])
        assert stream.verdict(frame).round == 1


# Out of place ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [verifying(1, 5)],
        [generating(1, 5)],
        [CLOSE],
        [schema.Request(media=schema.Media(data=b"x"))],
        [b""],
        [b"\xff\xff\xff"],
        [open_request(), open_request()],
        [open_request(), resuming(b"x" * 16, PROMPT)],
        [open_request(), schema.Request(media=schema.Media(data=b"x"))],
        [open_request(), CLOSE, verifying(1, 5)],
        [open_request(), verifying(0, 5)],
        [open_request(), verifying(1, 5, [V])],
        [open_request(), verifying(1, 6, new=[V + 4])],
        [open_request([V + 4])],
        [open_request(committed=[V + 4])],
        [open_request(change=lambda frame: setattr(frame, "vocab_size", 0))],
        [open_request(change=lambda frame: setattr(frame, "vocab_size", V + 1))],
        [open_request(change=lambda frame: frame.prompt.count.append(1))],
    ],
)
def test_frames_out_of_place(shared: Served, stream: RawStream, frames: list[Any]) -> None:
    stream.send(*frames)
    answers = [schema.Answer.FromString(data) for data in stream.call]
    assert [answer.WhichOneof("frame") for answer in answers[:-1]] == ["opened"] * (len(answers) - 1)
    assert error_name(answers[-1].error.code) == "INVALID"


def test_a_draft_beyond_the_sessions_vocabulary(stream: RawStream) -> None:
    """Tolerant rules look its score up: it must not get that far."""
    stream.opened(open_request(accept="rank:3", change=lambda frame: setattr(frame, "vocab_size", 10)))
    assert error_name(stream.refused(verifying(1, 5, [10])).code) == "INVALID"


def change_settings(**values: Any) -> Callable[[schema.Open], None]:
    def spoil(frame: schema.Open) -> None:
        frame.settings.MergeFrom(schema.Settings(**values))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "expected", "words"),
    [
        (change_open(protocol=schema.VERSION + 1), "PROTOCOL", f"protocol {schema.VERSION + 1}"),
        (change_open(protocol=0), "PROTOCOL", f"speaks {schema.VERSION}"),
        (change_open(fingerprint=b"other"), "VOCABULARY", "another vocabulary"),
        (change_open(model=b""), "MODEL", "another model"),
        (change_open(accept="rank:0"), "SETTINGS", "out of range"),
        (change_open(accept="rank:" + "9" * 400), "SETTINGS", "at most 64"),
        (change_settings(temperature=-1.0), "SETTINGS", "temperature"),
        (change_settings(min_new_tokens=999), "SETTINGS", "min_new_tokens"),
        (change_settings(suppress_tokens=[V]), "SETTINGS", "suppress_tokens"),
        (change_settings(suppress_tokens=[1] * 33), "SETTINGS", "suppress_tokens"),
        (change_settings(logit_bias={V: 1.0}), "SETTINGS", "logit_bias"),
        (change_settings(logit_bias={1: 101.0}), "SETTINGS", "logit_bias"),
        (change_settings(frequency_penalty=2.5), "SETTINGS", "frequency_penalty"),
        (change_open(conditioning=b"12345678"), "CONDITIONING", "not those"),
        (change_open(media=schema.AUDIO), "PROMPT", "takes no audio"),
        (change_open(media=schema.FEATURES), "PROMPT", "takes no audio"),
        (lambda frame: frame.prompt.CopyFrom(schema.Ids(token=[1], count=[2**32 - 1])), "PROMPT", "4294967295"),
        (lambda frame: frame.prompt.CopyFrom(schema.Ids(token=[1] * 257)), "PROMPT", "at most 256"),
        (lambda frame: frame.committed.CopyFrom(schema.Ids(token=[1] * 252)), "PROMPT", "at most 251"),
        (lambda frame: frame.ClearField("prompt"), "PROMPT", "empty"),
    ],
)
def test_openings_that_are_refused(
    shared: Served, stream: RawStream, spoil: Callable[[schema.Open], None], expected: str, words: str
) -> None:
    error = stream.refused(open_request(change=spoil))
    assert error_name(error.code) == expected
    assert words in error.message
    assert len(shared.service.sessions) == 0


def test_too_many_drafts(stream: RawStream) -> None:
    stream.opened(open_request())
    assert error_name(stream.refused(verifying(1, 5, [1] * (schema.MAX_DRAFTS + 1))).code) == "TOO_LARGE"


def test_a_session_holds_what_was_described_and_not_a_token_more(channel: grpc.Channel) -> None:
    prompt = [n % V for n in range(250)]
    with RawStream(channel) as stream:
        stream.opened(open_request(prompt))
        assert stream.verdict(verifying(1, 250, [1] * 6)).round == 1
    with RawStream(channel) as stream:
        stream.opened(open_request(prompt))
        error = stream.refused(verifying(1, 250, [1] * 7))
        assert (error_name(error.code), "257" in error.message) == ("PROMPT", True)
    with RawStream(channel) as stream:
        stream.opened(open_request(prompt, max_new_tokens=99, ignore_eos=True))
        stream.send(generating(1, 250))
        stream.finish()
        assert [schema.Answer.FromString(data).verdict.round for data in stream.call] == [1, 2, 3, 4, 5, 6]
