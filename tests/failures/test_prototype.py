"""The bugs of the prototype behind the project (docs/design/failures.md, "Errors of state"), one test per symptom.

Each test breaks a small part on purpose, in the way in which the prototype was broken, and shows that it is caught:
by a StateError, or by tokens that are not those of the reference. The same check passes with the part as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outrider
from outrider import Audio, PromptError, Result, SpeculativeDecoder, StateError, connect, local
from outrider.config import GenerationSettings
from outrider.decoding import committer, stopping
from outrider.decoding.actions import Draft, Proposal, Verify
from outrider.decoding.committer import Committer
from outrider.decoding.decoder import Decoder, Event
from outrider.decoding.gate import Decision
from outrider.decoding.loop_detection import LoopRule
from outrider.decoding.result import Stats
from outrider.decoding.sequence import Source, check_cache
from outrider.edge.drafter import Drafter
from outrider.engines.base import CachedSequence, Prompt, SequenceInput
from outrider.engines.prefix_cache import unique_salt
from outrider.sampling import logits_processors as constraints
from outrider.sampling.acceptance import Verdict
from outrider.sampling.logits_processors import LogitsProcessors, PrefixIndex
from outrider.sampling.policy import Policy
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
    byte_tokenizer,
    clip,
    reference,
    reference_audio,
    subword_tokenizer,
    tiny_engine,
    tiny_model,
)

V = 32
PROMPT = (3, 1, 4, 1, 5)
LENGTH = 20
TARGET = HashRows(1, V)
OTHER = HashRows(2, V)
Patch = pytest.MonkeyPatch


def replace_sequences(patch: Patch, side: str, mutant: type[CachedSequence]) -> None:
    """Let the drafter or the verifier keep its cache by a mutant."""

    def build(engine: Any, prompt: Prompt, owner: str, **slot: Any) -> CachedSequence:
        return (mutant if owner == side else CachedSequence)(engine, prompt, owner, **slot)

    patch.setattr("outrider.engines.prefix_cache.CachedSequence", build)


def generate_edge_only(rows: Any = TARGET, **options: Any) -> Result:
    """Edge-only."""
    decoder = SpeculativeDecoder(ScriptedEngine(rows, V), k=4, on_loop="ignore")
    return decoder.generate(list(PROMPT), max_new_tokens=LENGTH, **options)


def verified(share: float = 0.25, **options: Any) -> Result:
    """With a drafter that is right now and then; share 0 is a perfect one."""
    draft, target = ScriptedEngine(blend(TARGET, OTHER, share), V), ScriptedEngine(TARGET, V)
    return SpeculativeDecoder(draft, local(target), k=4).generate(list(PROMPT), max_new_tokens=LENGTH, **options)


def target_output(**options: Any) -> list[int]:
    return reference_output(TARGET, PROMPT, V, max_new_tokens=LENGTH, **options)


def caught(attempt: Callable[[], Result], right: list[int]) -> bool:
    """Whether a broken part shows."""
    try:
        return attempt().token_ids != right
    except StateError:
        return True


# State ----------------------------------------------------------------------------------------------------------


class FeedsTwice(CachedSequence):
    """Each forward begins with the last token that the cache has already."""

    def next_input(self, ids: Any, rows: int) -> SequenceInput:
        known = max(0, min(self.engine.kv_len(self.slot), len(ids)) - 1)
        return SequenceInput(self.slot, ids[known:], rows)


class AdvancesOnCommit(CachedSequence):
    """What was drafted is fed again when it is committed, where the cache should be rolled back."""

    _fed: tuple[int, ...] | list[int] = ()

    def next_input(self, ids: Any, rows: int) -> SequenceInput:
        self._fed = list(ids)[self.engine.kv_len(self.slot) :]
        return super().next_input(ids, rows)

    def rollback_to(self, length: int) -> None:
        if self._fed:
            self.engine.forward(self.slot, self._fed)
        check_cache(length, self.engine.kv_len(self.slot), self.owner)


@pytest.mark.parametrize("mutant", [FeedsTwice, AdvancesOnCommit])
def test_abab_loops_because_the_cache_advanced_twice(monkeypatch: Patch, mutant: type[CachedSequence]) -> None:
    right = target_output()
    assert generate_edge_only().token_ids == verified().token_ids == right
    replace_sequences(monkeypatch, "drafter", mutant)
    assert caught(generate_edge_only, right)
    replace_sequences(monkeypatch, "verifier", mutant)
    assert caught(verified, right)


def test_a_cache_that_has_run_ahead_is_named() -> None:
    for length in range(1, 5):
        check_cache(5, length, "drafter")
    for length in (5, 6):
        with pytest.raises(StateError, match=f"drafter: the cache holds {length} positions but only 5 tokens"):
            check_cache(5, length, "drafter")


class StaleSeed(Drafter):
    """Every block starts from the token that opened the first one."""

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        self._seed = getattr(self, "_seed", ids[-1])
        return super().draft([*ids[:-1], self._seed], action)


def test_the_same_token_opens_every_block(monkeypatch: Patch) -> None:
    right = target_output()
    perfect = verified(share=0.0)
    assert perfect.token_ids == right
    assert perfect.stats.acceptance_rate == 1.0
    monkeypatch.setattr("outrider.edge.generation.Drafter", StaleSeed)
    assert caught(generate_edge_only, right)
    broken = verified(share=0.0)
    assert broken.token_ids == right, "a bad drafter costs time, never correctness"
    assert broken.stats.acceptance_rate < 0.5


class NeverTruncates(ScriptedEngine):
    """The snapshot that was rolled back to was a reference to the same cache."""

    def truncate(self, slot: int, length: int) -> None:
        pass


class TruncatesTooLittle(ScriptedEngine):
    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, min(length + 1, self.kv_len(slot)))


@pytest.mark.parametrize("mutant", [NeverTruncates, TruncatesTooLittle])
@pytest.mark.parametrize("side", ["drafter", "verifier"])
def test_repeats_after_a_correction(side: str, mutant: type[ScriptedEngine]) -> None:
    kinds = {"drafter": ScriptedEngine, "verifier": ScriptedEngine, side: mutant}
    draft, target = kinds["drafter"](blend(TARGET, OTHER, 0.25), V), kinds["verifier"](TARGET, V)
    result = verified()
    assert result.token_ids == target_output()
    assert result.stats.corrected > 2, "the case must occur"
    with pytest.raises(StateError, match=f"{side}: the cache holds"):
        SpeculativeDecoder(draft, local(target), k=4).generate(list(PROMPT), max_new_tokens=LENGTH)


class PrefillsTwice(CachedSequence):
    """The whole prompt, and then its last token once more."""

    def next_input(self, ids: Any, rows: int) -> SequenceInput:
        if self.engine.kv_len(self.slot) == 0:
            return SequenceInput(self.slot, [*ids, ids[-1]], rows)
        return super().next_input(ids, rows)


def test_the_last_prompt_token_is_seen_twice(monkeypatch: Patch) -> None:
    replace_sequences(monkeypatch, "drafter", PrefillsTwice)
    assert caught(generate_edge_only, target_output())
    replace_sequences(monkeypatch, "verifier", PrefillsTwice)
    assert caught(verified, target_output())


def test_prefill_feeds_every_prompt_token_once() -> None:
    draft, target = ScriptedEngine(TARGET, V), ScriptedEngine(TARGET, V)
    SpeculativeDecoder(draft, local(target), k=4).generate(list(PROMPT), max_new_tokens=4)
    assert draft.fed == len(PROMPT) + 3
    assert target.fed == len(PROMPT) + 4
    assert draft.refed == target.refed == 0


# Constraints ----------------------------------------------------------------------------------------------------


def constrained(**options: Any) -> tuple[Callable[[], Result], list[int]]:
    """A transformers pair, and what the target's own `generate` says under the same settings."""
    prompt, verifier = (40, 41, 42, 40, 41), local(tiny_engine("phi"))
    decoder = SpeculativeDecoder(tiny_engine("phi", drift=0.05), verifier, k=4)
    right = reference(tiny_model("phi"), prompt, max_new_tokens=LENGTH, **options)
    return lambda: decoder.generate(list(prompt), max_new_tokens=LENGTH, **options), right


