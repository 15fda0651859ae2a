"""What lies in a server's prefix cache: it makes rounds cheap, its rows are never trusted, and recordings get lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider import Audio, SpeculativeDecoder, load_engine, local
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.engines.load import BUNDLED
from outrider.errors import CloudRefused, SettingsError
from outrider.verifiers.base import SessionParams
from outrider.verifiers.llm_server import session as llm_server_session
from tests.support.fake_llm_server import (
    BLOCK,
    Fault,
    Model,
    connect_servers,
    draft_engine,
    reference_result,
    target_engine,
)
from tests.support.fake_vllm import VllmServer
from tests.support.tiny_models import clip

pytestmark = pytest.mark.network

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
V1 = [{"runner": "v1", "garbage": garbage} for garbage in ("zeros", "random", "lies", "nan")]


def conditions(**options: Any) -> SessionParams:
    return SessionParams(GenerationSettings(**options), "exact", 266)


def met(server: VllmServer, **options: Any) -> Any:
    """A verifier that has compared its tokens with the drafter's."""
    verifier = connect_servers(server, **options)
    SpeculativeDecoder(draft_engine(), verifier)
    return verifier


# Garbage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [0, 45])
@pytest.mark.parametrize("how", [{"cut": True}, {"status": 503}, {"raw": b"{"}, {"delay": 0.5}])
@pytest.mark.parametrize("options", [{"runner": "v2"}, *V1[:3]], ids=str)
def test_after_a_lost_answer_nothing_is_taken_from_the_cache(
    options: dict[str, Any], how: dict[str, Any], token: int
) -> None:
    """The server read the block, and cached it whole: its rows are missing now, or what was in memory."""
    prompt, drafts = tuple(range(20, 49)), (token,) * 5  # 34 tokens, 32 of which are cached
    with VllmServer(Model(target_engine()), **options) as server, met(server, deadline=0.4) as verifier:
        session, near = verifier.open(Prompt(prompt), conditions()), local(target_engine())
        server.faults.append(Fault(GENERATE, **how))
        if how.get("raw"):
            with pytest.raises(CloudRefused, match="cannot be read"):
                verifier.verify(session, Verify(1, len(prompt), (), drafts))
        asked = len(server.asked(GENERATE))
        verdict = verifier.verify(session, Verify(1, len(prompt), (), drafts))
        assert verdict == near.verify(near.open(Prompt(prompt), conditions()), Verify(1, len(prompt), (), drafts))
        last = server.asked(GENERATE)[-1]
        assert last["token_ids"] == [*prompt, *drafts]
        assert last["sampling_params"]["skip_reading_prefix_cache"] is True
        assert len(server.asked(GENERATE)) >= asked + 1


@pytest.mark.parametrize("options", V1, ids=str)
@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_whatever_is_in_memory_the_output_is_the_model_s_own(options: dict[str, Any], driver: Any) -> None:
    """A server whose rows are no JSON at the start is asked prompt by prompt."""
    with VllmServer(Model(target_engine()), max_logprobs=-1, **options) as server, connect_servers(server) as verifier:
        for k, wanted in ((1, {}), (5, {"repetition_penalty": 1.2}), (3, {"temperature": 1.0, "top_k": 9, "seed": 4})):
            decoder = SpeculativeDecoder(draft_engine(), verifier, k=k, driver=driver)
            prompt = list(range(20, 52 + k))
            assert (
                decoder.generate(prompt, max_new_tokens=24, **wanted).token_ids
                == reference_result(prompt, k=k, max_new_tokens=24, **wanted).token_ids
            )
        assert verifier.replicas[0].capabilities.mode == (
            "hybrid" if options["garbage"] == "nan" else "prompt_logprobs"
        )


