"""`.gguf` files as the dense engine reads them: damaged ones are named, and nothing beside them runs."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from outrider import ModelError, load_engine
from tests.support.tiny_text_models import VOCAB

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="gguf or accelerate is not installed",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    from tests.support import tiny_gguf

    return tiny_gguf.write_qwen2(tmp_path / "tiny.gguf")


def test_code_beside_a_file_does_not_run(file: Path) -> None:
    spy = "from pathlib import Path\nPath(__file__).with_name('MARKER').touch()\n"
    file.with_name("spy.py").write_text(spy)
    code = {"AutoConfig": "spy.Spy", "AutoTokenizer": ["spy.Spy", "spy.Spy"], "AutoModelForCausalLM": "spy.Spy"}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file.with_name(name).write_text(json.dumps({"model_type": "spy", "auto_map": code}))
    assert load_engine(str(file), dtype="float32").vocab_size == VOCAB
    assert not file.with_name("MARKER").exists()


def test_an_adapter_beside_a_file_is_refused(file: Path) -> None:
    file.with_name("adapter_config.json").write_text('{"base_model_name_or_path": "evil/repo"}')
    with pytest.raises(ModelError, match=r"tiny\.gguf.*adapter"):
        load_engine(str(file), dtype="float32")


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_refused_by_its_name_or_read(file: Path, seed: int) -> None:
    chance, data = random.Random(seed), bytearray(file.read_bytes())
    if seed % 2:
        data = data[: chance.randrange(len(data))]
    else:
        for _ in range(8):
            data[chance.randrange(4, 2000)] = chance.randrange(256)
    file.write_bytes(bytes(data))
    refusal = ""
    try:
        load_engine(str(file), dtype="float32")
    except ModelError as error:
        refusal = str(error)
    assert not refusal or "tiny.gguf" in refusal