def test_penalties_raise_repeats(monkeypatch: Patch) -> None:
    def divides(row: torch.Tensor, seen: torch.Tensor, penalty: float) -> None:
        row[seen] /= penalty

    attempt, right = constrained(repetition_penalty=1.3)
    assert attempt().token_ids == right
    monkeypatch.setattr(constraints, "_apply_repetition_penalty", divides)
    assert caught(attempt, right)


def bigrams_repeat(ids: list[int]) -> bool:
    pairs = list(pairwise(ids))
    return len(pairs) != len(set(pairs))


def looping() -> Result:
    """A target that is driven by its last token, and so soon repeats itself, under a ban of repeated bigrams."""
    rows = HashRows(3, V, memory=1)
    draft, target = ScriptedEngine(blend(rows, OTHER, 0.2), V), ScriptedEngine(rows, V)
    decoder = SpeculativeDecoder(draft, local(target), k=4)
    return decoder.generate([8, 9], max_new_tokens=60, no_repeat_ngram_size=2)


def test_abab_gets_through_a_ban_of_immediate_repeats(monkeypatch: Patch) -> None:
    attempt, right = constrained(no_repeat_ngram_size=2, repetition_penalty=0.8)
    assert attempt().token_ids == right
    assert not bigrams_repeat([8, 9, *looping().token_ids])
    monkeypatch.setattr(PrefixIndex, "ngram_completions", lambda index: index._ids[-1:])
    assert caught(attempt, right)
    assert bigrams_repeat([8, 9, *looping().token_ids])


