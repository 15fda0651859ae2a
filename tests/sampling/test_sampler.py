"""Filters equal transformers'; noise depends on its key alone; draws follow the distribution."""

from __future__ import annotations

import math
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.config import GenerationSettings
from outrider.errors import DecodingError
from outrider.sampling.sampler import (
    Distribution,
    NoiseStream,
    SamplingParams,
    Support,
    filter_logits,
    gumbel_noise,
    position_key,
    position_keys,
    uniforms,
)

INF = math.inf
seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**40)
values = st.one_of(st.floats(-12, 12, width=32), st.sampled_from([0.0, 1.0, -INF]))  # with ties and bans
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.95, 0.8, 0.5, 0.1, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.6, 1.0]),
)


# Filters --------------------------------------------------------------------------------------------------------


def by_transformers(row: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities (float32 [V], −inf where filtered) after transformers' warpers, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return torch.log_softmax(warpers(torch.zeros(1, 1, dtype=torch.long), row[None])[0], -1)


def dense(found: Support, size: int) -> Tensor:
    row = torch.full((size,), -INF)
    row[found.ids] = found.logp
    return row


def borders_are_clear(row: Tensor, sampling: SamplingParams) -> bool:
    """No choice hangs on rounding, nor on which of two equal tokens a sort puts first."""
    logp = torch.log_softmax(row.double() / sampling.temperature, -1)
    if 0 < sampling.top_k < len(row):
        logp = torch.log_softmax(logp.masked_fill(logp < torch.topk(logp, sampling.top_k).values[-1], -INF), -1)
    p = logp.exp().sort(descending=True).values
    if sampling.top_p < 1:
        before = p.cumsum(0) - p
        if (before - sampling.top_p).abs().min() < 1e-4:
            return False
        kept = before < sampling.top_p
        if kept.sum() < len(p) and p[kept][-1] - p[~kept][0] < 1e-9:
            return False
        p = p[kept] / p[kept].sum()
    return not sampling.min_p or bool(((p / p[0] - sampling.min_p).abs() > 1e-5).all() or sampling.min_p == 1.0)


def same_as_transformers(row: Tensor, sampling: SamplingParams) -> None:
    ours, theirs = dense(filter_logits(row, sampling), len(row)), by_transformers(row, sampling)
    assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(values, min_size=1, max_size=16), samplings)
def test_support_equals_transformers(row: list[float], sampling: SamplingParams) -> None:
    assume(any(math.isfinite(x) for x in row))
    scores = torch.tensor(row)
    assume(borders_are_clear(scores, sampling))
    same_as_transformers(scores, sampling)


def clear_top_p(row: Tensor, temperature: float, top_k: int, size: int) -> float:
    """The top-p that keeps `size` tokens, half a token away from keeping one more or one less."""
    best = torch.softmax(torch.topk(row.double() / temperature, top_k or len(row)).values, -1)
    return float(best[: size - 1].sum() + best[size - 1] / 2)


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(
    ("top_k", "nucleus", "min_p"),
    [(50, 0, 0), (0, 300, 0), (0, 2000, 0), (2000, 1500, 0), (0, 0, 0.05), (0, 300, 0.1), (100, 60, 0.02)],
)
def test_support_equals_transformers_on_long_rows(top_k: int, nucleus: int, min_p: float, scale: float) -> None:
    """A nucleus of 1,500 or 2,000 tokens is longer than the shortlist that is tried first."""
    row = torch.randn(4000, generator=torch.Generator().manual_seed(3)) * scale
    row[::7] = -INF
    top_p = clear_top_p(row, 1.3, top_k, nucleus) if nucleus else 1.0
    same_as_transformers(row, SamplingParams(1.3, top_k, top_p, min_p))


