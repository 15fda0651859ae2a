"""One chain of constraints, equal to transformers' processors and vLLM's penalties, in any order of positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from outrider.sampling.logits_processors import LogitsProcessors, PrefixIndex

VOCAB = 11
tokens = st.integers(0, VOCAB - 1)
rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)
prefixes = st.lists(st.integers(0, 3) | tokens, min_size=1, max_size=24)  # few tokens, so that n-grams repeat
chains = st.builds(
    LogitsProcessors,
    repetition_penalty=st.sampled_from([1.0, 0.5, 0.9, 1.1, 2.0]),
    no_repeat_ngram=st.integers(0, 4),
    min_new_tokens=st.integers(0, 12),
    eos_ids=st.lists(tokens, max_size=2, unique=True).map(tuple),
    banned_ids=st.lists(tokens, max_size=3, unique=True).map(tuple),
    prompt_length=st.integers(1, 6),
    repetition_window=st.sampled_from([0, 0, 1, 3, 8, 64]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.7, 2.0]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.4, -2.0]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4).map(lambda biases: tuple(biases.items())),
)


def by_transformers(chain: LogitsProcessors, row: Tensor, prefix: list[int]) -> Tensor:
    """The row after transformers' own processors, in the order of `GenerationMixin._get_logits_processor`.

    Frequency and presence penalty, which transformers does not have, follow the repetition penalty as in vLLM.
    """
    processors = LogitsProcessorList()
    row = row.clone()[None]
    if chain.logit_bias:
        row = SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in chain.logit_bias})(None, row)
    if chain.repetition_penalty != 1.0:
        window = prefix[-chain.repetition_window :]  # −0: all
        row = RepetitionPenaltyLogitsProcessor(chain.repetition_penalty)(torch.tensor([window]), row)
    row = torch.from_numpy(minus_penalties(row[0].numpy(), chain, prefix[chain.prompt_length :]))[None]
    if chain.no_repeat_ngram:
        processors.append(NoRepeatNGramLogitsProcessor(chain.no_repeat_ngram))
    if chain.min_new_tokens and chain.eos_ids:
        arguments = chain.prompt_length, chain.min_new_tokens, list(chain.eos_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(*arguments))
    if chain.banned_ids:
        processors.append(SuppressTokensLogitsProcessor(list(chain.banned_ids)))
    return processors(torch.tensor([prefix]), row)[0]


def minus_penalties(row: np.ndarray, chain: LogitsProcessors, output: list[int]) -> np.ndarray:
    """vLLM's `apply_penalties`: its counts, mask and order, written out in numpy."""
    counts = np.zeros(len(row), np.float32)
    for token in output:
        counts[token] += 1
    row = row - np.float32(chain.frequency_penalty) * counts
    return row - np.float32(chain.presence_penalty) * (counts > 0)


def apply(chain: LogitsProcessors, row: Tensor, prefix: list[int]) -> Tensor:
    return chain.apply(row, prefix, len(prefix), chain.index())


