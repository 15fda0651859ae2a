"""Classes of errors reported for other engines (docs/design/failures.md), each applied to Outrider."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider import (
    Audio,
    PromptError,
    Result,
    SettingsError,
    SpeculativeDecoder,
    StateError,
    StreamEvent,
    VocabularyMismatch,
    local,
)
from outrider.config import GenerationSettings
from outrider.decoding.actions import Done, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import FixedDraftLength
from outrider.decoding.gate import Always
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules
from outrider.engines.base import Prompt, SequenceInput
from outrider.sampling.acceptance import Verdict, parse_acceptance_rule
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import (
    HashRows,
    OracleEngine,
    ScriptedEngine,
    ScriptedVerifier,
    blend,
    reference_output,
    replay,
)
from tests.support.tiny_models import (
    SPECIALS,
    VOCAB,
    byte_tokenizer,
    clip,
    new_engine,
    reference,
    reference_audio,
    subword_tokenizer,
    tiny_engine,
    tiny_model,
)

V = 32
PROMPT = (3, 1, 4, 1, 5)
TARGET = HashRows(1, V)
KS: tuple[int | str, ...] = (1, 2, 3, 5, 8, "auto")


def scripted(
    output: list[int], vocab_size: int = V, prompt_length: int = len(PROMPT), **options: Any
) -> ScriptedEngine:
    """A model that says `output`."""
    return ScriptedEngine(replay(prompt_length, output, vocab_size), vocab_size, **options)


def consistent(result: Result) -> None:
    """Nothing is counted past the end of the output."""
    stats, n = result.stats, len(result.token_ids)
    assert len(result.sources) == n
    assert stats.cloud_tokens + stats.edge_tokens == n
    assert stats.accepted + stats.corrected + stats.bonus == stats.cloud_tokens
    assert stats.accepted <= stats.verified <= stats.drafted
    assert all(0 <= index < n for index in result.near_ties)


# Ends in mid-block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("end", range(7))
def test_eos_is_accepted_in_mid_block(end: int, k: int | str) -> None:
    output = [*range(10, 10 + end), 2, *range(20, 30)]
    decoder = SpeculativeDecoder(scripted(output), local(scripted(output, eos_ids=(2,))), k=k)
    result = decoder.generate(list(PROMPT), max_new_tokens=16)
    assert result.token_ids == output[: end + 1]
    assert result.finish_reason == "eos"
    assert result.stats.acceptance_rate == (1.0 if result.stats.verified else None)
    consistent(result)


def test_what_a_block_holds_after_eos_is_dropped() -> None:
    """Even from a drafter that talks on: the block ends with the EOS, and no bonus follows it."""
    decoder = Decoder(
        PROMPT, Plan(StopRules(16, (2,)), Always(), parse_acceptance_rule("exact"), FixedDraftLength(5), True, "ignore")
    )
    decoder.next()
    decoder.drafted([Proposal(token) for token in (10, 2, 11, 12, 13)])
    asked = decoder.next()
    assert isinstance(asked, Verify)
    assert asked.draft_ids == (10, 2)
    decoder.decided(Verdict(asked.round, 2, 9))
    assert decoder.next() == Done("eos")
    assert decoder.sequence.ids == [*PROMPT, 10, 2]
    assert decoder.stats.verified == decoder.stats.drafted == 2


@pytest.mark.parametrize("k", KS)
def test_a_drafted_eos_that_the_target_rejects(k: int | str) -> None:
    """The drafter wants to end at the third token, and at every one after; the target goes on."""
    output = list(range(10, 22))
    keen = scripted([10, 11, *[2] * 10])
    result = SpeculativeDecoder(keen, local(scripted(output, eos_ids=(2,))), k=k).generate(
        list(PROMPT), max_new_tokens=12
    )
    assert result.token_ids == output
    assert result.finish_reason == "length"
    consistent(result)


def test_a_drafted_eos_is_verified_at_once() -> None:
    """Under a gate that would wait for ever, nothing is drafted past it."""
    output = [10, 11, 12, 13, 14, 2, 15]
    target = scripted(output, eos_ids=(2,))
    result = SpeculativeDecoder(scripted(output), local(target), k=4, gate="trigger:never").generate(
        list(PROMPT), max_new_tokens=40
    )
    assert result.token_ids == output[:6]
    assert result.stats.drafted == 6
    assert result.stats.rounds == 1


@pytest.mark.parametrize("k", KS)
def test_an_eos_that_only_the_drafter_has_means_nothing(k: int | str) -> None:
    output = [10, 11, 2, 12, 13, 14]
    draft, target = scripted(output, eos_ids=(2,)), scripted(output)
    result = SpeculativeDecoder(draft, local(target), k=k).generate(list(PROMPT), max_new_tokens=6)
    assert result.token_ids == output


@pytest.mark.parametrize("k", KS)
def test_the_length_limit_does_not_hide_an_earlier_stop(k: int | str) -> None:
    output = [10, 11, 12, 2, 13, 14, 15, 16]
    decoder = SpeculativeDecoder(scripted(output), local(scripted(output, eos_ids=(2,))), k=k)
    for limit, reason in ((3, "length"), (4, "eos"), (5, "eos"), (8, "eos")):
        result = decoder.generate(list(PROMPT), max_new_tokens=limit)
        assert (result.token_ids, result.finish_reason) == (output[: min(limit, 4)], reason)
        consistent(result)


TEXT = "He said: go on. Then he left.\nAnd so on\n\nIt ends."


def speaker(text: str, prompt: str, **options: Any) -> tuple[ScriptedEngine, list[int]]:
    tokenizer = byte_tokenizer()
    said = tokenizer(text)["input_ids"]
    n = len(tokenizer(prompt)["input_ids"])
    rows = replay(n, said, len(tokenizer), tail=tokenizer(" ")["input_ids"])
    return ScriptedEngine(rows, len(tokenizer), tokenizer=tokenizer, **options), said


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("stop", [".", "on.", " Then he left.\n", "\n\n", "on\n\nIt", "He", "H"])
def test_a_stop_string_over_tokens_and_blocks(stop: str, k: int | str) -> None:
    """It begins in one token and ends in another, in another block perhaps; text and ids end with it together."""
    target, said = speaker(TEXT, "Go: ")
    draft = OracleEngine(4, said, target.vocab_size, errors=(5, 6, 20), tokenizer=target.tokenizer)
    result = SpeculativeDecoder(draft, local(target), k=k).generate("Go: ", max_new_tokens=90, stop=["\0", stop])
    end = TEXT.index(stop) + len(stop)
    assert result.text == TEXT[:end] == target.tokenizer.decode(result.token_ids)
    assert result.token_ids == said[:end]
    assert result.finish_reason == "stop"
    consistent(result)


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    """Neither as a whole, nor where the prompt begins it and the output ends it."""
    target, said = speaker("nd. END", "END. E")
    result = SpeculativeDecoder(None, local(target)).generate("END. E", max_new_tokens=20, stop="END")
    assert result.token_ids == said
    target, said = speaker("ND. END", "END. E")
    result = SpeculativeDecoder(None, local(target)).generate("END. E", max_new_tokens=20, stop="END")
    assert result.token_ids == said


@pytest.mark.parametrize("k", [2, 5, "auto"])
def test_sentences_end_in_mid_block(k: int | str) -> None:
    target, _ = speaker("一个。二个！He said 3.14 to Dr. Who? Yes.", "Go: ")
    draft, _ = speaker("一个。二个！He said 3.14 to Dr. Who? Yes.", "Go: ")
    for count, end in ((1, "一个。"), (2, "二个！"), (3, "Who?"), (4, "Yes.")):
        result = SpeculativeDecoder(draft, local(target), k=k).generate("Go: ", max_new_tokens=90, sentences=count)
        assert result.text.endswith(end)
        assert result.finish_reason == "sentences"
        consistent(result)


@pytest.mark.parametrize("k", KS)
def test_metrics_are_not_counted_past_the_end(k: int | str) -> None:
    """The stop string ends with the second token of the output; the verdict had accepted the whole block."""
    target, _ = speaker("abcdefghij", "Go: ")
    draft, _ = speaker("abcdefghij", "Go: ")
    result = SpeculativeDecoder(draft, local(target), k=k).generate("Go: ", max_new_tokens=10, stop="b")
    assert result.text == "ab"
    consistent(result)
    assert result.stats.verified == result.stats.accepted == (1 if k == 1 else 2)
    assert result.stats.rounds == 1


@pytest.mark.parametrize("k", KS)
def test_near_ties_are_indices_of_the_output(k: int | str) -> None:
    """Choices whose lead is below the engine's noise, whoever drafted them, and only those that were emitted."""
    noise = 0.5
    wanted = reference_output(TARGET, PROMPT, V, max_new_tokens=40)
    best = [TARGET((*PROMPT, *wanted[:n])).topk(2).values for n in range(40)]
    ties = [n for n, (first, second) in enumerate(best) if first - second < noise]
    assert 5 < len(ties) < 35
    draft, target = ScriptedEngine(blend(TARGET, HashRows(2, V), 0.1), V), ScriptedEngine(TARGET, V)
    target.noise = noise
    result = SpeculativeDecoder(draft, local(target), k=k).generate(list(PROMPT), max_new_tokens=40)
    assert result.near_ties == ties
    assert result.stats.near_ties == len(ties)
    perfect = SpeculativeDecoder(ScriptedEngine(TARGET, V), local(target), k=k)
    for limit in ties[1:6]:  # the verdict goes on to a bonus that is a tie, but is not part of the output
        result = perfect.generate(list(PROMPT), max_new_tokens=limit)
        assert result.near_ties == [n for n in ties if n < limit]


# Prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
def test_a_prompt_of_one_token(k: int | str) -> None:
    wanted = reference_output(TARGET, (7,), V, max_new_tokens=10)
    draft = ScriptedEngine(blend(TARGET, HashRows(2, V), 0.25), V)
    result = SpeculativeDecoder(draft, local(ScriptedEngine(TARGET, V)), k=k).generate([7], max_new_tokens=10)
    assert result.token_ids == wanted
    assert result.prompt_tokens == 1


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused_before_any_work(prompt: Any) -> None:
    draft, target = (ScriptedEngine(TARGET, 266, tokenizer=byte_tokenizer()) for _ in range(2))
    for decoder in (SpeculativeDecoder(draft, local(target)), SpeculativeDecoder(draft)):
        with pytest.raises(PromptError, match="empty"):
            decoder.generate(prompt)
        with pytest.raises(PromptError, match="empty"):
            next(decoder.stream(prompt))
    assert not draft.opened
    assert not target.opened


def test_a_prompt_token_that_only_the_drafter_knows_is_refused() -> None:
    """The drafter's model may have more tokens; the target would be fed an id that it does not have."""
    draft, target = ScriptedEngine(HashRows(1, 40), 40), ScriptedEngine(TARGET, V)
    decoder = SpeculativeDecoder(draft, local(target), k=2)
    decoder.generate([V - 1], max_new_tokens=2)
    with pytest.raises(PromptError, match=str(V)):
        decoder.generate([V], max_new_tokens=2)


