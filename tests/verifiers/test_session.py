"""The verifier's sessions: continue from where they are, answer a repeat again, refuse what does not fit."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import SettingsError, StateError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.sampler import Support
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from outrider.verifiers.session import Session
from tests.support.fakes import HashRows, ScriptedEngine, plain

V = 32
PROMPT = (3, 1, 4, 1, 5)
TARGET = HashRows(1, V)


def opened(accept: str = "exact", **options: Any) -> tuple[LocalVerifier, ScriptedEngine, int]:
    engine = ScriptedEngine(TARGET, V)
    verifier = LocalVerifier(engine)
    return verifier, engine, verifier.open(Prompt(PROMPT), SessionParams(GenerationSettings(**options), accept, V))


def said(count: int, prompt: tuple[int, ...] = PROMPT, **options: Any) -> tuple[int, ...]:
    return tuple(plain(TARGET, prompt, V, max_new_tokens=count, **options))


def wrong(token: int) -> int:
    return (token + 1) % V


# Verdicts -------------------------------------------------------------------------------------------------------


def test_nothing_is_computed_before_the_first_request() -> None:
    _, engine, _ = opened()
    assert engine.forwards == 0
    assert engine.open_slots


@pytest.mark.parametrize("good", range(5))
def test_the_verdict_on_four_drafts(good: int) -> None:
    verifier, engine, session = opened()
    a = said(6)
    drafts = tuple(token if n < good else wrong(token) for n, token in enumerate(a[:4]))
    assert verifier.verify(session, Verify(1, 5, (), drafts)) == Verdict(1, good, a[good])
    assert verifier.verify(session, Verify(2, 5 + good + 1, (), ())) == Verdict(2, 0, said(good + 2)[-1])
    assert engine.refed == 0
    assert engine.fed == len(PROMPT) + 4 + 1


def test_the_cache_holds_a_proper_prefix_after_every_verdict() -> None:
    verifier, engine, session = opened()
    a = said(9)
    for round_, (base, drafts) in enumerate([(5, a[:3]), (9, (wrong(a[4]), 1, 2)), (10, (a[5], wrong(a[6])))], 1):
        verdict = verifier.verify(session, Verify(round_, base, (), drafts))
        ids = [*PROMPT, *a[: base - 5 + verdict.accepted + 1]]
        held = engine.slots[engine.open_slots[0]].tokens
        assert held == ids[: len(held)]
        assert len(held) < len(ids)


def test_cloud_only_verdicts_are_the_targets_own_tokens() -> None:
    verifier, engine, session = opened(repetition_penalty=1.3, no_repeat_ngram_size=2)
    verdicts = list(islice(verifier.generate(session), 12))
    assert tuple(v.next_token for v in verdicts) == said(12, repetition_penalty=1.3, no_repeat_ngram_size=2)
    assert [v.round for v in verdicts] == list(range(1, 13))
    assert all(v.accepted == 0 for v in verdicts)
    assert engine.fed == len(PROMPT) + 11


def test_choices_within_the_engines_noise_are_reported_by_offset() -> None:
    """Noise is a lead in logits: none counts as a tie at 0, all do at 1,000; rows after a rejection do not count."""
    a = said(4)
    for noise, expected in ((0.0, ()), (1000.0, (0, 1, 2))):
        engine = ScriptedEngine(TARGET, V)
        engine.noise = noise
        verifier = LocalVerifier(engine)
        session = verifier.open(Prompt(PROMPT), SessionParams(GenerationSettings(), "exact", V))
        verdict = verifier.verify(session, Verify(1, 5, (), (a[0], a[1], wrong(a[2]), a[3])))
        assert verdict.near_ties == expected
        assert verdict.accepted == 2


def test_constraints_are_the_sessions_own_and_see_the_whole_prefix() -> None:
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "min_new_tokens": 3}
    verifier, _, session = opened(**options)
    a = said(6, **options)
    assert verifier.verify(session, Verify(1, 5, (), a[:5])) == Verdict(1, 5, a[5])


# Repeats --------------------------------------------------------------------------------------------------------


@given(
    repeats=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    drafts=st.lists(st.lists(st.integers(0, V - 1) | st.none(), max_size=5), min_size=8, max_size=8),
)
def test_repeated_requests_are_answered_again_and_applied_once(
    repeats: list[int], drafts: list[list[int | None]]
) -> None:
    """A None among the drafts stands for the token that the target would say."""
    verifier, engine, session = opened()
    a = said(60)
    done = 0
    for round_, (repeat, block) in enumerate(zip(repeats, drafts, strict=False), 1):
        tokens = tuple(a[done + n] if token is None else token for n, token in enumerate(block))
        request = Verify(round_, 5 + done, (), tokens)
        verdict = verifier.verify(session, request)
        state = (engine.forwards, [list(slot.tokens) for slot in engine.slots.values()])
        assert all(verifier.verify(session, request) == verdict for _ in range(repeat))
        assert state == (engine.forwards, [list(slot.tokens) for slot in engine.slots.values()])
        done += verdict.accepted + 1
        assert (*tokens[: verdict.accepted], verdict.next_token) == a[done - verdict.accepted - 1 : done]


@pytest.mark.parametrize(
    "other",
    [Verify(1, 6, (9,), (1, 3)), Verify(1, 6, (9,), (1,)), Verify(1, 7, (9, 9), (1, 2)), Verify(1, 6, (8,), (1, 2))],
    ids=["other drafts", "fewer drafts", "another base", "other new ids"],
)
def test_an_answered_round_is_not_open_to_other_tokens(other: Verify) -> None:
    verifier, _, session = opened()
    request = Verify(1, 6, (9,), (1, 2))
    verdict = verifier.verify(session, request)
    with pytest.raises(StateError):
        verifier.verify(session, other)
    assert verifier.verify(session, request) == verdict


def test_a_round_from_long_ago_is_refused() -> None:
    verifier, _, session = opened()
    first = Verify(1, 5, (), (1, 2))
    verdict = verifier.verify(session, first)
    second = Verify(2, 6 + verdict.accepted, (), (3,))
    answer = verifier.verify(session, second)
    with pytest.raises(StateError, match="base length is 5"):
        verifier.verify(session, first)
    assert verifier.verify(session, second) == answer


# Bases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "new"), [(4, ()), (6, ()), (5, (1,)), (0, ()), (7, (1,))])
def test_a_wrong_base_names_both_lengths_and_changes_nothing(base: int, new: tuple[int, ...]) -> None:
    verifier, engine, session = opened()
    with pytest.raises(StateError, match=rf"base length is {base}, but .*has 5 tokens .*sent {len(new)} new"):
        verifier.verify(session, Verify(1, base, new, (1, 2)))
    assert engine.forwards == 0
    assert verifier.verify(session, Verify(1, 5, (), ())).next_token == said(1)[0]


# Skipped tokens -------------------------------------------------------------------------------------------------


@given(skipped=st.lists(st.integers(0, V - 1) | st.none(), max_size=8), count=st.integers(0, 4))
def test_the_audit_of_skipped_tokens(skipped: list[int | None], count: int) -> None:
    """Tokens that the edge committed alone come with the next request: they stand, and are compared in passing."""
    verifier, engine, session = opened()
    ids, disagreed = list(PROMPT), 0
    for token in skipped:
        own = said(1, tuple(ids))[0]
        ids.append(own if token is None else token)
        disagreed += ids[-1] != own
    drafts = said(count + 1, tuple(ids))[:count]
    verdict = verifier.verify(session, Verify(1, len(ids), tuple(ids[5:]), drafts))
    assert (verdict.audited, verdict.disagreed) == (len(skipped), disagreed)
    assert (verdict.accepted, verdict.next_token) == (count, said(count + 1, tuple(ids))[-1])
    assert engine.forwards == 1
    again = verifier.verify(session, Verify(2, len(ids) + count + 1, (), ()))
    assert again.next_token == said(count + 2, tuple(ids))[-1]
    assert (again.audited, again.disagreed) == (0, 0)


def test_the_audit_of_sampled_tokens_uses_the_sessions_draws() -> None:
    options = {"temperature": 1.0, "seed": 11}
    verifier, _, session = opened(**options)
    a = said(6, **options)
    verdict = verifier.verify(session, Verify(1, 10, (a[0], a[1], wrong(a[2]), a[3], a[4]), ()))
    assert verdict.audited == 5
    assert 1 <= verdict.disagreed <= 3


# Resuming -------------------------------------------------------------------------------------------------------


def session_of(verifier: LocalVerifier, number: int) -> Session:
    return verifier._sessions[number][0]


def test_an_answer_that_got_lost_is_kept_for_the_request_that_is_repeated() -> None:
    verifier, engine, number = opened()
    a, session = said(9), session_of(verifier, number)
    request = Verify(1, 5, (), a[:3])
    verdict = verifier.verify(number, request)
    for _ in range(3):  # however often it gets lost
        session.rewind(5)
        fed = engine.fed
        assert verifier.verify(number, request) == verdict
        assert engine.fed == fed, "it was read once"
    assert verifier.verify(number, Verify(2, 9, (), a[4:6])) == Verdict(2, 2, a[6])


@given(st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_whatever_is_asked_after_a_rewind_is_answered_as_if_nothing_else_had_been(
    length: int, drafts: int, repeats: bool
) -> None:
    verifier, _, number = opened(repetition_penalty=1.2)
    a, session = said(12, repetition_penalty=1.2), session_of(verifier, number)
    verifier.verify(number, Verify(1, 5, (), (a[0],)))
    verifier.verify(number, Verify(2, 7, (), (a[2], wrong(a[3]))))
    session.rewind(5 + length)
    round_ = 2 if repeats and length == 2 else 3
    blocks = (a[2], wrong(a[3])) if round_ == 2 else a[length : length + drafts]
    verdict = verifier.verify(number, Verify(round_, 5 + length, (), blocks))
    assert verdict == (Verdict(2, 1, a[3]) if round_ == 2 else Verdict(3, drafts, a[length + drafts]))
    assert session.ids[5:] == list(a[: len(session.ids) - 5])


def test_of_two_rewinds_the_last_counts() -> None:
    verifier, _, number = opened()
    a, session = said(6), session_of(verifier, number)
    verifier.verify(number, Verify(1, 5, (), (a[0],)))
    session.rewind(5)
    session.rewind(7)
    assert verifier.verify(number, Verify(2, 7, (), ())) == Verdict(2, 0, a[2])


def test_a_rewind_goes_neither_past_the_end_nor_into_the_prompt() -> None:
    verifier, _, number = opened()
    for length in (0, 4, 6):
        with pytest.raises(StateError, match=f"resumes at {length} tokens, but this session has 5"):
            session_of(verifier, number).rewind(length)


# Residual -------------------------------------------------------------------------------------------------------


def test_residual_needs_the_distribution_of_every_draft() -> None:
    verifier, engine, session = opened("residual", temperature=1.0)
    q = Support(torch.arange(V), torch.log_softmax(torch.zeros(V), -1))
    for given_ in ((), (q,), (q, q, q)):
        with pytest.raises(SettingsError, match="residual acceptance needs the distribution"):
            verifier.verify(session, Verify(1, 5, (), (1, 2), given_))
    verdict = verifier.verify(session, Verify(1, 5, (), (1, 2), (q, q)))
    assert 0 <= verdict.accepted <= 2
    assert engine.kv_len(engine.open_slots[0]) <= 5 + verdict.accepted


# Life and death -------------------------------------------------------------------------------------------------


def test_sessions_are_closed_once_and_leave_no_slot() -> None:
    verifier, engine, session = opened()
    other = verifier.open(Prompt((7,)), SessionParams(GenerationSettings(), "exact", V))
    assert session != other
    first = verifier.verify(other, Verify(1, 1, (), (2,)))
    verifier.close(session)
    assert len(engine.open_slots) == 1
    for call in (lambda: verifier.close(session), lambda: verifier.verify(session, Verify(1, 5, (), ()))):
        with pytest.raises(StateError, match=f"session {session} is not open"):
            call()
    assert verifier.verify(other, Verify(2, 2 + first.accepted, (), ())).round == 2
    verifier.close(other)
    assert not engine.open_slots


class Hiccups(ScriptedEngine):
    """Every other forward fails."""

    calls = 0

    def forward(self, slot: int, ids: Any, rows: int | None = None) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("hiccup")
        return super().forward(slot, ids, rows)


def test_a_request_that_failed_can_be_sent_again() -> None:
    verifier = LocalVerifier(Hiccups(TARGET, V))
    session = verifier.open(Prompt(PROMPT), SessionParams(GenerationSettings(), "exact", V))
    a, done = said(20), 0
    for round_ in range(1, 6):
        request = Verify(round_, 5 + done, (), (*a[done : done + 2], wrong(a[done + 2])))
        with pytest.raises(RuntimeError, match="hiccup"):
            verifier.verify(session, request)
        assert verifier.verify(session, request) == Verdict(round_, 2, a[done + 2])
        done += 3