@settings(max_examples=200, deadline=None)
@given(chains, rows, prefixes)
def test_equal_to_transformers_and_the_row_is_left_alone(
    chain: LogitsProcessors, row: Tensor, prefix: list[int]
) -> None:
    chain = replace(chain, prompt_length=min(chain.prompt_length, len(prefix)))
    before = row.clone()
    ours = apply(chain, row, prefix)
    assert torch.equal(ours, by_transformers(chain, before, prefix))
    assert torch.equal(row, before)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_ngram_length_bans_what_transformers_bans(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    banned = 0
    for length in range(1, 60):
        prefix = torch.randint(0, 3, (length,), generator=generator).tolist()
        chain, row = LogitsProcessors(no_repeat_ngram=n), torch.randn(VOCAB, generator=generator)
        ours = apply(chain, row, prefix)
        assert torch.equal(ours, by_transformers(chain, row, prefix))
        banned += int(torch.isinf(ours).sum())
    assert banned > 20  # the cases did ban something


def test_only_the_given_length_of_the_ids_counts() -> None:
    chain = LogitsProcessors(repetition_penalty=2.0, no_repeat_ngram=2)
    row, ids = torch.ones(VOCAB), [1, 2, 1, 5, 6]
    assert torch.equal(chain.apply(row, ids, 3, chain.index()), apply(chain, row, [1, 2, 1]))


def test_placeholders_beyond_the_vocabulary_are_passed_over() -> None:
    chain = LogitsProcessors(repetition_penalty=2.0, no_repeat_ngram=1, banned_ids=(3, VOCAB + 5))
    prefix = [VOCAB, 2, VOCAB + 100]
    expected = torch.ones(VOCAB)
    expected[[2, 3]] = -torch.inf
    assert torch.equal(apply(chain, torch.ones(VOCAB), prefix), expected)


def test_nothing_asked_for_returns_the_very_row() -> None:
    row = torch.randn(VOCAB)
    assert apply(LogitsProcessors(min_new_tokens=2, eos_ids=(1,), prompt_length=1), row, [1, 2, 3]) is row


def test_min_new_tokens_counts_generated_tokens_one_by_one() -> None:
    chain = LogitsProcessors(min_new_tokens=3, eos_ids=(4, 5), prompt_length=10)
    assert [chain.bans_eos(length) for length in (10, 11, 12, 13)] == [True, True, True, False]
    row = apply(chain, torch.zeros(VOCAB), [0] * 12)
    assert torch.isinf(row).nonzero().flatten().tolist() == [4, 5]


def test_frequency_and_presence_count_the_output_alone() -> None:
    chain = LogitsProcessors(frequency_penalty=0.5, presence_penalty=1.0, prompt_length=3)
    row = apply(chain, torch.zeros(VOCAB), [1, 1, 2, 2, 2, 3])
    expected = torch.zeros(VOCAB)
    expected[2], expected[3] = -2.0, -1.5
    assert torch.equal(row, expected)


def test_a_bias_precedes_the_repetition_penalty_and_the_others_follow_it() -> None:
    """vLLM: (2 + 2) / 2 − 0.5 · 1 − 0.25."""
    biased = LogitsProcessors(2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((4, 2.0),))
    assert float(apply(biased, torch.full((VOCAB,), 2.0), [4])[4]) == 1.25


def test_biased_and_generated_tokens_beyond_the_vocabulary_are_passed_over() -> None:
    chain = LogitsProcessors(frequency_penalty=1.0, logit_bias=((VOCAB, 5.0), (1, 5.0)))
    expected = torch.zeros(VOCAB)
    expected[1], expected[2] = 5.0, -1.0
    assert torch.equal(apply(chain, torch.zeros(VOCAB), [VOCAB + 2, 2]), expected)


def test_a_rolled_back_output_counts_anew() -> None:
    chain = LogitsProcessors(frequency_penalty=1.0, prompt_length=1)
    index, ids = chain.index(), [0, 5, 5, 5, 5]
    drops = [-float(chain.apply(torch.zeros(VOCAB), ids, n, index)[5]) for n in (5, 2, 4, 1, 3)]
    assert drops == [4.0, 1.0, 3.0, 0.0, 2.0]


# The memo -------------------------------------------------------------------------------------------------------


def contents(index: PrefixIndex) -> tuple[dict[int, int], dict[int, int], list[int]]:
    tokens, output = (
        dict(zip(each.ids.tolist(), each.counts.tolist(), strict=True)) for each in (index.tokens, index.output)
    )
    return tokens, output, sorted(index.ngram_completions())


def fresh(prefix: list[int], ngram: int, prompt_length: int = 0) -> PrefixIndex:
    index = PrefixIndex(ngram, prompt_length)
    index.move_to(prefix, len(prefix))
    return index


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.lists(prefixes, min_size=1, max_size=6), st.data())
def test_jumping_between_prefixes_leaves_no_trace(
    ngram: int, prompt_length: int, ids: list[list[int]], data: st.DataObject
) -> None:
    index = PrefixIndex(ngram, prompt_length)
    for prefix in ids:
        length = data.draw(st.integers(0, len(prefix)))
        index.move_to(prefix, length)
        assert contents(index) == contents(fresh(prefix[:length], ngram, prompt_length))
        assert contents(index)[:2] == (Counter(prefix[:length]), Counter(prefix[prompt_length:length]))


def test_the_memo_grows_past_its_first_256_tokens_and_shrinks_again() -> None:
    ids = [*range(700), *range(100)]
    index = PrefixIndex(2)
    for length in (255, 256, 257, 512, 513, 800, 300, 256, 1, 0, 800):
        index.move_to(ids, length)
        assert contents(index) == contents(fresh(ids[:length], 2))


def test_a_list_that_was_changed_in_place_is_noticed() -> None:
    ids = [1, 2, 3]
    index = fresh(ids, 2)
    ids[1] = 9
    index.move_to(ids, 3)
    assert contents(index) == contents(fresh([1, 9, 3], 2))


# The prototype's two bugs: each has the wrong way of doing it, and the case that tells it from ours ---------------


def divide_always(row: Tensor, prefix: list[int], penalty: float) -> Tensor:
    row = row.clone()
    row[sorted(set(prefix))] /= penalty
    return row


def test_penalties_raised_repeats() -> None:
    """Dividing a negative logit by the penalty makes its token likelier."""
    row, prefix = torch.tensor([-2.0, -1.0, -3.0]), [1]
    plain = torch.softmax(row, -1)[1]
    ours = apply(LogitsProcessors(repetition_penalty=1.5), row, prefix)
    assert torch.softmax(ours, -1)[1] < plain
    assert torch.softmax(divide_always(row, prefix, 1.5), -1)[1] > plain


def ban_immediate_repeat(row: Tensor, prefix: list[int]) -> Tensor:
    row = row.clone()
    row[prefix[-1]] = -torch.inf
    return row


def test_fake_2_gram_ban_let_abab_through() -> None:
    """After A B A, the 2-gram ban forbids B (A B was seen); the prototype only forbade A A."""
    a, b = 0, 1
    row, prefix = torch.tensor([0.0, 5.0, 1.0]), [a, b, a]
    assert int(apply(LogitsProcessors(no_repeat_ngram=2), row, prefix).argmax()) == 2
    assert int(ban_immediate_repeat(row, prefix).argmax()) == b