# Roll-back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["drafter only", "verifier only", "both"])
def test_roll_back_to_every_place_in_a_block(k: int, kind: str) -> None:
    """0, 1, … k−1, k drafts accepted; caches roll back to just there, and nothing is computed twice."""
    output = reference_output(TARGET, PROMPT, V, max_new_tokens=2 * k + 2)
    for place in range(k + 1):
        draft, target = OracleEngine(len(PROMPT), output, V, errors=(place,)), ScriptedEngine(TARGET, V)
        verifier: Any = ScriptedVerifier(output, V) if kind == "drafter only" else local(target)
        if kind == "verifier only":
            draft = OracleEngine(len(PROMPT), output, V, errors=range(place, 99))
        result = SpeculativeDecoder(draft, verifier, k=k).generate(list(PROMPT), max_new_tokens=2 * k + 2)
        assert result.token_ids == output
        assert result.sources[: place + 1] == [*[Source.ACCEPTED] * place, result.sources[place]]
        assert result.sources[place] == (Source.BONUS if place == k else Source.CORRECTION)
        assert draft.refed == target.refed == 0
        consistent(result)


def test_a_real_cache_rolled_back_to_every_length_gives_the_rows_of_a_fresh_one() -> None:
    for family in ("qwen2", "gemma3", "omni"):
        engine = tiny_engine(family)
        ids = [(7 * n) % 90 + 2 for n in range(20)]
        slot = engine.open(Prompt(tuple(ids)))
        whole = engine.forward(slot, ids)
        for length in (19, 16, 11, 6, 1, 0):
            engine.forward(slot, [5, 6, 8])
            engine.truncate(slot, length)
            torch.testing.assert_close(engine.forward(slot, ids[length:]), whole[length:], atol=2e-4, rtol=1e-4)
        engine.close(slot)


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_a_recording_read_in_pieces_gives_the_rows_of_one_prefill(family: str) -> None:
    """Rolled back into the middle of the audio placeholders, and read on from there in uneven steps."""
    engine = tiny_engine(family, tokenizer=subword_tokenizer())
    prompt = SpeculativeDecoder(engine).encode(Audio(clip(0.8), instruction="say it."))
    first = prompt.ids.index(1)
    slot = engine.open(prompt)
    whole = engine.forward(slot, prompt.ids)
    for length in (len(prompt.ids) - 1, first + 7, first + 1, first, 0):
        engine.truncate(slot, length)
        pieces = [engine.forward(slot, prompt.ids[n : n + 5]) for n in range(length, len(prompt.ids), 5)]
        torch.testing.assert_close(torch.cat(pieces), whole[length:], atol=2e-4, rtol=1e-4)
    engine.close(slot)