@pytest.mark.parametrize("options", V1, ids=str)
def test_rows_that_a_token_needs_more_of_are_read_anew(options: dict[str, Any]) -> None:
    """More entries of the same rows: they are all cached by then."""
    sampled = {"temperature": 1.9, "top_p": 0.9, "seed": 2, "max_new_tokens": 24}
    with VllmServer(Model(target_engine()), max_logprobs=-1, **options) as server, connect_servers(server) as verifier:
        result = SpeculativeDecoder(draft_engine(), verifier).generate(list(range(20, 60)), **sampled)
        assert result.token_ids == reference_result(list(range(20, 60)), **sampled).token_ids
        bodies = server.asked(GENERATE if options["garbage"] != "nan" else COMPLETIONS)
        assert len({body.get("logprobs", body.get("sampling_params", {}).get("logprobs")) for body in bodies}) > 2


def test_rows_that_turn_to_nan_later_are_read_anew() -> None:
    with VllmServer(Model(target_engine()), runner="v1") as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier)
        server.garbage = "nan"
        result = decoder.generate(list(range(20, 60)), max_new_tokens=12)
        assert result.token_ids == reference_result(list(range(20, 60)), max_new_tokens=12).token_ids
        assert any("not JSON compliant" in error for error in server.errors)


@pytest.mark.parametrize("rows", [lambda given: given[:1], lambda given: [{"5": {"logprob": 1.0}}] * len(given)])
def test_a_server_that_never_sends_the_rows_is_given_up(rows: Any) -> None:
    def without(answer: Any) -> Any:
        return {**answer, "prompt_logprobs": rows(answer["prompt_logprobs"])}

    with VllmServer(Model(target_engine())) as server, met(server) as verifier:
        server.faults.append(Fault(GENERATE, alter=without, times=99))
        before = len(server.asked(GENERATE))
        with pytest.raises(CloudRefused, match="does not send the rows"):
            SpeculativeDecoder(draft_engine(), verifier).generate(list(range(20, 40)))
        assert len(server.asked(GENERATE)) == before + 3


# Reuse ----------------------------------------------------------------------------------------------------------


def reads(server: VllmServer, length: int, drafts: int) -> list[int]:
    """How many tokens the server reads anew in each of three rounds behind a prompt of so many tokens."""
    prompt, found = tuple(20 + n * 7 % 200 for n in range(length)), []
    with server, met(server) as verifier:
        session, base, new = verifier.open(Prompt(prompt), conditions()), length, 0
        for n in (1, 2, 3):
            before = server.read
            verdict = verifier.verify(session, Verify(n, base, (), tuple(range(50, 50 + drafts))))
            found.append(server.read - before)
            base += verdict.accepted + 1
        assert new == 0
    return found


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_round_reads_no_more_behind_a_long_context_than_a_block(runner: str) -> None:
    for length in (40, 400):
        first, *later = reads(VllmServer(Model(target_engine()), runner=runner), length, 5)
        assert first == length + 5
        assert max(later) <= BLOCK + 6, length


def test_spread_reads_a_block_for_each_prompt_at_most() -> None:
    for length in (40, 400):
        first, *later = reads(VllmServer(Model(target_engine()), scale_out=403), length, 5)
        assert first <= length + 5 + 5 * BLOCK
        assert max(later) <= 6 * (BLOCK + 6), length


def test_a_whole_output_reads_its_prompt_once() -> None:
    prompt = [20 + n * 7 % 200 for n in range(400)]
    with VllmServer(Model(target_engine()), length=700) as server, met(server) as verifier:
        before, asked = server.read, len(server.asked(GENERATE))
        result = SpeculativeDecoder(draft_engine(), verifier, k=3).generate(prompt, max_new_tokens=24, ignore_eos=True)
        assert len(server.asked(GENERATE)) == asked + result.stats.rounds
        assert server.read - before <= 400 + result.stats.rounds * (BLOCK + 4)
        salts = {body["cache_salt"] for body in server.asked(GENERATE)[asked:]}
        assert len(salts) == 1, "what is cached is the session's own"


