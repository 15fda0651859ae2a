"""The drafter for a target with another tokenizer: alignment, signals, special tokens and its KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import GenerationSettings
from outrider.decoding.actions import Draft, Proposal
from outrider.decoding.gate import compute_signals
from outrider.edge import drafter as drafter_module
from outrider.edge import translated_drafter
from outrider.edge.drafter import Drafter
from outrider.edge.text_codec import build_codecs
from outrider.edge.translated_drafter import TranslatedDrafter, edge_settings
from outrider.engines.base import CachedSequence, Prompt
from outrider.sampling.policy import Policy
from tests.support.tokenized_models import TokenizedEngine, ids_in, model_of, model_that_knows
from tests.support.tokenizers import trained

PROMPT = "the lazy dog"
TEXT = " the quick brown fox jumps over the lazy dog, and the dog barks"


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine would return drafts in parts."""
    for module in (drafter_module, translated_drafter):
        monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 1e9)


def open_drafter(
    edge: TokenizedEngine, target: TokenizedEngine, prompt: list[int], **options: Any
) -> TranslatedDrafter:
    """A drafter with signals, for the settings given as options."""
    per_token = options.pop("per_token", False)
    settings = GenerationSettings(**options)

    def open_model(ids: list[int]) -> Drafter:
        policy = Policy.build(edge_settings(settings, greedy=True), edge.eos_ids, edge.vocab_size, len(ids))
        sequence = CachedSequence(edge, Prompt(tuple(ids)), "drafter")
        return Drafter(sequence, policy, needs_signals=True, needs_q=False)

    policy = Policy.build(settings, target.eos_ids, target.vocab_size, len(prompt))
    ends = {"edge_eos_ids": edge.eos_ids, "target_eos_ids": target.eos_ids}
    return TranslatedDrafter(
        build_codecs(edge, target), prompt, open_model, policy, max_length=edge.max_length, per_token=per_token, **ends
    )


def tokens(proposals: list[Proposal]) -> list[int]:
    return [proposal.token for proposal in proposals]


def draft_all(drafter: TranslatedDrafter, ids: list[int], count: int) -> list[int]:
    """All tokens that are drafted in calls of `count` tokens, each of them accepted."""
    ids, start = list(ids), len(ids)
    while proposals := tokens(drafter.draft(ids, Draft(count))):
        ids += proposals
        if ids[-1] == 0 or len(ids) > 200:
            break
    return ids[start:]


def test_the_whole_text_is_drafted_in_the_target_s_own_tokens() -> None:
    edge, target = model_that_knows(PROMPT + TEXT), model_of("llama", PROMPT, TEXT)
    prompt = ids_in("llama", PROMPT)
    wanted = [*ids_in("llama", PROMPT + TEXT)[len(prompt) :], target.tokenizer.eos_token_id]
    drafter = open_drafter(edge, target, prompt)
    ids = list(prompt)
    while len(ids) - len(prompt) < len(wanted):
        proposals = tokens(drafter.draft(ids, Draft(64)))
        assert proposals
        ids += proposals
    assert ids[len(prompt) :] == wanted
    drafter.close()
    assert not edge.open_slots


def test_the_cache_keeps_what_the_texts_have_in_common() -> None:
    """After a rejection the edge is fed the changed end, not the whole text again."""
    edge, target = model_that_knows(PROMPT + TEXT * 3), model_of("llama", PROMPT, TEXT)
    prompt = ids_in("llama", PROMPT + TEXT * 2)
    drafter = open_drafter(edge, target, prompt)
    drafter.draft(prompt, Draft(8))
    fed = edge.fed
    drafter.draft([*prompt, *ids_in("llama", "lazy")], Draft(1))
    assert edge.fed - fed < 24
    assert fed > 40


def test_a_proposal_has_the_signals_of_the_edge_token_at_the_end_of_its_text() -> None:
    edge, target = model_that_knows(PROMPT + TEXT), model_of("llama", PROMPT, TEXT)
    rows = edge.rows
    edge.rows = lambda prefix: rows(prefix) * (1 + len(prefix)) / 200  # another margin at every position
    prompt, whole = ids_in("llama", PROMPT), ids_in("byte level", PROMPT + TEXT)
    proposals = open_drafter(edge, target, prompt).draft(prompt, Draft(12))
    assert len(proposals) == 12
    ends = [len(edge.tokenizer.decode(whole[: n + 1])) for n in range(len(whole))]
    for n, proposal in enumerate(proposals):
        end = len(target.tokenizer.decode([*prompt, *tokens(proposals[: n + 1])]))
        covering = next(index for index, covered in enumerate(ends) if covered >= end)
        row = edge.rows(tuple(whole[:covering]))
        assert proposal.signals == compute_signals(row, whole[covering], 0.0)