def test_each_block_is_clean_but_the_output_loops(monkeypatch: Patch) -> None:
    whole = PrefixIndex.move_to

    def this_block_only(index: PrefixIndex, ids: list[int], length: int) -> None:
        start = max(0, length - 4)
        whole(index, ids[start:length], length - start)

    attempt, right = constrained(no_repeat_ngram_size=2, repetition_penalty=0.8)
    assert attempt().token_ids == right
    monkeypatch.setattr(PrefixIndex, "move_to", this_block_only)
    assert caught(attempt, right)
    assert bigrams_repeat([8, 9, *looping().token_ids])


class OnTheEdgeOnly(Policy):
    """The verifier's policy without any constraint: its corrections and its verdicts bypass them."""

    @classmethod
    def build(cls, settings: Any, eos_ids: Any, vocab_size: int, prompt_length: int, grammar: Any = None) -> Policy:
        full = Policy.build(settings, eos_ids, vocab_size, prompt_length, grammar)
        return cls(LogitsProcessors(prompt_length=prompt_length), full.sampling, vocab_size)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"suppress_tokens": tuple(range(0, 96, 2))}]
)
def test_drafter_and_verifier_disagree_by_construction(monkeypatch: Patch, options: dict[str, Any]) -> None:
    attempt, right = constrained(**options)
    assert attempt().token_ids == right
    monkeypatch.setattr("outrider.verifiers.local.Policy", OnTheEdgeOnly)
    assert caught(attempt, right)


class PiledUp(Policy):
    """Degeneration patched symptom by symptom: here, a ban on a second comma (token 7)."""

    def distribution(self, row: torch.Tensor, ids: list[int], length: int) -> Any:
        row = row.clone()
        row[7] -= 5.0 * ids[:length].count(7)
        return super().distribution(row, ids, length)


