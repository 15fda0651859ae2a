"""Log-probabilities: those of transformers' own forward pass, of the side that decided the token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import Result, SpeculativeDecoder, connect, local, prompt_lookup
from outrider.decoding.sequence import Source
from tests.support.cloud_server import serving
from tests.support.fakes import exhaust
from tests.support.tiny_models import VOCAB, subword_tokenizer, tiny_engine, tiny_model

PROMPT = (2, 33, 44, 55)
TOLERANCE = 1e-4
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_k": 12, "seed": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {40: 3.0}},
    {"temperature": 1.4, "top_p": 0.8, "seed": 3, "suppress_tokens": tuple(range(10, 30))},
)


def log_softmax(model: Any, prompt: tuple[int, ...], output: list[int]) -> torch.Tensor:
    """float32 [output, V]: one forward pass over the whole sequence, in transformers."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        return torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)


def check(result: Result, rows: dict[bool, torch.Tensor], top: int) -> None:
    """Compare with the rows of the target (True) and of the drafter (False)."""
    assert [each.token_id for each in result.logprobs] == result.token_ids
    for n, (found, source) in enumerate(zip(result.logprobs, result.sources, strict=True)):
        row = rows[source.by_cloud][n]
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)
        assert len(found.top) == min(top, VOCAB)
        best = row.topk(len(found.top)).values.tolist()
        assert [each.logprob for each in found.top] == pytest.approx(best, abs=TOLERANCE)
        assert [float(row[each.token_id]) for each in found.top] == pytest.approx(best, abs=TOLERANCE)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_they_are_the_targets_wherever_it_runs(family: str, options: dict[str, Any]) -> None:
    draft, target = tiny_engine(family, drift=0.05), tiny_engine(family)
    plain = SpeculativeDecoder(draft, local(target), k=3).generate(list(PROMPT), max_new_tokens=20, **options)
    assert plain.logprobs == []
    rows = {True: log_softmax(tiny_model(family), PROMPT, plain.token_ids)}
    with serving(tiny_engine(family)) as served, connect(f"grpc://{served.address}") as cloud:
        for verifier, drafter, own in (
            (local(target), draft, {"k": 3}),
            (cloud, draft, {"k": 5, "driver": "pipelined"}),
            (cloud, draft, {"k": "auto", "gate": "trigger:entropy:2"}),
            (local(target), None, {}),
            (cloud, None, {}),
        ):
            decoder = SpeculativeDecoder(drafter, verifier, **own)
            for top in (0, 4):
                result = decoder.generate(list(PROMPT), max_new_tokens=20, logprobs=top, **options)
                assert result.token_ids == plain.token_ids
                check(result, rows, top)


def test_the_drafters_are_reported_where_it_alone_spoke() -> None:
    draft, target = tiny_engine("qwen2", drift=0.05), tiny_engine("qwen2")
    for gate, scope in (("entropy:3.5", "block"), ("entropy:3.5", "repair"), ("never", "block")):
        decoder = SpeculativeDecoder(draft, local(target), k=3, gate=gate, scope=scope)
        result = decoder.generate(list(PROMPT), max_new_tokens=40, logprobs=2)
        rows = {
            True: log_softmax(tiny_model("qwen2"), PROMPT, result.token_ids),
            False: log_softmax(tiny_model("qwen2", drift=0.05), PROMPT, result.token_ids),
        }
        check(result, rows, 2)
        assert Source.EDGE in result.sources
        assert gate == "never" or any(source.by_cloud for source in result.sources)
    alone = SpeculativeDecoder(draft, on_loop="ignore").generate(list(PROMPT), max_new_tokens=12, logprobs=20)
    check(alone, {False: log_softmax(tiny_model("qwen2", drift=0.05), PROMPT, alone.token_ids)}, 20)


def test_rejection_sampling_reports_them_too() -> None:
    draft, target = tiny_engine("qwen2", drift=0.1), tiny_engine("qwen2")
    decoder = SpeculativeDecoder(draft, local(target), k=4, accept="residual")
    result = decoder.generate(list(PROMPT), max_new_tokens=30, temperature=1.0, logprobs=3)
    check(result, {True: log_softmax(tiny_model("qwen2"), PROMPT, result.token_ids)}, 3)


def test_a_stream_s_last_event_of_a_token_has_the_result_s() -> None:
    tokenizer = subword_tokenizer()
    draft = tiny_engine("qwen2", drift=0.1, tokenizer=tokenizer)
    decoder = SpeculativeDecoder(draft, local(tiny_engine("qwen2", tokenizer=tokenizer)), k=4, gate="trigger:never")
    stream = decoder.stream(list(PROMPT), max_new_tokens=20, logprobs=2, suppress_tokens=tuple(range(10)))
    last = {}
    try:
        while True:
            event = next(stream)
            last[event.index] = event.logprob
    except StopIteration as end:
        result = end.value
    assert [last[n] for n in range(20)] == result.logprobs
    texts = [each.text for each in result.logprobs]
    assert "".join(texts).strip() == (result.text or "").strip()
    assert all(each.data is not None for each in result.logprobs)
    assert exhaust(decoder.stream(list(PROMPT), max_new_tokens=2)).logprobs == []


@pytest.mark.parametrize("with_model", [True, False])
def test_looked_up_drafts_are_the_targets_once_verified(with_model: bool) -> None:
    prompt, target = (40, 41, 42, 40, 41, 42, 40, 41), tiny_engine("qwen2")
    lookup = prompt_lookup()
    sources: Any = {"draft": tiny_engine("qwen2", drift=0.05), "lookup": lookup} if with_model else {"draft": lookup}
    decoder = SpeculativeDecoder(**sources, verifier=local(target), k=4)
    result = decoder.generate(list(prompt), max_new_tokens=24, logprobs=3)
    check(result, {True: log_softmax(tiny_model("qwen2"), prompt, result.token_ids)}, 3)
