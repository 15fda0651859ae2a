"""An SGLang server as the verifier. SGLang itself was not run: it needs a GPU. It is played after its documents."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import SpeculativeDecoder
from outrider.errors import CloudRefused, OutriderError, PromptError, SettingsError
from tests.support.fake_llm_server import (
    EOS,
    Fault,
    Model,
    connect_servers,
    draft_engine,
    generate,
    reference_result,
    target_engine,
)
from tests.support.fake_sglang import SglangServer

pytestmark = pytest.mark.network

GENERATE = "/generate"
PROMPT = [20, 30, 40, 50]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "n-gram": {"no_repeat_ngram_size": 2},
    "min-new": {"min_new_tokens": 11},
    "counted": {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    "biased": {"logit_bias": {40: 1.0, 41: -3.0, 200: 0.8}, "presence_penalty": -0.3},
    "top-k": {"temperature": 0.9, "top_k": 8, "seed": 3},
    "top-p": {"temperature": 0.7, "top_p": 0.8, "seed": 4},
    "residual": {"temperature": 1.0, "top_k": 10, "seed": 7, "accept": "residual"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_the_model_s_own(name: str) -> None:
    with SglangServer(Model(target_engine())) as server, connect_servers(server) as verifier:
        for n, k in enumerate((1, 3, 5)):
            prompt, driver = [20 + n, 30, *range(40, 60)], ("sequential", "pipelined")[n % 2]
            result, wanted = (
                generate(verifier, prompt, k=k, driver=driver, **SETTINGS[name]),
                reference_result(prompt, k=k, **SETTINGS[name]),
            )
            assert (result.token_ids, result.guarantee) == (wanted.token_ids, wanted.guarantee)
            assert result.finish_reason == wanted.finish_reason
        assert not server.errors
        assert all(len(body["input_ids"]) > 1 for body in server.asked(GENERATE))


def test_without_a_drafter_after_a_first_meeting() -> None:
    with SglangServer(Model(target_engine())) as server, connect_servers(server) as verifier:
        SpeculativeDecoder(draft_engine(), verifier)
        result = SpeculativeDecoder(None, verifier).generate(PROMPT, max_new_tokens=12)
        assert result.token_ids == reference_result(PROMPT).token_ids
        assert verifier.describe().max_length == 511
        assert verifier.describe().eos_ids == EOS


def test_rows_are_wanted_from_the_last_token_before_the_drafts_on() -> None:
    with SglangServer(Model(target_engine())) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        before, read = len(server.asked(GENERATE)), server.read
        prompt = [20 + n * 7 % 200 for n in range(300)]
        result = decoder.generate(prompt, max_new_tokens=12, ignore_eos=True)
        bodies = server.asked(GENERATE)[before:]
        assert len(bodies) == result.stats.rounds
        assert all(1 <= len(body["input_ids"]) - body["logprob_start_len"] <= 4 for body in bodies)
        assert server.read - read <= 300 + result.stats.rounds * (16 + 4)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (SettingsError, "needs logits", {"repetition_penalty": 1.2}),
        (SettingsError, "top_k 1024", {"temperature": 1.0, "top_k": 1024}),
        (SettingsError, "whole vocabulary", {"temperature": 1.0}),
        (SettingsError, "exact and residual work", {"accept": "rank:3"}),
    ],
)
def test_what_cannot_be_done_is_refused(error: type[Exception], match: str, options: dict[str, Any]) -> None:
    with (
        SglangServer(Model(target_engine())) as server,
        connect_servers(server) as verifier,
        pytest.raises(error, match=match),
    ):
        generate(verifier, PROMPT, **options)


def test_rows_that_are_no_log_probabilities_are_refused() -> None:
    with (
        SglangServer(Model(target_engine()), logits=True) as server,
        connect_servers(server) as verifier,
        pytest.raises(CloudRefused, match="no log-probabilities"),
    ):
        verifier.probe()


def test_an_end_that_only_the_server_knows_is_refused() -> None:
    token = reference_result(PROMPT, target_engine(eos=()), drafter=draft_engine(eos=())).token_ids[0]
    with SglangServer(Model(target_engine(eos=(99, token)))) as server, connect_servers(server) as verifier:
        SpeculativeDecoder(draft_engine(eos=(99,)), verifier)
        alone = SpeculativeDecoder(None, verifier)
        with pytest.raises(CloudRefused, match=f"ends its output at token {token}"):
            alone.generate(PROMPT, max_new_tokens=1)


def test_recordings_are_refused() -> None:
    from outrider import Audio
    from tests.support.tiny_models import clip

    with SglangServer(Model(target_engine("omni"))) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine("omni"), verifier)
        with pytest.raises(SettingsError, match="use vllm or our own cloud"):
            decoder.generate(Audio(clip(1.3), instruction="hi"), max_new_tokens=4)


@pytest.mark.parametrize(
    "fault",
    [{"status": 429, "headers": (("retry-after", "0.01"),)}, {"status": 503}, {"cut": True}, {"delay": 0.6}],
    ids=str,
)
def test_transient_failures_are_retried(fault: dict[str, Any]) -> None:
    with SglangServer(Model(target_engine())) as server, connect_servers(server, deadline=0.5) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        server.faults.append(Fault(GENERATE, skip=1, **fault))
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == reference_result(PROMPT).token_ids
        assert server.faults[0].times == 0


def _other(answer: Any) -> Any:
    meta = answer["meta_info"]
    return {**answer, "meta_info": {**meta, "input_token_logprobs": meta["input_token_logprobs"][:-1]}}


@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        ({"raw": b"{"}, CloudRefused, "cannot be read"),
        ({"alter": lambda answer: {**answer, "meta_info": None}}, CloudRefused, "cannot be read"),
        ({"alter": _other}, CloudRefused, "not of the drafts"),
        ({"status": 400, "message": "no"}, CloudRefused, "no"),
        ({"status": 400, "message": "longer than the model's context length"}, PromptError, "context length"),
    ],
)
def test_permanent_failures_are_not_retried(fault: dict[str, Any], error: type[Exception], match: str) -> None:
    with SglangServer(Model(target_engine())) as server, connect_servers(server) as verifier:
        decoder = SpeculativeDecoder(draft_engine(), verifier, k=3)
        server.faults.append(Fault(GENERATE, **fault))
        with pytest.raises(error, match=match):
            decoder.generate(PROMPT, max_new_tokens=12)


@pytest.mark.parametrize("path", ["/get_model_info", "/get_server_info", GENERATE, "/v1/detokenize"])
@pytest.mark.parametrize("raw", [b"<html>", b'{"model_path": "x", "context_length": "long", "meta_info": 5}'])
def test_another_http_service_is_refused_by_name(path: str, raw: bytes) -> None:
    with SglangServer(Model(target_engine())) as server, connect_servers(server, patience=0.2) as verifier:
        server.faults.append(Fault(path, raw=raw, times=99))
        if (path, raw) == ("/get_server_info", b"<html>") or (path == "/get_model_info" and raw[:1] == b"{"):
            verifier.probe()  # it says no length; it has another name
            return
        with pytest.raises(OutriderError, match=r"127\.0\.0\.1|sglang"):
            SpeculativeDecoder(draft_engine(), verifier)
