"""Edge and target with different tokenizers: the output is the target's own, token for token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SettingsError, SpeculativeDecoder, VocabularyMismatch, connect, local, prompt_lookup
from outrider.config import Grammar
from outrider.errors import PromptError
from outrider.prompts.audio import Audio
from outrider.verifiers.base import disconnect
from tests.support.cloud_server import serving
from tests.support.fakes import FarVerifier, HashRows, Rows, ScriptedEngine, reference_output
from tests.support.tiny_models import clip
from tests.support.tokenized_models import (
    TokenizedEngine,
    ids_in,
    ids_of_bytes,
    model_of,
    model_that_emits,
    model_that_knows,
)
from tests.support.tokenizers import CORPUS, trained

KINDS = ("byte level", "llama", "unigram", "wordpiece")
KS: tuple[int | str, ...] = (1, 3, 8, "auto")
TEXTS = (
    "the quick fox\n\tjumps:  don't  stop",
    "社区的人们 喜欢狐狸。",
    "이 여우는 빠르다 뷁",
    "الثعلب السريع يقفز",
    "👍👨‍👩‍👧‍👦🏳️‍🌈 ok 👍",
    "ﬁ Å é e\u0301 \u200d\u00a0क्षि",
    "<|end|></s> <unk> [END] the end",
    "def f(x):\n\tif x:\n\t\treturn  x\t# 社区\r\n",
)
NO_UTF8 = (b"\xff", b"\xe7\xa4", b"\xa4\xbe", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x91", b"caf\xe9 ")
PROMPT = "the lazy dog"


def texts() -> st.SearchStrategy[str]:
    """Texts of many scripts: known ones, parts of the tokenizers' corpus, and any characters."""
    parts = st.one_of(st.sampled_from((*TEXTS, *CORPUS)), st.text(min_size=1, max_size=12))
    return st.lists(parts, min_size=1, max_size=3).map(" ".join)


def kinds() -> st.SearchStrategy[tuple[str, str]]:
    """Any two kinds of tokenizers."""
    return st.permutations(KINDS).map(lambda some: (some[0], some[1]))


def generate(edge: Any, target: TokenizedEngine, prompt: list[int], options: dict[str, Any], **values: Any) -> Any:
    """Generate with the verifier in this process, or behind a scripted network with the pipelined driver."""
    verifier: Any = local(target)
    if values["polls"] is not None:
        verifier = FarVerifier(local(target), polls=values["polls"])
        options = {**options, "driver": "pipelined", "reader": prompt_lookup(target.tokenizer)}
    decoder = SpeculativeDecoder(edge, verifier, on_loop="ignore", **options)
    settings = {"max_new_tokens": 24, "temperature": values["temperature"], "seed": values["seed"]}
    wanted = reference_output(target.rows, prompt, target.vocab_size, eos=target.eos_ids, **settings)
    result = decoder.generate(prompt, **settings)
    assert result.token_ids == wanted
    assert result.guarantee == "exact"
    assert not edge.open_slots
    return result


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_of_many_scripts_give_the_tokens_of_the_target(data: st.DataObject) -> None:
    kind, target_kind = data.draw(kinds(), "kinds")
    output, said = data.draw(texts(), "output"), data.draw(texts(), "said by the edge")
    prompt_text = PROMPT + data.draw(texts(), "prompt")
    lead = data.draw(st.sampled_from((30.0, 4.0)), "lead")
    target = model_of(target_kind, prompt_text, output, lead=lead)
    same = data.draw(st.booleans(), "edge knows the output")
    edge = model_of(kind, prompt_text, output if same else said, name="edge")
    values = {
        "temperature": data.draw(st.sampled_from((0.0, 1.0)), "temperature"),
        "seed": data.draw(st.integers(0, 9), "seed"),
        "polls": data.draw(st.sampled_from((None, (0,), (3, 0, 40))), "polls"),
    }
    gate = data.draw(st.sampled_from(("always", "trigger:entropy:1.0", "trigger:entropy:20")), "gate")
    options = {"k": data.draw(st.sampled_from(KS), "k"), "gate": gate}
    prompt = ids_in(target_kind, prompt_text)
    for _ in range(2):  # a second generation has an adaptive draft length that has learnt
        generate(edge, target, prompt, options, **values)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_tokens_of_the_target(data: st.DataObject) -> None:
    """Random models write special tokens, bytes that are no UTF-8 and parts of words in any order."""
    kind, target_kind = data.draw(kinds(), "kinds")
    rows: list[Rows] = [
        HashRows(data.draw(st.integers(0, 99), "rows"), len(trained(each))) for each in (kind, target_kind)
    ]
    edge = TokenizedEngine(rows[0], trained(kind), name="edge")
    target = TokenizedEngine(rows[1], trained(target_kind))
    ids = st.integers(0, target.vocab_size - 1)
    prompt = data.draw(st.lists(ids, min_size=1, max_size=40), "prompt")
    values = {
        "temperature": data.draw(st.sampled_from((0.0, 0.7)), "temperature"),
        "seed": data.draw(st.integers(0, 9), "seed"),
        "polls": data.draw(st.sampled_from((None, (2,))), "polls"),
    }
    generate(edge, target, prompt, {"k": data.draw(st.sampled_from(KS), "k")}, **values)


