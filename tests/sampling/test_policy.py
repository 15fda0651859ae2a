"""From a row to a token: constraints, then sampling, over the shared vocabulary."""

from __future__ import annotations

import torch

from outrider.config import GenerationSettings
from outrider.sampling.policy import LOOP_TOP_K, Policy


def policy(eos: tuple[int, ...] = (), vocab_size: int = 6, prompt_length: int = 1, **settings: object) -> Policy:
    return Policy.build(GenerationSettings.build(settings), eos, vocab_size, prompt_length)


def test_every_setting_arrives() -> None:
    sampled = policy(
        (5,),
        temperature=0.7,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=2**64 - 1,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        min_new_tokens=2,
        suppress_tokens=(1,),
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={7: 1.5, 2: -3},
    )
    chain, sampling = sampled.processors, sampled.sampling
    assert (chain.repetition_penalty, chain.no_repeat_ngram, chain.min_new_tokens) == (1.2, 3, 2)
    assert (chain.frequency_penalty, chain.presence_penalty) == (0.25, -0.5)
    assert chain.logit_bias == ((2, -3), (7, 1.5))
    assert (chain.eos_ids, chain.banned_ids, chain.prompt_length) == ((5,), (1,), 1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 4, 0.9, 0.1)
    assert sampling.seed == 2**64 - 1


def test_padding_beyond_the_vocabulary_is_never_chosen() -> None:
    row = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0])
    assert policy().distribution(row, [0], 1).token == 1
    assert all(policy(temperature=2.0, seed=s).distribution(row, [0], 1).token < 6 for s in range(50))


def test_min_new_tokens_holds_for_sampled_choices_too() -> None:
    row = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
    early, late = [0, 0], [0, 0, 0]
    for settings in ({}, {"temperature": 1.0, "seed": 4}):
        built = policy((5,), min_new_tokens=2, **settings)
        assert built.distribution(row, early, 2).token != 5
        assert built.distribution(row, late, 3).token == 5


def test_an_ignored_eos_is_an_ordinary_token() -> None:
    row = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
    assert policy((5,), min_new_tokens=2, ignore_eos=True).distribution(row, [0], 1).token == 5


def test_the_memo_follows_any_order_of_positions() -> None:
    row, ids = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]), [0, 1, 0, 2, 1, 0]
    shared = policy(no_repeat_ngram_size=2)
    for length in (6, 2, 5, 1, 3, 6, 4):
        fresh = policy(no_repeat_ngram_size=2).distribution(row, ids, length)
        assert torch.equal(shared.distribution(row, ids, length).logits, fresh.logits)


def test_leaving_a_loop_draws_from_the_five_best_the_same_every_time() -> None:
    row = torch.tensor([3.0, 2.9, 2.8, 2.7, 2.6, -9.0])
    greedy = policy(seed=3)
    drawn = [greedy.leave_loop(row, [0] * n, n) for n in range(1, 200)]
    assert set(drawn) == set(range(LOOP_TOP_K))
    assert drawn == [policy(seed=3).leave_loop(row, [0] * n, n) for n in range(1, 200)]
    assert drawn != [policy(seed=4).leave_loop(row, [0] * n, n) for n in range(1, 200)]


def test_the_draw_that_leaves_a_loop_has_noise_of_its_own() -> None:
    """With the shared noise it would repeat the choice that sampling at 0.8 makes anyway."""
    row = torch.zeros(6)
    sampled = policy(temperature=0.8, top_k=5, seed=3)
    same = sum(sampled.leave_loop(row, [0] * n, n) == sampled.distribution(row, [0] * n, n).token for n in range(200))
    assert same < 80  # one in five or six by chance


def test_leaving_a_loop_respects_bans() -> None:
    row = torch.tensor([3.0, 9.0, 2.8, 2.7, 2.6, 2.5])
    banned = policy(suppress_tokens=(1,))
    assert 1 not in {banned.leave_loop(row, [0] * n, n) for n in range(1, 100)}