# Sessions -------------------------------------------------------------------------------------------------------


def lock_step(streams: list[Iterator[StreamEvent]]) -> list[Result]:
    results: dict[int, Result] = {}
    while len(results) < len(streams):
        for n, stream in enumerate(streams):
            if n not in results:
                try:
                    next(stream)
                except StopIteration as end:
                    results[n] = end.value
    return [results[n] for n in range(len(streams))]


def test_two_decoders_in_lock_step_on_one_engine() -> None:
    for family in ("qwen2", "mistral"):
        target, draft = tiny_engine(family), tiny_engine(family, drift=0.05)
        prompts = [(40, 41, 42), (2, 33, 44, 55, 66, 77, 88), (9,)]
        decoder = SpeculativeDecoder(draft, local(target), k=3)
        results = lock_step([decoder.stream(list(prompt), max_new_tokens=14) for prompt in prompts])
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == reference(tiny_model(family), prompt, max_new_tokens=14)


def test_drafter_and_verifier_may_be_one_engine() -> None:
    engine = tiny_engine("qwen2")
    results = lock_step(
        [SpeculativeDecoder(engine, local(engine), k=k).stream([40 + k, 41], max_new_tokens=12) for k in (2, 3)]
    )
    for k, result in zip((2, 3), results, strict=True):
        assert result.token_ids == reference(tiny_model("qwen2"), (40 + k, 41), max_new_tokens=12)
        assert result.stats.acceptance_rate == 1.0


def test_recordings_and_texts_do_not_contaminate_each_other() -> None:
    """Positions (rope_deltas) and audio embeddings live with the session, not on the shared module."""
    tokenizer = subword_tokenizer()
    target, draft = (tiny_engine("omni", drift=drift, tokenizer=tokenizer) for drift in (0.0, 0.02))
    decoder = SpeculativeDecoder(draft, local(target), k=3)
    clips = [clip(0.4, seed=1), clip(1.1, seed=2)]
    recordings = [Audio(wave, instruction="say it.") for wave in clips]
    streams = [decoder.stream(prompt, max_new_tokens=12) for prompt in (recordings[0], [44, 60], recordings[1])]
    first, text, second = lock_step(streams)
    assert text.token_ids == reference(tiny_model("omni"), (44, 60), max_new_tokens=12)
    for wave, recording, result in zip(clips, recordings, (first, second), strict=True):
        ids = decoder.encode(recording).ids
        assert result.token_ids == reference_audio(tiny_model("omni"), ids, "omni", wave, max_new_tokens=12)


def open_session(verifier: LocalVerifier, prompt: tuple[int, ...] = PROMPT, **options: Any) -> int:
    return verifier.open(Prompt(prompt), SessionParams(GenerationSettings(**options), "exact", V))


def test_two_sessions_interleaved_on_one_verifier() -> None:
    verifier = LocalVerifier(ScriptedEngine(TARGET, V))
    prompts = (PROMPT, (9, 8))
    sessions = [open_session(verifier, prompt) for prompt in prompts]
    outputs: list[list[int]] = [[], []]
    for round_ in range(1, 6):
        for n, prompt in enumerate(prompts):
            drafts = tuple((11 * round_ + i + n) % V for i in range(n + 2))
            base = len(prompt) + len(outputs[n])
            verdict = verifier.verify(sessions[n], Verify(round_, base, (), drafts))
            outputs[n] += [*drafts[: verdict.accepted], verdict.next_token]
    for n, prompt in enumerate(prompts):
        assert outputs[n] == reference_output(TARGET, prompt, V, max_new_tokens=len(outputs[n]))


