"""Drafting ahead, and the loss of the verifier, driven by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.actions import Done, Draft, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_buffer import MAX_PROVISIONAL
from outrider.decoding.draft_length import ConfidenceStop, FixedDraftLength
from outrider.decoding.gate import Always, Never, Signals, Trigger
from outrider.decoding.result import derive_guarantee
from outrider.decoding.sequence import Source
from outrider.errors import StateError
from outrider.sampling.acceptance import Exact, RejectionSampling, Verdict, parse_acceptance_rule
from outrider.sampling.sampler import Support
from tests.support.decoder_steps import (
    EOS,
    PROMPT,
    A,
    B,
    C,
    Cloud,
    Consumer,
    Model,
    Script,
    balanced,
    chance,
    decide,
    ended,
    kinds,
    letters,
    looping,
    models,
    propose,
    run_loop,
    start,
    worlds,
)


def draft_ahead(decoder: Decoder, *tokens: int) -> None:
    """Draft on while a verdict is awaited: every token must have been asked for."""
    assert isinstance(decoder.next(), Verify)
    for token in tokens:
        assert decoder.ahead() == Draft(1)
        decoder.drafted_ahead([Proposal(token)])


def waiting(*ahead: int, **changes: object) -> Decoder:
    """1 2 3 await their verdict, `ahead` is drafted behind them."""
    decoder = start(**changes)
    propose(decoder, 1, 2, 3)
    draft_ahead(decoder, *ahead)
    return decoder


# What is asked for ----------------------------------------------------------------------------------------------


def test_nothing_is_drafted_ahead_unless_a_verdict_is_awaited() -> None:
    decoder = start()
    assert decoder.ahead() is None
    decoder.drafted_ahead([Proposal(1)])
    assert decoder.context == PROMPT
    propose(decoder, 1, 2)
    assert decoder.ahead() is None
    assert start(draft_length=None).ahead() is None
    cloud_only = start(draft_length=None)
    assert isinstance(cloud_only.next(), Verify)
    assert cloud_only.ahead() is None


def test_what_is_drafted_ahead_is_no_part_of_the_sequence() -> None:
    decoder = waiting(4, 5)
    assert decoder.sequence.ids == [*PROMPT, 1, 2, 3]
    assert decoder.context == [*PROMPT, 1, 2, 3, 4, 5]
    assert decoder.context_length == 7
    assert kinds(decoder.events()) == [("provisional", n, n + 1) for n in range(3)]
    assert decoder.stats.drafted == 5


@pytest.mark.parametrize(("limit", "useful"), [(3, 0), (4, 0), (5, 2), (6, 3), (20, 17)])
def test_no_further_than_the_room(limit: int, useful: int) -> None:
    """A guess with nothing behind it would be of no use."""
    decoder = waiting(limit=limit)
    decoder.drafted_ahead([Proposal(1)] * 30)
    assert decoder.ahead() is None
    assert decoder.context_length == 5 + useful
    assert decoder.stats.drafted == 3 + useful


def test_nothing_is_drafted_ahead_behind_an_end() -> None:
    decoder = waiting(4, EOS)
    assert decoder.ahead() is None
    early = start()
    propose(early, 1, EOS)
    assert isinstance(early.next(), Verify)
    assert early.ahead() is None


def test_no_more_than_the_limit_in_all() -> None:
    decoder = waiting(limit=500)
    decoder.drafted_ahead([Proposal(1)] * 500)
    assert decoder.context_length == 5 + MAX_PROVISIONAL


# A hit, a miss --------------------------------------------------------------------------------------------------


def test_a_right_guess_is_taken_as_if_it_were_drafted_now() -> None:
    decoder = waiting(4, 5, 6)
    decide(decoder, 3, 4)
    assert decoder.next() == Draft(1)
    assert decoder.sequence.pending == [5, 6]
    assert decoder.context == [*PROMPT, 1, 2, 3, 4, 5, 6]
    assert kinds(decoder.events())[-2:] == [("provisional", 4, 5), ("provisional", 5, 6)]
    propose(decoder, 7)
    assert decoder.next() == Verify(2, 6, (), (5, 6, 7))
    assert decoder.stats.drafted == 7
    balanced(decoder)


@pytest.mark.parametrize(("accepted", "token"), [(3, 7), (2, 3), (2, 4), (0, 4)])
def test_a_wrong_guess_is_dropped(accepted: int, token: int) -> None:
    decoder = waiting(4, 5, 6)
    decide(decoder, accepted, token)
    assert decoder.next() == Draft(3)
    assert decoder.context == decoder.sequence.ids == [*PROMPT, *[1, 2, 3][:accepted], token]
    assert decoder.stats.drafted == 6
    balanced(decoder)


def test_a_refused_verdict_leaves_what_was_drafted_ahead() -> None:
    decoder = waiting(4, 5)
    with pytest.raises(StateError):
        decoder.decided(Verdict(7, 3, 4))
    assert decoder.context_length == 7
    decide(decoder, 3, 4)
    assert decoder.next() == Draft(2)


def test_the_end_drops_tokens_drafted_ahead() -> None:
    decoder = waiting(4, 5, 6, stop=("c",))
    decide(decoder, 3, 4)
    ended(decoder, "stop", 1, 2, 3)
    assert decoder.context_length == len(decoder.sequence.ids)


# One request for several blocks ---------------------------------------------------------------------------------


def test_whole_blocks_go_in_one_request_and_the_rest_stays_ahead() -> None:
    decoder = waiting(4, 5, 6, 7, 8, 1, 2, 3, 1, limit=60)
    decide(decoder, 3, 4)
    assert decoder.next() == Verify(2, 6, (), (5, 6, 7, 8, 1, 2))
    assert decoder.context[-2:] == [3, 1]
    assert (decoder.stats.blocks, decoder.stats.escalated, decoder.stats.rounds) == (3, 3, 2)
    decide(decoder, 6, 3)
    assert decoder.next() == Draft(2)
    assert decoder.sequence.pending == [1]
    balanced(decoder)


@pytest.mark.parametrize(
    "changes",
    [{"accept": parse_acceptance_rule("rank:2")}, {"accept": RejectionSampling()}, {"gate": Script(rest=True)}],
)
def test_where_the_cut_may_show_it_stays_as_it_was(changes: dict) -> None:
    decoder = waiting(4, 5, 6, 7, 8, 1, 2, 3, 1, limit=60, **changes)
    decide(decoder, 3, 4)
    assert decoder.next().draft_ids == (5, 6, 7)  # type: ignore[union-attr]
    assert decoder.context[-8:] == [5, 6, 7, 8, 1, 2, 3, 1]
    decide(decoder, 3, 8)
    assert decoder.next().draft_ids == (1, 2, 3)  # type: ignore[union-attr]
    decide(decoder, 2, 5)
    assert decoder.next() == Draft(3)
    balanced(decoder)


def test_a_request_takes_no_more_than_the_limit() -> None:
    decoder = waiting(limit=500)
    decoder.drafted_ahead([Proposal(4)] * 500)
    decide(decoder, 3, 4)
    assert len(decoder.next().draft_ids) == 63  # type: ignore[union-attr]
    assert decoder.context_length == 6 + 63


def test_a_trigger_is_asked_about_every_block() -> None:
    gate = Trigger(Script([True, False, True, False]))
    decoder = waiting(*range(4, 9), *range(1, 6), limit=60, gate=gate)
    decide(decoder, 3, 4)
    assert decoder.next() == Verify(2, 6, (), (5, 6, 7, 8, 1, 2, 3, 4, 5))
    assert (decoder.stats.blocks, decoder.stats.escalated, decoder.stats.rounds) == (4, 2, 2)
    balanced(decoder)


def test_the_confidence_stop_cuts_what_was_drafted_ahead() -> None:
    decoder = start(draft_length=ConfidenceStop(max_tokens=4, min_survival=0.5), limit=60)
    sure, unsure = Signals(0.0, 1.0, 0.0, 0.1), Signals(0.0, 1.0, 0.0, 0.9)
    decoder.drafted([Proposal(1, unsure)])
    assert isinstance(decoder.next(), Verify)
    drafts = [(2, sure), (3, sure), (4, unsure), (5, unsure), (6, sure)]
    decoder.drafted_ahead([Proposal(token, signals) for token, signals in drafts])
    decide(decoder, 1, 2)
    assert decoder.next() == Verify(2, 4, (), (3, 4, 5))
    assert decoder.context[-1] == 6


def test_what_each_draft_was_drawn_from_stays_with_it() -> None:
    q = [Support(torch.tensor([n]), torch.zeros(1)) for n in range(10)]
    decoder = start(accept=RejectionSampling())
    decoder.drafted([Proposal(n, q=q[n]) for n in (1, 2, 3)])
    decoder.next()
    decoder.drafted_ahead([Proposal(n, q=q[n]) for n in (4, 5, 6, 7, 8)])
    decide(decoder, 3, 4)
    assert decoder.next().q == (q[5], q[6], q[7])  # type: ignore[union-attr]


# Gates and loops ------------------------------------------------------------------------------------------------


def test_blocks_drafted_ahead_may_be_skipped() -> None:
    decoder = waiting(4, 5, 6, 7, 8, 1, gate=Script([True, False, True]))
    decide(decoder, 3, 4)
    assert decoder.next() == Draft(1)
    assert decoder.sequence.sources[4:] == [Source.EDGE] * 3
    assert decoder.sequence.pending == [8, 1]


def test_a_loop_found_with_the_verdict_forces_the_block_that_was_drafted_ahead() -> None:
    """ABABABA and the bonus B make a loop; C C C C was drafted ahead, and would have been skipped."""
    decoder = start(gate=Script([False, True, False]), draft_length=FixedDraftLength(4), limit=60)
    propose(decoder, A, B, A, B)
    propose(decoder, A, B, A, B)
    draft_ahead(decoder, A, C, C, C, C)
    decide(decoder, 4, A)
    assert decoder.next().draft_ids == (C, C, C, C)  # type: ignore[union-attr]
    assert (decoder.stats.escalated, decoder.stats.forced_by_loop) == (2, 1)


def test_what_would_have_been_drawn_to_leave_a_loop_is_not_taken_from_ahead() -> None:
    decoder = start(gate=Script([False, True]), draft_length=FixedDraftLength(4), limit=60, on_loop="sample")
    propose(decoder, A, B, A, B)
    propose(decoder, A, B, A, B)
    draft_ahead(decoder, A, C, C)
    decide(decoder, 4, A)
    assert decoder.next() == Draft(4, leave_loop=True)
    assert decoder.context == decoder.sequence.ids


# The verifier is lost -------------------------------------------------------------------------------------------


def test_provisional_tokens_are_committed_unverified_after_a_loss() -> None:
    decoder = waiting(4, 5)
    decoder.events()
    decoder.on_verifier_lost()
    assert decoder.next() == Draft(1, model_only=True)
    assert decoder.sequence.generated == [1, 2, 3, 4, 5]
    assert decoder.sequence.sources == [Source.EDGE] * 5
    assert [event.kind for event in decoder.events()][:3] == ["confirmed"] * 3
    propose(decoder, 6, 7)
    assert decoder.sequence.generated == [1, 2, 3, 4, 5, 6]
    balanced(decoder)
    assert derive_guarantee(decoder.stats, lossless=True) == "edge-only"


def test_an_earlier_verdict_stands_and_the_result_says_edge_only_all_the_same() -> None:
    decoder = waiting()
    decide(decoder, 1, 7)
    propose(decoder, 4, 5, EOS)
    assert isinstance(decoder.next(), Verify)
    decoder.on_verifier_lost()
    ended(decoder, "eos", 1, 7, 4, 5, EOS)
    assert (decoder.stats.cloud_tokens, decoder.stats.edge_tokens) == (2, 3)
    assert derive_guarantee(decoder.stats, lossless=True) == "edge-only"


def test_what_follows_an_end_is_dropped() -> None:
    in_pending = waiting(4, 5, 6, stop=("b",))
    in_pending.on_verifier_lost()
    ended(in_pending, "stop", 1, 2)
    in_ahead = waiting(4, 5, 6, stop=("e",))
    in_ahead.on_verifier_lost()
    ended(in_ahead, "stop", 1, 2, 3, 4, 5)
    assert in_ahead.context_length == len(in_ahead.sequence.ids)


def test_the_gate_is_not_asked_any_more() -> None:
    decoder = waiting(gate=Script([True], rest=True))
    decoder.on_verifier_lost()
    for n in range(5):
        assert isinstance(decoder.next(), Draft)
        propose(decoder, *[n % 5 + 1, 7 - n, 8 - n][: decoder.next().count])  # type: ignore[union-attr]
    assert decoder.stats.escalated == decoder.stats.rounds == 1


def test_provisional_stretches_of_a_trigger_are_kept() -> None:
    decoder = start(gate=Trigger(Never()), limit=50)
    propose(decoder, 1, 2, 3)
    propose(decoder, 4, 5)
    decoder.on_verifier_lost()
    assert decoder.sequence.generated == [1, 2, 3, 4, 5]
    assert isinstance(decoder.next(), Draft)


@pytest.mark.parametrize(
    ("looked_up", "generated", "left"),
    [({}, [1, 2, 3], [4, 5, 6]), ({5}, [1, 2, 3], [4]), ({4}, [1, 2, 3], []), ({2, 5}, [1], []), ({1}, [], [])],
    ids=str,
)
def test_looked_up_tokens_are_dropped_after_a_loss(looked_up: set[int], generated: list[int], left: list[int]) -> None:
    """Prompt lookup has no model: only a verdict may commit its tokens, and those behind them depend on them."""
    decoder, consumer = start(), Consumer()
    proposals = [Proposal(token, match_length=4 * (token in looked_up)) for token in range(1, 7)]
    decoder.drafted(proposals[:3])
    assert isinstance(decoder.next(), Verify)
    decoder.drafted_ahead(proposals[3:])
    events = decoder.events()
    decoder.on_verifier_lost()
    assert decoder.sequence.generated == generated
    assert decoder.context[len(PROMPT) + len(generated) :] == left
    while not isinstance(decoder.next(), Done):
        action = decoder.next()
        assert isinstance(action, Draft)
        assert action.model_only
        propose(decoder, *[7] * action.count)
    for event in [*events, *decoder.events()]:
        consumer.take(event)
    assert decoder.sequence.generated[: len(generated + left)] == generated + left
    assert consumer.shown == decoder.sequence.generated
    balanced(decoder)


def test_a_loop_is_left_by_a_draw_now() -> None:
    decoder = looping(3)
    assert isinstance(decoder.next(), Verify)
    draft_ahead(decoder, A, B, A, B, A, B, A, B, A)
    decoder.on_verifier_lost()
    assert decoder.next() == Draft(4, leave_loop=True, model_only=True)
    assert decoder.sequence.generated == [A, B] * 8, "eight more, until it shows"
    assert decoder.context == decoder.sequence.ids
    stop = looping(2, gate=Script([False, True]), on_loop="stop")
    assert isinstance(stop.next(), Verify)
    stop.on_verifier_lost()
    ended(stop, "loop", *[A, B] * 4)


@pytest.mark.parametrize("scope", ["block", "repair"])
def test_skipped_tokens_stay_as_they_were(scope: str) -> None:
    decoder = start(gate=Script([False, False, True]), draft_length=FixedDraftLength(2), scope=scope)
    for n in (1, 3, 5):
        propose(decoder, n, n + 1)
    assert isinstance(decoder.next(), Verify)
    decoder.on_verifier_lost()
    assert decoder.sequence.generated == [1, 2, 3, 4, 5, 6]
    assert set(decoder.sequence.sources) == {Source.EDGE}
    balanced(decoder)


def test_without_a_drafter_a_lost_verifier_is_an_error() -> None:
    decoder = start(draft_length=None)
    decoder.next()
    with pytest.raises(StateError, match="no drafter"):
        decoder.on_verifier_lost()


# Any schedule ---------------------------------------------------------------------------------------------------


def run_pipelined(
    plan: Plan, drafter: Model, target: Model, looks: list[int], lost: int
) -> tuple[Decoder, Consumer, str]:
    """The pipelined driver: `looks` tokens are drafted before each verdict; the one numbered `lost` never comes."""
    decoder, cloud, consumer = Decoder(PROMPT, plan, letters), Cloud(target), Consumer()
    while not isinstance(action := decoder.next(), Done):
        if isinstance(action, Draft):
            assert decoder.context == decoder.sequence.ids
            decoder.drafted(drafts(decoder, drafter, action))
        else:
            for _ in range(looks[action.round % len(looks)]):
                if (more := decoder.ahead()) is not None:
                    decoder.drafted_ahead(drafts(decoder, drafter, more))
            if action.round == lost:
                decoder.on_verifier_lost()
            else:
                decoder.decided(cloud.judge(action))
        for event in decoder.events():
            consumer.take(event)
        balanced(decoder)
    for event in decoder.events():
        consumer.take(event)
    balanced(decoder)
    return decoder, consumer, action.reason


def drafts(decoder: Decoder, drafter: Model, action: Draft) -> list[Proposal]:
    ids, proposals = decoder.context, []
    for n in range(action.count):
        leave = action.leave_loop and n == 0
        ids.append(1 + chance(5, ids, 4) if leave else drafter(ids))
        proposals.append(Proposal(ids[-1], Signals(0.0, 1.0, 0.0, 0.2), left_loop=leave))
    return proposals


looking = st.lists(st.integers(0, 30), min_size=1, max_size=6)
modes = st.sampled_from(["always", "trigger", "block", "repair"])


def planned(world: dict, mode: str, on_loop: str) -> Plan:
    script = Script(list(world["answers"]))
    gate = {"always": Always(), "trigger": Trigger(script)}.get(mode, script)
    scope = "repair" if mode == "repair" else "block"
    return Plan(world["rules"], gate, Exact(), world["draft_length"], True, on_loop, scope)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(worlds, modes, st.sampled_from(["escalate", "sample", "stop", "ignore"]), looking)
def test_drafting_ahead_changes_nothing(world: dict, mode: str, on_loop: str, looks: list[int]) -> None:
    drafter, target = models(world)
    one, _, reason = run_loop(planned(world, mode, on_loop), drafter, target)
    other, consumer, other_reason = run_pipelined(planned(world, mode, on_loop), drafter, target, looks, 0)
    assert (other_reason, other.sequence.generated) == (reason, one.sequence.generated)
    assert consumer.shown[: consumer.final] == one.sequence.generated
    balanced(one)
    if mode in ("block", "repair"):
        assert other.sequence.sources == one.sequence.sources
        assert replace(other.stats, drafted=0) == replace(one.stats, drafted=0)


@settings(max_examples=150, deadline=None)
@given(worlds, modes, st.sampled_from(["escalate", "stop", "ignore"]), looking, st.integers(1, 9))
def test_a_loss_at_any_round(world: dict, mode: str, on_loop: str, looks: list[int], lost: int) -> None:
    drafter, target = models(world)
    decoder, consumer, reason = run_pipelined(planned(world, mode, on_loop), drafter, target, looks, lost)
    sequence, stats = decoder.sequence, decoder.stats
    assert stats.cloud_lost == (stats.rounds == lost)
    assert consumer.shown[: consumer.final] == sequence.generated
    assert reason in ("eos", "length", "stop", "loop")
    if mode in ("always", "trigger"):
        clouds = [source.by_cloud for source in sequence.sources]
        assert clouds == sorted(clouds, reverse=True)
    for n, source in enumerate(sequence.sources, len(PROMPT)):
        if source is Source.EDGE:
            assert sequence.ids[n] == drafter(sequence.ids[:n])
