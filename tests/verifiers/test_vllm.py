"""A vLLM server as the verifier: outputs are those of the same model in this process, token for token.

The server is played (tests/support/fake_vllm.py) by a tiny model in float32; the real one's turn is in tests/vllm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from outrider import Grammar, SpeculativeDecoder
from outrider.decoding.sequence import Source
from outrider.errors import CloudRefused, PromptError, SettingsError, VocabularyMismatch
from outrider.verifiers.llm_server.verifier import LlmServerVerifier
from tests.support.fake_llm_server import (
    EOS,
    TOKENS,
    Fault,
    Model,
    connect_servers,
    draft_engine,
    generate,
    reference_result,
    target_engine,
)
from tests.support.fake_vllm import VllmServer
from tests.support.tiny_models import byte_tokenizer

pytestmark = pytest.mark.network

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
WAYS: dict[str, dict[str, Any]] = {
    "prompt_logprobs-v2": {"max_logprobs": -1},
    "prompt_logprobs-v1-lies": {"runner": "v1", "garbage": "lies", "max_logprobs": -1},
    "per_prefix": {"scale_out": 403, "max_logprobs": -1},
    "prompt_logprobs-normalised": {"logits": False, "max_logprobs": 256},
    "per_prefix-normalised": {"logits": False, "scale_out": 404, "max_logprobs": -1},
    "prompt_logprobs-0.24-v2": {"old": True, "logits": False, "max_logprobs": 256},
    "prompt_logprobs-0.24-v1": {"old": True, "runner": "v1", "garbage": "random", "max_logprobs": 256},
}
PROMPTS = ([33], [20, 30, 40, 50], [60, 61, 62] * 6, list(range(20, 63)))
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8, "max_new_tokens": 24},
    "n-gram": {"no_repeat_ngram_size": 2},
    "min-new": {"min_new_tokens": 11},
    "counted": {"frequency_penalty": 0.8, "presence_penalty": 0.5, "max_new_tokens": 24},
    "rewarded": {"frequency_penalty": -0.3, "presence_penalty": -0.4},
    "biased": {"logit_bias": {40: 1.0, 41: -3.0, 200: 0.8}, "temperature": 0.9, "top_k": 8},
    "raised": {"logit_bias": dict.fromkeys(range(77, 90), 3.0), "no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": tuple(range(100, 266, 2)), "ignore_eos": True},
    "top-k": {"temperature": 0.9, "top_k": 8, "seed": 3},
    "top-p": {"temperature": 0.7, "top_p": 0.8, "seed": 4},
    "min-p": {"temperature": 1.2, "min_p": 0.1, "seed": 5, "no_repeat_ngram_size": 3},
    "top-k-p": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "seed": 6, "min_new_tokens": 8},
    "residual": {"temperature": 1.0, "top_k": 10, "seed": 7, "accept": "residual"},
    "grammar": {"grammar": Grammar("regex", "[a-z]{2,6}( [A-Z]+)?"), "max_new_tokens": 14},
    "grammar-json": {"grammar": Grammar("json_object"), "max_new_tokens": 14},
    "grammar-top-k": {"grammar": Grammar("regex", "[a-z]+"), "temperature": 0.9, "top_k": 4, "seed": 8},
    "grammar-forced": {"grammar": Grammar("regex", "one way"), "temperature": 0.9, "top_p": 0.5, "seed": 9},
}


@pytest.fixture(scope="module", params=WAYS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[VllmServer, LlmServerVerifier]]:
    with VllmServer(Model(target_engine()), **WAYS[request.param]) as server, connect_servers(server) as verifier:
        yield server, verifier


def check_equal_results(result: Any, wanted: Any, why: object = "") -> None:
    assert result.token_ids == wanted.token_ids, why
    assert result.finish_reason == wanted.finish_reason, why
    assert result.guarantee == wanted.guarantee, why
    assert result.near_ties == wanted.near_ties, why
    assert not result.stats.cloud_lost, why


def test_a_grammar_that_the_rows_cannot_settle_is_refused_with_the_remedy() -> None:
    """Five entries of a row seldom hold a digit. A single allowed token needs none."""
    options = {"max_logprobs": 5, "logits": False, "old": True}
    with VllmServer(Model(target_engine()), **options) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier)
        with pytest.raises(CloudRefused, match=r"grammar allows none of them: .*max-logprobs.*describe the format"):
            decoder.generate([33], grammar=Grammar("regex", "[0-9]{8}"))
        result = decoder.generate([33], grammar=Grammar("regex", "one way"))
        assert (result.finish_reason, len(result.token_ids)) == ("eos", len("one way") + 1)


# Equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_the_model_s_own(served: tuple[VllmServer, LlmServerVerifier], name: str) -> None:
    server, verifier = served
    options = SETTINGS[name]
    if "repetition_penalty" in options and not server.logits:
        pytest.skip("penalties need logits; refused, see below")
    turn = list(SETTINGS).index(name) + len(server.garbage)
    for n, k in enumerate((1, 3, 5)):
        prompt, driver = PROMPTS[(n + turn) % len(PROMPTS)], ("sequential", "pipelined")[(n + turn) % 2]
        check_equal_results(
            generate(verifier, prompt, k=k, driver=driver, **options),
            reference_result(prompt, k=k, **options),
            (k, driver),
        )


@pytest.mark.parametrize("way", [way for way in WAYS if "normalised" in way or WAYS[way].get("max_logprobs") == -1])
def test_log_probabilities_are_those_of_our_own_cloud(way: str) -> None:
    options: dict[str, Any] = {"k": 4, "logprobs": 5, "max_new_tokens": 12, "logit_bias": {40: 2.0}}
    with VllmServer(Model(target_engine()), **WAYS[way]) as server, connect_servers(server) as verifier:
        for more in ({}, {"temperature": 0.9, "top_k": 8, "seed": 3}):
            result = generate(verifier, PROMPTS[1], **options, **more)
            wanted = reference_result(PROMPTS[1], **options, **more)
            check_equal_results(result, wanted)
            assert len(result.logprobs) == len(result.token_ids)
            for ours, theirs in zip(result.logprobs, wanted.logprobs, strict=True):
                assert ours.token_id == theirs.token_id
                found = [ours.logprob, *(each.logprob for each in ours.top)]
                assert found == pytest.approx([theirs.logprob, *(each.logprob for each in theirs.top)], abs=1e-4)


def test_a_biased_token_that_is_missing_is_asked_for_or_refused() -> None:
    """A bias of 100 makes one token of the vocabulary the next one, wherever it ranks."""
    with (
        VllmServer(Model(target_engine()), max_logprobs=-1) as whole,
        VllmServer(Model(target_engine()), max_logprobs=64) as partial,
        connect_servers(whole) as asked,
        connect_servers(partial) as limited,
    ):
        refusals = []
        for token in range(200, 206):
            options: dict[str, Any] = {"logit_bias": {token: 100.0}, "max_new_tokens": 6}
            wanted = reference_result(PROMPTS[1], k=3, **options)
            assert {*wanted.token_ids} == {token}
            check_equal_results(generate(asked, PROMPTS[1], k=3, **options), wanted)
            try:
                check_equal_results(generate(limited, PROMPTS[1], k=3, **options), wanted)
            except CloudRefused as error:
                refusals.append(str(error))
        assert refusals
        assert all("64 entries of a row" in text and "--max-logprobs 256, or restrict" in text for text in refusals)


def test_each_way_is_found_out(served: tuple[VllmServer, LlmServerVerifier], request: pytest.FixtureRequest) -> None:
    server, verifier = served
    verifier.probe()
    capabilities = verifier.replicas[0].capabilities
    assert capabilities is not None
    assert capabilities.mode == request.node.callspec.params["served"].split("-")[0]
    assert capabilities.normalised is not server.logits
    assert (capabilities.top, capabilities.model, capabilities.max_length, capabilities.noise) == (
        server.max_logprobs,
        "tiny",
        511,
        0.0,
    )


SAMPLED = st.fixed_dictionaries(
    {"temperature": st.floats(0.2, 1.8), "top_k": st.integers(1, 18), "top_p": st.floats(0.3, 1.0)},
    optional={"accept": st.just("residual")},
)
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.05, 1.5, 4.0]),
        "no_repeat_ngram_size": st.integers(1, 4),
        "frequency_penalty": st.sampled_from([0.5, -0.2, 2.0]),
        "presence_penalty": st.sampled_from([1.0, -0.5]),
        "logit_bias": st.dictionaries(
            st.integers(0, 265), st.sampled_from([-100.0, -1.0, 0.5, 4.0, 100.0]), max_size=4
        ),
        "min_new_tokens": st.integers(0, TOKENS),
        "ignore_eos": st.booleans(),
        "suppress_tokens": st.lists(st.integers(10, 265), max_size=40),
        "max_new_tokens": st.integers(TOKENS, 30),
    },
)


@given(
    prompt=st.lists(st.integers(0, 265), min_size=1, max_size=40),
    k=st.integers(1, 8),
    driver=st.sampled_from(["sequential", "pipelined"]),
    sampled=st.just({}) | SAMPLED,
    others=OTHERS,
    drift=st.sampled_from([0.0, 0.05, 0.3]),
)
@hypothesis_settings(max_examples=8)
@pytest.mark.parametrize("served", ["prompt_logprobs-v1-lies", "per_prefix"], indirect=True)
def test_any_prompt_and_any_settings(
    served: tuple[VllmServer, LlmServerVerifier],
    prompt: Any,
    k: int,
    driver: str,
    sampled: Any,
    others: Any,
    drift: float,
) -> None:
    options, drafter = {**sampled, **others}, draft_engine(drift=drift)
    wanted = reference_result(prompt, drafter=drafter, k=k, **options)
    check_equal_results(generate(served[1], prompt, drafter=drafter, k=k, driver=driver, **options), wanted, options)


def test_gates_that_skip_are_audited_alike(served: tuple[VllmServer, LlmServerVerifier]) -> None:
    for gate in ("entropy:3.0", "margin:0.1", "trigger:entropy:3.0"):
        options = {"gate": gate, "k": 3, "max_new_tokens": 30, "ignore_eos": True}
        result, wanted = generate(served[1], PROMPTS[1], **options), reference_result(PROMPTS[1], **options)
        check_equal_results(result, wanted, gate)
        assert (result.stats.audited, result.stats.disagreed) == (wanted.stats.audited, wanted.stats.disagreed)


def test_without_a_drafter_after_a_first_meeting(served: tuple[VllmServer, LlmServerVerifier]) -> None:
    verifier = served[1]
    SpeculativeDecoder(draft_engine(), verifier)
    for name in ("greedy", "n-gram", "top-k"):
        result = SpeculativeDecoder(None, verifier).generate(PROMPTS[1], max_new_tokens=TOKENS, **SETTINGS[name])
        check_equal_results(result, reference_result(PROMPTS[1], **SETTINGS[name]), name)


def test_without_a_drafter_and_without_a_meeting_it_is_said_what_is_missing() -> None:
    with (
        VllmServer(Model(target_engine())) as server,
        connect_servers(server) as verifier,
        pytest.raises(SettingsError, match="give an edge model"),
    ):
        SpeculativeDecoder(None, verifier)


# What cannot be done is refused, with what to change ------------------------------------------------------------


def refused(server: VllmServer, error: type[Exception], match: str, **options: Any) -> None:
    with server, connect_servers(server) as verifier, pytest.raises(error, match=match):
        generate(verifier, options.pop("prompt", PROMPTS[1]), **options)


SAMPLE = {"temperature": 1.0, "seed": 1}


@pytest.mark.parametrize("scale_out", [200, 403])
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (SettingsError, "covers top_k up to 19; start vllm with --max-logprobs 21", {**SAMPLE, "top_k": 20}),
        (SettingsError, "set top_k .up to 19., top_p or min_p, or start vllm with --max-logprobs -1", SAMPLE),
        (CloudRefused, "sends 20 entries of a row, which do not determine.*--max-logprobs", {**SAMPLE, "top_p": 0.999}),
        (CloudRefused, "do not determine the token at position", {"temperature": 9.0, "min_p": 0.01}),
        (
            SettingsError,
            "logprobs: .* sends only 20 logits of a row, without normalisation: start vllm",
            {"logprobs": 0},
        ),
        (SettingsError, "accept rank:3: .*exact and residual work", {"accept": "rank:3"}),
        (SettingsError, "accept margin:0.5", {"accept": "margin:0.5"}),
        (SettingsError, "accept typical:0.1", {"accept": "typical:0.1"}),
    ],
)
def test_settings_that_truncated_rows_cannot_decide_are_refused(
    scale_out: int, error: Any, match: str, options: dict[str, Any]
) -> None:
    refused(VllmServer(Model(target_engine()), scale_out=scale_out), error, match, **options)


def test_the_limit_is_found_to_the_entry_and_what_the_refusal_advises_works() -> None:
    with VllmServer(Model(target_engine()), max_logprobs=31) as server, connect_servers(server) as verifier:
        for top_k, good in ((30, True), (31, False)):
            options = {**SAMPLE, "top_k": top_k}
            if good:
                check_equal_results(generate(verifier, PROMPTS[1], **options), reference_result(PROMPTS[1], **options))
            else:
                with pytest.raises(SettingsError, match="--max-logprobs 32"):
                    generate(verifier, PROMPTS[1], **options)


@pytest.mark.parametrize("options", [{"top_k": 300}, {"top_p": 0.999}, {"top_p": 0.9, "repetition_penalty": 0.5}, {}])
@pytest.mark.parametrize("scale_out", [200, 403])
def test_no_more_entries_are_asked_for_than_a_row_has(scale_out: int, options: dict[str, Any]) -> None:
    """A vocabulary that is smaller than the steps in which one asks for more."""
    with (
        VllmServer(Model(target_engine()), max_logprobs=-1, scale_out=scale_out) as server,
        connect_servers(server) as verifier,
    ):
        wanted = {"temperature": 1.9, "seed": 2, **options}
        check_equal_results(generate(verifier, PROMPTS[1], **wanted), reference_result(PROMPTS[1], **wanted))


def test_a_penalty_needs_logits() -> None:
    server = VllmServer(Model(target_engine()), logits=False)
    refused(server, SettingsError, "--logprobs-mode raw_logits", repetition_penalty=1.1)


def test_a_limit_of_one_entry_is_refused() -> None:
    refused(VllmServer(Model(target_engine()), max_logprobs=1), CloudRefused, "max allowed: 1|--max-logprobs")


def test_a_busy_server_is_not_taken_for_a_narrow_one() -> None:
    with VllmServer(Model(target_engine()), max_logprobs=-1) as server, connect_servers(server) as verifier:
        server.faults.append(Fault(GENERATE, 429, headers=(("retry-after", "0.01"),), skip=3))
        check_equal_results(generate(verifier, PROMPTS[1], **SAMPLE), reference_result(PROMPTS[1], **SAMPLE))


def test_a_prompt_that_is_too_long() -> None:
    server = VllmServer(Model(target_engine()), length=90)
    prompt = list(range(20, 100))
    refused(server, PromptError, "holds 89", prompt=prompt, max_new_tokens=10)
    with server, connect_servers(server) as verifier:
        options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
        check_equal_results(generate(verifier, prompt, **options), reference_result(prompt, **options))


class Renamed:
    """A tokenizer with another word for one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, tokens: list[int], **options: Any) -> str:
        parts = [f"<{t}?>" if t == self.token else byte_tokenizer().decode([t], **options) for t in tokens]
        return byte_tokenizer().decode(tokens, **options) if self.token not in tokens else "".join(parts)


