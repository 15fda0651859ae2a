"""Greedy decoding, exact mode: the tokens are those of the target's own `generate`, whatever drafts them.

Every comparison is with transformers' `generate(do_sample=False)` on the same weights in float32: its cache, its
logits processors, its stopping criteria. Nothing of outrider is on that side.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Audio, Result, SpeculativeDecoder, local
from outrider.decoding.gate_parsing import gate as parse_gate
from tests.support.fakes import OracleEngine
from tests.support.tiny_models import (
    VOCAB,
    clip,
    reference,
    reference_audio,
    subword_tokenizer,
    tiny_engine,
    tiny_model,
)

TEXT = ("qwen2", "llama", "omni")
SLIDING = ("mistral", "gemma2", "gemma3", "qwen2-mixed")
PROMPTS = ((17,), (2, 33, 44, 55), (40, 41, 42, 40, 41, 42, 40, 41), tuple(range(20, 60)))
KS: tuple[int | str, ...] = (1, 2, 3, 5, 8, "auto")
EXACT_GATES = (
    "always",
    "trigger:never",
    "trigger:entropy:2.5",
    "trigger:margin.mean:0.4",
    "trigger:logprob:2|maxprob:0.6",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 0.8},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "max_new_tokens": 40},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2, "min_new_tokens": 2},
    {"suppress_tokens": tuple(range(10, VOCAB, 3)), "repetition_penalty": 0.8},
    {"suppress_tokens": tuple(range(0, VOCAB, 2)), "repetition_penalty": 1.1, "no_repeat_ngram_size": 2},
)


@lru_cache(maxsize=4096)
def _expected(family: str, prompt: tuple[int, ...], frozen: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    given_ = {name: list(value) if isinstance(value, tuple) else value for name, value in frozen}
    return tuple(reference(tiny_model(family), prompt, **given_))


def expected(family: str, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """The target's own output. `eos` is handed to `generate` as eos_token_id."""
    options["eos_token_id"] = tuple(options.pop("eos", ()))
    return list(_expected(family, prompt, tuple(sorted(options.items()))))


ERRORS: dict[str, range | tuple[int, ...]] = {
    "perfect": (),
    "wrong at every third": range(2, 100, 3),
    "wrong at the first": (0,),
    "wrong now and then": (1, 2, 7, 12, 13, 14),
    "always wrong": range(100),
}


def oracles(prompt: tuple[int, ...], target: list[int], eos: tuple[int, ...] = ()) -> dict[str, Any]:
    """Drafters from perfect to adversarial; past the end of what it knows, an oracle talks on."""
    return {name: OracleEngine(len(prompt), target, VOCAB, errors, eos_ids=eos) for name, errors in ERRORS.items()}


def check_exact(result: Result, wanted: list[int], why: object = "") -> None:
    """The tokens, and that the counters add up to them."""
    assert result.token_ids == wanted, why
    stats = result.stats
    assert result.guarantee == "exact", why
    assert stats.cloud_tokens == len(wanted), why
    assert stats.edge_tokens == 0, why
    assert stats.accepted + stats.corrected + stats.bonus == stats.cloud_tokens, why
    assert stats.accepted <= stats.verified <= stats.drafted, why
    assert result.near_ties == [], why


