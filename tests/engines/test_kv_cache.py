"""The slot cache: positions, roll-back, growth, isolation."""

import pytest
import torch

from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch import append_plan
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.extents import INITIAL_TOTAL
from outrider.engines.torch.kv_cache import SlotKVCache
from outrider.errors import StateError
from tests.support.tiny_models import tiny_model
from tests.support.tiny_text_models import CONFIGS, engine, tokens

PROMPT = Prompt((1,))


def test_a_slot_is_reused_empty() -> None:
    cache = SlotKVCache(1)
    first, second = cache.allocate(), cache.allocate()
    cache.lengths[first] = 5
    cache.release(first)
    assert cache.allocate() == first
    assert cache.lengths[first] == 0
    assert second != first


@pytest.mark.parametrize("length", [-1, 4])
def test_truncating_to_what_is_not_there_is_an_error(length: int) -> None:
    cache = SlotKVCache(1)
    slot = cache.allocate()
    cache.lengths[slot] = 3
    with pytest.raises(StateError, match="holds 3 positions"):
        cache.truncate(slot, length)


def test_a_closed_slot_cannot_be_used() -> None:
    model = engine("qwen2")
    slot = model.open(PROMPT)
    model.close(slot)
    for use in (lambda: model.kv_len(slot), lambda: model.truncate(slot, 0), lambda: model.forward(slot, [1])):
        with pytest.raises(StateError, match="not open"):
            use()


@pytest.mark.parametrize("keep", [0, 1, 6, 7])
def test_rows_after_a_roll_back_equal_a_fresh_read(keep: int) -> None:
    model = engine("llama")
    ids = tokens(12)
    slot = model.open(PROMPT)
    model.forward(slot, ids[:7])
    model.truncate(slot, keep)
    model.forward(slot, [*ids[keep:9], 5])
    model.truncate(slot, 9)
    rows = model.forward(slot, ids[9:])
    fresh = model.open(PROMPT)
    torch.testing.assert_close(rows, model.forward(fresh, ids)[9:], rtol=1e-5, atol=1e-5)
    assert model.kv_len(slot) == 12


def test_growing_past_the_first_buffer_keeps_what_was_there() -> None:
    model = engine("qwen2")
    ids = tokens(INITIAL_TOTAL + 60)
    slot, whole = model.open(PROMPT), model.open(PROMPT)
    for start in range(0, len(ids), 50):
        rows = model.forward(slot, ids[start : start + 50], 1)
    torch.testing.assert_close(rows, model.forward(whole, ids, 1), rtol=1e-4, atol=1e-4)


def test_slots_do_not_see_each_other() -> None:
    model = engine("qwen2")
    alone = model.forward(model.open(PROMPT), tokens(9, seed=1))
    first, second, third = (model.open(PROMPT) for _ in range(3))
    model.forward(first, tokens(30, seed=2))
    rows = model.forward(second, tokens(9, seed=1))
    model.forward(third, tokens(3, seed=3))
    torch.testing.assert_close(rows, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gemma3"])
def test_a_ragged_batch_equals_single_forwards(kind: str) -> None:
    model = engine(kind)
    lengths = [(20, 1), (3, 6), (0, 9), (11, 4)]
    single, batched = [], []
    for n, (prefix, new) in enumerate(lengths):
        slot = model.open(PROMPT)
        if prefix:
            model.forward(slot, tokens(prefix, seed=n))
        single.append(model.forward(slot, tokens(new, seed=100 + n), min(new, 3)))
    slots = [model.open(PROMPT) for _ in lengths]
    for n, (slot, (prefix, _)) in enumerate(zip(slots, lengths, strict=True)):
        if prefix:
            model.forward(slot, tokens(prefix, seed=n))
    feeds = [SequenceInput(slots[n], tokens(new, seed=100 + n), min(new, 3)) for n, (_, new) in enumerate(lengths)]
    batched = model.forward_many(feeds)
    for one, many in zip(single, batched, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-4)
    assert [model.kv_len(slot) for slot in slots] == [prefix + new for prefix, new in lengths]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral", "qwen3", "omni", "qwen2-audio"])
def test_long_rows_attend_to_views_of_their_own_keys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, and each row's logits are those of the batch that reads copies."""
    model = engine(kind) if kind in CONFIGS else TorchEngine(tiny_model(kind), name=kind)
    assert model._cache.by_row
    slots = [model.open(PROMPT) for _ in range(3)]
    for slot, length in zip(slots, (9, 40, 25), strict=True):
        model.forward(slot, plain_tokens(length, slot), 1)
    counts = zip(slots, (3, 1, 70), strict=True)
    inputs = [SequenceInput(slot, plain_tokens(count, 50 + slot), 1) for slot, count in counts]
    copied = model.forward_many(inputs)
    for seq_input in inputs:
        model.truncate(seq_input.slot, model.kv_len(seq_input.slot) - len(seq_input.ids))
    monkeypatch.setattr(append_plan, "MAX_COPIED_SIZE", 0)
    monkeypatch.setattr(append_plan.AppendPlan, "_row_indices", lambda *args: pytest.fail("copied"))
    torch.testing.assert_close(model.forward_many(inputs), copied, rtol=1e-4, atol=1e-4)


def plain_tokens(count: int, seed: int) -> list[int]:
    """Tokens that no model of these takes for a recording or a picture."""
    return [10 + token % 20 for token in tokens(count, seed)]


def test_a_batch_with_one_slot_twice_or_too_many_rows_is_refused() -> None:
    model = engine("qwen2")
    slot = model.open(PROMPT)
    with pytest.raises(StateError, match="twice"):
        model.forward_many([SequenceInput(slot, [1], 1), SequenceInput(slot, [2], 1)])
    with pytest.raises(StateError, match="logits for 3 positions, but only 1 tokens"):
        model.forward(slot, [1], 3)


def test_padding_never_runs_past_a_table_of_positions() -> None:
    model = engine("gpt2")
    nearly_full, short = model.open(PROMPT), model.open(PROMPT)
    model.forward(nearly_full, tokens(508), 1)
    rows = model.forward_many([SequenceInput(nearly_full, [3, 4], 1), SequenceInput(short, tokens(40), 1)])
    alone = model.open(PROMPT)
    torch.testing.assert_close(rows[0], model.forward(alone, [*tokens(508), 3, 4], 1), rtol=1e-4, atol=1e-4)