class Stutters(LocalVerifier):
    """The network delivers every request twice, and the answer to the second counts."""

    def verify(self, session: int, request: Verify) -> Verdict:
        first = super().verify(session, request)
        second = super().verify(session, request)
        assert first == second
        return second


def test_a_request_that_is_delivered_twice_is_applied_once() -> None:
    for gate in ("always", "trigger:entropy:2", "entropy:2"):
        draft = ScriptedEngine(blend(TARGET, HashRows(2, V), 0.25), V)
        once, twice = ScriptedEngine(TARGET, V), ScriptedEngine(TARGET, V)
        results = [
            SpeculativeDecoder(draft, verifier, k=3, gate=gate).generate(list(PROMPT), max_new_tokens=24)
            for verifier in (LocalVerifier(once), Stutters(twice))
        ]
        assert results[0].token_ids == results[1].token_ids
        assert once.forwards == twice.forwards > 1


def test_a_wrong_base_length_is_an_error_that_names_both() -> None:
    verifier = LocalVerifier(ScriptedEngine(TARGET, V))
    session = open_session(verifier)
    with pytest.raises(StateError, match=r"base length is 7\b.*has 5 tokens.*sent 1 new"):
        verifier.verify(session, Verify(1, 7, (9,), (1, 2)))
    assert (
        verifier.verify(session, Verify(1, 6, (9,), ())).next_token
        == reference_output(TARGET, (*PROMPT, 9), V, max_new_tokens=1)[0]
    )


# Vocabularies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["exact", "residual"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_rows_are_never_emitted(temperature: float, accept: str) -> None:
    """Seven rows beyond the tokenizer whose logits beat all others."""
    draft = ScriptedEngine(blend(TARGET, HashRows(2, V), 0.25), V, padding=3)
    target = ScriptedEngine(TARGET, V, padding=7)
    options = {"max_new_tokens": 20, "temperature": temperature, "seed": 5}
    wanted = reference_output(TARGET, PROMPT, V, **options)
    for gate in ("always", "trigger:margin:0.3"):
        decoder = SpeculativeDecoder(draft, local(target), k=3, gate=gate, accept=accept)
        result = decoder.generate(list(PROMPT), **options)
        assert max(result.token_ids) < V
        if accept == "exact":
            assert result.token_ids == wanted


class Renamed:
    """A tokenizer of the same size in which some tokens are called something else."""

    def __init__(self, renamed: dict[int, str], extra: int = 0) -> None:
        names = subword_tokenizer().convert_ids_to_tokens(list(range(VOCAB)))
        self._names = [renamed.get(n, name) for n, name in enumerate(names)] + [f"extra {n}" for n in range(extra)]

    def get_vocab(self) -> dict[str, int]:
        return {name: n for n, name in enumerate(self._names)}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._names[n] for n in ids]

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(self.convert_ids_to_tokens(ids))


def test_equal_sizes_with_different_strings_are_refused() -> None:
    ours = tiny_engine("qwen2", tokenizer=subword_tokenizer())
    theirs = tiny_engine("qwen2", tokenizer=Renamed({60: "zzz", 61: "yyy"}))
    with pytest.raises(VocabularyMismatch, match=r"token 60 is '\w+' in the first and 'zzz' in"):
        SpeculativeDecoder(ours, local(theirs))
    assert SPECIALS[3] in ours.vocabulary
    with pytest.raises(VocabularyMismatch, match="token 0 is"):
        SpeculativeDecoder(tiny_engine("qwen2", tokenizer=Renamed({0: "<unk>"})), local(ours))


def test_sizes_that_no_padding_explains_are_refused() -> None:
    with pytest.raises(VocabularyMismatch, match=r"129 tokens more than .*the first of them 32"):
        SpeculativeDecoder(ScriptedEngine(TARGET, V), local(ScriptedEngine(TARGET, V + 129, name="large")))


