"""Attention over grouped heads: equal to transformers' own, which is called for whatever is not ours."""

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch import attention
from outrider.engines.torch.engine import TorchEngine
from tests.support.tiny_text_models import engine, model, tokens


def states(heads: int, shared: int, batch: int = 3, new: int = 5, span: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    key, value = torch.randn(2, 8, shared, 64, 16)[:, 2 : 2 + batch, :, :span]
    return torch.randn(batch, new, heads, 16).transpose(1, 2), key, value


def additive(new: int = 5, span: int = 20) -> Tensor:
    visible = torch.arange(span) <= torch.arange(span - new, span)[:, None]
    return torch.zeros(3, 1, new, span).masked_fill(~visible, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (6, 1), (4, 4), (8, 2)])
def test_grouped_heads_give_what_repeated_keys_give(heads: int, shared: int) -> None:
    module = nn.Module()
    module.num_key_value_groups = heads // shared  # type: ignore[assignment]
    query, key, value = states(heads, shared)
    mine, _ = attention.grouped_attention(module, query, key, value, additive(), scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, additive(), scaling=0.3)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [None, torch.ones(3, 1, 5, 20, dtype=torch.bool)])
def test_other_masks_are_left_to_transformers(mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, key, value = states(4, 2)
    monkeypatch.setattr(torch.Tensor, "repeat", lambda *args: pytest.fail("folded"))
    mine, _ = attention.grouped_attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert torch.equal(mine, theirs)


def test_a_batch_of_neighbouring_slots_copies_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the feeds come; sequences of unequal lengths are gathered, with the same rows."""
    made, other = TorchEngine(model("qwen2")), TorchEngine(model("qwen2"))
    slots = [engine.open(Prompt((1,))) for _ in range(4) for engine in (made, other)][::2]
    feeds = [SequenceInput(slot, tokens(9, seed=slot), 2) for slot in slots]
    gathered = other.forward_many([feeds[3], feeds[0], SequenceInput(slots[1], tokens(4), 1)])
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *args: pytest.fail("gathered"))
    rows = made.forward_many([feeds[2], feeds[0], feeds[3], feeds[1]])
    torch.testing.assert_close(gathered[:2], [rows[2], rows[1]], rtol=1e-5, atol=1e-5)


def test_the_model_s_own_generate_still_works_and_agrees() -> None:
    made = engine("qwen2")
    ids = tokens(12)
    plain = model("qwen2")
    settings = {"max_new_tokens": 10, "do_sample": False}
    wanted = plain.generate(torch.tensor([ids]), **settings)
    assert made.model.generate(torch.tensor([ids]), **settings).tolist() == wanted.tolist()


def test_a_long_prefill_beside_short_feeds_computes_only_the_rows_that_are_wanted() -> None:
    made = engine("qwen2")
    seen: list[torch.Size] = []
    hook = made.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    first, second = made.open(Prompt((1,))), made.open(Prompt((1,)))
    rows = made.forward_many([SequenceInput(first, tokens(90), 1), SequenceInput(second, tokens(5), 4)])
    hook.remove()
    assert seen[0][1] == 5
    assert [len(part) for part in rows] == [1, 4]
    for feed, part in zip((tokens(90), tokens(5)), rows, strict=True):
        alone = made.open(Prompt((1,)))
        torch.testing.assert_close(part, made.forward(alone, feed, len(part)), rtol=1e-4, atol=1e-4)