@pytest.mark.parametrize("kind", ["llama", "unigram", "wordpiece"])
def test_drafts_per_token_do_not_depend_on_the_division_into_calls(kind: str) -> None:
    drafts = []
    for count in (1, 3, 8):
        edge, target = model_that_knows(PROMPT + TEXT), model_of(kind, PROMPT, TEXT)
        prompt = ids_in(kind, PROMPT)
        drafts.append(draft_all(open_drafter(edge, target, prompt, per_token=True), prompt, count)[:20])
    assert drafts[0] == drafts[1] == drafts[2]
    assert len(drafts[0]) > 3


def test_banned_tokens_are_not_proposed() -> None:
    edge, target = model_that_knows(PROMPT + TEXT), model_of("llama", PROMPT, TEXT)
    prompt = ids_in("llama", PROMPT)
    free = tokens(open_drafter(edge, target, prompt).draft(prompt, Draft(6)))
    banned = tokens(open_drafter(edge, target, prompt, suppress_tokens=(free[3],)).draft(prompt, Draft(6)))
    assert banned == free[:3]


def test_an_edge_without_room_drafts_nothing() -> None:
    edge, target = model_that_knows(PROMPT + TEXT), model_of("llama", PROMPT, TEXT)
    prompt = ids_in("llama", PROMPT)
    edge.max_length = len(ids_in("byte level", PROMPT))
    assert open_drafter(edge, target, prompt).draft(prompt, Draft(6)) == []
    edge.max_length = 3
    assert open_drafter(edge, target, prompt).draft(prompt, Draft(6)) == []


def test_a_loop_is_left_by_the_first_proposal_only() -> None:
    edge, target = model_that_knows(PROMPT + TEXT), model_of("llama", PROMPT, TEXT)
    prompt = ids_in("llama", PROMPT)
    drafter = open_drafter(edge, target, prompt)
    drafter.draft(prompt, Draft(6))
    proposals = drafter.draft(prompt, Draft(3, leave_loop=True))
    assert [proposal.left_loop for proposal in proposals] == [True, *[False] * (len(proposals) - 1)]


def test_special_tokens_are_translated_by_name_and_end_tokens_to_each_other() -> None:
    edge, target = model_of("byte level", PROMPT, TEXT), model_of("unigram", PROMPT, TEXT)
    ours, theirs = build_codecs(edge, target)
    for name in ("<s>", "</s>", "<unk>"):
        token, other = (trained(kind).convert_tokens_to_ids(name) for kind in ("byte level", "unigram"))
        if token in edge.tokenizer.added_tokens_decoder and other in target.tokenizer.added_tokens_decoder:
            assert theirs.encode(ours.decode([token])) == [other]
    assert ours.decode([edge.eos_ids[0]]) == theirs.decode([target.eos_ids[0]]) != ""


def test_an_incomplete_character_is_no_text_yet() -> None:
    edge, target = model_of("byte level", PROMPT, TEXT), model_of("llama", PROMPT, TEXT)
    ours, theirs = build_codecs(edge, target)
    for kind, codec in (("byte level", ours), ("llama", theirs)):
        ids = ids_in(kind, "ok 뷁")
        assert codec.decode(ids) == "ok 뷁"
        assert codec.decode(ids[:-1]) == "ok "


def test_a_slow_draft_is_returned_in_parts_without_drafting_anything_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_drafter, "FLUSH_INTERVAL_S", 0.0)
    monkeypatch.setattr(drafter_module, "FLUSH_INTERVAL_S", 0.0)
    edge, target = model_that_knows(PROMPT + TEXT), model_of("llama", PROMPT, TEXT)
    prompt = ids_in("llama", PROMPT)
    drafter, ids, sizes = open_drafter(edge, target, prompt), list(prompt), []
    while len(ids) < len(prompt) + 12:
        proposals = tokens(drafter.draft(ids, Draft(12)))
        sizes.append(len(proposals))
        ids += proposals
    assert (PROMPT + TEXT).startswith(trained("llama").decode(ids))  # a part's end may divide a token of the whole text
    assert len(sizes) > 3
    assert edge.fed < len(ids_in("byte level", PROMPT + TEXT)) + 4
