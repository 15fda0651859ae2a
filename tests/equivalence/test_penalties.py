"""Frequency and presence penalty and logit biases: the tokens of an independent loop, whatever drafts and verifies.

The reference is written in numpy, from vLLM's definition: bias, repetition penalty, frequency penalty, presence
penalty, in this order, counts over the output alone. Sampling adds the seeded Gumbel noise of `sampling/sampler.py`.
Every comparison runs with a verifier in this process, with a cloud over gRPC, and without a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SpeculativeDecoder, connect, local
from outrider.errors import SettingsError
from outrider.sampling.sampler import uniforms
from tests.support.cloud_server import serving
from tests.support.fakes import HashRows, OracleEngine, Rows, ScriptedEngine, blend
from tests.support.tiny_models import VOCAB, reference, tiny_engine, tiny_model

V = 24  # few tokens, so that they come again
PROMPT = (3, 1, 4, 1, 5)
TARGET, OTHER = HashRows(1, V), HashRows(2, V)
BIASES = st.sampled_from([-100.0, -2.5, 0.5, 3.0, 100.0])

processors = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([0.4, 1.3, 2.0, -0.5, -2.0]),
        "presence_penalty": st.sampled_from([0.7, 2.0, -0.3, -1.5]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), BIASES, max_size=5),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
    },
)
samplings = st.sampled_from([{}, {}, {"temperature": 1.0}, {"temperature": 0.7, "seed": 2**64 - 1}])


def by_numpy(rows: Rows, prompt: tuple[int, ...], count: int, options: dict[str, Any]) -> list[int]:
    """Decode token by token, with every processor written out."""
    ids, f32 = list(prompt), np.float32
    penalty, temperature = f32(options.get("repetition_penalty", 1.0)), options.get("temperature", 0.0)
    frequency, presence = f32(options.get("frequency_penalty", 0.0)), f32(options.get("presence_penalty", 0.0))
    while len(ids) < len(prompt) + count:
        logits = rows(tuple(ids)).numpy().copy()
        for token, bias in options.get("logit_bias", {}).items():
            logits[token] += f32(bias)
        for token in set(ids):
            logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
        output = ids[len(prompt) :]
        for token in set(output):
            logits[token] = logits[token] - frequency * f32(output.count(token)) - presence
        if temperature:
            noise = -np.log(-np.log(uniforms(options.get("seed", 0), len(ids), np.arange(V))))
            logits = logits / f32(temperature) + noise
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def verifiers() -> Iterator[tuple[Any, Any]]:
    target = ScriptedEngine(TARGET, V)
    with serving(ScriptedEngine(TARGET, V)) as served, connect(f"grpc://{served.address}") as cloud:
        yield local(target), cloud


@settings(max_examples=60)
@given(options=processors, sampling=samplings, errors=st.sets(st.integers(0, 29)), k=st.sampled_from((1, 3, 5, "auto")))
def test_every_way_gives_the_reference_s_tokens(
    verifiers: tuple[Any, Any], options: dict[str, Any], sampling: dict[str, Any], errors: set[int], k: int | str
) -> None:
    options = {**options, **sampling}
    wanted = by_numpy(TARGET, PROMPT, 30, options)
    for draft in (OracleEngine(len(PROMPT), wanted, V, errors), ScriptedEngine(blend(TARGET, OTHER, 0.3), V), None):
        for verifier in verifiers:
            decoder = SpeculativeDecoder(draft, verifier, **({} if draft is None else {"k": k}))
            result = decoder.generate(list(PROMPT), max_new_tokens=30, **options)
            assert (result.token_ids, result.guarantee) == (wanted, "exact")
    alone = SpeculativeDecoder(ScriptedEngine(TARGET, V), on_loop="ignore")
    assert alone.generate(list(PROMPT), max_new_tokens=30, **options).token_ids == wanted


@pytest.mark.parametrize("gate", ["always", "trigger:never", "trigger:entropy:1.5"])
def test_rolled_back_drafts_are_not_counted(verifiers: tuple[Any, Any], gate: str) -> None:
    options = {"frequency_penalty": 1.1, "presence_penalty": 0.4, "logit_bias": {2: 2.0}}
    wanted = by_numpy(TARGET, PROMPT, 60, options)
    assert wanted != by_numpy(TARGET, PROMPT, 60, {})
    for verifier, driver in zip(verifiers, ("sequential", "pipelined"), strict=True):
        draft = ScriptedEngine(blend(TARGET, OTHER, 0.3), V)
        decoder = SpeculativeDecoder(draft, verifier, k=5, gate=gate, driver=driver)
        result = decoder.generate(list(PROMPT), max_new_tokens=60, **options)
        assert result.token_ids == wanted
        assert result.stats.corrected > 3  # drafts were rolled back


@pytest.mark.parametrize("family", ["qwen2", "phi", "gemma3"])
def test_biases_are_those_of_transformers(family: str) -> None:
    """generate's own `sequence_bias`, with single tokens, together with its other processors."""
    biases = {token: float(token % 11 - 5) for token in range(0, VOCAB, 4)}
    sequence_bias = [[[token], bias] for token, bias in biases.items()]
    for others in ({}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2}):
        wanted = reference(tiny_model(family), (2, 33, 44, 55), sequence_bias=sequence_bias, **others)
        assert wanted != reference(tiny_model(family), (2, 33, 44, 55), **others)
        decoder = SpeculativeDecoder(tiny_engine(family, drift=0.05), local(tiny_engine(family)), k=3)
        result = decoder.generate([2, 33, 44, 55], max_new_tokens=16, logit_bias=biases, **others)
        assert result.token_ids == wanted


def test_a_bias_of_a_token_that_the_target_lacks_is_refused(verifiers: tuple[Any, Any]) -> None:
    for verifier in verifiers:
        decoder = SpeculativeDecoder(ScriptedEngine(TARGET, V), verifier)
        with pytest.raises(SettingsError, match=f"logit_bias: ids go up to {V - 1}"):
            decoder.generate(list(PROMPT), logit_bias={V: 1.0})
