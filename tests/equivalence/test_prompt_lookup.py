"""Prompt lookup as the drafter: the output is the target's own, whatever repeats in prompt and output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Audio, SpeculativeDecoder, connect, local, prompt_lookup
from outrider.edge.verifier_session import PipelinedVerifier
from outrider.verifiers.base import Verifier, disconnect
from tests.equivalence.test_greedy import PROMPTS, SETTINGS, check_exact, expected
from tests.equivalence.test_sampled import FILTERS, SEEDS, SMALL, assert_frequencies, exact_probabilities
from tests.support.cloud_server import Served, serving
from tests.support.fake_llm_server import EOS, Model, connect_servers, target_engine
from tests.support.fake_vllm import VllmServer
from tests.support.fakes import FarVerifier, HashRows, OracleEngine, ScriptedEngine, blend, exhaust, replay
from tests.support.tiny_models import (
    VOCAB,
    byte_tokenizer,
    clip,
    feature_extractor,
    reference_audio,
    subword_tokenizer,
    tiny_engine,
    tiny_model,
)

KS: tuple[int | str, ...] = (1, 2, 5, 16, "auto")


def ngram_sizes() -> st.SearchStrategy[tuple[int, int]]:
    """Any least and most tokens of a match."""
    return st.tuples(st.integers(1, 4), st.integers(0, 8)).map(lambda sizes: (sizes[0], sizes[0] + sizes[1]))


def repetitive_prompts() -> st.SearchStrategy[list[int]]:
    """Prompts in which n-grams repeat: parts of a few tokens, each several times."""
    part = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
    parts = st.lists(part, min_size=1, max_size=3)
    return parts.flatmap(lambda some: st.lists(st.sampled_from(some), min_size=1, max_size=6)).map(
        lambda some: [token for part in some for token in part]
    )


# Greedy ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_random_settings_give_the_tokens_of_generate(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(("qwen2", "llama", "mistral")))
    ids = st.integers(0, VOCAB - 1)
    prompt = tuple(data.draw(repetitive_prompts(), "prompt"))
    most = data.draw(st.integers(1, 30), "max_new_tokens")
    options = {
        "max_new_tokens": most,
        "min_new_tokens": data.draw(st.integers(0, most), "min_new_tokens"),
        "repetition_penalty": data.draw(st.sampled_from((0.8, 1.0, 1.3)), "penalty"),
        "no_repeat_ngram_size": data.draw(st.integers(0, 3), "ngram"),
        "suppress_tokens": data.draw(st.lists(ids, max_size=60).map(tuple), "suppressed"),
    }
    eos = tuple(data.draw(st.lists(ids, max_size=8, unique=True), "eos"))
    wanted = expected(family, prompt, eos=eos, **options)
    least, most_compared = data.draw(ngram_sizes(), "sizes")
    target = tiny_engine(family, eos=())
    target.eos_ids = eos
    try:
        lookup = prompt_lookup(min_ngram=least, max_ngram=most_compared)
        model = data.draw(st.sampled_from((None, tiny_engine(family, drift=0.05), tiny_engine(family, 7))), "model")
        sources: dict[str, Any] = {"draft": lookup} if model is None else {"draft": model, "lookup": lookup}
        decoder = SpeculativeDecoder(**sources, verifier=local(target), k=data.draw(st.sampled_from(KS), "k"))
        for _ in range(2):  # the second one has a controller that has learnt
            check_exact(decoder.generate(list(prompt), **options), wanted)
    finally:
        target.eos_ids = ()


@pytest.mark.parametrize("k", KS)
def test_a_repetitive_output_takes_few_rounds(k: int | str) -> None:
    """After its first period, a loop is drafted without errors."""
    output = [5, 6, 7, 8] * 16
    decoder = SpeculativeDecoder(
        prompt_lookup(), local(ScriptedEngine(replay(2, output, VOCAB), VOCAB)), k=k, on_loop="ignore"
    )
    result = decoder.generate([1, 2], max_new_tokens=len(output))
    check_exact(result, output)
    assert result.stats.acceptance_rate == 1.0
    if isinstance(k, int):
        assert result.stats.rounds <= 5 + -(-len(output) // (k + 1))


def test_a_model_and_lookup_together_take_as_few_rounds_as_the_better_of_the_two() -> None:
    """The model is right in the first half and wrong in the second, which repeats."""
    fresh, loop = list(range(10, 60)), [5, 6, 7, 8] * 12
    output = [*fresh, *loop]
    verifier = local(ScriptedEngine(replay(2, output, VOCAB), VOCAB))
    rounds = {}
    for name, errors in (("fresh", range(50, 98)), ("all", range(98))):
        model = OracleEngine(2, output, VOCAB, errors)
        sources: dict[str, dict[str, Any]] = {
            "model": {"draft": model},
            "lookup": {"draft": prompt_lookup()},
            "both": {"draft": model, "lookup": prompt_lookup()},
        }
        for which, source in sources.items():
            decoder = SpeculativeDecoder(**source, verifier=verifier, k=4, on_loop="ignore")
            result = decoder.generate([1, 2], max_new_tokens=len(output))
            check_exact(result, output)
            rounds[name, which] = result.stats.rounds
    assert rounds["fresh", "both"] < 0.6 * min(rounds["fresh", "model"], rounds["fresh", "lookup"])
    assert rounds["all", "both"] <= rounds["all", "lookup"] + 3


def test_without_a_match_nothing_is_drafted_and_each_verdict_gives_one_token() -> None:
    output = list(range(10, 30))
    decoder = SpeculativeDecoder(prompt_lookup(), local(ScriptedEngine(replay(2, output, VOCAB), VOCAB)))
    result = decoder.generate([1, 2], max_new_tokens=20)
    check_exact(result, output)
    stats = result.stats
    assert (stats.drafted, stats.verified, stats.rounds, stats.blocks, stats.escalated) == (0, 0, 20, 20, 20)
    assert stats.acceptance_rate is None or stats.acceptance_rate == 0.0


def test_suppressed_tokens_are_not_proposed() -> None:
    """Each match is followed by a suppressed token, and each proposal would be rejected."""
    prompt = [20, 50, 20, 50, 20, 50]
    options = {"max_new_tokens": 16, "suppress_tokens": tuple(range(20, VOCAB, 2))}
    for lookup in (prompt_lookup(), prompt_lookup(min_ngram=2)):
        result = SpeculativeDecoder(lookup, local(tiny_engine("qwen2"))).generate(prompt, **options)
        check_exact(result, expected("qwen2", tuple(prompt), **options))


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_recordings_are_encoded_by_the_verifier_in_this_process(family: str) -> None:
    tokenizer, waveform = subword_tokenizer(), clip(0.777, seed=3)
    prompt = Audio(waveform, instruction="tell the emotion, tell the emotion.")
    verifier = local(tiny_engine(family, tokenizer=tokenizer))
    decoder = SpeculativeDecoder(prompt_lookup(), verifier, k=4)
    wanted = reference_audio(tiny_model(family), decoder.encode(prompt).ids, family, waveform)
    check_exact(decoder.generate(prompt, max_new_tokens=16), wanted)


@pytest.mark.network
@pytest.mark.parametrize("privacy", ["audio", "features"])
@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_recordings_are_prepared_without_weights_for_our_own_cloud(family: str, privacy: Any, tmp_path: Path) -> None:
    tokenizer, waveform = subword_tokenizer(), clip(0.777, seed=3)
    tokenizer.save_pretrained(tmp_path)
    tiny_model(family).config.save_pretrained(tmp_path)
    feature_extractor(family).save_pretrained(tmp_path)
    prompt = Audio(waveform, instruction="tell the emotion, tell the emotion.")
    with serving(tiny_engine(family, tokenizer=tokenizer)) as served, connected_to(served) as verifier:
        decoder = SpeculativeDecoder(prompt_lookup(tmp_path), verifier, k=4, privacy=privacy)
        decoder.check_audio_support()
        result = decoder.generate(prompt, max_new_tokens=16)
        wanted = reference_audio(tiny_model(family), decoder.encode(prompt).ids, family, waveform)
        check_exact(result, wanted)
        assert result.stats.media_bytes_up > 1000


# Sampled --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    prompt=repetitive_prompts(),
    filters=st.sampled_from(FILTERS),
    seed=st.integers(0, 99),
    k=st.sampled_from(KS),
    memory=st.sampled_from((1, 2, None)),
)
def test_one_seed_gives_the_target_s_own_draws(
    prompt: list[int], filters: dict[str, Any], seed: int, k: int | str, memory: int | None
) -> None:
    """A target with a short memory repeats itself, so that lookup is often right."""
    verifier = local(ScriptedEngine(HashRows(4, VOCAB, spread=4.0, memory=memory), VOCAB))
    options = {"max_new_tokens": 24, "seed": seed, **filters}
    wanted = SpeculativeDecoder(None, verifier).generate(prompt, **options)
    result = SpeculativeDecoder(prompt_lookup(), verifier, k=k).generate(prompt, **options)
    check_exact(result, wanted.token_ids)


@pytest.mark.parametrize("k", [1, 3])
def test_rejection_sampling_with_a_point_mass_keeps_the_target_s_distribution(k: int) -> None:
    decoder = SpeculativeDecoder(prompt_lookup(), local(ScriptedEngine(SMALL, 3)), k=k, accept="residual")
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = verified = 0
    for seed in range(SEEDS):
        result = decoder.generate([0], seed=seed, temperature=1.0, max_new_tokens=3)
        counts[tuple(result.token_ids)] += 1
        accepted, verified = accepted + result.stats.accepted, verified + result.stats.verified
    assert 0 < accepted < verified
    assert_frequencies(counts, exact_probabilities(lambda prefix, row: row, 1.0))


# Across a network -----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    prompt=repetitive_prompts(),
    k=st.sampled_from(KS),
    driver=st.sampled_from(("sequential", "pipelined")),
    polls=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    losses=st.sets(st.integers(0, 20)),
    heard=st.booleans(),
    accept=st.sampled_from(("exact", "residual", "rank:3")),
    temperature=st.sampled_from((0.0, 0.7)),
    with_model=st.booleans(),
)
def test_late_and_lost_verdicts_change_nothing(
    prompt: list[int],
    k: int | str,
    driver: Any,
    polls: Seq[int],
    losses: set[int],
    heard: bool,
    accept: str,
    temperature: float,
    with_model: bool,
) -> None:
    target = ScriptedEngine(HashRows(4, VOCAB, memory=2), VOCAB, eos_ids=(0,))
    verifier = FarVerifier(local(target), polls=polls, losses=losses, heard=heard)
    assert isinstance(verifier, PipelinedVerifier)
    options = {"max_new_tokens": 24, "temperature": temperature}
    close = ScriptedEngine(blend(target.rows, HashRows(5, VOCAB, memory=2), 0.4), VOCAB)
    sources: dict[str, Any] = {"draft": close, "lookup": prompt_lookup()} if with_model else {"draft": prompt_lookup()}
    alone = {} if accept == "exact" else sources  # the output of other rules depends on the drafts
    wanted = SpeculativeDecoder(**alone, verifier=local(target), k=k, accept=accept if alone else "exact").generate(
        prompt, **options
    )
    decoder = SpeculativeDecoder(**sources, verifier=verifier, k=k, driver=driver, on_cloud_loss="wait", accept=accept)
    result = decoder.generate(prompt, **options)
    assert result.token_ids == wanted.token_ids
    assert result.guarantee == wanted.guarantee


@settings(max_examples=40)
@given(
    prompt=repetitive_prompts(),
    k=st.sampled_from(KS),
    driver=st.sampled_from(("sequential", "pipelined")),
    polls=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    lost=st.integers(0, 12),
)
def test_after_a_loss_of_the_cloud_the_model_continues_alone(
    prompt: list[int], k: int | str, driver: Any, polls: Seq[int], lost: int
) -> None:
    """The output is the target's up to the loss, then the model's: no looked-up token is committed unverified."""
    target = ScriptedEngine(HashRows(4, VOCAB, memory=2), VOCAB)
    model = ScriptedEngine(blend(target.rows, HashRows(5, VOCAB, memory=2), 0.5), VOCAB)
    verifier = FarVerifier(local(target), polls=polls, losses=range(lost, 1000))
    options: dict[str, Any] = {"k": k, "driver": driver, "on_cloud_loss": "edge-only", "on_loop": "ignore"}
    decoder = SpeculativeDecoder(model, verifier, lookup=prompt_lookup(), **options)
    found = exhaust(decoder.stream(prompt, max_new_tokens=24))
    result = decoder.generate(prompt, max_new_tokens=24)
    alone = SpeculativeDecoder(model, on_loop="ignore")
    assert result.token_ids == alone.generate(prompt, max_new_tokens=24).token_ids, "the cloud is lost from the start"
    cut = sum(source.by_cloud for source in found.sources)
    assert all(source.by_cloud for source in found.sources[:cut])
    wanted = SpeculativeDecoder(None, local(target)).generate(prompt, max_new_tokens=24).token_ids[:cut]
    if cut < 24:
        wanted += alone.generate([*prompt, *wanted], max_new_tokens=24 - cut).token_ids
    assert found.token_ids == wanted


@contextmanager
def connected_to(served: Served) -> Iterator[Verifier]:
    verifier = connect(f"grpc://{served.address}")
    assert verifier is not None
    try:
        yield verifier
    finally:
        disconnect(verifier)


@pytest.mark.network
@pytest.mark.parametrize("accept", ["exact", "residual"])
def test_our_own_cloud_verifies_lookups_and_empty_blocks(accept: str) -> None:
    engine = tiny_engine("qwen2", tokenizer=subword_tokenizer())
    with serving(engine) as served, connected_to(served) as verifier:
        for n, prompt in enumerate(PROMPTS):
            options = {"max_new_tokens": 20, **SETTINGS[n]}
            wanted = expected("qwen2", prompt, **options)
            for driver, lookup in (
                ("sequential", prompt_lookup()),
                ("pipelined", prompt_lookup(subword_tokenizer())),
            ):
                decoder = SpeculativeDecoder(lookup, verifier, k=4, driver=driver, accept=accept)  # type: ignore[arg-type]
                check_exact(decoder.generate(list(prompt), **options), wanted, (driver, prompt))
        texts = SpeculativeDecoder(prompt_lookup(subword_tokenizer()), verifier)
        ids = tuple(subword_tokenizer()("the end and the end and the")["input_ids"])
        result = texts.generate("the end and the end and the", max_new_tokens=12)
        check_exact(result, expected("qwen2", ids, max_new_tokens=12))
        assert result.text == subword_tokenizer().decode(result.token_ids, skip_special_tokens=True)


@pytest.mark.network
@pytest.mark.parametrize("options", [{"max_logprobs": -1}, {"scale_out": 403, "max_logprobs": -1}], ids=str)
def test_a_vllm_server_verifies_lookups_and_empty_blocks(options: dict[str, Any], tmp_path: Path) -> None:
    """The tokenizer comes from a directory without weights."""
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    with VllmServer(Model(target_engine()), **options) as server, connect_servers(server) as verifier:
        lookup = prompt_lookup(tmp_path)
        assert {*EOS} <= {*lookup.eos_ids}
        for k, prompt in ((1, [33]), (5, [20, 30, 40, 50]), (3, [60, 61, 62] * 6)):
            for accept, sampled in (("exact", {}), ("exact", {"temperature": 0.9, "top_k": 8, "seed": 3})):
                result = SpeculativeDecoder(lookup, verifier, k=k, accept=accept).generate(
                    prompt, max_new_tokens=12, **sampled
                )
                wanted = SpeculativeDecoder(None, local(target_engine())).generate(prompt, max_new_tokens=12, **sampled)
                assert result.token_ids == wanted.token_ids
                assert result.guarantee == "exact"
