"""Prefix caching: a slot is continued from the tokens that it holds, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SpeculativeDecoder
from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.prefix_cache import PrefixCache, close_sequence, common_prefix, open_sequence, shared_length
from outrider.engines.shared_engine import SharedEngine
from outrider.engines.torch.engine import TorchEngine
from outrider.errors import ModelError, StateError
from outrider.verifiers.local import LocalVerifier
from tests.support import tiny_text_models
from tests.support.fakes import HashRows, ReusableEngine, ScriptedAudioEncoder, reference_output

V = 24
ROWS = HashRows(1, V)


def engine() -> ReusableEngine:
    return ReusableEngine(ROWS, V)


def run(made: ReusableEngine, ids: Seq[int], *, keep: bool = True, **options: object) -> int:
    """Compute `ids`, and return how many of them had been cached before."""
    sequence = open_sequence(made, Prompt(tuple(ids), **options), "test")  # type: ignore[arg-type]
    cached = sequence.cached_len
    logits = sequence.extend(list(ids), 1)
    assert torch.equal(logits[0], ROWS(tuple(ids)))
    close_sequence(sequence, keep=keep)
    return cached


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix(one: list[int], other: list[int]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_the_longest_common_prefix_is_continued() -> None:
    made = engine()
    assert run(made, [1, 2, 3, 4]) == 0
    assert run(made, [9, 2, 3]) == 0
    assert run(made, [1, 2, 3, 4, 5]) == 4
    assert run(made, [1, 2, 7]) == 2
    assert len(made.open_slots) == 2


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    made = engine()
    run(made, [1, 2, 3])
    assert run(made, [1, 2, 3]) == 2
    assert run(made, [1]) == 0


def test_prompts_of_other_salts_share_nothing() -> None:
    made = engine()
    run(made, [1, 2, 3], cache_salt="one")
    assert run(made, [1, 2, 3, 4], cache_salt="other") == 0
    assert run(made, [1, 2, 3, 4]) == 0
    assert run(made, [1, 2, 3, 4], cache_salt="one") == 3


def test_a_sequence_that_failed_is_not_kept() -> None:
    made = engine()
    run(made, [1, 2, 3], keep=False)
    assert made.open_slots == []
    assert run(made, [1, 2, 3, 4]) == 0


def test_running_sequences_leave_less_room_for_finished_ones() -> None:
    made = engine()
    made.prefix_cache = PrefixCache(max_kept=2)
    for first in range(5):
        run(made, [first, 1])
    assert len(made.open_slots) == 2
    running = [open_sequence(made, Prompt((20 + n,)), "test") for n in range(3)]
    assert len(made.open_slots) == 3
    assert not len(made.prefix_cache)
    for sequence in running:
        close_sequence(sequence, keep=True)
    assert made.open_slots == []  # nothing was computed


def test_an_engine_with_fewer_slots_evicts_finished_sequences() -> None:
    made = engine()
    made.open = _limited(made, 1)  # type: ignore[method-assign]
    run(made, [1, 2])
    assert run(made, [3, 4]) == 0
    held = open_sequence(made, Prompt((5,)), "test")
    with pytest.raises(StateError, match="in use"):
        open_sequence(made, Prompt((6,)), "test")
    close_sequence(held, keep=False)


def _limited(made: ReusableEngine, slots: int):  # type: ignore[no-untyped-def]
    def open_(prompt: Prompt) -> int:
        if len(made.open_slots) >= slots:
            raise StateError("all slots are in use")
        return ReusableEngine.open(made, prompt)

    return open_


WAVE, OTHER_WAVE = np.zeros(3200, np.float32), np.ones(3200, np.float32)
HEARD = (5, 1, 1, 6)


@pytest.mark.parametrize(
    ("previous", "prompt", "expected"),
    [
        (Prompt(HEARD, WAVE), Prompt((*HEARD, 7), WAVE.copy()), 4),
        (Prompt(HEARD, WAVE), Prompt((*HEARD, 7), OTHER_WAVE), 1),
        (Prompt(HEARD, WAVE), Prompt((*HEARD, 7)), 1),
        (Prompt(HEARD), Prompt((*HEARD, 7), WAVE), 1),
        (Prompt(HEARD), Prompt((*HEARD, 7)), 4),
        (Prompt((5, 6, 7)), Prompt((5, 6, 7, 1, 1, 8), WAVE), 3),
        (Prompt(HEARD, features=WAVE[None]), Prompt((*HEARD, 7), features=WAVE[None].copy()), 4),
        (Prompt(HEARD, features=WAVE[None]), Prompt((*HEARD, 7), WAVE), 1),
    ],
)
def test_behind_a_placeholder_of_other_media_nothing_is_shared(previous: Prompt, prompt: Prompt, expected: int) -> None:
    made = engine()
    made.audio = ScriptedAudioEncoder()
    assert shared_length(made, previous.ids, previous, prompt) == expected


def test_a_recording_is_encoded_once_for_two_turns() -> None:
    made = engine()
    made.audio = ScriptedAudioEncoder()
    run(made, HEARD, audio=WAVE)
    assert run(made, (*HEARD, 7, 8), audio=WAVE.copy()) == 4
    assert made.media_sent == 1
    assert run(made, (*HEARD, 7, 8), audio=OTHER_WAVE) == 1
    assert made.media_sent == 2


token = st.integers(0, 5)
turn = st.tuples(st.integers(0, 2), st.lists(token, min_size=1, max_size=5), st.integers(0, 12), st.integers(1, 6))


@settings(max_examples=60, deadline=None)
@given(st.lists(turn, min_size=1, max_size=12), st.integers(1, 4), st.booleans(), st.booleans())
def test_conversations_with_and_without_reuse_are_equal(
    turns: list[tuple[int, list[int], int, int]], max_kept: int, shared: bool, stopped_early: bool
) -> None:
    """Three interleaved conversations whose histories are sometimes cut, drafter and target with kept slots."""
    draft, target = ReusableEngine(HashRows(2, V), V), engine()
    sides: list[Any] = [SharedEngine(draft), SharedEngine(target)] if shared else [draft, target]
    for side in sides:
        side.prefix_cache = PrefixCache(max_kept)
    decoder = SpeculativeDecoder(sides[0], LocalVerifier(sides[1]), k=3)
    histories: list[list[int]] = [[], [], []]
    for which, new, cut, count in turns:
        history = [*histories[which][: len(histories[which]) - cut], *new]
        if stopped_early:
            next(iter(decoder.stream(history, max_new_tokens=count)), None)
        result = decoder.generate(history, max_new_tokens=count)
        assert result.token_ids == reference_output(ROWS, history, V, max_new_tokens=count)
        assert result.stats.cloud_cached_tokens < len(history)
        histories[which] = [*history, *result.token_ids]
    assert len(draft.open_slots) <= max_kept
    assert len(target.open_slots) <= max_kept


def test_the_next_turn_computes_only_what_is_new() -> None:
    draft, target = engine(), engine()
    decoder = SpeculativeDecoder(draft, LocalVerifier(target), k=3)
    first = decoder.generate([3, 1, 4, 1, 5], max_new_tokens=8)
    assert (first.stats.edge_cached_tokens, first.stats.cloud_cached_tokens) == (0, 0)
    history = [3, 1, 4, 1, 5, *first.token_ids, 9, 2]
    second = decoder.generate(history, max_new_tokens=8)
    assert second.stats.edge_cached_tokens >= 11
    assert second.stats.cloud_cached_tokens >= 11
    assert target.fed - target.refed <= len(history) + 8 + 3 * second.stats.rounds + 3 * first.stats.rounds


def test_memory_can_be_reserved_after_a_generation(tiny_engine_with_kept_slot: object) -> None:
    made = tiny_engine_with_kept_slot
    with pytest.raises(ModelError):
        made.reserve(1, 64)  # type: ignore[attr-defined]
    assert made.reserve(64 * made.position_bytes, 64) == 1  # type: ignore[attr-defined]


@pytest.fixture
def tiny_engine_with_kept_slot() -> object:
    made = TorchEngine(tiny_text_models.model("qwen2"))
    sequence = open_sequence(made, Prompt((1, 2, 3)), "test")
    made.forward_many([SequenceInput(sequence.slot, sequence.next_input([1, 2, 3], 1).ids, 1)])
    close_sequence(sequence, keep=True)
    assert len(made.prefix_cache) == 1
    return made