def test_no_penalty_that_was_not_asked_for(monkeypatch: Patch) -> None:
    policy = Policy.build(GenerationSettings(), (0,), V, 2)
    row = OTHER((1, 2))
    assert policy.distribution(row, [7, 7, 7, 7, 11, 11], 6).logits.equal(row)
    known = {"repetition_penalty", "repetition_window", "no_repeat_ngram_size", "min_new_tokens", "suppress_tokens"}
    known |= {"frequency_penalty", "presence_penalty", "logit_bias", "grammar"}
    others = {"max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "sentences", "ignore_eos"}
    others |= {"logprobs"}
    assert {f.name for f in fields(GenerationSettings)} == known | others
    right = reference_output(
        lambda prefix: TARGET(prefix) + 3.0 * (torch.arange(V) == 7), PROMPT, V, max_new_tokens=LENGTH
    )

    def attempt() -> Result:
        commas = ScriptedEngine(lambda prefix: TARGET(prefix) + 3.0 * (torch.arange(V) == 7), V)
        decoder = SpeculativeDecoder(commas, local(commas), k=4)
        return decoder.generate(list(PROMPT), max_new_tokens=LENGTH)

    assert right.count(7) > 2
    assert not caught(attempt, right)
    monkeypatch.setattr("outrider.verifiers.local.Policy", PiledUp)
    assert caught(attempt, right)


# Loops ----------------------------------------------------------------------------------------------------------

PERIOD = (6, 7, 8)


def escape(on_loop: str | None = None) -> Result:
    """A drafter that says 6 7 8 for ever, never unsure of it, and a verifier that would say something else."""
    draft = ScriptedEngine(replay(len(PROMPT), (), V, tail=PERIOD), V)
    decoder = SpeculativeDecoder(draft, local(ScriptedEngine(TARGET, V)), k=3, gate="never", on_loop=on_loop)
    return decoder.generate(list(PROMPT), max_new_tokens=40)


class BreaksOff(Committer):
    def _finish_commit(self, source: Source, *, revised: bool = False) -> None:
        super()._finish_commit(source, revised=revised)
        if self.loop_found:
            self.finish_reason = "loop"


def test_a_loop_is_detected_and_generation_is_cut_off(monkeypatch: Patch) -> None:
    result = escape()
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 40
    assert result.stats.forced_by_loop >= 1
    assert result.stats.cloud_tokens >= 1
    monkeypatch.setattr("outrider.decoding.decoder.Committer", BreaksOff)
    assert len(escape().token_ids) < 40


class ForgetsToForce(Decoder):
    """The flag that a loop set is overwritten by the gate's own answer."""

    def _forced_reason(self) -> str:
        return ""


def test_the_force_flag_is_overwritten_before_use(monkeypatch: Patch) -> None:
    assert escape().stats.forced_by_loop >= 1
    monkeypatch.setattr("outrider.edge.generation.Decoder", ForgetsToForce)
    broken = escape()
    assert broken.stats.forced_by_loop == broken.stats.cloud_tokens == 0


def test_loops_across_blocks_are_not_seen(monkeypatch: Patch) -> None:
    find = LoopRule.find_period
    monkeypatch.setattr(LoopRule, "find_period", lambda rule, tokens: find(rule, tokens[-3:]))
    assert escape().stats.forced_by_loop == 0


def test_one_loop_forces_one_block() -> None:
    """The verifier is asked once per loop: 12 tokens until it shows, the verdict, then 12 more of the next one."""
    stats = escape().stats
    assert stats.forced_by_loop == stats.escalated == stats.rounds
    assert 2 <= stats.forced_by_loop <= 4


def test_a_loop_that_the_verifier_confirms_is_not_sent_block_after_block() -> None:
    """The target wants to say 6 7 8 for ever, too. Each new stretch of ten tokens is sent once; the rest is skipped."""
    draft, target = (ScriptedEngine(replay(len(PROMPT), (), V, tail=PERIOD), V) for _ in range(2))
    decoder = SpeculativeDecoder(draft, local(target), k=3, gate="never")
    stats = decoder.generate(list(PROMPT), max_new_tokens=80).stats
    assert 4 <= stats.forced_by_loop <= 8


# Ends -----------------------------------------------------------------------------------------------------------


class StopsPerBlock(Committer):
    """The stop rules look at the last token of what a verdict brought."""

    def commit_verdict(self, verdict: Verdict, request: Verify) -> None:
        for _ in range(verdict.accepted):
            self._sequence.accept(Source.ACCEPTED)
        self._sequence.replace_pending(verdict.next_token, Source.BONUS)
        self._finish_commit(Source.BONUS)


def test_tokens_after_eos_are_kept(monkeypatch: Patch) -> None:
    free = target_output()
    eos = free[6]
    right = free[: free.index(eos) + 1]

    def attempt() -> Result:
        target = ScriptedEngine(TARGET, V, eos_ids=(eos,))
        draft = ScriptedEngine(TARGET, V)
        return SpeculativeDecoder(draft, local(target), k=4).generate(list(PROMPT), max_new_tokens=LENGTH)

    result = attempt()
    assert result.token_ids == right == target_output(eos=(eos,))
    assert result.finish_reason == "eos"
    monkeypatch.setattr("outrider.decoding.decoder.Committer", StopsPerBlock)
    assert caught(attempt, right)


def speak(prompt: str, text: str, tokenizer: Any, **options: Any) -> Result:
    """A perfect pair whose target says `text`, then spaces."""
    ids, said = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
    space = tokenizer(" ")["input_ids"]
    rows = replay(len(ids), said, len(tokenizer), tail=space)
    draft, target = (ScriptedEngine(rows, len(tokenizer), tokenizer=tokenizer) for _ in range(2))
    options = {"max_new_tokens": len(said), **options}
    return SpeculativeDecoder(draft, local(target), k=4).generate(prompt, **options)


def test_sentences_of_the_prompt_are_counted(monkeypatch: Patch) -> None:
    tokenizer, prompt = subword_tokenizer(), "he said it. and then."
    text = "one is here. two is there! are three in the end? four."
    offset = len(tokenizer(prompt)["input_ids"])

    def with_the_prompt(rules: Any, generated: list[int], decode: Any) -> Any:
        rules = replace(rules, max_new_tokens=rules.max_new_tokens + offset)
        return stopping.find_finish_reason(rules, [*tokenizer(prompt)["input_ids"], *generated], decode)

    for count, end in ((1, "here."), (2, "there!"), (3, "end?")):
        result = speak(prompt, text, tokenizer, sentences=count)
        assert result.text == text[: text.index(end) + len(end)]
        assert result.finish_reason == "sentences"
    monkeypatch.setattr(committer, "find_finish_reason", with_the_prompt)
    assert speak(prompt, text, tokenizer, sentences=3).text != text[: text.index("end?") + 4]


def test_a_newline_or_a_role_name_is_taken_for_the_end(monkeypatch: Patch) -> None:
    tokenizer, text = byte_tokenizer(), "One.\n\nHuman: two\nUser: </s> <|im_end|> three"

    def by_heuristics(rules: Any, generated: list[int], decode: Any) -> Any:
        said = tokenizer.decode(generated)
        return "stop" if said.endswith(("\n", "Human")) else stopping.find_finish_reason(rules, generated, decode)

    result = speak("Go: ", text, tokenizer)
    assert result.text == text
    assert result.finish_reason == "length"
    monkeypatch.setattr(committer, "find_finish_reason", by_heuristics)
    assert speak("Go: ", text, tokenizer).text != text


# Recordings -----------------------------------------------------------------------------------------------------


def hear(draft: Any = None, gate: str = "always") -> Result:
    tokenizer = subword_tokenizer()
    target = tiny_engine("omni", tokenizer=tokenizer)
    decoder = SpeculativeDecoder(draft or target, local(target), k=3, gate=gate, on_loop="ignore")
    recording = Audio(clip(0.7), instruction="tell the emotion.")
    return decoder.generate(recording, cache_salt=unique_salt(), max_new_tokens=12)


class Deaf(LocalVerifier):
    """The verifier gets the tokens, placeholders and all, but not the recording."""

    def open(self, prompt: Prompt, conditions: Any) -> int:
        return super().open(Prompt(prompt.ids), conditions)


def test_the_cloud_rejects_everything_because_it_lacks_the_audio() -> None:
    tokenizer = subword_tokenizer()
    target = tiny_engine("omni", tokenizer=tokenizer)
    recording = Audio(clip(0.7), instruction="tell the emotion.")
    ids = SpeculativeDecoder(target).encode(recording).ids
    right = reference_audio(tiny_model("omni"), ids, "omni", clip(0.7), max_new_tokens=12)
    result = hear()
    assert result.token_ids == right
    assert result.stats.acceptance_rate == 1.0
    without_audio = SpeculativeDecoder(target, Deaf(target), k=3)
    assert caught(lambda: without_audio.generate(recording, max_new_tokens=12), right)


def test_a_verifier_that_would_hear_something_else_refuses() -> None:
    tokenizer = subword_tokenizer()
    omni = tiny_engine("omni", tokenizer=tokenizer)
    recording = Audio(clip(0.7), instruction="tell the emotion.")
    text_only = SpeculativeDecoder(omni, local(tiny_engine("qwen2", tokenizer=tokenizer)))
    with pytest.raises(PromptError, match="takes no audio"):
        text_only.generate(recording, max_new_tokens=4)
    prompt = SpeculativeDecoder(omni).encode(recording)
    longer = Prompt(prompt.ids, np.concatenate([prompt.audio, prompt.audio]))
    verifier = LocalVerifier(omni)
    with pytest.raises(PromptError, match="makes 35 audio tokens of the recording, the drafter 17"):
        verifier.open(longer, outrider.verifiers.base.SessionParams(GenerationSettings(), "exact", 96))


class ResendsMedia(CachedSequence):
    """Every round starts from the beginning, the recording included."""

    def __init__(self, engine: Any, prompt: Prompt, owner: str, **slot: Any) -> None:
        super().__init__(engine, prompt, owner, **slot)
        self._prompt = prompt

    def rollback_to(self, length: int) -> None:
        self.engine.close(self.slot)
        self.slot = self.engine.open(self._prompt)


def test_a_recording_is_sent_with_every_call(monkeypatch: Patch) -> None:
    tokenizer = subword_tokenizer()
    draft, target = tiny_engine("omni", 7, tokenizer=tokenizer), tiny_engine("omni", tokenizer=tokenizer)
    encoded = {"drafter": 0, "verifier": 0}

    def count(engine: Any, side: str) -> None:
        embed = engine.audio.embed_features

        def counting(features: np.ndarray) -> torch.Tensor:
            encoded[side] += 1
            return embed(features)

        monkeypatch.setattr(engine.audio, "embed_features", counting)

    count(draft, "drafter")
    count(target, "verifier")
    assert hear(draft).stats.rounds > 5
    assert encoded == {"drafter": 1, "verifier": 1}
    hear(draft, gate="never")
    assert encoded == {"drafter": 2, "verifier": 1}, "nothing was escalated: nothing had to be heard over there"
    replace_sequences(monkeypatch, "verifier", ResendsMedia)
    hear(draft)
    assert encoded["verifier"] > 6


# Wiring and words -------------------------------------------------------------------------------------------------


def test_an_edge_only_run_loads_the_second_model(monkeypatch: Patch) -> None:
    loaded: list[str] = []

    def load(model: str, **options: Any) -> ScriptedEngine:
        loaded.append(model)
        return ScriptedEngine(TARGET, V)

    def with_a_dummy(target: str) -> Any:
        dummy = connect("local:the 7B model")
        return None if target == "none" else dummy

    monkeypatch.setattr("outrider.verifiers.connect.load_engine", load)
    assert connect("none") is None
    engine = ScriptedEngine(TARGET, V)
    result = SpeculativeDecoder(engine, connect("none"), on_loop="ignore").generate(list(PROMPT), max_new_tokens=4)
    assert result.guarantee == "edge-only"
    assert len(engine.opened) == 1
    assert loaded == []
    with_a_dummy("none")
    assert loaded == ["the 7B model"]


class Breaks(ScriptedEngine):
    def forward(self, slot: int, ids: Any, rows: int | None = None) -> torch.Tensor:
        if self.forwards == 4:
            raise RuntimeError("out of memory")
        return super().forward(slot, ids, rows)


def test_exceptions_are_swallowed_and_empty_captions_saved(monkeypatch: Patch) -> None:
    def swallowing(*args: Any) -> Iterator[Event]:
        try:
            yield from outrider.edge.drivers.sequential(*args)
        except Exception:  # noqa: BLE001 - the mutant
            return

    for broken_side in (0, 1):
        engines = [ScriptedEngine(blend(TARGET, OTHER, 0.25), V), ScriptedEngine(TARGET, V)]
        engines[broken_side] = Breaks(TARGET, V)
        decoder = SpeculativeDecoder(engines[0], local(engines[1]), k=4)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.generate(list(PROMPT), max_new_tokens=LENGTH)
        assert not engines[0].open_slots
        assert not engines[1].open_slots
    monkeypatch.setattr("outrider.edge.generation.sequential", swallowing)
    decoder = SpeculativeDecoder(Breaks(TARGET, V), local(ScriptedEngine(TARGET, V)), k=4)
    with pytest.raises((AttributeError, StateError)):  # an unfinished output makes no result
        decoder.generate(list(PROMPT), max_new_tokens=LENGTH)


OUTERMOST = {  # a process, a thread, a stream: whatever reaches these is told, and the others go on
    "cli/exit_codes.py": 1,
    "cli/terminal.py": 1,  # a log record that cannot be shown is reported as the standard library's handlers do
    "cloud/batcher.py": 1,
    "cloud/service.py": 1,
    "engines/llama_cpp/engine.py": 1,  # what the tokenizers library raises has no narrower name; it is mapped at once
    "prompts/chat_template.py": 1,  # a template is the checkpoint's program: whatever it raises is mapped at once
    "engines/shared_engine.py": 1,  # a failed batch is repeated one by one, each with its own error
}


def test_no_broad_except_anywhere_but_outermost() -> None:
    source = Path(outrider.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("except Exception") == OUTERMOST.get(path.relative_to(source).as_posix(), 0), path
        assert "except:" not in text, path


class EveryOther:
    """Verifies the second block, the fourth, and so on."""

    needs_signals = exact = False

    def __init__(self) -> None:
        self.blocks = 0

    def decide(self, block: Any) -> Decision:
        self.blocks += 1
        return Decision(self.blocks % 2 == 0, "every other")


def test_an_acceptance_rate_that_counts_unverified_tokens(monkeypatch: Patch) -> None:
    output = [n % V for n in range(24)]
    draft = OracleEngine(len(PROMPT), output, V, errors=(6, 7, 13, 18, 19))
    verifier = ScriptedVerifier(output, V)
    decoder = SpeculativeDecoder(draft, verifier, k=4, gate=EveryOther(), on_loop="ignore")
    stats = decoder.generate(list(PROMPT), max_new_tokens=24).stats
    judged = sum(len(request.draft_ids) for request in verifier.requests)
    assert stats.verified == judged < stats.drafted
    assert 0 < stats.accepted < stats.verified
    assert stats.acceptance_rate == stats.accepted / judged
    assert stats.escalation_rate == len(verifier.requests) / stats.blocks == 0.5
    assert stats.cloud_share == (stats.accepted + stats.corrected + stats.bonus) / 24
    loose = property(lambda stats: (stats.accepted + stats.edge_tokens) / stats.drafted)
    rate = stats.acceptance_rate
    monkeypatch.setattr(Stats, "acceptance_rate", loose)
    assert stats.acceptance_rate != rate
