"""The drafter of prompt lookup: its proposals, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GenerationSettings
from outrider.decoding.acceptance_model import AcceptanceModel
from outrider.decoding.actions import Draft
from outrider.decoding.ngram_index import NgramIndex
from outrider.edge.drafter import Drafter
from outrider.edge.lookup_drafter import CombinedDrafter, LookupDrafter
from outrider.engines.base import CachedSequence, Prompt
from outrider.sampling.policy import Policy
from tests.support.fakes import ScriptedEngine, replay
from tests.support.generation import block


def drafter(
    vocab_size: int = 100,
    *,
    min_ngram: int = 1,
    eos_ids: tuple[int, ...] = (),
    prompt_length: int = 0,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> LookupDrafter:
    """Return a drafter under a policy with these generation settings."""
    settings = GenerationSettings.build(options or {})
    return LookupDrafter(NgramIndex(min_ngram, 8), Policy.build(settings, eos_ids, vocab_size, prompt_length), **more)


def tokens(lookup: LookupDrafter, ids: list[int], count: int = 4) -> list[int]:
    return [proposal.token for proposal in lookup.draft(ids, Draft(count))]


def test_the_longest_match_wins_then_the_earliest() -> None:
    assert tokens(drafter(), [1, 2, 30, 9, 2, 40, 9, 2, 50, 1, 2], 1) == [30]
    assert tokens(drafter(), [9, 2, 40, 9, 2, 50, 9, 2], 1) == [40]


def test_a_copy_runs_into_itself() -> None:
    assert tokens(drafter(), [5, 6, 5], 5) == [6, 5, 6, 5, 6]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_proposals_do_not_depend_on_the_division_into_calls(ids: list[int], counts: list[int]) -> None:
    """Under rejection sampling the output depends on the drafts. A pipelined driver requests them one by one."""
    whole, parts = tokens(drafter(), ids, sum(counts)), drafter()
    pieces: list[int] = []
    for count in counts:
        pieces += tokens(parts, [*ids, *pieces], count)
    assert pieces == whole


def test_no_match_gives_no_proposals() -> None:
    assert tokens(drafter(), [1, 2, 3]) == []
    assert tokens(drafter(min_ngram=2), [1, 2, 3, 2]) == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"eos_ids": (3,)}, [2, 3]),
        ({"eos_ids": (3,), "options": {"ignore_eos": True}}, [2, 3, 4, 1]),
        ({"eos_ids": (3,), "prompt_length": 5, "options": {"min_new_tokens": 3}}, [2]),
        ({"options": {"suppress_tokens": (3,)}}, [2]),
        ({"placeholder": 3}, [2]),
        ({"vocab_size": 3}, [2]),
        ({"placeholder": 2}, []),
    ],
)
def test_a_block_ends_at_an_eos_and_before_a_token_that_the_target_cannot_emit(options: Any, wanted: list[int]) -> None:
    assert tokens(drafter(**options), [1, 2, 3, 4, 1]) == wanted


def test_a_token_that_the_policy_bans_is_replaced_by_that_of_a_shorter_match() -> None:
    ids = [5, 1, 40, 1, 30, 5, 1]  # behind "5 1" followed 40, behind another "1" followed 30
    assert tokens(drafter(), ids, 1) == [40]
    assert tokens(drafter(options={"suppress_tokens": (40,)}), ids, 1) == [30]
    assert tokens(drafter(options={"suppress_tokens": (30, 40)}), ids, 1) == []


def test_no_draft_repeats_an_n_gram_that_may_not_repeat() -> None:
    ids = [1, 2, 3, 9, 2, 8, 1, 2]
    assert tokens(drafter(), ids, 2) == [3, 9]
    assert tokens(drafter(options={"no_repeat_ngram_size": 3}), ids, 1) == [8]
    assert tokens(drafter(options={"no_repeat_ngram_size": 2}), ids, 1) == []
    assert tokens(drafter(options={"no_repeat_ngram_size": 1}), ids, 1) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 6))
def test_no_draft_is_banned_by_the_policy(ids: list[int], size: int, least: int) -> None:
    options = {"no_repeat_ngram_size": size, "min_new_tokens": least}
    lookup = drafter(eos_ids=(0,), prompt_length=len(ids), options=options)
    judge = Policy.build(GenerationSettings.build(options), (0,), 100, len(ids))
    for token in tokens(lookup, ids, 6):
        assert token not in judge.banned_ids(ids)
        ids = [*ids, token]


def test_after_a_roll_back_the_index_follows_the_new_tokens() -> None:
    """As the drivers do: the last token of the kept prefix may have changed."""
    lookup = drafter()
    assert tokens(lookup, [1, 2, 3, 1], 2) == [2, 3]
    lookup.rollback_to(6)  # two accepted, and a bonus token: 1, 2, 3, 1, 2, 3, 7
    assert tokens(lookup, [1, 2, 3, 1, 2, 3, 7, 2], 2) == [3, 1]
    lookup.rollback_to(5)  # the token at index 4 was corrected
    assert tokens(lookup, [1, 2, 3, 1, 3], 2) == [1, 3]


def test_q_is_a_point_mass_where_rejection_sampling_needs_it() -> None:
    (plain,) = drafter().draft([1, 2, 1], Draft(1))
    (with_q,) = drafter(needs_q=True).draft([1, 2, 1], Draft(1))
    assert plain.q is None
    assert plain.signals is None
    assert with_q.q is not None
    assert [with_q.q.probability(token) for token in (1, 2, 3)] == [0.0, 1.0, 0.0]


def test_the_time_to_index_the_prompt_is_the_prefill() -> None:
    lookup = drafter()
    tokens(lookup, [1, 2, 1])
    first = lookup.prefill_seconds
    tokens(lookup, [1, 2, 1, 2])
    assert 0 < first == lookup.prefill_seconds < lookup.seconds


@pytest.mark.parametrize(("per_token", "last"), [(True, 9), (False, 6)])
def test_together_with_a_model_the_source_is_chosen_per_token_or_per_call(per_token: bool, last: int) -> None:
    """The model drafts five tokens of the prompt, which become a match in the middle of the block."""
    prompt = [1, 2, 3, 4, 5, 9, 8]
    engine = ScriptedEngine(replay(len(prompt), [1, 2, 3, 4, 5, 6], 100), 100)
    policy = Policy.build(GenerationSettings(), (), 100, len(prompt))
    model = Drafter(
        CachedSequence(engine, Prompt(tuple(prompt)), "drafter"), policy, needs_signals=False, needs_q=False
    )
    both = CombinedDrafter(model, drafter(), AcceptanceModel().prefers_lookup, per_token=per_token)
    known = [*prompt, 1]
    assert [proposal.token for proposal in both.draft(prompt, Draft(1))] == [1]  # the model's first call
    drafted = block(both, known, 5)
    assert [proposal.token for proposal in drafted] == [2, 3, 4, 5, last]
    assert [proposal.match_length for proposal in drafted] == [0, 0, 0, 0, 5 if per_token else 0]
    both.rollback_to(len(prompt) + 3)
    assert engine.kv_len(engine.open_slots[0]) <= len(prompt) + 2
    assert [proposal.token for proposal in both.draft([*prompt, 1, 2, 7], Draft(1))] == [4]
    both.rollback_to(len(prompt) + 3)
    assert [proposal.match_length for proposal in both.draft([*prompt, 1, 2, 3, 4, 5], Draft(1))] == [5]
    assert [proposal.match_length for proposal in both.draft([*prompt, 1, 2, 3, 4, 5], Draft(1, model_only=True))] == [
        0
    ]
    both.close()
    assert not engine.open_slots
    assert both.seconds > both.prefill_seconds > 0


def test_without_the_model_only_matches_are_drafted() -> None:
    engine = ScriptedEngine(replay(2, [1, 2, 3], 100), 100)
    policy = Policy.build(GenerationSettings(), (), 100, 2)
    model = Drafter(CachedSequence(engine, Prompt((7, 8)), "drafter"), policy, needs_signals=False, needs_q=False)
    both = CombinedDrafter(model, drafter(), lambda _: False, per_token=False)
    assert both.draft([7, 8], Draft(1, lookup_only=True)) == []
    assert [proposal.token for proposal in both.draft([7, 8, 7], Draft(1, lookup_only=True))] == [8]
    assert engine.forwards == 0
    assert [proposal.token for proposal in both.draft([7, 8], Draft(1))] == [1]