def test_a_target_with_more_named_tokens_than_the_drafter_is_refused_or_exact() -> None:
    """Tokens that only the target can name are no padding: without them its output is not its own."""
    larger = tiny_engine("qwen2", vocab=112, tokenizer=Renamed({}, extra=16))
    smaller = tiny_engine("qwen2", 7, tokenizer=Renamed({}))
    assert (larger.vocab_size, smaller.vocab_size) == (112, 96)
    prompt = next((n, 44) for n in range(10, 60) if max(reference(tiny_model("qwen2", vocab=112), (n, 44))) >= VOCAB)
    wanted = reference(tiny_model("qwen2", vocab=112), prompt)
    try:
        result = SpeculativeDecoder(smaller, local(larger), k=3).generate(list(prompt), max_new_tokens=16)
    except VocabularyMismatch:
        return
    assert result.token_ids == wanted or result.guarantee != "exact"


# Batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "phi", "omni"])
def test_batched_rows_of_different_k_equal_single_forwards(family: str) -> None:
    """Other lengths, other block sizes, some rolled back: what one slot gets does not depend on the others."""
    engine = new_engine(family)
    texts = [[(3 * n + 5 * i) % 90 + 2 for i in range(3 + 6 * n)] for n in range(4)]
    ks = (1, 5, 2, 8)
    blocks = [[(n + 7 * i) % 90 + 2 for i in range(k)] for n, k in enumerate(ks)]

    def slots() -> list[int]:
        opened = [engine.open(Prompt(tuple(text))) for text in texts]
        for slot, text in zip(opened, texts, strict=True):
            engine.forward(slot, [*text, 17, 18], 1)
            engine.truncate(slot, len(text))
        return opened

    apart, together = slots(), slots()
    wanted = [engine.forward(slot, block) for slot, block in zip(apart, blocks, strict=True)]
    feeds = [SequenceInput(slot, block, len(block)) for slot, block in zip(together, blocks, strict=True)]
    rows = engine.forward_many(feeds)
    for got, want, k in zip(rows, wanted, ks, strict=True):
        assert got.shape[0] == k
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
        assert got.argmax(-1).equal(want.argmax(-1))
    assert [engine.kv_len(slot) for slot in together] == [engine.kv_len(slot) for slot in apart]
    later = engine.forward_many([SequenceInput(slot, [19, 20], 1) for slot in together])
    for slot, row in zip(apart, later, strict=True):
        torch.testing.assert_close(row, engine.forward(slot, [19, 20], 1), atol=2e-4, rtol=1e-4)
    for slot in (*apart, *together):
        engine.close(slot)


def test_a_prefill_and_a_step_share_a_batch() -> None:
    engine = new_engine("qwen2")
    one, two = engine.open(Prompt((11, 12))), engine.open(Prompt((13, 14, 15)))
    engine.forward(one, [11, 12], 1)
    step, prefill = engine.forward_many([SequenceInput(one, [16], 1), SequenceInput(two, [13, 14, 15], 1)])
    for slot, row, ids in ((one, step, [11, 12, 16]), (two, prefill, [13, 14, 15])):
        engine.truncate(slot, 0)
        torch.testing.assert_close(row, engine.forward(slot, ids, 1), atol=2e-4, rtol=1e-4)
        engine.close(slot)


# Characters -----------------------------------------------------------------------------------------------------

CHARACTERS = ("社区", "삼겹살", "👩‍👩‍👧‍👦 e\u0301", "naïve ☕", "a社b삼c👍🏽d")


def show(stream: Iterator[StreamEvent]) -> tuple[str, Result]:
    """What a screen shows in the end: provisional pieces, replaced from the index of a revision on."""
    shown: list[str] = []
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            result: Result = end.value
            return "".join(shown[: len(result.token_ids)]), result
        assert "\ufffd" not in event.text, "half a character was shown"
        if event.kind == "revised":
            del shown[event.index :]
        if event.index == len(shown):
            shown.append(event.text)
        assert shown[event.index] == event.text, "a piece was shown twice, and differently"


