"""The budget of keys and values: never passed, whatever is opened, read, rolled back and closed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.extents import INITIAL_TOTAL
from outrider.errors import ModelError, PromptError, StateError
from tests.support.tiny_text_models import model, tokens

PROMPT = Prompt((1,))


def fresh(kind: str = "qwen2") -> TorchEngine:
    return TorchEngine(model(kind), name=kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen2", 2 * 2 * 2 * 8 * 4),
        ("mistral", 2 * 2 * 2 * 8 * 4),
        ("gemma3", 2 * 2 * 2 * 8 * 4),
        ("gpt2", 2 * 2 * 32 * 4),
    ],
)
def test_a_position_s_bytes_are_those_of_all_layers(kind: str, expected: int) -> None:
    """Layers × keys and values × heads × dim × 4 bytes, sliding windows too: they hold all positions here."""
    made = fresh(kind)
    assert made.position_bytes == expected
    made.forward(made.open(PROMPT), tokens(4))
    assert made.cache_bytes % made.position_bytes == 0
    assert fresh(kind).position_bytes == TorchEngine(model(kind).to(torch.bfloat16)).position_bytes * 2


def test_what_a_budget_allows_is_counted_in_slots() -> None:
    made = fresh()
    assert made.reserve(made.position_bytes * 300 + 5, 100) == 3
    assert made.cache_bytes == 0, "what the probe held is given back"
    assert made.max_length == 100


def test_more_positions_than_the_model_has_are_not_reserved() -> None:
    made = fresh()
    assert made.reserve(made.position_bytes * 512 * 2, 10_000) == 2
    assert made.max_length == 512


def test_a_budget_for_less_than_one_sequence_is_refused_with_the_smallest_that_would_do() -> None:
    made = fresh()
    with pytest.raises(ModelError, match=rf"{made.position_bytes * 100} bytes of cache; the budget is 99"):
        made.reserve(99, 100)
    with pytest.raises(ModelError, match="at least 1 position, not 0"):
        made.reserve(10**9, 0)
    made.open(PROMPT)
    with pytest.raises(StateError, match="before slots are opened"):
        made.reserve(10**9, 100)


def test_one_slot_too_many_is_an_error_that_names_the_limit() -> None:
    made = fresh()
    made.reserve(made.position_bytes * 300, 100)
    slots = [made.open(PROMPT) for _ in range(3)]
    with pytest.raises(StateError, match="all 3 slots"):
        made.open(PROMPT)
    made.close(slots[1])
    assert made.open(PROMPT) == slots[1]


def test_a_position_too_many_is_refused_before_any_work_and_changes_nothing() -> None:
    made = fresh()
    made.reserve(made.position_bytes * 200, 100)
    long, short = made.open(PROMPT), made.open(PROMPT)
    made.forward(long, tokens(95), 1)
    made.forward(short, tokens(3), 1)
    hook = made.model.register_forward_pre_hook(lambda *args: pytest.fail("computed"))
    for feeds in (
        [SequenceInput(long, tokens(6), 1)],
        [SequenceInput(short, tokens(2), 1), SequenceInput(long, tokens(6), 6)],
    ):
        with pytest.raises(PromptError, match=r"101 positions.*at most 100"):
            made.forward_many(feeds)
    hook.remove()
    assert (made.kv_len(long), made.kv_len(short)) == (95, 3)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "gpt2"])
def test_a_slot_may_be_filled_to_the_last_position_beside_a_longer_feed(kind: str) -> None:
    """The full slot's padding would lie beyond its buffer: it is never written."""
    made, free = fresh(kind), fresh(kind)
    made.reserve(made.position_bytes * 200, 100)
    rows = []
    for one in (made, free):
        full, empty = one.open(PROMPT), one.open(PROMPT)
        one.forward(full, tokens(98), 1)
        rows.append(one.forward_many([SequenceInput(full, tokens(2), 2), SequenceInput(empty, tokens(70), 2)]))
        rows[-1].append(one.forward(full, tokens(1), 1) if one is free else rows[-1][0][:1])
    torch.testing.assert_close(rows[0][:2], rows[1][:2], rtol=1e-4, atol=1e-4)


def test_growth_stops_at_the_limit_and_keeps_what_was_there() -> None:
    limit = INITIAL_TOTAL + 40  # a whole step would pass it
    made, free = fresh(), fresh()
    made.reserve(made.position_bytes * limit, limit)
    ids = tokens(limit)
    slot = made.open(PROMPT)
    made.forward(slot, ids[:200], 1)
    torch.testing.assert_close(
        made.forward(slot, ids[200:], 3), free.forward(free.open(PROMPT), ids, 3), rtol=1e-4, atol=1e-4
    )
    assert made.cache_bytes == made.position_bytes * limit


steps = st.tuples(
    st.sampled_from(["open", "forward", "truncate", "close"]), st.integers(0, 99), st.integers(1, 60), st.integers(1, 4)
)


@settings(max_examples=40, deadline=None)
@given(slots=st.integers(1, 5), length=st.integers(8, 120), schedule=st.lists(steps, max_size=25))
def test_buffers_never_pass_the_budget(slots: int, length: int, schedule: list[tuple[str, int, int, int]]) -> None:
    made = _shared()
    budget = made.position_bytes * length * slots + 7
    assert made.reserve(budget, length) == slots
    held: dict[int, int] = {}
    try:
        for action, pick, size, width in schedule:
            _act(made, held, action, pick, size, width)
            assert made.cache_bytes <= budget
            assert {slot: made.kv_len(slot) for slot in held} == held
            assert len(held) <= slots
    finally:
        for slot in held:
            made.close(slot)


_ENGINES: list[TorchEngine] = []


def _shared() -> TorchEngine:
    if not _ENGINES:
        _ENGINES.append(fresh())
    return _ENGINES[0]


def _act(made: TorchEngine, held: dict[int, int], action: str, pick: int, size: int, width: int) -> None:
    """One step of a schedule; `held` has the lengths that the engine should have after it."""
    if action == "open":
        _unless_refused(StateError, lambda: held.setdefault(made.open(PROMPT), 0))
    if not held or action == "open":
        return
    chosen = sorted(held)[pick % len(held) :][:width]
    if action == "forward":
        feeds = [SequenceInput(slot, tokens(1 + (size * (n + 1)) % 60, seed=n), 1) for n, slot in enumerate(chosen)]
        if _unless_refused(PromptError, lambda: made.forward_many(feeds)):
            held.update({feed.slot: held[feed.slot] + len(feed.ids) for feed in feeds})
    elif action == "truncate":
        held[chosen[0]] = held[chosen[0]] * size // 60
        made.truncate(chosen[0], held[chosen[0]])
    else:
        made.close(chosen[0])
        del held[chosen[0]]


def _unless_refused(error: type[Exception], act: Callable[[], Any]) -> bool:
    try:
        act()
    except error:
        return False
    return True
