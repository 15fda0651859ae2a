"""The GGUF engine: rows are those of transformers on the same weights, whatever was read and rolled back before."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import ModelError, PromptError, SettingsError, SpeculativeDecoder, StateError, load_engine, local
from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch.engine import TorchEngine
from tests.support.tiny_text_models import VOCAB, model, tokens

PROMPT = Prompt((1,))
EMPTY_GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)  # version 3, without tensors and keys
CLOSE = {"rtol": 0.0, "atol": 0.05}  # keys and values are cached in float16; logits spread by 1.6
SAME = {"rtol": 0.0, "atol": 0.01}  # llama.cpp against itself

needs_llama = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf", "accelerate")),
    reason="llama-cpp-python, gguf or accelerate is not installed: pip install 'outrider[gguf]'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@cache
def written(folder: Path, kind: str) -> Path:
    from tests.support import tiny_gguf

    path = folder / f"{kind}.gguf"
    if kind == "mamba":
        return tiny_gguf.write_mamba(path)
    return tiny_gguf.write_qwen2(path, 1 if kind == "other" else 0, named=kind == "named")


@cache
def shared(folder: Path) -> Any:
    """An engine for all tests that leave no slot open."""
    return load_engine(written(folder, "unnamed"))


@pytest.fixture
def engine(folder: Path) -> Any:
    return load_engine(written(folder, "unnamed"))


def plain(ids: list[int]) -> torch.Tensor:
    """Transformers' own rows of a forward without a cache."""
    with torch.inference_mode():
        return model("qwen2")(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def fresh(engine: Any, ids: list[int], rows: int) -> torch.Tensor:
    slot = engine.open(PROMPT)
    out = engine.forward(slot, ids, rows)
    engine.close(slot)
    return out


# Rows -----------------------------------------------------------------------------------------------------------


@needs_llama
def test_rows_equal_a_plain_forward_in_transformers(engine: Any) -> None:
    ids = tokens(30)
    slot = engine.open(PROMPT)
    rows = torch.cat([engine.forward(slot, ids[:13]), engine.forward(slot, ids[13:14]), engine.forward(slot, ids[14:])])
    assert rows.dtype == torch.float32
    assert rows.shape == (30, VOCAB)
    torch.testing.assert_close(rows, plain(ids), **CLOSE)
    assert engine.kv_len(slot) == 30


@needs_llama
def test_rows_stay_valid_after_the_next_forward(engine: Any) -> None:
    slot = engine.open(PROMPT)
    first = engine.forward(slot, tokens(5))
    kept = first.clone()
    engine.forward(slot, tokens(9, seed=1))
    assert torch.equal(first, kept)


@needs_llama
def test_more_tokens_and_rows_than_a_call_takes(engine: Any) -> None:
    """512 tokens and 64 rows: cut anywhere, also inside a feed."""
    slots = [engine.open(PROMPT) for _ in range(2)]
    texts = [tokens(300, seed=n) for n in range(2)]
    rows = engine.forward_many([SequenceInput(slots[0], texts[0], 100), SequenceInput(slots[1], texts[1], 7)])
    assert [len(part) for part in rows] == [100, 7]
    for text, part in zip(texts, rows, strict=True):
        torch.testing.assert_close(part, plain(text)[-len(part) :], **CLOSE)
    assert [engine.kv_len(slot) for slot in slots] == [300, 300]


@needs_llama
def test_a_ragged_batch_equals_single_forwards(engine: Any) -> None:
    lengths = [(20, 1), (3, 6), (0, 9), (11, 4), (2, 40)]
    slots = [engine.open(PROMPT) for _ in lengths]
    feeds = []
    for n, (slot, (prefix, new)) in enumerate(zip(slots, lengths, strict=True)):
        if prefix:
            engine.forward(slot, tokens(prefix, seed=n), 1)
        feeds.append(SequenceInput(slot, tokens(new, seed=100 + n), min(new, 3)))
    for n, rows in enumerate(engine.forward_many(feeds)):
        ids = [*tokens(lengths[n][0], seed=n), *feeds[n].ids]
        torch.testing.assert_close(rows, plain(ids)[-feeds[n].logits_to_keep :], **CLOSE)
    assert [engine.kv_len(slot) for slot in slots] == [prefix + new for prefix, new in lengths]


@needs_llama
def test_what_is_cached_survives_growth_bit_for_bit(folder: Path, engine: Any) -> None:
    """More slots, then longer ones of any context: a longer context takes over."""
    ids = tokens(250)
    slot = engine.open(PROMPT)
    engine.forward(slot, ids, 1)
    others = [engine.open(PROMPT) for _ in range(3)]
    after_slots = engine.forward(slot, [5])
    engine.truncate(slot, 250)
    engine.forward(others[1], tokens(100), 1)
    engine.forward(others[0], tokens(30), 1)
    engine.forward(others[2], tokens(400), 1)  # beside others[1], in one context
    engine.forward(slot, tokens(100), 1)
    engine.truncate(slot, 250)
    assert torch.equal(engine.forward(slot, [5]), after_slots)
    torch.testing.assert_close(after_slots, fresh(shared(folder), [*ids, 5], 1), **SAME)
    for other, length in zip(others, (30, 100, 400), strict=True):
        torch.testing.assert_close(engine.forward(other, [5]), plain([*tokens(length), 5])[-1:], **CLOSE)


@needs_llama
def test_a_slot_that_is_opened_again_is_empty(engine: Any) -> None:
    slot = engine.open(PROMPT)
    engine.forward(slot, tokens(40, seed=3), 1)
    engine.close(slot)
    assert engine.open(PROMPT) == slot
    assert engine.kv_len(slot) == 0
    torch.testing.assert_close(engine.forward(slot, tokens(9)), plain(tokens(9)), **CLOSE)


STEPS = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.integers(1, 12), st.floats(0, 1))), min_size=1, max_size=14)