@pytest.mark.parametrize("options", [{"runner": "v2"}, *V1[:3]], ids=str)
def test_the_next_turn_of_a_conversation_reads_only_what_is_new(options: dict[str, Any]) -> None:
    history = [20 + n * 7 % 200 for n in range(400)]
    alone = SpeculativeDecoder(draft_engine(), local(target_engine()), k=3)
    with VllmServer(Model(target_engine()), length=700, **options) as server, met(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        salts = []
        for turn in range(4):
            before, asked = server.read, len(server.asked(GENERATE))
            result = decoder.generate(history, max_new_tokens=8, ignore_eos=True)
            assert result.token_ids == alone.generate(history, max_new_tokens=8, ignore_eos=True).token_ids
            used = {body["cache_salt"] for body in server.asked(GENERATE)[asked:]}
            assert len(used) == 1
            salts.append(used.pop())
            if turn:
                assert server.read - before <= BLOCK + 30 + result.stats.rounds * (BLOCK + 4)
            history += [*result.token_ids, *(30 + turn for _ in range(24))]
        assert len(set(salts)) == 1
        for prompt, salt in ((history[:300], ""), (history, "another user's")):
            asked = len(server.asked(GENERATE))
            decoder.generate(prompt, cache_salt=salt, max_new_tokens=2, ignore_eos=True)
            assert salts[0] not in {body["cache_salt"] for body in server.asked(GENERATE)[asked:]}


@pytest.mark.parametrize("options", [{}, {"old": True}, {"runner": "v1", "garbage": "random"}], ids=str)
@pytest.mark.parametrize("length", [96, 97, 111])
def test_a_long_text_is_computed_before_its_first_block(
    options: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would come with those of the block, which are all there, at every place in a cache block."""
    monkeypatch.setattr(llm_server_session, "PREFILL_MIN", 95)
    prompt = [20 + n * 7 % 200 for n in range(length)]
    with VllmServer(Model(target_engine()), **options) as server, met(server) as verifier:
        asked = len(server.asked(GENERATE))
        result = SpeculativeDecoder(draft_engine(), verifier, k=3).generate(prompt, max_new_tokens=8, ignore_eos=True)
        first, *blocks = server.asked(GENERATE)[asked:]
        assert first["token_ids"] == prompt[:-1]
        assert "prompt_logprobs" not in first["sampling_params"]
        assert len(blocks) == result.stats.rounds
        assert not any(body["sampling_params"]["skip_reading_prefix_cache"] for body in blocks)
    assert result.token_ids == reference_result(prompt, k=3, max_new_tokens=8, ignore_eos=True).token_ids


def test_a_token_without_drafts_needs_no_rows_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_server_session, "PREFILL_MIN", 0)
    prompt = [20 + n * 7 % 200 for n in range(60)]
    with VllmServer(Model(target_engine())) as server, met(server) as verifier:
        asked = len(server.asked(GENERATE))
        result = SpeculativeDecoder(None, verifier).generate(prompt, max_new_tokens=3)
        bodies = server.asked(GENERATE)[asked:]
        assert len(bodies) == len(result.token_ids)
        assert not any("prompt_logprobs" in body["sampling_params"] for body in bodies)
    assert result.token_ids == reference_result(prompt, max_new_tokens=3).token_ids


def test_sessions_never_share_what_is_cached() -> None:
    with VllmServer(Model(target_engine())) as server, met(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier)
        for _ in range(2):
            before = server.read
            decoder.generate(list(range(20, 60)), max_new_tokens=2)
            assert server.read - before >= 40


# Recordings -----------------------------------------------------------------------------------------------------


def recording(seconds: float = 1.3, loudness: float = 1.0) -> Audio:
    return Audio(clip(seconds) * np.float32(loudness), instruction="hi")


def urls(server: VllmServer) -> list[str | None]:
    """The recordings in requests since the meeting."""
    return [body["content_parts"][0]["url"] for body in server.asked(GENERATE) if "content_parts" in body]


@pytest.mark.parametrize("options", [{}, *V1[:3]], ids=str)
@pytest.mark.parametrize(("loudness", "kind"), [(1.0, "flac"), (4.0, "wav"), (1e-5, "flac")])
def test_a_recording_is_sent_once_and_heard_as_here(options: dict[str, Any], loudness: float, kind: str) -> None:
    target, drafter = target_engine("omni"), draft_engine("omni")
    with VllmServer(Model(target), **options) as server, connect_servers(server) as verifier:
        heard = recording(loudness=loudness)
        result = SpeculativeDecoder(drafter, verifier, k=3, driver="pipelined").generate(heard, max_new_tokens=12)
        assert result.token_ids == reference_result(heard, target, drafter=drafter, k=3, max_new_tokens=12).token_ids
        assert result.guarantee == "exact"
        first, *later = urls(server)
        assert first is not None
        assert first.startswith(f"data:audio/{kind};base64,")
        assert later
        assert later == [None] * len(later)
        assert result.stats.media_bytes_up == len(first)


def test_a_server_that_forgot_the_recording_gets_it_again() -> None:
    target, drafter = target_engine("omni"), draft_engine("omni")
    with VllmServer(Model(target)) as server, connect_servers(server) as verifier:
        stream = SpeculativeDecoder(drafter, verifier, k=3).stream(recording(), max_new_tokens=12, ignore_eos=True)
        tokens = {event.index: event.token_id for event in (next(stream) for _ in range(8))}
        server.media.clear()
        tokens |= {event.index: event.token_id for event in stream}
        wanted = reference_result(recording(), target, drafter=drafter, k=3, max_new_tokens=12, ignore_eos=True)
        assert [tokens[n] for n in range(12)] == wanted.token_ids
        assert len([url for url in urls(server) if url is not None]) == 2
        assert server.errors[-1] == "Cache miss for audio at index 0 but data is not provided."


def test_a_server_that_never_has_the_recording_is_given_up() -> None:
    message = "Cache miss for audio at index 0 but data is not provided."
    with VllmServer(Model(target_engine("omni"))) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier)
        server.faults.append(Fault(GENERATE, 400, message, times=99))
        with pytest.raises(CloudRefused, match="does not send the rows"):
            decoder.generate(recording())


@pytest.mark.parametrize("privacy", ["features", "tokens"])
def test_what_a_server_cannot_be_given_is_refused(privacy: Any) -> None:
    with VllmServer(Model(target_engine("omni"))) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier, privacy=privacy)
        with pytest.raises(SettingsError, match="takes recordings only"):
            decoder.generate(recording())
        assert urls(server) == []


def test_a_recording_for_a_server_that_is_asked_prompt_by_prompt_is_refused() -> None:
    """It would be judged by a model that did not hear it."""
    with VllmServer(Model(target_engine("omni")), scale_out=403) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier)
        with pytest.raises(SettingsError, match="--enable-scale-out"):
            decoder.generate(recording())


def test_a_server_that_makes_other_tokens_of_a_recording_is_refused() -> None:
    def longer(answer: Any) -> Any:
        return {**answer, "usage": {"prompt_tokens": answer["usage"]["prompt_tokens"] + 1}}

    with VllmServer(Model(target_engine("omni"))) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier)
        server.faults.append(Fault(GENERATE, alter=longer))
        with pytest.raises(CloudRefused, match="other audio tokens"):
            decoder.generate(recording())


def test_the_bundled_pair_and_its_clips() -> None:
    target, drafter = load_engine("demo:cloud"), load_engine("demo:edge")
    with VllmServer(Model(target), length=2048) as server, connect_servers(server) as verifier:
        for name, driver in (("en-1", "sequential"), ("zh-1", "pipelined")):
            heard = Audio(BUNDLED / "clips" / f"{name}.ogg", lang=name[:2])
            result = SpeculativeDecoder(drafter, verifier, driver=driver).generate(heard, max_new_tokens=8)
            wanted = reference_result(heard, target, drafter=drafter, k=5, max_new_tokens=8)
            assert (result.token_ids, result.text) == (wanted.token_ids, wanted.text)
