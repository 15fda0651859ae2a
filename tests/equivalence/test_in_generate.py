"""Outrider inside `generate`: the call is the same with `custom_generate` and without, and so is all that comes of it.

Every comparison is of one call with itself: the inputs, settings, criteria and streamers are those of transformers.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from threading import Thread
from typing import Any

import pytest
import torch
import transformers

from outrider import Audio, SpeculativeDecoder, for_transformers, load_engine, local
from outrider.engines.load import BUNDLED
from tests.support.fakes import OracleEngine
from tests.support.tiny_models import VOCAB, clip, feature_extractor, subword_tokenizer, tiny_engine, tiny_model

pytestmark = pytest.mark.network

PROMPT = (2, 33, 44, 55)
KS = (1, 3, 5)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 2, "suppress_tokens": list(range(10, VOCAB, 3))},
    {"sequence_bias": [[[n], 3.0 - n % 7] for n in range(0, VOCAB, 3)], "repetition_penalty": 1.2},
    {"max_new_tokens": 1},
)


def call(model: Any, draft: Any = None, ids: tuple[int, ...] = PROMPT, *, k: int = 3, **options: Any) -> list[int]:
    """Return the new tokens of `generate`, with its own loop, or with Outrider's if there is a draft.

    Outrider's loop is the `custom_generate`, unless transformers would not hand all options on to it.
    """
    given = torch.tensor([ids])
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **options}
    options |= {"input_ids": given, "attention_mask": torch.ones_like(given)}
    if draft is None:
        out = model.generate(**options)
    elif {"streamer", "tokenizer"} & options.keys():
        out = for_transformers(draft, k=k).generate(model, **options)
    else:
        out = model.generate(custom_generate=for_transformers(draft, k=k), **options)
    assert out[0, : len(ids)].tolist() == list(ids)
    return out[0, len(ids) :].tolist()


def drafters(family: str, target: list[int]) -> dict[str, Any]:
    """A model that is often right, a stranger, and one that errs at every third token."""
    return {
        "often right": tiny_model(family, drift=0.05),
        "a stranger": tiny_model("mistral" if family == "llama" else "llama", 7),
        "an engine": OracleEngine(len(PROMPT), target, VOCAB, range(2, 100, 3)),
    }


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("family", ["qwen2", "llama", "omni"])
def test_every_setting_gives_generate_s_tokens(family: str, k: int) -> None:
    model = tiny_model(family)
    for n, options in enumerate(SETTINGS):
        wanted = call(model, **options)
        for name, draft in list(drafters(family, wanted).items())[n % 2 :: 2]:
            assert call(model, draft, k=k, **options) == wanted, (name, options)


@pytest.mark.parametrize("at", [0, 1, 2, 4, 7])
def test_eos_at_every_place_in_a_block(at: int) -> None:
    model = tiny_model("qwen2")
    free = call(model)
    end = next(n for n in range(at, 16) if free[n] not in free[:n])
    eos = [free[end], 5]
    assert call(model, eos_token_id=eos) == free[: end + 1]
    for draft, k in zip(drafters("qwen2", free).values(), KS, strict=True):
        assert call(model, draft, k=k, eos_token_id=eos) == free[: end + 1]


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")  # transformers on a least length past the end
@pytest.mark.parametrize("least", [{"min_new_tokens": 6}, {"min_length": 9}, {"min_new_tokens": 30}, {"min_length": 2}])
def test_eos_is_banned_until_the_least_length(least: dict[str, int]) -> None:
    model = tiny_model("qwen2")
    free = call(model)
    eos = sorted({free[0], free[2], free[7]})
    options = {"eos_token_id": eos, "repetition_penalty": 1.2, **least}
    wanted = call(model, **options)
    for draft, k in zip(drafters("qwen2", free).values(), KS, strict=True):
        assert call(model, draft, k=k, **options) == wanted


def test_the_generation_config_of_the_model_counts_as_in_generate() -> None:
    """Eos ids, penalties and lengths of a configuration, and a max_length that the prompt is part of."""
    free = call(tiny_model("llama"))
    config = transformers.GenerationConfig(
        eos_token_id=free[9], repetition_penalty=1.1, max_length=17, do_sample=False, pad_token_id=0
    )
    ids = torch.tensor([PROMPT])
    plain = tiny_model("llama").generate(ids, generation_config=config)
    draft = for_transformers(tiny_model("llama", drift=0.05))
    assert tiny_model("llama").generate(ids, generation_config=config, custom_generate=draft).tolist() == plain.tolist()


# Stopping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "omni"])
def test_stop_strings_end_as_in_generate(family: str) -> None:
    """With generate's own tokenizer argument, which transformers does not hand on, and at every place in a block."""
    tokenizer, model = subword_tokenizer(), tiny_model(family)
    options = {"suppress_tokens": list(range(10))}
    free = call(model, **options)
    text = tokenizer.decode(free)
    for start, size in ((0, 1), (3, 5), (8, 2), (13, 2)):
        stop = {"stop_strings": [text[start : start + size], "never said"], "tokenizer": tokenizer}
        wanted = call(model, **stop, **options)
        assert len(wanted) < 16
        for n, draft in enumerate(drafters(family, free).values()):
            assert call(model, draft, k=KS[n], **stop, **options) == wanted, stop


