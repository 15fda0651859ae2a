"""What an engine's tokenizer says: end tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from outrider import load_engine
from outrider.engines.torch.engine import TorchEngine
from outrider.errors import ModelError
from tests.support.tiny_models import subword_tokenizer, tiny_model


def engine(name: str, ends: Any) -> TorchEngine:
    model = tiny_model("qwen2")
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, ends
    tokenizer = subword_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    try:
        return TorchEngine(model, tokenizer, name=name)
    finally:
        model.generation_config.eos_token_id = before
        tokenizer.eos_token = None


@pytest.mark.parametrize("ends", [2, [2], [5, 2], [2, 5]])
def test_end_tokens_that_agree_need_no_word(ends: int | list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        engine("agrees", ends)
    assert not caplog.records


@pytest.mark.parametrize(
    ("ends", "named"),
    [(-1, "-1"), ([2, -1], "-1"), ([2, "3"], "'3'"), (True, "True"), (2.0, "2.0")],
)
def test_an_end_token_that_is_none_is_refused_by_name(ends: Any, named: str) -> None:
    with pytest.raises(ModelError, match=f"odd: eos_token_id {named} of its generation config is not a token id"):
        engine("odd", ends)


@pytest.mark.parametrize("ends", [5, [5, 6], None])
def test_end_tokens_that_disagree_are_named_once(
    ends: int | list[int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        made = [engine(f"disagrees about {ends}", ends) for _ in range(2)]
    (record,) = caplog.records
    message = record.getMessage()
    assert f"disagrees about {ends}" in message
    assert "(2)" in message
    assert all(f"({token})" in message for token in made[0].eos_ids)
    assert made[0].eos_ids == (() if ends is None else tuple([ends] if isinstance(ends, int) else ends))


def test_the_bundled_pair_agrees(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        load_engine("demo:edge")
    assert not caplog.records


def test_an_end_token_beyond_the_vocabulary_is_left_out() -> None:
    assert engine("beyond", [2, 999_999]).eos_ids == (2,)
