"""A real pair, where one lies in .cache/models: exact mode against transformers' own greedy output."""

from pathlib import Path

import pytest

from benchmarks.convert_gguf import convert
from benchmarks.exactness import reference
from outrider import SpeculativeDecoder, load_engine, local

MODELS = Path(__file__).parents[2] / ".cache" / "models"


@pytest.mark.real
@pytest.mark.parametrize("k", [3, 8])
def test_exact_mode_equals_generate(k: int) -> None:
    files = sorted(MODELS.glob("*.gguf"), key=lambda file: file.stat().st_size)
    if len(files) < 2:
        pytest.skip(f"no pair of .gguf files in {MODELS}")
    edge, cloud = (load_engine(str(convert(file, MODELS))) for file in (files[0], files[-1]))
    decoder = SpeculativeDecoder(edge, local(cloud), k=k)
    for text in ("def fibonacci(n):", "写一首关于海的短诗。", "The three laws of robotics are"):
        ids = decoder.encode(text).ids
        assert decoder.generate(text, max_new_tokens=32).token_ids == reference(cloud, ids, 32)
