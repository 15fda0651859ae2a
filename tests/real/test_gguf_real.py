"""A real pair of `.gguf` files in llama.cpp, where one lies in .cache/models: exact mode against plain decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider import SpeculativeDecoder, load_engine, local
from outrider.engines.base import Prompt

MODELS = Path(__file__).parents[2] / ".cache" / "models"
TEXTS = ("def fibonacci(n):", "写一首关于海的短诗。", "The three laws of robotics are")
TOKENS = 32


@cache
def pair() -> tuple[Any, Any]:
    """The smallest and the largest file's engine."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'outrider[gguf]'")
    files = sorted(MODELS.glob("*.gguf"), key=lambda file: file.stat().st_size)
    if len(files) < 2:
        pytest.skip(f"no pair of .gguf files in {MODELS}")
    return load_engine(files[0]), load_engine(files[-1])


def greedy(engine: Any, ids: tuple[int, ...], count: int) -> list[int]:
    """Plain decoding in a slot of its own that is never rolled back."""
    slot, out = engine.open(Prompt(ids)), []
    row = engine.forward(slot, ids, 1)[0]
    while len(out) < count:
        out.append(int(row.argmax()))
        if out[-1] in engine.eos_ids:
            break
        row = engine.forward(slot, out[-1:])[0]
    engine.close(slot)
    return out


@pytest.mark.real
@pytest.mark.parametrize("k", [3, 8])
@pytest.mark.parametrize("text", TEXTS)
def test_exact_mode_equals_plain_decoding_but_for_near_ties(k: int, text: str) -> None:
    edge, cloud = pair()
    decoder = SpeculativeDecoder(edge, local(cloud), k=k)
    result = decoder.generate(text, max_new_tokens=TOKENS)
    wanted = greedy(cloud, decoder.encode(text).ids, TOKENS)
    same = next((n for n, (a, b) in enumerate(zip(result.token_ids, wanted, strict=False)) if a != b), len(wanted))
    assert result.token_ids == wanted or same in result.near_ties
    assert result.stats.accepted > 0


@pytest.mark.real
def test_drafting_with_roll_backs_is_plain_decoding_of_the_edge() -> None:
    """A verifier that is the edge itself: what it rejects of its own drafts are near-ties."""
    edge, _ = pair()
    decoder = SpeculativeDecoder(edge, local(edge), k=5)
    ids = decoder.encode(TEXTS[0]).ids
    result, wanted = decoder.generate(TEXTS[0], max_new_tokens=TOKENS), greedy(edge, ids, TOKENS)
    same = next((n for n, (a, b) in enumerate(zip(result.token_ids, wanted, strict=False)) if a != b), len(wanted))
    assert result.token_ids == wanted or same in result.near_ties
    assert result.stats.corrected <= len(result.near_ties)


@pytest.mark.real
def test_noise_bounds_what_rounding_does_to_a_longer_text() -> None:
    """Its measure is taken on few tokens: on a longer text, blocks and single tokens must not differ by much more."""
    edge, _ = pair()
    ids = (edge.tokenizer("The sea is wide and the wind is cold today. " * 12)["input_ids"])[:110]
    slot = edge.open(Prompt(tuple(ids)))
    blocks = edge.forward(slot, ids, 10)
    edge.truncate(slot, len(ids) - 10)
    single = torch.cat([edge.forward(slot, [token]) for token in ids[-10:]])
    edge.close(slot)
    assert float((blocks - single).abs().max()) <= edge.noise


@pytest.mark.real
def test_the_tokenizer_is_the_one_that_transformers_makes_of_the_file() -> None:
    for engine in pair():
        path = Path(engine.name)
        slow = transformers.AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
        assert slow.get_vocab() == engine.tokenizer.get_vocab()
        assert slow.chat_template == engine.tokenizer.chat_template
        assert type(slow) is type(engine.tokenizer)
        for text in TEXTS:
            assert slow(text)["input_ids"] == engine.tokenizer(text)["input_ids"]