@st.composite
def mixed_ids(draw: st.DrawFn, kind: str) -> list[int]:
    """Ids of texts and of bytes that are no UTF-8, in any order."""
    raw = st.one_of(st.sampled_from(NO_UTF8), st.binary(min_size=1, max_size=5))
    parts = draw(st.lists(st.one_of(texts(), raw), min_size=1, max_size=4))
    ids = (ids_in(kind, part) if isinstance(part, str) else ids_of_bytes(kind, part) for part in parts)
    return [token for some in ids for token in some]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_mixed_with_bytes_that_are_no_utf8_give_the_tokens_of_the_target(data: st.DataObject) -> None:
    kind, target_kind = data.draw(st.permutations(("byte level", "llama")), "kinds")
    prompt, output = data.draw(mixed_ids(target_kind), "prompt"), data.draw(mixed_ids(target_kind), "output")
    target = model_that_emits(target_kind, len(prompt), output, lead=data.draw(st.sampled_from((30.0, 4.0)), "lead"))
    said = data.draw(mixed_ids(kind), "said by the edge")
    edge = model_that_emits(kind, data.draw(st.integers(1, len(prompt) + 4), "position"), said, name="edge")
    values = {
        "temperature": data.draw(st.sampled_from((0.0, 1.0)), "temperature"),
        "seed": data.draw(st.integers(0, 9), "seed"),
        "polls": data.draw(st.sampled_from((None, (0,), (3, 0, 40))), "polls"),
    }
    generate(edge, target, prompt, {"k": data.draw(st.sampled_from(KS), "k")}, **values)


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
@pytest.mark.parametrize("k", [3, 8])
def test_a_skip_gate_gives_the_same_tokens_with_both_drivers(k: int, driver: Any) -> None:
    """Unverified tokens depend on the tokens before them alone, not on the division into calls."""
    text = " the quick brown fox 社区 jumps over the lazy dog, and the dog barks"
    outputs = []
    for polls in ((0,), (5, 0, 2)):
        edge, target = model_of("byte level", PROMPT, text), model_of("llama", PROMPT, " the quick" + text)
        far = FarVerifier(local(target), polls=polls)
        decoder = SpeculativeDecoder(
            edge, far, k=k, gate="logprob:0.5", driver=driver, reader=prompt_lookup(target.tokenizer), on_loop="ignore"
        )
        outputs.append(decoder.generate(ids_in("llama", PROMPT), max_new_tokens=30).token_ids)
    other = model_of("byte level", PROMPT, text)
    one = SpeculativeDecoder(other, local(target), k=k, gate="logprob:0.5", on_loop="ignore")
    assert outputs[0] == outputs[1] == one.generate(ids_in("llama", PROMPT), max_new_tokens=30).token_ids


@pytest.mark.parametrize(("kind", "target_kind"), [("byte level", "llama"), ("llama", "byte level")])
@pytest.mark.parametrize("text", TEXTS[:5])
def test_an_edge_that_knows_the_output_saves_most_rounds(kind: str, target_kind: str, text: str) -> None:
    target = model_of(target_kind, PROMPT, " " + text)
    edge = model_of(kind, PROMPT, " " + text, name="edge")
    prompt = ids_in(target_kind, PROMPT)
    result = generate(edge, target, prompt, {"k": 8}, temperature=0.0, seed=0, polls=None)
    assert result.stats.rounds <= 2 + len(result.token_ids) // 5
    assert edge.refed == 0 or edge.refed < len(result.token_ids)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_the_edge_continues_alone_after_the_loss_of_the_cloud(lost: int) -> None:
    text = " the quick brown fox 社区 jumps over 👍 the lazy dog"
    edge, target = model_that_knows(PROMPT + text), model_of("llama", PROMPT, text)
    far = FarVerifier(local(target), losses=range(lost, 99))
    decoder = SpeculativeDecoder(
        edge, far, k=3, on_cloud_loss="edge-only", reader=prompt_lookup(target.tokenizer), on_loop="ignore"
    )
    result = decoder.generate(ids_in("llama", PROMPT), max_new_tokens=60)
    assert result.text is not None
    assert result.text.strip() == text.strip()
    assert result.finish_reason == "eos"
    assert result.stats.cloud_lost


SAMPLING_FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"logit_bias": ((300, 2.0), (12, -3.0)), "repetition_penalty": 1.2, "temperature": 1.0},
)