class Watching(transformers.StoppingCriteria):
    """Stops at a length, and remembers what it was shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids[0].tolist(), scores))
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("length", [5, 6, 8, 11, 99])
def test_a_caller_s_criterion_is_asked_after_each_token_and_no_more(length: int) -> None:
    model, (plain, ours) = tiny_model("qwen2"), (Watching(length), Watching(length))
    wanted = call(model, stopping_criteria=[plain])
    for draft, k in zip(drafters("qwen2", wanted).values(), KS, strict=True):
        ours.seen.clear()
        assert call(model, draft, k=k, stopping_criteria=[ours]) == wanted
        assert ours.seen == plain.seen


class Noting(transformers.generation.BaseStreamer):
    """What a streamer was told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append((value.dtype, str(value.device), value.tolist()))

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 1}, {"stopping_criteria": [Watching(9)]}])
def test_a_streamer_receives_the_same_calls(options: dict[str, Any]) -> None:
    model, plain = tiny_model("qwen2"), Noting()
    wanted = call(model, streamer=plain, **options)
    assert plain.told[-1] == "end"
    for draft, k in zip(drafters("qwen2", wanted).values(), KS, strict=True):
        ours = Noting()
        call(model, draft, k=k, streamer=ours, **options)
        assert ours.told == plain.told


def test_a_streamer_in_another_thread_ends() -> None:
    tokenizer, model = subword_tokenizer(), tiny_model("qwen2")
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=300)
    work = Thread(target=lambda: call(model, tiny_model("qwen2", drift=0.05), streamer=streamer))
    work.start()
    text = "".join(streamer)
    work.join()
    assert text == tokenizer.decode(call(model))


# Sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 12}, {"top_p": 0.8, "top_k": 0, "min_p": 0.02}])
def test_a_seed_gives_what_the_target_alone_draws_with_it(options: dict[str, Any]) -> None:
    """That has the target's distribution, as test_sampled.py shows. top_k is 50 in generate unless it is said."""
    model, settings = tiny_model("qwen2"), {"temperature": 1.0, "top_k": 50, **options}
    alone = SpeculativeDecoder(None, local(tiny_engine("qwen2")))
    seen = set()
    for seed, k in product((0, 7), KS):
        wanted = alone.generate(list(PROMPT), max_new_tokens=16, seed=seed, **settings).token_ids
        decode = for_transformers(tiny_model("qwen2", drift=0.05), k=k, seed=seed)
        assert call(model, custom_generate=decode, do_sample=True, **options) == wanted
        seen.add(tuple(wanted))
    assert len(seen) == 2


def test_without_a_seed_torch_s_governs() -> None:
    model, draft = tiny_model("qwen2"), tiny_model("qwen2", drift=0.05)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([call(model, draft, do_sample=True) for _ in range(2)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1], "each call draws anew"


# Recordings -------------------------------------------------------------------------------------------------


def heard(family: str, seconds: float, seed: int = 3) -> tuple[tuple[int, ...], dict[str, Any]]:
    """An expanded prompt, and a recording as the family's processor prepares it."""
    waveform = clip(seconds, seed)
    features = feature_extractor(family)(
        waveform, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    ids = SpeculativeDecoder(tiny_engine(family, tokenizer=subword_tokenizer())).encode(Audio(waveform)).ids
    return ids, {
        "input_features": features["input_features"],
        "feature_attention_mask": features["attention_mask"],
    }


@pytest.mark.parametrize("seconds", [0.1, 0.777, 2.0])
@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_recordings_give_generate_s_tokens_with_any_drafter(family: str, seconds: float) -> None:
    """Also a drafter without ears, and one with the other family's."""
    model = tiny_model(family)
    ids, inputs = heard(family, seconds)
    options = {**inputs, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    wanted = call(model, ids=ids, **options)
    assert wanted != call(model, ids=ids, **{**options, **heard(family, seconds, 4)[1]}), "what is heard must matter"
    other = "omni" if family == "qwen2-audio" else "qwen2-audio"
    drafts = tiny_model("llama", 7), tiny_model(family, drift=0.05), tiny_model(other)
    for k, draft in zip(KS, drafts, strict=True):
        assert call(model, draft, ids, k=k, **options) == wanted
    assert call(model, tiny_model(family, drift=0.05), ids) == call(model, ids=ids), "placeholders without a recording"


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_a_drafter_of_the_same_family_hears(family: str) -> None:
    """The target as its own drafter is always right; deaf, it would not be."""
    model = tiny_model(family)
    ids, inputs = heard(family, 0.777)
    for draft in (model, tiny_engine(family)):
        out = model.generate(
            torch.tensor([ids]),
            custom_generate=for_transformers(draft),
            return_dict_in_generate=True,
            max_new_tokens=16,
            **inputs,
        )
        assert out.outrider.stats.acceptance_rate == 1.0
        assert out.outrider.guarantee == "exact"


@lru_cache
def bundled(name: str) -> Any:
    return load_engine(f"demo:{name}")


@pytest.mark.parametrize("clip_name", ["zh-1.ogg", "en-2.ogg"])
def test_the_bundled_pair_and_its_clips(clip_name: str) -> None:
    target, edge = bundled("cloud"), bundled("edge")
    prompt = SpeculativeDecoder(edge).encode(Audio(BUNDLED / "clips" / clip_name))
    features = torch.from_numpy(target.audio.features(prompt.audio))[None]
    inputs = {"input_features": features, "feature_attention_mask": torch.ones(1, features.shape[2], dtype=torch.long)}
    options = {**inputs, "max_new_tokens": 32, "repetition_penalty": 1.05}
    wanted = call(target.model, ids=prompt.ids, **options)
    blind = tiny_model("llama", vocab=target.row_count)
    for draft in (edge.model, edge, blind):
        assert call(target.model, draft, prompt.ids, k=5, **options) == wanted