@needs_llama
@settings(max_examples=60)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_any_schedule_of_reading_and_rolling_back_equals_a_fresh_reading(
    folder: Path, steps: list[tuple[int, int | float]], seed: int
) -> None:
    """A whole number reads so many tokens, a fraction rolls back to that part; three slots at once."""
    engine = shared(folder)
    slots, texts = [engine.open(PROMPT) for _ in range(3)], [[], [], []]  # type: ignore[var-annotated]
    for n, (at, step) in enumerate(steps):
        if isinstance(step, float):
            texts[at] = texts[at][: int(step * len(texts[at]))]
            engine.truncate(slots[at], len(texts[at]))
        else:
            new = tokens(step, seed=seed + n)
            texts[at] = [*texts[at], *new]
            rows = engine.forward(slots[at], new)
            torch.testing.assert_close(rows, fresh(engine, texts[at], len(new)), **SAME)
        assert [engine.kv_len(slot) for slot in slots] == [len(text) for text in texts]
    for slot in slots:
        engine.close(slot)


# Decoding -------------------------------------------------------------------------------------------------------


def greedy(engine: Any, prompt: list[int], count: int) -> list[int]:
    """Plain decoding: every token from a reading by an empty slot."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(fresh(engine, ids, 1)[0].argmax()))
    return ids[len(prompt) :]


@needs_llama
@pytest.mark.parametrize("k", [1, 4, 7])
def test_as_a_drafter_it_leaves_the_target_s_output_as_it_is(folder: Path, k: int) -> None:
    target = TorchEngine(model("qwen2", 1), name="target")
    made = model("qwen2", 1)
    for seed in range(4):
        prompt = tokens(8, seed=seed)
        wanted = made.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 8:].tolist()
        for kind in ("unnamed", "other"):  # another model, and the target's own weights
            drafter = load_engine(written(folder, kind))
            decoder = SpeculativeDecoder(drafter, local(target), k=k)
            result = decoder.generate(prompt, max_new_tokens=20, ignore_eos=True)
            assert result.token_ids == wanted
            assert result.guarantee == "exact"
            assert kind == "unnamed" or result.stats.accepted > result.stats.corrected


@needs_llama
@pytest.mark.parametrize("k", [1, 4, 7])
def test_as_a_target_its_output_is_that_of_its_own_plain_decoding(folder: Path, k: int) -> None:
    target = load_engine(written(folder, "unnamed"))
    decoder = SpeculativeDecoder(TorchEngine(model("qwen2", 1)), local(target), k=k)
    for seed in range(3):
        prompt = tokens(8, seed=seed)
        result = decoder.generate(prompt, max_new_tokens=20)
        wanted = greedy(target, prompt, 20)
        same = next((n for n in range(20) if result.token_ids[n] != wanted[n]), 20)
        assert same == 20 or same in result.near_ties


# What it says of itself -----------------------------------------------------------------------------------------


@needs_llama
@pytest.mark.filterwarnings("ignore")  # of transformers, about reading a file of ours
def test_it_says_what_the_dense_engine_says_of_the_same_file(folder: Path) -> None:
    path = written(folder, "named")
    here, dense = load_engine(path), load_engine(path, dtype="float32")
    assert isinstance(dense, TorchEngine)
    for name in ("fingerprint", "vocabulary", "vocab_size", "row_count", "eos_ids", "max_length", "audio"):
        assert getattr(here, name) == getattr(dense, name), name
    assert here.eos_ids == (2,)
    assert here.tokenizer("thein")["input_ids"] == dense.tokenizer("thein")["input_ids"] == [93 + 1, 93 + 2]
    assert here.tokenizer.chat_template == dense.tokenizer.chat_template
    assert (here.dtype, here.device) == ("all F32", "cpu")
    torch.testing.assert_close(
        here.forward(here.open(PROMPT), tokens(9)), dense.forward(dense.open(PROMPT), tokens(9)), **CLOSE
    )


@needs_llama
def test_without_a_vocabulary_it_takes_ids_or_a_tokenizer_that_is_given(folder: Path) -> None:
    assert shared(folder).tokenizer is None
    assert shared(folder).vocabulary == []
    named = load_engine(written(folder, "named"))
    given_one = load_engine(written(folder, "unnamed"), tokenizer=named.tokenizer)
    assert given_one.fingerprint == named.fingerprint != shared(folder).fingerprint


@needs_llama
def test_identity_tells_files_apart(folder: Path) -> None:
    first = shared(folder).identity
    assert load_engine(written(folder, "unnamed")).identity == first
    assert (
        len({first, load_engine(written(folder, "other")).identity, load_engine(written(folder, "named")).identity})
        == 3
    )


@needs_llama
def test_noise_is_what_rounding_makes_of_the_same_tokens(folder: Path) -> None:
    engine = shared(folder)
    assert 0.0 < engine.noise < 0.02
    ids = tokens(60)
    slot = engine.open(PROMPT)
    single = torch.cat([engine.forward(slot, [token]) for token in ids])
    engine.close(slot)
    assert float((single - fresh(engine, ids, 60)).abs().max()) <= engine.noise


# Memory ---------------------------------------------------------------------------------------------------------


@needs_llama
def test_a_budget_is_counted_in_slots_and_never_passed(engine: Any) -> None:
    budget = engine.position_bytes * 256 * 3 + 5
    assert engine.reserve(budget, 100) == 3
    assert engine.max_length == 100
    slots = [engine.open(PROMPT) for _ in range(3)]
    with pytest.raises(StateError, match="all 3 slots"):
        engine.open(PROMPT)
    for slot in slots:
        engine.forward(slot, tokens(100), 1)
    assert engine.cache_bytes <= budget
    with pytest.raises(PromptError, match="101 positions"):
        engine.forward(slots[0], [1])
    assert engine.kv_len(slots[0]) == 100
    with pytest.raises(StateError, match="3 are open"):
        engine.reserve(budget, 100)


@needs_llama
def test_a_budget_for_less_than_one_sequence_is_refused(engine: Any) -> None:
    with pytest.raises(ModelError, match="the budget is 99"):
        engine.reserve(99, 100)
    with pytest.raises(ModelError, match="at least 1 position, not 0"):
        engine.reserve(10**9, 0)


@needs_llama
def test_a_position_takes_what_its_keys_and_values_take(engine: Any) -> None:
    """2 layers × keys and values × 2 heads × 8 × 2 bytes, and up to 16 bytes of bookkeeping."""
    assert 128 <= engine.position_bytes <= 144


@needs_llama
def test_no_sequence_passes_the_length_that_the_model_was_made_for(engine: Any) -> None:
    slot = engine.open(PROMPT)
    engine.forward(slot, tokens(510), 1)
    with pytest.raises(PromptError, match="513 positions"):
        engine.forward(slot, [1, 2, 3])
    assert engine.kv_len(slot) == 510


# What is refused ------------------------------------------------------------------------------------------------


@needs_llama
def test_a_closed_slot_and_impossible_feeds_are_refused(engine: Any) -> None:
    slot = engine.open(PROMPT)
    with pytest.raises(StateError, match="twice"):
        engine.forward_many([SequenceInput(slot, [1], 1), SequenceInput(slot, [2], 1)])
    with pytest.raises(StateError, match="logits for 3 positions, but only 1 tokens"):
        engine.forward(slot, [1], 3)
    for length in (-1, 1):
        with pytest.raises(StateError, match="holds 0 positions"):
            engine.truncate(slot, length)
    engine.close(slot)
    for use in (lambda: engine.kv_len(slot), lambda: engine.truncate(slot, 0), lambda: engine.forward(slot, [1])):
        with pytest.raises(StateError, match="not open"):
            use()


@needs_llama
def test_what_was_read_of_a_refused_batch_is_forgotten(engine: Any) -> None:
    slot, other = engine.open(PROMPT), engine.open(PROMPT)
    engine.forward(slot, tokens(5), 1)
    long = tokens(500)
    with pytest.raises(StateError, match="could not read"):
        engine.forward_many([SequenceInput(other, long, 1), SequenceInput(slot, [*tokens(30, seed=1), VOCAB], 1)])
    assert (engine.kv_len(slot), engine.kv_len(other)) == (5, 0)
    new = tokens(4, seed=2)
    torch.testing.assert_close(engine.forward(slot, new), plain([*tokens(5), *new])[5:], **CLOSE)
    torch.testing.assert_close(engine.forward(other, new), plain(new), **CLOSE)


@needs_llama
def test_a_recording_is_refused(engine: Any) -> None:
    import numpy as np

    with pytest.raises(PromptError, match="takes no audio"):
        engine.open(Prompt((1,), np.zeros(16000, np.float32)))


@needs_llama
def test_a_recurrent_model_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"mamba\): its cache cannot be truncated"):
        load_engine(written(folder, "mamba"))


@needs_llama
def test_a_cache_that_ignores_roll_backs_is_caught_by_the_probe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.engines.llama_cpp.context import LlamaContext

    forget = LlamaContext.truncate
    monkeypatch.setattr(LlamaContext, "truncate", lambda self, slot, length: forget(self, slot, length) or True)
    load_engine(written(folder, "unnamed"))
    decode = LlamaContext.decode

    def stale(self: Any, read: Any) -> Any:
        """As if the first token after a roll-back to 32 were another one."""
        return decode(self, [token._replace(id=1) if token.position == 32 else token for token in read])

    seen: list[int] = []
    monkeypatch.setattr(
        LlamaContext,
        "decode",
        lambda self, read: seen.append(1) or (stale if len(seen) > 1 else decode)(self, read),
    )
    with pytest.raises(ModelError, match="cannot be truncated"):
        load_engine(written(folder, "unnamed"))


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "another format": lambda whole: b"PK\x03\x04" + whole[4:],
    "only the magic": lambda whole: whole[:4],
    "a cut header": lambda whole: whole[:1000],
    "cut weights": lambda whole: whole[: len(whole) * 2 // 3],
    "noise": lambda whole: b"GGUF" + bytes(7 * n % 256 for n in range(5000)),
    "another architecture": lambda whole: whole.replace(b"qwen2", b"qwenX"),
    "a missing tensor": lambda whole: whole.replace(b"blk.1.ffn_down", b"blk.1.ffn_gone"),
    "another shape": lambda whole: whole.replace(
        b"qwen2.block_count\x04\x00\x00\x00\x02", b"qwen2.block_count\x04\x00\x00\x00\x03"
    ),
    "weights that are no numbers": lambda whole: whole[:-20000] + b"\xff" * 20000,
}


@needs_llama
@pytest.mark.parametrize("how", SPOILT)
def test_a_broken_file_is_named_and_llama_cpp_stays_silent(
    folder: Path, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = written(folder, "named").read_bytes()
    (tmp_path / "broken.gguf").write_bytes(SPOILT[how](whole))
    assert SPOILT[how](whole) != whole
    with pytest.raises(ModelError, match="broken"):
        load_engine(tmp_path / "broken.gguf")
    assert capfd.readouterr() == ("", "")


@needs_llama
def test_loading_is_silent_but_for_the_debug_log(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_engine(written(folder, "unnamed"))
    told = [record.name for record in caplog.records if not record.name.startswith("gguf.")]  # who writes the file
    assert told == ["outrider.engines.load"]
    with caplog.at_level(logging.DEBUG):
        load_engine(written(folder, "unnamed"))
    assert any("n_ctx_seq" in record.message for record in caplog.records)
    assert capfd.readouterr() == ("", "")


# Which engine ---------------------------------------------------------------------------------------------------


def test_without_llama_cpp_both_ways_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(EMPTY_GGUF)
    monkeypatch.setattr("outrider.engines.llama_cpp.context.is_installed", lambda: False)
    with pytest.raises(ModelError, match=r"compiling llama\.cpp: pip install .*dtype such as float32: pip install "):
        load_engine(tmp_path / "x.gguf")


@pytest.mark.parametrize("options", [{"dtype": "int3"}, {"device": "toaster"}])
def test_unknown_formats_and_devices_are_refused_for_gguf_files_too(tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "x.gguf").write_bytes(EMPTY_GGUF)
    with pytest.raises(SettingsError):
        load_engine(tmp_path / "x.gguf", **options)


@needs_llama
def test_an_extractor_has_no_use(folder: Path) -> None:
    with pytest.raises(SettingsError, match="extractor"):
        load_engine(written(folder, "unnamed"), extractor=object())


@needs_llama
def test_decoders_of_many_threads_share_an_engine(engine: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [tokens(count, seed=count) for count in (3, 9, 17, 40)]

    def outputs(_: int) -> list[list[int]]:
        decoder = SpeculativeDecoder(None, local(engine), reader=engine)
        return [decoder.generate(prompt, max_new_tokens=8).token_ids for prompt in prompts]

    expected = outputs(0)
    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(outputs, range(16)))