@pytest.mark.parametrize("k", [1, 2, 3, 5, "auto"])
@pytest.mark.parametrize("text", CHARACTERS)
def test_characters_over_tokens_and_blocks_are_shown_whole_and_once(text: str, k: int | str) -> None:
    """One token per byte. Some drafts are wrong, so that characters are begun by one block and ended by another."""
    target, said = speaker(text, "Go: ")
    n = len(target.tokenizer)
    options = {"max_new_tokens": len(said)}
    for errors, gate in (
        ((), "always"),
        (range(1, 99, 3), "always"),
        (range(2, 99, 4), "trigger:never"),
        ((), "never"),
    ):
        draft = OracleEngine(4, said, n, errors, tokenizer=target.tokenizer)
        decoder = SpeculativeDecoder(draft, local(target), k=k, gate=gate, on_loop="ignore")
        shown, result = show(decoder.stream("Go: ", **options))
        assert shown == result.text == text, (errors, gate)
        assert result.token_ids == said
    shown, result = show(SpeculativeDecoder(None, local(target)).stream("Go: ", **options))
    assert shown == text


def test_an_output_that_is_cut_within_a_character() -> None:
    """The length limit falls after two of three bytes: the whole characters are shown, and half of one is not."""
    target, _ = speaker("社区", "Go: ")
    shown, result = show(SpeculativeDecoder(target, local(target), k=2).stream("Go: ", max_new_tokens=5))
    assert shown == "社"
    assert result.text == "社"
    assert len(result.token_ids) == 5


def test_revised_characters_replace_what_was_shown() -> None:
    """Skipped blocks are shown as confirmed, then repaired by a later verdict in the middle of a character."""
    tokenizer = byte_tokenizer()
    target, said = speaker("社区服务", "Go: ")
    wrong = tokenizer("社會服务")["input_ids"]

    class Second:
        needs_signals = exact = False
        blocks = 0

        def decide(self, block: Any) -> Any:
            from outrider.decoding.gate import Decision

            self.blocks += 1
            return Decision(self.blocks % 2 == 0, "every other")

    draft, _ = speaker("社會服务", "Go: ")
    decoder = SpeculativeDecoder(draft, local(target), k=5, gate=Second(), scope="repair", on_loop="ignore")
    shown, result = show(decoder.stream("Go: ", max_new_tokens=len(said)))
    assert wrong != said
    assert shown == result.text
    assert result.text.startswith("社区")


def test_special_tokens_are_ids_but_not_text() -> None:
    target, _ = speaker("ab", "Go: ", eos_ids=(3,))
    said = [*target.tokenizer("ab")["input_ids"], 8, *target.tokenizer("c")["input_ids"], 3]
    target.rows = replay(4, said, len(target.tokenizer))
    shown, result = show(SpeculativeDecoder(target, local(target), k=2).stream("Go: ", max_new_tokens=9))
    assert result.token_ids == said
    assert shown == result.text == "abc"


# Distributions --------------------------------------------------------------------------------------------------


def test_the_q_that_is_sent_is_the_q_that_was_drawn_from() -> None:
    """Cut to the shortlist first, then drawn from what is left, then sent: never more, and never another."""
    from outrider.decoding.actions import Draft
    from outrider.edge.drafter import Drafter
    from outrider.engines.base import CachedSequence
    from outrider.sampling.acceptance import REJECTION_SHORTLIST
    from outrider.sampling.policy import Policy

    rows, vocab = HashRows(1, 3 * REJECTION_SHORTLIST, spread=0.1), 3 * REJECTION_SHORTLIST
    for seed in range(20):
        policy = Policy.build(GenerationSettings(temperature=1.0, seed=seed), (), vocab, 2)
        drafter = Drafter(
            CachedSequence(ScriptedEngine(rows, vocab), Prompt((1, 2)), "drafter"),
            policy,
            needs_signals=False,
            needs_q=True,
        )
        for n, proposal in enumerate(drafter.draft([1, 2], Draft(4))):
            assert proposal.q is not None
            assert len(proposal.q.ids) == REJECTION_SHORTLIST
            assert abs(float(proposal.q.logp.exp().sum()) - 1) < 1e-5
            assert proposal.q.draw(seed, 2 + n) == proposal.token


def test_settings_that_greedy_decoding_would_ignore_are_refused() -> None:
    decoder = SpeculativeDecoder(ScriptedEngine(TARGET, V))
    for name, value in (("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)):
        with pytest.raises(SettingsError, match=f"{name} needs a temperature above 0"):
            decoder.generate(list(PROMPT), **{name: value})
