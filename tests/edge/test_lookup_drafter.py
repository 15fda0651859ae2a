"""The drafter of prompt lookup: its proposals, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GenerationSettings
from outrider.decoding.actions import Draft
from outrider.decoding.draft_source import DraftSourceController
from outrider.decoding.ngram_index import NgramIndex
from outrider.edge.drafter import Drafter
from outrider.edge.lookup_drafter import CombinedDrafter, LookupDrafter
from outrider.engines.base import CachedSequence, Prompt
from outrider.sampling.policy import Policy
from tests.support.fakes import ScriptedEngine, replay
from tests.support.generation import block


def drafter(vocab_size: int = 100, **options: Any) -> LookupDrafter:
    return LookupDrafter(NgramIndex(1, 8), vocab_size, **options)


def tokens(lookup: LookupDrafter, ids: list[int], count: int = 4) -> list[int]:
    return [proposal.token for proposal in lookup.draft(ids, Draft(count))]


def test_the_longest_match_wins_then_the_most_recent() -> None:
    assert tokens(drafter(), [1, 2, 30, 9, 2, 40, 9, 2, 50, 1, 2], 1) == [30]
    assert tokens(drafter(), [9, 2, 40, 9, 2, 50, 9, 2], 1) == [50]


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
    assert tokens(LookupDrafter(NgramIndex(2, 8), 100), [1, 2, 3, 2]) == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"eos_ids": (3,)}, [2, 3]),
        ({"excluded_ids": {3}}, [2]),
        ({"vocab_size": 3}, [2]),
        ({"excluded_ids": {2}}, []),
    ],
)
def test_a_block_ends_at_an_eos_and_before_a_token_that_the_target_cannot_emit(options: Any, wanted: list[int]) -> None:
    assert tokens(drafter(**options), [1, 2, 3, 4, 1]) == wanted


def test_after_a_roll_back_the_index_follows_the_new_tokens() -> None:
    """As the drivers do: the last token of the kept prefix may have changed."""
    lookup = drafter()
    assert tokens(lookup, [1, 2, 3, 1], 2) == [2, 3]
    lookup.rollback_to(6)  # two accepted, and a bonus token: 1, 2, 3, 1, 2, 3, 7
    assert tokens(lookup, [1, 2, 3, 1, 2, 3, 7, 2], 2) == [3, 7]
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
    both = CombinedDrafter(model, drafter(), DraftSourceController(), per_token=per_token)
    known = [*prompt, 1]
    assert [proposal.token for proposal in both.draft(prompt, Draft(1))] == [1]  # the model's first call
    drafted = block(both, known, 5)
    assert [proposal.token for proposal in drafted] == [2, 3, 4, 5, last]
    assert [proposal.match_length for proposal in drafted] == [0, 0, 0, 0, 5 if per_token else 0]
    both.rollback_to(len(prompt) + 3)
    assert engine.kv_len(engine.open_slots[0]) <= len(prompt) + 2
    assert [proposal.token for proposal in both.draft([*prompt, 1, 2, 7], Draft(1))] == [4]
    both.close()
    assert not engine.open_slots
    assert both.seconds > both.prefill_seconds > 0