@pytest.mark.parametrize("options", SAMPLING_FIELDS, ids=str)
def test_filters_penalties_and_biases_are_those_of_the_target_s_ids(options: dict[str, Any]) -> None:
    edge = model_of("byte level", PROMPT, " the quick brown fox jumps", name="edge")
    target, prompt = model_of("llama", PROMPT, " the quick brown fox jumps"), ids_in("llama", PROMPT)
    options = {"max_new_tokens": 24, **options}
    wanted = reference_output(target.rows, prompt, target.vocab_size, eos=target.eos_ids, **options)
    for gate in ("always", "trigger:entropy:1"):
        result = SpeculativeDecoder(edge, local(target), k=4, gate=gate, on_loop="ignore").generate(prompt, **options)
        assert result.token_ids == wanted


def test_log_probabilities_are_the_target_s_or_refused_where_the_edge_may_speak_alone() -> None:
    edge = model_of("byte level", PROMPT, " the end", name="edge")
    target, prompt = model_of("llama", PROMPT, " the end"), ids_in("llama", PROMPT)
    result = SpeculativeDecoder(edge, local(target)).generate(prompt, max_new_tokens=12, logprobs=2)
    alone = SpeculativeDecoder(None, local(target)).generate(prompt, max_new_tokens=12, logprobs=2)
    assert result.logprobs == alone.logprobs != []
    decoder = SpeculativeDecoder(edge, local(target), gate="entropy:1")
    with pytest.raises(
        SettingsError, match=r"logprobs are not available for unverified tokens of a drafter with another tokenizer"
    ):
        decoder.generate(prompt, max_new_tokens=12, logprobs=2)


def test_prompts_are_encoded_with_the_tokenizer_of_the_target() -> None:
    edge, target = model_of("byte level", PROMPT, " the end"), model_of("llama", PROMPT, " the end")
    decoder = SpeculativeDecoder(edge, local(target))
    assert "its drafts translated through text to model" in decoder.summary()
    assert "translated" not in SpeculativeDecoder(edge, local(edge)).summary()
    assert list(decoder.encode(PROMPT).ids) == ids_in("llama", PROMPT)
    assert decoder.tokenizer is target.tokenizer
    assert decoder.generate(PROMPT).text.strip() == "the end"


def test_rejection_sampling_recordings_and_missing_tokenizers_are_refused_by_name() -> None:
    edge = model_of("byte level", PROMPT, " the end", name="small")
    target = model_of("llama", PROMPT, " the end", name="large")
    with pytest.raises(SettingsError, match=r"residual .* small and large have different tokenizers"):
        SpeculativeDecoder(edge, local(target), accept="residual")
    with pytest.raises(PromptError, match="small and large have different tokenizers"):
        SpeculativeDecoder(edge, local(target)).generate(Audio(clip(0.5, seed=1)))
    with pytest.raises(VocabularyMismatch):
        SpeculativeDecoder(edge, local(ScriptedEngine(target.rows, target.vocab_size)))
    with pytest.raises(VocabularyMismatch):  # the target's tokenizer is not known here
        SpeculativeDecoder(edge, FarVerifier(local(target)))
    with pytest.raises(VocabularyMismatch):  # and this is another one
        SpeculativeDecoder(edge, FarVerifier(local(target)), reader=prompt_lookup(trained("unigram")))


@pytest.mark.network
@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_a_cloud_across_a_network_is_compared_with_the_tokenizer_that_is_named(driver: Any, tmp_path: Path) -> None:
    text = " the quick brown fox 社区 jumps over 👍 the lazy dog"
    edge, target = model_that_knows(PROMPT + text), model_of("llama", PROMPT, text)
    prompt = ids_in("llama", PROMPT)
    trained("llama").save_pretrained(tmp_path)
    with serving(target) as served:
        verifier = connect(f"grpc://{served.address}")
        try:
            with pytest.raises(VocabularyMismatch):
                SpeculativeDecoder(edge, verifier, reader=prompt_lookup(trained("unigram")))
            reader = prompt_lookup(tmp_path)
            result = SpeculativeDecoder(edge, verifier, k=8, driver=driver, reader=reader).generate(PROMPT)
        finally:
            disconnect(verifier)
    assert result.token_ids == reference_output(target.rows, prompt, target.vocab_size, eos=target.eos_ids)
    assert result.guarantee == "exact"
    assert result.stats.rounds <= 2 + len(result.token_ids) // 5


@pytest.mark.parametrize("expression", ["[a-z ]{5,40}[.!?]", "the (quick|lazy) (fox|dog) .{1,9}"])
@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_a_grammar_over_the_targets_tokens_masks_translated_drafts(kind: str, expression: str) -> None:
    grammar = Grammar("regex", expression)
    target = model_of("byte level", PROMPT, "the quick fox jumps", lead=4.0)
    edge = model_of(kind, PROMPT, "the quick fox 社区 jumps", name="edge")
    prompt = ids_in("byte level", PROMPT)
    limits = {"max_new_tokens": 40, "grammar": grammar}
    wanted = SpeculativeDecoder(None, local(target)).generate(prompt, **limits)
    result = SpeculativeDecoder(edge, local(target), k=5).generate(prompt, **limits)
    assert result.token_ids == wanted.token_ids
    assert re.fullmatch(expression, result.text or "")
    assert result.stats.drafted
