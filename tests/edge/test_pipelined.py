"""Drafting on while a verdict is in flight changes nothing but the time that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.actions import Verify
from outrider.decoding.draft_buffer import MAX_PROVISIONAL, DraftBuffer
from outrider.decoding.sequence import Source
from outrider.edge.verifier_session import VerifierSession
from outrider.errors import SettingsError
from tests.support.fakes import OracleEngine, ScriptedEngine, ScriptedVerifier, blend, plain
from tests.support.generation import LOOPY, OTHER, PROMPT, TARGET, Case, Generation, V

FAR = (10_000,)  # a verdict that arrives when nothing is left to draft


def mixed(rows: Any, share: float) -> Callable[[], ScriptedEngine]:
    return lambda: ScriptedEngine(blend(rows, OTHER, share), V)


def oracle(errors: Any = (), length: int = 40) -> Callable[[], ScriptedEngine]:
    output = plain(TARGET, PROMPT, V, eos=(0,), max_new_tokens=length)
    return lambda: OracleEngine(len(PROMPT), output, V, errors)


@st.composite
def cases(draw: Any) -> Case:
    """Any pair, gate, rule and ending."""
    rows = draw(st.sampled_from((TARGET, TARGET, LOOPY)))
    shares = st.sampled_from((0.0, 0.1, 0.25, 0.5, 1.0)).map(lambda share: mixed(rows, share))
    answers = st.lists(st.booleans(), max_size=25)
    gate: Any = st.one_of(
        st.sampled_from(("always", "always", "never", "trigger:never", "trigger:entropy:1.5", "entropy:1.5")),
        st.tuples(st.sampled_from(("trigger", "skip")), answers),
    )
    skips = draw(st.shared(gate, key="gate"))
    lossy = skips in ("never", "entropy:1.5") or (isinstance(skips, tuple) and skips[0] == "skip")
    accept = draw(st.sampled_from(("exact", "exact", "residual", "rank:3", "typical:0.3")))
    on_loop = draw(st.sampled_from(("escalate", "escalate", "sample", "stop", "ignore")))
    if accept == "residual" and on_loop == "sample":  # such a draw has no distribution; check_modes refuses it
        on_loop = "escalate"
    return Case(
        draft=draw(st.one_of(shares, st.sets(st.integers(0, 39)).map(oracle)) if rows is TARGET else shares),
        target=rows,
        gate=skips,
        k=draw(st.sampled_from((1, 2, 3, 5, 8, "auto"))),
        accept=accept,
        scope=draw(st.sampled_from(("block", "repair"))) if lossy else "block",
        on_loop=on_loop,
        options={
            "max_new_tokens": draw(st.integers(1, 45)),
            "temperature": draw(st.sampled_from((0.0, 1.0))),
            "seed": draw(st.integers(0, 9)),
            "ignore_eos": draw(st.booleans()),
            "repetition_penalty": draw(st.sampled_from((1.0, 1.0, 1.2))),
            "stop": draw(st.sampled_from(((), (), ("a", "bc"), ("q",)))),
        },
    )


@settings(max_examples=400)
@given(case=cases(), polls=st.lists(st.integers(0, 25), min_size=1, max_size=8))
def test_pipelined_says_what_sequential_says(case: Case, polls: list[int]) -> None:
    one, other = Generation(case, "sequential").run(), Generation(case, "pipelined", polls=polls).run()
    assert other.said() == one.said()
    if not case.merges:
        assert other.sources == one.sources
        assert other.counted() == one.counted()
        assert other.asked == one.asked
    assert other.decoder.stats.rounds <= one.decoder.stats.rounds
    assert other.decoder.stats.drafted == other.draft.forwards
    if case.on_loop != "sample":  # there, what was drafted ahead is dropped for a draw that may fall on the same token
        assert other.draft.refed == 0
    assert not other.draft.open_slots
    assert not other.target.open_slots


@settings(max_examples=60)
@given(case=cases())
def test_a_verdict_that_is_there_at_once_makes_the_drivers_the_same(case: Case) -> None:
    one, other = Generation(case, "sequential").run(), Generation(case, "pipelined").run()
    assert other.sources == one.sources
    assert other.counted() == one.counted()
    assert other.decoder.stats.drafted == one.decoder.stats.drafted
    assert other.asked == one.asked


# What it saves ----------------------------------------------------------------------------------------------------

PERFECT = Case(oracle(length=200), k=4, on_loop="ignore", options={"max_new_tokens": 60, "ignore_eos": True})


@pytest.mark.parametrize("polls", [(0,), (1,), (3,), (5,), (9,), (0, 7, 2), FAR])
@pytest.mark.parametrize("accept", ["exact", "rank:3"])
def test_a_perfect_drafter_reads_every_token_once(accept: str, polls: tuple[int, ...]) -> None:
    case = replace(PERFECT, draft=mixed(TARGET, 0.0), accept=accept)
    run = Generation(case, "pipelined", polls=polls).run()
    assert run.draft.forwards == run.decoder.stats.drafted <= len(run.tokens) == 60
    assert run.draft.fed <= len(PROMPT) + 60
    assert run.draft.refed == 0
    assert Source.CORRECTION not in run.sources


def test_blocks_drafted_ahead_go_in_one_request() -> None:
    """Nine tokens ahead: the guess, two whole blocks of four; then the guess of the next bonus, and so on."""
    run = Generation(replace(PERFECT, draft=mixed(TARGET, 0.0)), "pipelined", polls=(9,)).run()
    lengths = [len(request.draft_ids) for request in run.verifier.requests]
    assert lengths[:4] == [4, 8, 8, 8]
    stats = run.decoder.stats
    assert stats.rounds == len(lengths) == 8
    assert stats.blocks == stats.escalated == 14, "a block counts as one, however it travels"


def test_a_part_of_a_block_waits_for_its_end() -> None:
    run = Generation(replace(PERFECT, draft=mixed(TARGET, 0.0)), "pipelined", polls=(7, 0, 0)).run()
    lengths = [len(request.draft_ids) for request in run.verifier.requests]
    assert lengths[:3] == [4, 4, 4]
    assert run.decoder.stats.drafted == run.draft.forwards < 60


def test_a_request_holds_no_more_than_the_protocol_allows() -> None:
    case = replace(PERFECT, draft=mixed(TARGET, 0.0), k=7, options={"max_new_tokens": 300, "ignore_eos": True})
    run = Generation(case, "pipelined", polls=FAR).run()
    lengths = [len(request.draft_ids) for request in run.verifier.requests]
    assert max(lengths) == 63 <= MAX_PROVISIONAL
    assert lengths[:2] == [7, 63]


def test_a_stranger_costs_drafts_but_no_request() -> None:
    case = replace(PERFECT, draft=mixed(TARGET, 1.0))
    one, other = Generation(case, "sequential").run(), Generation(case, "pipelined", polls=(5,)).run()
    assert other.decoder.stats.rounds == one.decoder.stats.rounds
    assert other.decoder.stats.verified == one.decoder.stats.verified
    assert other.decoder.stats.drafted > one.decoder.stats.drafted


# Broken on purpose ------------------------------------------------------------------------------------------------


class KeepsAheadAfterAMiss(DraftBuffer):
    """Tokens drafted ahead continue the output after every verdict."""

    def resolve_guess(self, bonus: int | None) -> None:
        self.ahead = self.ahead[1:]


class ForgetsTheGuess(DraftBuffer):
    """The guess stays in front of the tokens drafted behind it."""

    def resolve_guess(self, bonus: int | None) -> None:
        kept = list(self.ahead)
        super().resolve_guess(bonus)
        if self.ahead:
            self.ahead = kept


@pytest.mark.parametrize(("broken", "share"), [(KeepsAheadAfterAMiss, 0.25), (ForgetsTheGuess, 0.0)])
def test_a_decoder_that_keeps_the_wrong_tokens_is_seen(
    broken: type[DraftBuffer], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(mixed(TARGET, share), gate=("skip", [True, False, False] * 9), options={"ignore_eos": True})
    right = Generation(case, "sequential").run().said()
    assert Generation(case, "pipelined", polls=(6,)).run().said() == right
    monkeypatch.setattr("outrider.decoding.decoder.DraftBuffer", broken)
    with pytest.raises(AssertionError):
        Generation(case, "pipelined", polls=(6,)).run()
    monkeypatch.setattr(Generation, "check", lambda self: None)
    assert Generation(case, "pipelined", polls=(6,)).run().said() != right


def test_a_verifier_that_answers_only_while_one_waits_is_refused() -> None:
    link = VerifierSession(ScriptedVerifier([1, 2], V), lambda verifier: 1)
    with pytest.raises(SettingsError, match="across a network"):
        link.submit(Verify(1, 5, (), (1,)))