@pytest.mark.parametrize(
    ("size", "nucleus", "sought"), [(4000, 300, [1024]), (4000, 2000, [1024, 4000]), (50, 9, [50])]
)
def test_a_nucleus_is_sought_in_a_shortlist_first(
    size: int, nucleus: int, sought: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorting all of a vocabulary of 150,000 takes 10 ms."""
    row, sizes, topk = torch.randn(size, generator=torch.Generator().manual_seed(3)) / 20, [], torch.topk
    top_p = clear_top_p(row, 1.0, 0, nucleus)
    monkeypatch.setattr(torch, "topk", lambda scores, k: sizes.append(k) or topk(scores, k))
    assert len(filter_logits(row, SamplingParams(1.0, top_p=top_p)).ids) == nucleus
    assert sizes == sought


def test_top_p_and_min_p_work_together() -> None:
    """min-p looks at what top-p has left: ids 3 and 1 here, out of their order in the vocabulary."""
    row = torch.log(torch.tensor([0.02, 0.3, 0.03, 0.6, 0.05]))
    found = filter_logits(row, SamplingParams(1.0, top_p=0.85, min_p=0.2))
    assert found.ids.tolist() == [1, 3]
    torch.testing.assert_close(found.logp.exp(), torch.tensor([1 / 3, 2 / 3]))


def test_defaults_are_those_of_a_request() -> None:
    asked = GenerationSettings()
    assert asdict(SamplingParams()) == {field.name: getattr(asked, field.name) for field in fields(SamplingParams)}


def test_ties_with_the_kth_stay() -> None:
    assert filter_logits(torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0]), SamplingParams(1.0, top_k=2)).ids.tolist() == [
        0,
        1,
        2,
        4,
    ]


def test_top_k_never_brings_banned_tokens_back() -> None:
    assert filter_logits(torch.tensor([-INF, 2.0, -INF, 1.0]), SamplingParams(1.0, top_k=3)).ids.tolist() == [1, 3]


def test_the_likeliest_token_always_stays() -> None:
    row = torch.tensor([0.0, 3.0, 1.0])
    for sampling in (
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, top_p=1e-9),
        SamplingParams(1.0, min_p=1.0),
        SamplingParams(1e-6),
    ):
        found = filter_logits(row, sampling)
        assert found.ids[found.logp.argmax()] == 1
        assert found.probability(1) == pytest.approx(1.0)


def test_probability_is_zero_outside_the_support() -> None:
    found = filter_logits(torch.log(torch.tensor([0.5, 0.3, 0.2])), SamplingParams(1.0, top_k=2))
    assert [found.probability(token) for token in range(3)] == pytest.approx([0.625, 0.375, 0.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=19, unique=True), st.integers(1, 25))
def test_head_is_the_likeliest_and_sums_to_one(row: list[int], count: int) -> None:
    whole = filter_logits(torch.tensor(row).float(), SamplingParams(1.0))
    head = whole.top_k(count)
    assert sorted(head.ids.tolist()) == sorted(sorted(range(len(row)), key=row.__getitem__)[-count:])
    assert float(torch.logsumexp(head.logp, -1)) == pytest.approx(0.0, abs=1e-5)
    ratio = head.logp - whole.logp[head.ids]
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio[0])), rtol=0, atol=1e-5)


# Noise ----------------------------------------------------------------------------------------------------------

MASK = 2**64 - 1
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

KNOWN = {  # (seed, position, stream): the uniforms of tokens 0, 1, 2, 100,000 and 2^40, on every machine
    (0, 0, 0): [
        0.617330984170188,
        0.055737485022307076,
        0.012883824743657513,
        0.024463821825150334,
        0.03232523205595855,
    ],
    (1, 7, 0): [0.5124130406211493, 0.6629358409934736, 0.6425896640199533, 0.04508760138985807, 0.47351090373940646],
    (2**64 - 1, 123456, 2): [
        0.2572578152117431,
        0.24764139629727083,
        0.4358945802826483,
        0.8458739299128883,
        0.23361801121086484,
    ],
}
KNOWN_TOKENS = np.array([0, 1, 2, 100_000, 2**40])


def philox(seed: int, stream: int, position: int) -> int:
    """The first word of Philox4x64-10 (Salmon et al., 2011), in plain integers."""
    a, b, c, d = 1, position, 0, 0
    k, m = seed, stream
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k, right & MASK, (left >> 64) ^ d ^ m, left & MASK
        k, m = (k + GAMMA) & MASK, (m + 0xBB67AE8584CAA73B) & MASK
    return a


def splitmix(key: int, token: int) -> int:
    """Output number `token` of SplitMix64 (Steele et al., 2014) from `key`."""
    x = (key + (token + 1) * GAMMA) & MASK
    x = (x ^ (x >> 30)) * FIRST & MASK
    x = (x ^ (x >> 27)) * SECOND & MASK
    return x ^ (x >> 31)


def key_for(output: int) -> int:
    """The key from which SplitMix64 gives `output` for token 0: its steps, undone."""
    x = output ^ (output >> 31) ^ (output >> 62)
    x = x * pow(SECOND, -1, 2**64) & MASK
    x = x ^ (x >> 27) ^ (x >> 54)
    x = x * pow(FIRST, -1, 2**64) & MASK
    x = x ^ (x >> 30) ^ (x >> 60)
    return (x - GAMMA) & MASK


def one(seed: int, position: int, stream: NoiseStream = NoiseStream.TOKEN, token: int = 0) -> float:
    return float(uniforms(seed, position, np.array([token]), stream)[0])


@given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=6))
def test_keys_of_many_positions_are_those_of_each(pairs: list[tuple[int, int]]) -> None:
    own_seeds, own_positions = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    assert position_keys(own_seeds, own_positions).tolist() == [int(position_key(*pair)) for pair in pairs]


@pytest.mark.parametrize(("key", "expected"), KNOWN.items())
def test_uniforms_and_noise_have_known_values(key: tuple[int, int, int], expected: list[float]) -> None:
    seed, position, stream = key
    assert uniforms(seed, position, KNOWN_TOKENS, NoiseStream(stream)).tolist() == expected
    noise = gumbel_noise(seed, position, torch.from_numpy(KNOWN_TOKENS), NoiseStream(stream))
    assert noise.tolist() == pytest.approx([-math.log(-math.log(u)) for u in expected], rel=1e-13)


KNOWN_DRAWS = {  # seed: the draws from eight equal tokens at positions 0, 1, 2, …
    0: [0, 1, 6, 6, 0, 3, 5, 4, 0, 7, 3, 4],
    2**64 - 1: [3, 5, 6, 5, 1, 3, 6, 7, 3, 0, 5, 6],
}


@pytest.mark.parametrize(("seed", "expected"), KNOWN_DRAWS.items())
def test_known_draws(seed: int, expected: list[int]) -> None:
    even = Support(torch.arange(8), torch.full((8,), -math.log(8)))
    assert [even.draw(seed, position) for position in range(12)] == expected


@settings(max_examples=60, deadline=None)
@given(seeds, positions, st.sampled_from(NoiseStream), st.lists(st.integers(0, 2**50), min_size=1, max_size=8))
def test_noise_is_a_function_of_its_key_alone(seed: int, position: int, stream: NoiseStream, tokens: list[int]) -> None:
    key = philox(seed, stream, position)
    expected = [((splitmix(key, token) >> 11) + 0.5) * 2.0**-53 for token in tokens]
    assert uniforms(seed, position, np.array(tokens), stream).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(seeds, positions, st.lists(st.integers(0, 300), min_size=1, max_size=12, unique=True))
def test_a_tokens_noise_does_not_depend_on_the_others(seed: int, position: int, ids: list[int]) -> None:
    together = gumbel_noise(seed, position, torch.tensor(ids))
    alone = torch.cat([gumbel_noise(seed, position, torch.tensor([token])) for token in ids])
    assert together.dtype == torch.float64
    assert torch.equal(together, alone)


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_uniforms_stay_inside_zero_and_one(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest word must not round up to 1.0: its Gumbel noise would be infinite."""

    class Philox:
        def __init__(self, **_: object) -> None: ...

        def random_raw(self) -> int:
            return key_for(word)

    assert splitmix(key_for(word), 0) == word
    monkeypatch.setattr(np.random, "Philox", Philox)
    assert 0.0 < one(0, 0) < 1.0


@pytest.mark.parametrize("stream", NoiseStream)
def test_uniforms_are_uniform(stream: NoiseStream) -> None:
    along_tokens = uniforms(5, 3, np.arange(20_000), stream)
    along_positions = np.array([one(5, n, stream) for n in range(2_000)])
    along_seeds = np.array([one(seed, 3, stream) for seed in range(2_000)])
    for sample in (along_tokens, along_positions, along_seeds):
        assert abs(sample.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(sample))
        assert abs(sample.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / len(sample))
        assert kstest(sample, "uniform").pvalue > 1e-4


def test_streams_positions_and_seeds_do_not_correlate() -> None:
    size = 4_000
    tokens = np.arange(size)
    samples = [uniforms(5, 3, tokens, stream) for stream in NoiseStream]
    samples += [uniforms(5, 4, tokens), uniforms(6, 3, tokens)]
    correlation = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlation).max() < 5 / math.sqrt(size)


