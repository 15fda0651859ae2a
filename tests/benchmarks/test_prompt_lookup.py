"""The replays of the prompt lookup benchmark, against generations by a model."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.prompt_lookup import Drafters, check, count_accepted, replay_transformers
from outrider import SpeculativeDecoder, local, prompt_lookup
from tests.support.tiny_models import tiny_engine

PROMPT = [5, 6, 7, 8, 5, 6, 9, 5, 6, 7, 8, 5]


@pytest.mark.parametrize("k", [1, 4, 10])
def test_replays_take_as_many_verdicts_as_generations(k: int) -> None:
    target = tiny_engine("qwen2", eos=(3,))
    real = SpeculativeDecoder(prompt_lookup(), local(target), k=k).generate(PROMPT, max_new_tokens=40)
    output = real.token_ids
    assert check(target, PROMPT, output, Namespace(tokens=40, k=k)) == ""
    replayed = Drafters(target, tiny_engine("qwen2", drift=0.05), k, timed=False).run(PROMPT, output)
    assert replayed["lookup"].verdicts == real.stats.rounds
    assert replayed["lookup"].accepted == real.stats.accepted
    assert replayed["min_ngram 1"] == replayed["lookup"]
    timed = Drafters(target, tiny_engine("qwen2", drift=0.05), k, timed=True).run(PROMPT, output)
    assert {name: tally.verdicts for name, tally in timed.items()} == {
        name: tally.verdicts for name, tally in replayed.items()
    }
    assert timed["model"].seconds > 0 == replayed["model"].seconds


def test_a_difference_from_transformers_is_named() -> None:
    target = tiny_engine("qwen2", eos=(3,))
    output = SpeculativeDecoder(None, local(target)).generate(PROMPT, max_new_tokens=8).token_ids
    wrong = [*output[:-1], (output[-1] + 1) % 90]
    assert "in place of" in check(target, PROMPT, wrong, Namespace(tokens=8, k=4))


def test_a_replay_of_transformers_counts_each_token_once() -> None:
    tally = replay_transformers([1, 2, 3, 1, 2], [3, 1, 2, 7, 8, 9], 2)
    assert (tally.tokens, tally.verdicts, tally.accepted) == (6, 4, 2)
    assert count_accepted([3, 1, 4], [3, 1, 2]) == 2
    assert count_accepted([3, 1, 4], [3]) == 1
