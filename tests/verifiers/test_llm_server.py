"""Serving engines that fail: what is tried again, what is refused and how, replicas, and the books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from outrider import SpeculativeDecoder
from outrider.decoding.actions import Verify
from outrider.edge import model_pair
from outrider.engines.base import Prompt
from outrider.errors import CloudError, CloudLost, CloudRefused, OutriderError, PromptError, SettingsError, StateError
from outrider.verifiers.base import SessionParams
from outrider.verifiers.llm_server import replicas
from tests.support.fake_llm_server import Fault, Model, connect_servers, draft_engine, reference_result, target_engine
from tests.support.fake_vllm import VllmServer
from tests.support.processes import HANG_S, wait_until

pytestmark = pytest.mark.network

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
PROMPT = [20, 30, 40, 50]
SOON = (("retry-after", "0.01"),)

connect_patiently = partial(connect_servers, patience=HANG_S, deadline=HANG_S)


def generate_tokens(decoder: SpeculativeDecoder, prompt: Any = PROMPT, **options: Any) -> list[int]:
    return decoder.generate(prompt, max_new_tokens=12, ignore_eos=True, **options).token_ids


def reference_tokens(prompt: Any = PROMPT, **options: Any) -> list[int]:
    return reference_result(prompt, max_new_tokens=12, ignore_eos=True, **options).token_ids


@pytest.fixture
def server() -> Iterator[VllmServer]:
    with VllmServer(Model(target_engine())) as running:
        yield running


# Faults ---------------------------------------------------------------------------------------------------------

PASSING: dict[str, dict[str, Any]] = {
    "busy": {"status": 429, "headers": SOON},
    "busy-without-a-time": {"status": 429},
    "busy-until-a-date": {"status": 429, "headers": (("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"),)},
    "failed": {"status": 500},
    "failed-unread": {"status": 500, "drop": True, "raw": b"Internal Server Error"},
    "overloaded": {"status": 503, "headers": SOON, "times": 3},
    "slow": {"delay": 1.5},
    "cut": {"cut": True},
    "cut-twice": {"cut": True, "times": 2},
    "not-what-it-says-it-is": {"headers": (("content-encoding", "gzip"),)},
}


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_transient_failures_are_retried(server: VllmServer, name: str, driver: Any) -> None:
    with connect_patiently(server, deadline=1.0 if name == "slow" else HANG_S) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3, driver=driver)
        server.faults.append(Fault(GENERATE, skip=2, **PASSING[name]))
        assert generate_tokens(decoder) == reference_tokens(k=3)
        assert server.faults[0].times == 0, "it did happen"


def test_a_busy_server_is_asked_when_it_says(server: VllmServer) -> None:
    with connect_patiently(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier)
        server.faults.append(Fault(GENERATE, 429, headers=(("retry-after", "0.4"),)))
        started, before = time.monotonic(), len(server.requests)
        assert decoder.generate(PROMPT, max_new_tokens=1).token_ids == reference_tokens()[:1]
        assert time.monotonic() - started >= 0.4
        assert len(server.requests) - before == 2, "it was not away: nothing to find out again"


REFUSED: dict[str, tuple[dict[str, Any], type[OutriderError], str]] = {
    "no-json": ({"raw": b'{"choices": ['}, CloudRefused, "cannot be read"),
    "html": ({"raw": b"<html>"}, CloudRefused, "cannot be read"),
    "a-list": ({"raw": b"[]"}, CloudRefused, "cannot be read"),
    "empty": ({"raw": b""}, CloudRefused, "cannot be read"),
    "no-choice": ({"alter": lambda a: {**a, "choices": []}}, CloudRefused, "cannot be read"),
    "two-choices": ({"alter": lambda a: {**a, "choices": a["choices"] * 2}}, CloudRefused, "cannot be read"),
    "no-rows": (
        {"alter": lambda a: {**a, "prompt_logprobs": None}, "times": 9},
        CloudRefused,
        "does not send the rows",
    ),
    "texts": (
        {"alter": lambda a: {**a, "prompt_logprobs": [" ".join(map(str, range(266)))] * 9}},
        CloudRefused,
        "cannot be read",
    ),
    "huge": (
        {
            "alter": lambda a: {
                **a,
                "prompt_logprobs": [{**r, str(2**70): {"logprob": 1}} if r else r for r in a["prompt_logprobs"]],
            }
        },
        CloudRefused,
        "cannot be read",
    ),
    "another-prompt": ({"alter": lambda a: {**a, "usage": {"prompt_tokens": 3}}}, CloudRefused, "makes 3 tokens"),
    "bad": ({"status": 400, "message": "no"}, CloudRefused, r"no \(HTTP 400\)"),
    "gone": ({"status": 404}, CloudRefused, "HTTP 404"),
    "forbidden": ({"status": 403, "message": "not you"}, CloudRefused, "not you; it may want a token"),
    "unknown": ({"status": 401}, CloudRefused, "it may want a token"),
    "too-long": (
        {"status": 400, "message": "This model's maximum context length is 5 tokens."},
        PromptError,
        "maximum context length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_permanent_failures_are_not_retried(server: VllmServer, name: str) -> None:
    fault, error, match = REFUSED[name]
    with connect_patiently(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, on_cloud_loss="edge-only")
        server.faults.append(Fault(GENERATE, skip=1, **fault))
        with pytest.raises(error, match=match):
            generate_tokens(decoder)
        server.faults.clear()
        assert generate_tokens(decoder) == reference_tokens(), "the next output is none the worse"


STRANGE = [
    b"{}",
    b"[]",
    b"null",
    b"<html>",
    b'{"data": null}',
    b'{"data": [5]}',
    b'{"data": [{"id": 5}], "choices": []}',
    b'{"data": [{"id": "x", "max_model_len": "long"}], "prompt": 5, "choices": [{}]}',
    b'{"prompt": null}',
]


@pytest.mark.parametrize("path", ["/v1/models", "/detokenize", GENERATE, COMPLETIONS])
@pytest.mark.parametrize("raw", STRANGE)
def test_another_http_service_is_refused_by_name(server: VllmServer, path: str, raw: bytes) -> None:
    """Whatever answers 200 with something else, at any step of the meeting."""
    server.faults.append(Fault(path, raw=raw, times=99))
    server.scale_out = 200 if path != COMPLETIONS else 403
    with connect_patiently(server, patience=0.2) as verifier:
        if path == GENERATE:  # then it is asked prompt by prompt
            assert SpeculativeDecoder(draft_engine(), verifier).verifier is verifier
            assert verifier.replicas[0].capabilities.mode == "per_prefix"
        else:
            with pytest.raises((CloudRefused, OutriderError), match=r"127\.0\.0\.1|vllm"):
                SpeculativeDecoder(draft_engine(), verifier)


def test_a_server_that_requires_a_token_is_named() -> None:
    with VllmServer(Model(target_engine()), key="secret") as server:
        for given in ({}, {"token": "wrong"}):
            with connect_patiently(server, **given) as verifier, pytest.raises(CloudRefused, match="Unauthorized; "):
                verifier.probe()
        with connect_patiently(server, token="secret") as verifier:
            assert generate_tokens(SpeculativeDecoder(draft_engine(), verifier)) == reference_tokens()


def test_sessions_that_are_closed_and_verifiers_that_are_disconnected(server: VllmServer) -> None:
    verifier = connect_patiently(server)
    SpeculativeDecoder(draft_engine(), verifier)
    session = verifier.open(Prompt(tuple(PROMPT)), conditions())
    request = Verify(1, len(PROMPT), (), (5, 6))
    assert verifier.verify(session, request) == verifier.verify(session, request), "a repeat is answered from memory"
    verifier.close(session)
    verifier.close(session)
    with pytest.raises(StateError, match="not open"):
        verifier.verify(session, request)
    other = verifier.open(Prompt(tuple(PROMPT)), conditions())
    server.faults.append(Fault(GENERATE, delay=1.0))
    before = len(server.requests)
    waiting = verifier.submit(other, request)
    wait_until(lambda: len(server.requests) > before)
    verifier.disconnect()
    with pytest.raises(CloudError, match="was disconnected"):
        waiting.result()
    verifier.disconnect()


def conditions() -> SessionParams:
    from outrider.config import GenerationSettings

    return SessionParams(GenerationSettings(), "exact", 266)


# The cloud is lost ----------------------------------------------------------------------------------------------


def midway(decoder: SpeculativeDecoder, then: Callable[[], object]) -> Any:
    """The result of an output in the middle of which something happens."""
    stream = decoder.stream(PROMPT, max_new_tokens=24, ignore_eos=True)
    for _ in range(8):
        next(stream)
    then()
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_on_cloud_loss_fail_raises(server: VllmServer, driver: Any) -> None:
    with connect_patiently(server, patience=0.3) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3, driver=driver)
        with pytest.raises(CloudLost, match=r"cannot be reached: .*tried for 0\.3 s"):
            midway(decoder, server.stop)
        server.start()
        assert generate_tokens(decoder) == reference_tokens()


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_on_cloud_loss_edge_only_continues_without_the_server(
    server: VllmServer, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pair, "BRIEF_OUTAGE_S", HANG_S)  # the next generation asks the server again
    with connect_patiently(server, patience=0.3) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3, driver=driver, on_cloud_loss="edge-only")
        result = midway(decoder, server.stop)
        decided = result.stats.cloud_tokens
        assert result.stats.cloud_lost
        assert 0 < decided < 24
        assert len(result.token_ids) == 24
        assert (
            result.token_ids[:decided]
            == reference_result(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids[:decided]
        )
        assert result.guarantee != "exact"
        server.start()
        assert generate_tokens(decoder) == reference_tokens()


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_on_cloud_loss_wait_continues_after_the_restart(server: VllmServer, driver: Any) -> None:
    with connect_patiently(server, patience=0.2) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3, driver=driver, on_cloud_loss="wait")

        def away() -> None:
            server.stop()
            threading.Timer(0.7, server.start).start()

        result = midway(decoder, away)
        assert result.token_ids == reference_result(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
        assert result.guarantee == "exact"


def test_a_server_that_is_not_there_yet(server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pair, "BRIEF_OUTAGE_S", HANG_S)  # the next generation asks the server again
    server.stop()
    with connect_patiently(server, patience=0.2) as verifier:
        with pytest.raises(CloudLost):
            SpeculativeDecoder(draft_engine(), verifier)
        decoder = SpeculativeDecoder(draft_engine(), verifier, on_cloud_loss="edge-only")
        assert decoder.generate(PROMPT, max_new_tokens=4).stats.cloud_lost
        server.start()
        result = decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        assert (result.token_ids, result.guarantee) == (reference_tokens(), "exact")


@pytest.mark.parametrize(
    ("name", "match"), [("tiny", "serves other weights"), ("giant", "serves giant, not tiny as before")]
)
def test_another_model_at_the_same_address_is_never_mixed_in(server: VllmServer, name: str, match: str) -> None:
    def restart() -> None:
        server.stop()
        server.name, server.model = name, Model(target_engine(seed=5))
        threading.Timer(0.3, server.start).start()

    with connect_patiently(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3, on_cloud_loss="wait")
        with pytest.raises(CloudRefused, match=match):
            midway(decoder, restart)


@pytest.mark.parametrize("changed", [{"model": Model(target_engine(seed=5))}, {"logits": False}])
def test_a_changed_server_after_a_restart_is_refused(server: VllmServer, changed: dict[str, Any]) -> None:
    with connect_patiently(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier)
        server.stop()
        vars(server).update(changed)
        server.start()
        with pytest.raises((CloudRefused, SettingsError)):
            generate_tokens(decoder, repetition_penalty=1.3)


# Replicas -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[VllmServer, VllmServer]]:
    with VllmServer(Model(target_engine())) as one, VllmServer(Model(target_engine())) as two:
        yield one, two


def finish(streams: list[Any]) -> list[Any]:
    """Run all streams to their ends in turns."""
    results: list[Any] = [None] * len(streams)
    while None in results:
        for n, stream in enumerate(streams):
            if results[n] is None:
                try:
                    next(stream)
                except StopIteration as end:
                    results[n] = end.value
    return results


def test_twelve_outputs_while_one_of_two_replicas_stops(pair: tuple[VllmServer, VllmServer]) -> None:
    prompts = [[20 + n, 30, 40 + n, 50] for n in range(12)]
    with connect_patiently(*pair) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        streams = [decoder.stream(prompt, max_new_tokens=24, ignore_eos=True) for prompt in prompts]
        for stream in streams:
            for _ in range(8):
                next(stream)
        ours, others = (set(server.sessions) for server in pair)
        assert ours
        assert others
        assert not ours & others, "a session stays where its tokens are"
        heard = len(pair[1].requests)
        pair[0].stop()
        results = finish(streams)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == reference_result(prompt, max_new_tokens=24, ignore_eos=True).token_ids, prompt
            assert result.guarantee == "exact"
        assert set(pair[1].sessions) == ours | others, "who was with the first moved to the second"
        undisturbed = [
            body for path, body in pair[1].requests[heard:] if path == GENERATE and body["cache_salt"] in others
        ]
        assert undisturbed
        assert not any(body["sampling_params"]["skip_reading_prefix_cache"] for body in undisturbed)


def test_a_replica_that_comes_back_is_used_again(
    pair: tuple[VllmServer, VllmServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "AVOID_SECONDS", 0.05)
    with connect_patiently(*pair) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        midway(decoder, pair[0].stop)
        for _ in range(4):
            assert generate_tokens(decoder) == reference_tokens()
        pair[0].start()
        pair[0].requests.clear()

        def used_again() -> bool:
            assert generate_tokens(decoder) == reference_tokens()
            return bool(pair[0].asked(GENERATE))

        wait_until(used_again)


def test_a_busy_replica_is_waited_for_where_the_session_is(pair: tuple[VllmServer, VllmServer]) -> None:
    with connect_patiently(*pair) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)

        def busy() -> None:
            for server in pair:
                server.faults.append(Fault(GENERATE, 429, headers=SOON, times=2))

        result = midway(decoder, busy)
        assert result.token_ids == reference_result(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
        assert sum(bool(server.sessions) for server in pair) == 1


@pytest.mark.parametrize("swapped", [{"name": "giant"}, {"length": 256}])
def test_replicas_serve_one_model(swapped: dict[str, Any]) -> None:
    with (
        VllmServer(Model(target_engine())) as one,
        VllmServer(Model(target_engine()), **swapped) as two,
        connect_patiently(one, two) as verifier,
    ):
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        with pytest.raises(CloudRefused, match=r"serves .* as before"):
            any(generate_tokens(decoder, [20 + n]) == [] for n in range(32))


def test_replicas_may_differ_in_how_they_are_asked() -> None:
    ways: list[dict[str, Any]] = [{"runner": "v1"}, {"scale_out": 403}, {"max_logprobs": 5}]
    servers = [VllmServer(Model(target_engine()), **options) for options in ways]
    with servers[0], servers[1], servers[2], connect_patiently(*servers) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        for n in range(24):
            assert generate_tokens(decoder, [20 + n]) == reference_tokens([20 + n])
        assert all(server.sessions for server in servers)