# Draws ----------------------------------------------------------------------------------------------------------

P = torch.tensor([0.6, 0.3, 0.1])


def follows(draws: list[int], p: Tensor) -> bool:
    """Whether the draws' frequencies are those of p (chi-square; the seeds are fixed, so it never changes its mind)."""
    expected = p.double() / p.double().sum() * len(draws)
    return chisquare([draws.count(token) for token in range(len(p))], expected.tolist()).pvalue > 1e-4


def test_draws_follow_the_distribution_over_seeds_and_over_positions() -> None:
    size = 2_000
    by_seed = [Distribution(P.log(), SamplingParams(1.0, seed=seed), 9).token for seed in range(size)]
    by_position = [Distribution(P.log(), SamplingParams(1.0, seed=1), n).token for n in range(size)]
    for draws in (by_seed, by_position):
        assert follows(draws, P)
        assert not follows(draws, torch.tensor([0.53, 0.34, 0.13]))  # the test has teeth


def test_draws_follow_temperature_and_filters() -> None:
    draws = [Distribution(P.log(), SamplingParams(2.0, top_k=2, seed=seed), 0).token for seed in range(1_200)]
    assert 2 not in draws
    assert follows(draws, torch.softmax(P.log()[:2] / 2.0, -1))


def test_equal_distributions_give_equal_tokens_and_near_ones_nearly_always() -> None:
    """docs/design/maths.md, "Shared randomness": at least (1 − TV)/(1 + TV); independent draws agree in Σ p·q."""
    q = torch.tensor([0.5, 0.35, 0.15])
    tv = float((P - q).abs().sum() / 2)
    size = 1_000
    agreed = sum(
        Distribution(P.log(), SamplingParams(1.0, seed=s), 4).token
        == Distribution(q.log(), SamplingParams(1.0, seed=s), 4).token
        for s in range(size)
    )
    assert agreed / size > (1 - tv) / (1 + tv) - 0.03
    assert agreed / size > float(P @ q) + 0.3