@pytest.mark.parametrize("shift", range(len(SETTINGS)), ids=lambda n: f"{n}-" + "-".join(SETTINGS[n]))
@pytest.mark.parametrize("family", ["qwen2", "phi", "omni"])
def test_every_setting_gives_the_target_s_tokens(family: str, shift: int) -> None:
    """With every prompt, and with drafters and block lengths in rotation."""
    options = {"max_new_tokens": 16, **SETTINGS[shift]}
    verifier = local(tiny_engine(family))
    for n, prompt in enumerate(PROMPTS):
        wanted = expected(family, prompt, **options)
        models = {"the target": verifier.engine, "often right": tiny_engine(family, drift=0.05)}
        drafters = [*oracles(prompt, wanted).items(), *models.items()]
        for m in range(2):
            name, drafter = drafters[(shift + 2 * n + m) % len(drafters)]
            k = KS[(shift + n + m) % len(KS)]
            result = SpeculativeDecoder(drafter, verifier, k=k).generate(list(prompt), **options)
            check_exact(result, wanted, (name, k, prompt))
            assert result.finish_reason == "length"


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("family", TEXT)
def test_every_k_with_every_exact_gate(family: str, k: int | str) -> None:
    prompt, verifier = PROMPTS[1], local(tiny_engine(family))
    options = {"max_new_tokens": 20, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    wanted = expected(family, prompt, **options)
    for gate in EXACT_GATES:
        decoder = SpeculativeDecoder(tiny_engine(family, drift=0.05), verifier, k=k, gate=gate)
        check_exact(decoder.generate(list(prompt), **options), wanted, gate)


@pytest.mark.parametrize("family", TEXT)
def test_an_unrelated_drafter_changes_nothing(family: str) -> None:
    """Another random model, of another family: nearly every block is rejected at its first token."""
    prompt, verifier = PROMPTS[1], local(tiny_engine(family))
    wanted = expected(family, prompt, max_new_tokens=16)
    for k, gate in ((1, "always"), (3, "trigger:entropy:2"), (8, "always"), ("auto", "trigger:never")):
        drafter = tiny_engine("mistral" if family == "llama" else "llama", 7)
        result = SpeculativeDecoder(drafter, verifier, k=k, gate=gate).generate(list(prompt), max_new_tokens=16)
        check_exact(result, wanted, (k, gate))
        assert result.stats.accepted < 8


@pytest.mark.parametrize("family", [*TEXT, "phi", *SLIDING])
def test_cloud_only_and_edge_only(family: str) -> None:
    engine = tiny_engine(family)
    for n in (0, 2, 4, 7):
        prompt, options = PROMPTS[n % len(PROMPTS)], {"max_new_tokens": 16, **SETTINGS[n]}
        wanted = expected(family, prompt, **options)
        check_exact(SpeculativeDecoder(None, local(engine)).generate(list(prompt), **options), wanted)
        alone = SpeculativeDecoder(engine, on_loop="ignore", k=4).generate(list(prompt), **options)
        assert alone.token_ids == wanted
        assert alone.guarantee == "edge-only"
        assert alone.stats.cloud_tokens == 0


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_windows_are_passed_over_and_rolled_back(family: str) -> None:
    """The window is 6: prompts and outputs are longer, and blocks begin, end and are rejected across its edge."""
    verifier = local(tiny_engine(family))
    for n, prompt in enumerate(PROMPTS):
        wanted = expected(family, prompt, max_new_tokens=20)
        drafters = [*oracles(prompt, wanted).items(), ("often right", tiny_engine(family, drift=0.05))]
        for m, (name, drafter) in enumerate(drafters[n % 2 :: 2]):
            k = KS[(n + 2 * m) % len(KS)]
            result = SpeculativeDecoder(drafter, verifier, k=k).generate(list(prompt), max_new_tokens=20)
            check_exact(result, wanted, (name, k, prompt))


# Ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("family", TEXT)
def test_eos_at_every_place_in_a_block(family: str, at: int) -> None:
    prompt = PROMPTS[1]
    free = expected(family, prompt, max_new_tokens=16)
    end = next(n for n in range(at, 16) if free[n] not in free[:n])
    eos = (free[end], 5)  # a set of EOS ids, of which one occurs
    wanted = expected(family, prompt, max_new_tokens=16, eos=eos)
    assert wanted == free[: end + 1]
    verifier = local(tiny_engine(family, eos=eos))
    for (name, drafter), k in product(oracles(prompt, free).items(), (1, 3, 5, "auto")):
        result = SpeculativeDecoder(drafter, verifier, k=k).generate(list(prompt), max_new_tokens=16)
        check_exact(result, wanted, (name, k))
        assert result.finish_reason == "eos"
    result = SpeculativeDecoder(drafter, verifier).generate(list(prompt), max_new_tokens=16, ignore_eos=True)
    check_exact(result, free)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("least", [1, 3, 6, 11, 16])
@pytest.mark.parametrize("family", TEXT)
def test_eos_is_banned_until_min_new_tokens(family: str, least: int) -> None:
    prompt = PROMPTS[1]
    free = expected(family, prompt, max_new_tokens=16)
    eos = tuple(sorted({free[0], free[2], free[7]}))
    options = {"max_new_tokens": 16, "min_new_tokens": least, "repetition_penalty": 1.2}
    wanted = expected(family, prompt, eos=eos, **options)
    assert len(wanted) >= least
    verifier = local(tiny_engine(family, eos=eos))
    drafters = {**oracles(prompt, free), "often right": tiny_engine(family, drift=0.05)}
    for n, (name, drafter) in enumerate(drafters.items()):
        result = SpeculativeDecoder(drafter, verifier, k=(2, 5, "auto")[n % 3]).generate(list(prompt), **options)
        check_exact(result, wanted, name)


@pytest.mark.parametrize("family", TEXT)
def test_stop_strings_wherever_they_begin_and_end(family: str) -> None:
    """Cut from the target's own text: within one token, across two or three, at any place of a block."""
    tokenizer, prompt = subword_tokenizer(), (44, 60, 2)
    options = {"max_new_tokens": 16, "suppress_tokens": tuple(range(10))}
    free = expected(family, prompt, **options)
    text = tokenizer.decode(free)
    verifier: Any = local(tiny_engine(family, tokenizer=tokenizer))
    for n, (start, size) in enumerate(product((0, 3, 8, 13), (1, 2, 3, 5))):
        stop = [text[start : start + size], "never said"]
        plain = {**options, "suppress_tokens": list(range(10))}
        wanted = reference(tiny_model(family), prompt, stop_strings=stop, tokenizer=tokenizer, **plain)
        drafter: Any = OracleEngine(len(prompt), free, VOCAB, list(ERRORS.values())[n % 5], tokenizer=tokenizer)
        drafter.vocabulary = verifier.engine.vocabulary
        decoder = SpeculativeDecoder(drafter, verifier, k=KS[n % 6], gate=EXACT_GATES[n % 2])
        result = decoder.generate(list(prompt), stop=stop, **options)
        check_exact(result, wanted, stop)
        assert result.finish_reason == "stop"
        assert stop[0] in result.text
        assert stop[0] not in tokenizer.decode(wanted[:-1])


# Recordings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.1, 0.777, 1.9])
@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_recordings_give_the_target_s_tokens(family: str, seconds: float) -> None:
    tokenizer, waveform = subword_tokenizer(), clip(seconds, seed=3)
    prompt = Audio(waveform, instruction="tell the emotion.")
    verifier = local(tiny_engine(family, tokenizer=tokenizer))
    options = {"max_new_tokens": 16, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    ids = SpeculativeDecoder(None, verifier).encode(prompt).ids
    wanted = reference_audio(tiny_model(family), ids, family, waveform, **options)
    without_audio = reference_audio(tiny_model(family), ids, family, clip(seconds, seed=4), **options)
    assert wanted != without_audio, "what is heard must matter"
    for drift, seed, k, gate in ((0.0, 0, 4, "always"), (0.05, 0, "auto", "trigger:entropy:1"), (0.0, 7, 1, "always")):
        drafter = tiny_engine(family, seed, drift=drift, tokenizer=tokenizer)
        result = SpeculativeDecoder(drafter, verifier, k=k, gate=gate).generate(prompt, **options)
        check_exact(result, wanted, (drift, seed, k, gate))
    check_exact(SpeculativeDecoder(None, verifier).generate(prompt, **options), wanted)
    alone = SpeculativeDecoder(verifier.engine, on_loop="ignore").generate(prompt, **options)
    assert alone.token_ids == wanted


# Vocabularies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("edge_rows", "cloud_rows"), [(96, 130), (130, 96), (104, 112), (112, 104)])
def test_padding_rows_are_masked_on_both_sides(edge_rows: int, cloud_rows: int) -> None:
    """One tokenizer of 96 tokens, more rows in one model or both: random weights would choose padding rows often."""
    tokenizer, prompt = subword_tokenizer(), PROMPTS[1]
    target = tiny_model("qwen2", vocab=cloud_rows)
    padding = list(range(VOCAB, cloud_rows))
    wanted = reference(target, prompt, suppress_tokens=padding)
    verifier = local(tiny_engine("qwen2", vocab=cloud_rows, tokenizer=tokenizer))
    for seed, k in ((0, 1), (7, 5)):
        drafter = tiny_engine("llama", seed, vocab=edge_rows, tokenizer=tokenizer)
        check_exact(SpeculativeDecoder(drafter, verifier, k=k).generate(list(prompt), max_new_tokens=16), wanted)
    perfect = tiny_engine("qwen2", vocab=cloud_rows, tokenizer=tokenizer)
    result = SpeculativeDecoder(perfect, verifier).generate(list(prompt), max_new_tokens=16)
    check_exact(result, wanted)
    assert result.stats.acceptance_rate == 1.0


# Number formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_half_precision_differs_only_at_reported_near_ties(family: str, dtype: torch.dtype) -> None:
    """The first token that differs from the target's own decoding is reported as a near-tie; the rest follows it."""
    target = tiny_engine(family, dtype=dtype)
    verifier = local(target)
    for n, prompt in enumerate(PROMPTS):
        alone = SpeculativeDecoder(None, verifier).generate(list(prompt), max_new_tokens=40)
        drafter = list(oracles(prompt, alone.token_ids).values())[n]
        result = SpeculativeDecoder(drafter, verifier, k=3 + n).generate(list(prompt), max_new_tokens=40)
        pairs = zip(result.token_ids, alone.token_ids, strict=True)
        differs = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert differs is None or differs in result.near_ties, (prompt, differs, result.near_ties)
        assert result.stats.near_ties == len(result.near_ties)
        assert result.guarantee == "exact"


# At random ------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(data=st.data())
def test_random_combinations_of_options_give_the_target_s_tokens(data: st.DataObject) -> None:
    """Random settings, prompts, EOS sets, drafters, k and exact gates."""
    family = data.draw(st.sampled_from(("qwen2", "llama", "phi")))
    ids = st.integers(0, VOCAB - 1)
    prompt = tuple(data.draw(st.lists(ids, min_size=1, max_size=20), "prompt"))
    most = data.draw(st.integers(1, 20), "max_new_tokens")
    options = {
        "max_new_tokens": most,
        "min_new_tokens": data.draw(st.integers(0, most), "min_new_tokens"),
        "repetition_penalty": data.draw(st.sampled_from((0.8, 1.0, 1.3)), "penalty"),
        "no_repeat_ngram_size": data.draw(st.integers(0, 3), "ngram"),
        "suppress_tokens": data.draw(st.lists(ids, max_size=30).map(tuple), "suppressed"),
    }
    eos = tuple(data.draw(st.lists(ids, max_size=25, unique=True), "eos"))
    wanted = expected(family, prompt, eos=eos, **options)
    errors = data.draw(st.sets(st.integers(0, 19)), "errors")
    oracle = OracleEngine(len(prompt), wanted, VOCAB, errors=errors)
    models = [tiny_engine(family, seed, drift=drift) for seed, drift in ((0, 0.0), (0, 0.05), (0, 0.1), (7, 0.0))]
    target = tiny_engine(family, eos=())
    target.eos_ids = eos
    try:
        decoder = SpeculativeDecoder(
            data.draw(st.sampled_from([oracle, *models, None]), "drafter"),
            local(target),
            k=data.draw(st.sampled_from(KS), "k"),
        )
        if decoder.draft is not None:
            exact_gate = parse_gate(data.draw(st.sampled_from(EXACT_GATES), "gate"))
            decoder.options = replace(decoder.options, gate=exact_gate)
        check_exact(decoder.generate(list(prompt), **options), wanted)
    finally:
        target.eos_ids = ()