@pytest.mark.parametrize("token", [0, 43, 132, 265])
def test_the_first_token_that_differs_is_named(token: int) -> None:
    ours = byte_tokenizer().decode([token])
    server = VllmServer(Model(target_engine(), tokenizer=Renamed(token)))
    refused(server, VocabularyMismatch, f"token {token} is {ours!r} in the first and '<{token}.>' in the second")


def test_a_drafter_without_a_tokenizer_cannot_be_compared() -> None:
    from tests.support.tiny_models import tiny_engine

    bare = tiny_engine("qwen2", vocab=266)
    refused(VllmServer(Model(target_engine())), VocabularyMismatch, "without a tokenizer", drafter=bare)


# Ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_out", [200, 403])
@pytest.mark.parametrize("ours", [(99,), ()])
def test_an_end_that_only_the_server_knows_is_refused(scale_out: int, ours: tuple[int, ...]) -> None:
    """As soon as it comes behind a block that was accepted: only there the server says that it would end."""
    open_ended = reference_result(PROMPTS[1], target_engine(eos=()), drafter=draft_engine(eos=()), k=1)
    said_so = zip(open_ended.token_ids, open_ended.sources, strict=True)
    token = next(token for token, source in said_so if source is Source.BONUS)
    target, drafter = target_engine(eos=(99, token)), draft_engine(eos=ours)
    server = VllmServer(Model(target), scale_out=scale_out)
    refused(server, CloudRefused, f"ends its output at token {token}", drafter=drafter, k=1)
    with server, connect_servers(server) as verifier:
        options: dict[str, Any] = {"drafter": drafter, "k": 1, "ignore_eos": True}
        check_equal_results(generate(verifier, PROMPTS[1], **options), reference_result(PROMPTS[1], target, **options))


@pytest.mark.parametrize("scale_out", [200, 403])
def test_an_end_that_only_the_drafter_knows_is_none(scale_out: int) -> None:
    token = reference_result(PROMPTS[1], target_engine(eos=()), drafter=draft_engine(eos=())).token_ids[3]
    drafter, target = draft_engine(eos=(token, *EOS)), target_engine(eos=EOS)
    with VllmServer(Model(target), scale_out=scale_out) as server, connect_servers(server) as verifier:
        check_equal_results(
            generate(verifier, PROMPTS[1], drafter=drafter), reference_result(PROMPTS[1], target, drafter=drafter)
        )
        assert verifier.describe().eos_ids == EOS