def test_a_filtered_drafter_draws_with_the_same_noise() -> None:
    row = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for seed in range(100):
        whole = Distribution(row, SamplingParams(1.0, seed=seed), 2).token
        short = filter_logits(row, SamplingParams(1.0)).top_k(20)
        if whole in short.ids:
            assert short.draw(seed, 2) == whole


def test_the_last_seed_draws() -> None:
    assert Distribution(P.log(), SamplingParams(1.0, seed=2**64 - 1), 3).token in (0, 1, 2)


# Distribution ---------------------------------------------------------------------------------------------------


def test_greedy_is_the_argmax_with_probability_one() -> None:
    found = Distribution(torch.tensor([1.0, 4.0, -INF]), SamplingParams(seed=3), 5)
    assert found.token == 1
    assert [found.support.probability(token) for token in range(3)] == [0.0, 1.0, 0.0]
    assert found.top2_margin == 3.0


def test_logp_is_at_the_sampling_temperature_before_the_filters() -> None:
    row = torch.tensor([1.0, 4.0, -INF])
    for temperature, used in ((0.0, 1.0), (0.5, 0.5), (2.0, 2.0)):
        logp = Distribution(row, SamplingParams(temperature, top_k=1 if temperature else 0), 0).logp
        torch.testing.assert_close(logp, torch.log_softmax(row / used, -1))


def test_a_sampled_lead_is_what_it_takes_to_change_the_draw() -> None:
    row = torch.tensor([0.3, 0.1, 0.0, -1.0])
    for seed in range(40):
        sampling = SamplingParams(0.7, seed=seed)
        drawn = Distribution(row, sampling, 6)
        less, more = row.clone(), row.clone()
        less[drawn.token] -= drawn.top2_margin * 0.999
        more[drawn.token] -= drawn.top2_margin * 1.001
        assert Distribution(less, sampling, 6).token == drawn.token
        assert Distribution(more, sampling, 6).token != drawn.token


def test_a_token_without_a_rival_leads_by_far() -> None:
    row = torch.tensor([-INF, 2.0, -INF])
    assert Distribution(row, SamplingParams(), 0).top2_margin == INF
    assert Distribution(row, SamplingParams(1.0), 0).top2_margin == INF
    assert Distribution(torch.tensor([1.0]), SamplingParams(), 0).top2_margin == INF


def test_the_coin_is_its_streams_first_uniform() -> None:
    coin = Distribution(P.log(), SamplingParams(1.0, seed=8), 4).uniform(NoiseStream.ACCEPT)
    assert coin == one(8, 4, NoiseStream.ACCEPT)
    assert coin != one(8, 4, NoiseStream.TOKEN)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_and_never_overflows(temperature: float) -> None:
    row = torch.tensor([1.0, 30.0, -5.0, 29.5])
    assert Distribution(row, SamplingParams(temperature=temperature, seed=3), 0).token == 1


@pytest.mark.parametrize("row", [[float("nan"), 1.0, 2.0], [float("-inf")] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_anything_to_choose_is_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(DecodingError, match="position 7"):
        _ = Distribution(torch.tensor(row), SamplingParams(temperature=temperature), 7).token
