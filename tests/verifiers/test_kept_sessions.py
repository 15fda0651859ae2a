"""Sessions that continue closed ones: what crosses the wire, what the cloud computes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Audio, SpeculativeDecoder
from outrider.cloud.limits import Limits
from outrider.engines.base import Prompt
from outrider.protocol import schema
from outrider.protocol.messages import digest
from outrider.verifiers.remote.verifier import RemoteVerifier
from tests.support.cloud_server import Served, serving
from tests.support.cloud_service import (
    PROMPT,
    TARGET,
    V,
    change_open,
    error_name,
    metric_total,
    open_request,
    target_output,
    wait_until,
)
from tests.support.fakes import HashRows, ReusableEngine, Rows, ScriptedAudioEncoder, reference_output
from tests.support.raw_stream import RawStream, verifying

ROWS = TARGET
KEEP = schema.Request(close=schema.Close(keep=True))


def engine_of(rows: Rows, *, hears: bool = False) -> ReusableEngine:
    engine = ReusableEngine(rows, V)
    engine.audio = ScriptedAudioEncoder() if hears else None
    return engine


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(engine_of(ROWS, hears=getattr(request, "param", False)), slots=2) as running:
        yield running


@pytest.fixture
def verifier(served: Served) -> Iterator[RemoteVerifier]:
    with RemoteVerifier("127.0.0.1", served.port) as made:
        yield made


def decoder(verifier: RemoteVerifier, *, hears: bool = False) -> SpeculativeDecoder:
    return SpeculativeDecoder(engine_of(HashRows(1, V), hears=hears), verifier, k=3)


def test_the_next_turn_sends_and_computes_only_what_is_new(served: Served, verifier: RemoteVerifier) -> None:
    engine: Any = served.service.engine
    pair = decoder(verifier)
    history = [int(token) for token in np.random.default_rng(0).integers(2, V, 150)]
    first = pair.generate(history, max_new_tokens=8)
    history += [*first.token_ids, 9, 2]
    fed = engine.fed
    second = pair.generate(history, max_new_tokens=8)
    assert second.token_ids == reference_output(ROWS, history, V, max_new_tokens=8)
    assert second.stats.cloud_cached_tokens >= len(history) - 3
    assert engine.fed - fed <= 3 + 4 * second.stats.rounds
    assert second.ledger["up"]["open"] <= first.ledger["up"]["open"] - 100
    assert metric_total(served, "outrider_prefix_cache_hits_total") == second.stats.cloud_cached_tokens
    assert len(engine.open_slots) == 1


@pytest.mark.parametrize("served", [True], indirect=True)
def test_a_follow_up_question_sends_no_recording(served: Served, verifier: RemoteVerifier) -> None:
    engine: Any = served.service.engine
    pair = decoder(verifier, hears=True)
    wave = (np.round(np.sin(np.arange(3200) / 9.0) * 9000) / 32768).astype(np.float32)
    heard = (5, 1, 1, 6)
    first = run(pair, Prompt(heard, wave))
    assert first.stats.media_bytes_up > 0
    second = run(pair, Prompt((*heard, *first.token_ids, 7), wave.copy()))
    assert second.stats.media_bytes_up == 0
    assert engine.media_sent == 1
    other = run(pair, Prompt((*heard, 8), -wave))
    assert other.stats.media_bytes_up > 0
    assert other.stats.cloud_cached_tokens <= 1
    assert engine.media_sent == 2


def run(pair: SpeculativeDecoder, prompt: Prompt) -> Any:
    """Generate from an encoded prompt."""
    pair.encode = lambda _: prompt  # type: ignore[method-assign, assignment]
    result = pair.generate(Audio(b""), max_new_tokens=4)
    assert result.token_ids == reference_output(ROWS, prompt.ids, V, max_new_tokens=4)
    return result


def test_prompts_of_other_salts_are_sent_whole(verifier: RemoteVerifier) -> None:
    pair = decoder(verifier)
    for salt, cached in (("one", False), ("other", False), ("one", True)):
        result = pair.generate(list(PROMPT), max_new_tokens=4, cache_salt=salt)
        assert bool(result.stats.cloud_cached_tokens) is cached
        assert bool(result.stats.edge_cached_tokens) is cached


def test_a_cloud_that_has_forgotten_gets_everything_again(served: Served, verifier: RemoteVerifier) -> None:
    pair = decoder(verifier)
    history = [*PROMPT, *pair.generate(list(PROMPT), max_new_tokens=4).token_ids, 9]
    pair.generate([8, 8, 8], max_new_tokens=4)
    served.restart()
    result = pair.generate(history, max_new_tokens=4)
    assert result.token_ids == reference_output(ROWS, history, V, max_new_tokens=4)
    assert result.stats.cloud_cached_tokens == 0


def test_a_session_that_lost_its_slot_is_computed_again_but_not_sent(served: Served, verifier: RemoteVerifier) -> None:
    pair = decoder(verifier)
    history = [*PROMPT, *pair.generate(list(PROMPT), max_new_tokens=4).token_ids, 9]
    for first in (10, 11, 12):  # two slots
        pair.generate([first, 8, 8], max_new_tokens=4)
    result = pair.generate(history, max_new_tokens=4)
    assert result.token_ids == reference_output(ROWS, history, V, max_new_tokens=4)
    assert result.stats.cloud_cached_tokens == 0


token = st.integers(2, 6)
turn = st.tuples(
    st.integers(0, 2), st.lists(token, min_size=1, max_size=4), st.integers(0, 8), st.integers(1, 5), st.booleans()
)


@settings(max_examples=15, deadline=None)
@given(st.lists(turn, min_size=2, max_size=12), st.sampled_from(["sequential", "pipelined", "cloud-only"]))
def test_conversations_equal_fresh_ones_over_evictions_and_restarts(turns: list[Any], mode: str) -> None:
    limits = Limits(max_sessions=3, max_sessions_per_identity=3)
    with (
        serving(engine_of(ROWS), slots=2, limits=limits) as running,
        RemoteVerifier("127.0.0.1", running.port) as verifier,
    ):
        driver: dict[str, Any] = {} if mode == "cloud-only" else {"driver": mode, "k": 3}
        draft = None if mode == "cloud-only" else engine_of(HashRows(1, V))
        pair = SpeculativeDecoder(draft, verifier, **driver)
        histories: list[list[int]] = [[], [], []]
        for which, new, cut, count, restarts in turns:
            if restarts and len(new) > 2:
                running.restart()
            history = [*histories[which][: len(histories[which]) - cut], *new]
            result = pair.generate(history, max_new_tokens=count)
            assert result.token_ids == reference_output(ROWS, history, V, max_new_tokens=count)
            assert result.guarantee == "exact"
            histories[which] = [*history, *result.token_ids]
        wait_until(lambda: running.service.streams == 0)
        assert len(running.service.engine.open_slots) <= 2  # type: ignore[attr-defined]


# What a cloud refuses --------------------------------------------------------------------------------------------


def kept_session(channel: grpc.Channel) -> bytes:
    """The id of a closed session with the tokens of PROMPT and one more."""
    with RawStream(channel) as stream:
        id_ = stream.opened(open_request(PROMPT))
        stream.verdict(verifying(1, len(PROMPT), ()))
        stream.send(KEEP)
    return id_


def continuing(id_: bytes, length: int, prefix: tuple[int, ...], rest: tuple[int, ...], **changes: Any) -> Any:
    """An opening that continues a session."""
    base = schema.Base(session=id_, length=length, digest=digest(prefix))
    request = open_request(rest, change=change_open(**changes))
    request.open.base.CopyFrom(base)
    request.open.conditioning = digest((*prefix, *rest))
    return request


@pytest.mark.parametrize(
    ("length", "prefix"),
    [(5, (3, 1, 4, 1, 6)), (0, ()), (7, (*PROMPT, 1, 1)), (4, PROMPT)],
    ids=["other tokens", "nothing", "more than it has", "another length"],
)
def test_a_base_with_other_tokens_is_unknown(served: Served, length: int, prefix: tuple[int, ...]) -> None:
    with grpc.insecure_channel(served.address) as channel:
        id_ = kept_session(channel)
        with RawStream(channel) as stream:
            stream.send(continuing(id_, length, prefix, (9,)))
            assert error_name(stream.receive().error.code) == "UNKNOWN_SESSION"
        with RawStream(channel) as stream:  # and the session is still there
            stream.opened(continuing(id_, 5, PROMPT, (9,)))


def test_a_base_is_continued_once(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        id_ = kept_session(channel)
        for known in (True, False):
            with RawStream(channel) as stream:
                stream.send(continuing(id_, 5, PROMPT, (9,)))
                assert (stream.receive().WhichOneof("frame") == "opened") is known


def test_kept_media_need_a_base(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel, RawStream(channel) as stream:
        stream.send(open_request(PROMPT, change=change_open(media=schema.KEPT)))
        assert error_name(stream.receive().error.code) == "INVALID"


def test_a_closed_session_is_kept_only_if_its_edge_asks_for_it(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel, RawStream(channel) as stream:
        stream.opened(open_request(PROMPT))
        stream.verdict(verifying(1, len(PROMPT), ()))
        stream.send(schema.Request(close=schema.Close()))
        wait_until(lambda: not len(served.service.sessions))


def test_the_conditioning_covers_the_shared_tokens(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        id_ = kept_session(channel)
        request = continuing(id_, 5, PROMPT, (9,))
        request.open.conditioning = digest((9,))
        with RawStream(channel) as stream:
            stream.send(request)
            assert error_name(stream.receive().error.code) == "CONDITIONING"


def test_a_session_that_is_dropped_before_its_first_verdict_frees_its_bases_slot(served: Served) -> None:
    engine: Any = served.service.engine
    with grpc.insecure_channel(served.address) as channel:
        id_ = kept_session(channel)
        assert len(engine.open_slots) == 1
        with RawStream(channel) as stream:
            stream.opened(continuing(id_, 5, PROMPT, (9,)))
            stream.send(schema.Request(close=schema.Close()))
            wait_until(lambda: not engine.open_slots)


def test_the_verdicts_of_a_continued_session(served: Served) -> None:
    """Also where it continues one that never got a verdict."""
    expected = target_output(2, (*PROMPT, 9, 8))
    with grpc.insecure_channel(served.address) as channel:
        id_ = kept_session(channel)
        with RawStream(channel) as stream:
            second = stream.opened(continuing(id_, 5, PROMPT, (9,)))
            stream.send(KEEP)
        with RawStream(channel) as stream:
            stream.opened(continuing(second, 6, (*PROMPT, 9), (8,)))
            verdict = stream.verdict(verifying(1, 7, expected[:1]))
    assert (verdict.accepted, verdict.next_token) == (1, expected[1])
    assert verdict.cached == 5
