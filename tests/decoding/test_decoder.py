"""The loop, driven by hand: no models, only scripted proposals and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.actions import Draft, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_buffer import MAX_PROVISIONAL
from outrider.decoding.draft_length import ConfidenceStop, FixedDraftLength
from outrider.decoding.gate import MAX_UNREPAIRED, Always, Gate, Never, Signals, Trigger
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules, find_finish_reason
from outrider.errors import StateError
from outrider.sampling.acceptance import Exact, Verdict
from outrider.sampling.sampler import Support
from tests.support.decoder_steps import (
    EOS,
    PROMPT,
    A,
    B,
    C,
    Model,
    Script,
    balanced,
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

# One round ------------------------------------------------------------------------------------------------------


def test_a_round_drafts_verifies_and_drafts_again() -> None:
    decoder = start()
    assert decoder.next() == Draft(3)
    propose(decoder, 1, 2, 3)
    assert decoder.next() == Verify(1, 2, (), (1, 2, 3))
    decoder.decided(Verdict(1, 3, 4))
    assert decoder.next() == Draft(3)
    assert decoder.sequence.generated == [1, 2, 3, 4]
    propose(decoder, 5, 6, 7)
    assert decoder.next() == Verify(2, 6, (), (5, 6, 7))


@pytest.mark.parametrize("gate", [Always(), Trigger(Never()), Never(), Script([False, False, False])])
def test_without_proposals_the_block_is_verified_as_it_is(gate: Gate) -> None:
    """A drafter without a model may have nothing to propose. Skipping such a block would never end."""
    decoder = start(gate=gate)
    propose(decoder)
    assert decoder.next() == Verify(1, 2, (), ())
    decoder.decided(Verdict(1, 0, 4))
    assert decoder.sequence.sources == [Source.BONUS]
    assert decoder.next() == Draft(3)
    propose(decoder, 1, 2)
    assert decoder.next() == Draft(1)
    propose(decoder)
    if isinstance(gate, Always):
        assert decoder.next() == Verify(2, 3, (), (1, 2))
        decoder.decided(Verdict(2, 1, 7))
    assert decoder.next() == Draft(3)
    assert decoder.stats.blocks == 2


def test_without_proposals_and_without_a_verifier_the_error_says_so() -> None:
    with pytest.raises(StateError, match="the drafter proposed no token, and there is no verifier"):
        propose(start(has_verifier=False))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_roll_back_to_any_length(accepted: int) -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    decide(decoder, accepted, 7)
    assert decoder.sequence.ids == PROMPT + [1, 2, 3][:accepted] + [7]
    last = Source.BONUS if accepted == 3 else Source.CORRECTION
    assert decoder.sequence.sources == [Source.ACCEPTED] * accepted + [last]
    assert decoder.stats.verified == 3
    propose(decoder, 4, 5, 6)
    assert decoder.next() == Verify(2, 3 + accepted, (), (4, 5, 6))


def test_next_is_idempotent() -> None:
    decoder = start(gate=Script([False, True]))
    steps = (
        lambda: decoder.drafted([Proposal(1)]),
        lambda: decoder.drafted([Proposal(2), Proposal(3)]),
        lambda: decoder.drafted([Proposal(4), Proposal(5), Proposal(6)]),
        lambda: decoder.decided(Verdict(1, 2, 7)),
    )
    for step in steps:
        once = decoder.next(), replace(decoder.stats), decoder.sequence.ids.copy()
        twice = decoder.next(), replace(decoder.stats), decoder.sequence.ids.copy()
        assert once == twice
        step()
    assert (decoder.stats.blocks, decoder.stats.escalated, decoder.stats.rounds) == (2, 1, 1)


def test_a_block_may_arrive_in_pieces() -> None:
    decoder = start()
    propose(decoder, 1)
    assert decoder.next() == Draft(2)
    propose(decoder, 2, 3)
    assert decoder.next() == Verify(1, 2, (), (1, 2, 3))


def test_proposals_after_the_end_of_the_block_are_dropped() -> None:
    decoder = start()
    propose(decoder, 1, 2, 3, 4, 5)
    assert decoder.next() == Verify(1, 2, (), (1, 2, 3))
    assert decoder.stats.drafted == 3
    late = start()
    propose(late, 1, EOS, 3)
    assert late.next() == Verify(1, 2, (), (1, EOS))
    assert late.stats.drafted == 2


def test_the_confidence_stop_decides_where_a_block_ends() -> None:
    decoder = start(draft_length=ConfidenceStop(max_tokens=4, min_survival=0.5))
    for token, logprob in ((1, 0.1), (2, 0.1), (3, 0.9)):
        assert decoder.next() == Draft(1)
        decoder.drafted([Proposal(token, Signals(0.0, 1.0, 0.0, logprob))])
    assert decoder.next() == Verify(1, 2, (), (1, 2, 3))


def test_what_each_draft_was_drawn_from_travels_with_it() -> None:
    decoder = start()
    supports = [Support(torch.tensor([n]), torch.zeros(1)) for n in range(3)]
    decoder.drafted([Proposal(n + 1, q=q) for n, q in enumerate(supports)])
    assert decide(decoder, 1, 7).q == tuple(supports)
    decoder.drafted([Proposal(n + 1, q=q) for n, q in enumerate(supports)])
    assert decoder.next().q == tuple(supports)  # type: ignore[union-attr]


def test_cloud_only_is_one_bonus_a_round() -> None:
    decoder = start(draft_length=None, limit=3)
    for n in range(3):
        assert decoder.next() == Verify(n + 1, 2 + n, (), ())
        decoder.decided(Verdict(n + 1, 0, n + 1))
    ended(decoder, "length", 1, 2, 3)
    assert (decoder.stats.bonus, decoder.stats.drafted, decoder.stats.verified) == (3, 0, 0)


def test_edge_only_commits_at_once() -> None:
    decoder = start(has_verifier=False, limit=4)
    propose(decoder, 1, 2, 3)
    assert decoder.sequence.generated == [1, 2, 3]
    assert decoder.next() == Draft(1, model_only=True)
    propose(decoder, 4)
    ended(decoder, "length", 1, 2, 3, 4)
    assert (decoder.stats.edge_tokens, decoder.stats.rounds, decoder.stats.escalated) == (4, 0, 0)


def test_edge_only_ends_in_mid_block() -> None:
    decoder = start(has_verifier=False)
    propose(decoder, 1, EOS, 3)
    ended(decoder, "eos", 1, EOS)
    assert decoder.stats.drafted == 2


# The end --------------------------------------------------------------------------------------------------------


def test_an_accepted_eos_ends_the_output_and_the_bonus_is_dropped() -> None:
    decoder = start()
    propose(decoder, 1, EOS)
    decide(decoder, 2, 7)
    ended(decoder, "eos", 1, EOS)
    assert (decoder.stats.accepted, decoder.stats.bonus, decoder.stats.verified) == (2, 0, 2)


def test_a_drafted_eos_that_the_target_rejects_does_not_end_anything() -> None:
    decoder = start()
    propose(decoder, 1, EOS)
    decide(decoder, 1, 7)
    assert decoder.next() == Draft(3)
    assert decoder.sequence.generated == [1, 7]


@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_an_eos_from_the_verifier_ends_the_output(accepted: int) -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    decide(decoder, accepted, EOS)
    ended(decoder, "eos", *[1, 2, 3][:accepted], EOS)


def test_blocks_are_cut_to_the_room_that_is_left() -> None:
    decoder = start(limit=5)
    propose(decoder, 1, 2, 3)
    decide(decoder, 3, 4)
    assert decoder.next() == Draft(1)
    propose(decoder, 5, 6)
    assert decide(decoder, 1, 7).draft_ids == (5,)
    ended(decoder, "length", 1, 2, 3, 4, 5)
    assert (decoder.stats.accepted, decoder.stats.bonus, decoder.stats.drafted) == (4, 1, 4)


def test_the_bonus_past_the_limit_is_dropped() -> None:
    decoder = start(limit=3)
    propose(decoder, 1, 2, 3)
    decide(decoder, 3, 4)
    ended(decoder, "length", 1, 2, 3)


@pytest.mark.parametrize("gate", [Always(), Never(), Trigger(Never())])
def test_a_stop_string_in_mid_block_drops_the_rest(gate: Gate) -> None:
    decoder = start(gate=gate, stop=("ab",), limit=6)
    propose(decoder, C, A, B)
    if gate.exact:
        while isinstance(decoder.next(), Draft):
            propose(decoder, C, C, C)
        decide(decoder, len(decoder.sequence.pending), C)
    ended(decoder, "stop", C, A, B)
    other = start(gate=gate, stop=("ca",), limit=3)
    propose(other, C, A, B)
    if gate.exact:
        decide(other, 3, C)
    ended(other, "stop", C, A)
    assert other.stats.accepted == other.stats.verified == (2 if gate.exact else 0)


def test_an_earlier_stop_beats_the_limit_of_the_same_block() -> None:
    decoder = start(stop=("b",), limit=3)
    propose(decoder, A, B, C)
    decide(decoder, 3, C)
    ended(decoder, "stop", A, B)


def test_a_stop_string_that_begins_in_an_earlier_block() -> None:
    decoder = start(stop=("cab",))
    propose(decoder, A, B, C)
    decide(decoder, 3, A)
    propose(decoder, B, A, A)
    decide(decoder, 3, A)
    ended(decoder, "stop", A, B, C, A, B)


# Skipping -------------------------------------------------------------------------------------------------------


def skipped_twice(scope: str) -> Decoder:
    """Two blocks of two skipped, the third waits for a verdict."""
    decoder = start(gate=Script([False, False, True]), draft_length=FixedDraftLength(2), scope=scope)
    for n in (1, 3, 5):
        assert decoder.next() == Draft(2)
        decoder.drafted([Proposal(t, q=Support(torch.tensor([t]), torch.zeros(1))) for t in (n, n + 1)])
    return decoder


def test_skipped_blocks_are_committed_on_the_edges_word() -> None:
    decoder = skipped_twice("block")
    request = decoder.next()
    assert isinstance(request, Verify)
    assert (request.base_length, request.new_ids, request.draft_ids) == (6, (1, 2, 3, 4), (5, 6))
    assert len(request.q) == 2
    decoder.decided(Verdict(1, 1, 7, audited=4, disagreed=1))
    assert decoder.sequence.generated == [1, 2, 3, 4, 5, 7]
    assert decoder.sequence.sources == [Source.EDGE] * 4 + [Source.ACCEPTED, Source.CORRECTION]
    assert (decoder.stats.audited, decoder.stats.disagreed, decoder.stats.verified) == (4, 1, 2)
    assert (decoder.stats.blocks, decoder.stats.escalated) == (3, 1)
    balanced(decoder)


def test_what_the_verifier_has_seen_is_not_sent_again() -> None:
    decoder = skipped_twice("block")
    decide(decoder, 2, 7)
    decoder.plan.gate.answers.extend([False, True])  # type: ignore[attr-defined]
    propose(decoder, 1, 2)
    propose(decoder, 3, 4)
    assert decoder.next() == Verify(2, 11, (1, 2), (3, 4))


def test_repair_puts_skipped_blocks_before_the_verifier() -> None:
    decoder = skipped_twice("repair")
    decoder.next()
    decoder.events()
    request = decide(decoder, 1, 7)
    assert (request.base_length, request.new_ids, request.draft_ids) == (2, (), (1, 2, 3, 4, 5, 6))
    assert [int(q.ids) for q in request.q] == [1, 2, 3, 4, 5, 6]
    assert decoder.sequence.generated == [1, 7]
    assert decoder.sequence.sources == [Source.ACCEPTED, Source.CORRECTION]
    assert kinds(decoder.events()) == [("confirmed", 0, 1), ("revised", 1, 7)]
    assert decoder.stats.verified == 6
    balanced(decoder)


def test_repair_asks_before_more_was_skipped_than_one_request_holds() -> None:
    decoder, n = start(gate=Script(), scope="repair", limit=400, on_loop="ignore"), 0
    while isinstance(decoder.next(), Draft):
        propose(decoder, 10 + n % 7, 20 + n % 11, 40 + n % 13)
        n += 1
    request = decoder.next()
    assert isinstance(request, Verify)
    assert MAX_UNREPAIRED <= len(request.draft_ids) < MAX_UNREPAIRED + 3
    block = start(gate=Script(), scope="block", limit=400, on_loop="ignore")
    for n in range(133):
        propose(block, 10 + n % 7, 20 + n % 11, 40 + n % 13)
    assert block.stats.rounds == 0, "nothing has to be repaired there, and the gate decides alone"


def test_repair_that_finds_nothing_to_repair() -> None:
    decoder = skipped_twice("repair")
    decide(decoder, 6, 7)
    assert decoder.sequence.generated == [1, 2, 3, 4, 5, 6, 7]
    assert decoder.sequence.sources == [Source.ACCEPTED] * 6 + [Source.BONUS]
    assert not [event for event in decoder.events() if event.kind == "revised"]


def test_a_skipped_eos_ends_the_output() -> None:
    decoder = start(gate=Never())
    propose(decoder, 1, EOS)
    ended(decoder, "eos", 1, EOS)
    assert (decoder.stats.edge_tokens, decoder.stats.rounds) == (2, 0)


# Trigger --------------------------------------------------------------------------------------------------------


def test_a_trigger_leaves_tokens_provisional_until_a_verdict() -> None:
    decoder = start(gate=Trigger(Script([False, False, True])), draft_length=FixedDraftLength(2))
    for n in (1, 3, 5):
        propose(decoder, n, n + 1)
    assert {event.kind for event in decoder.events()} == {"provisional"}
    assert decoder.sequence.generated == []
    assert decoder.next() == Verify(1, 2, (), (1, 2, 3, 4, 5, 6))
    decide(decoder, 3, 7)
    assert decoder.sequence.generated == [1, 2, 3, 7]
    assert decoder.stats.edge_tokens == 0
    assert (decoder.stats.blocks, decoder.stats.escalated, decoder.stats.rounds) == (3, 1, 1)


def test_a_trigger_settles_before_the_end() -> None:
    at_eos = start(gate=Trigger(Never()))
    propose(at_eos, 1, EOS)
    assert decide(at_eos, 1, 7).draft_ids == (1, EOS)
    assert at_eos.next() == Draft(3)
    at_limit = start(gate=Trigger(Never()), limit=4)
    propose(at_limit, 1, 2, 3)
    propose(at_limit, 4)
    assert decide(at_limit, 4, 5).draft_ids == (1, 2, 3, 4)
    ended(at_limit, "length", 1, 2, 3, 4)


def test_a_trigger_does_not_wait_for_ever() -> None:
    decoder = start(gate=Trigger(Never()), draft_length=FixedDraftLength(5), limit=500)
    while isinstance(decoder.next(), Draft):
        propose(decoder, 1, 2, 3, 4, 5)
    assert MAX_PROVISIONAL <= len(decoder.next().draft_ids) < MAX_PROVISIONAL + 5  # type: ignore[union-attr]


# Loops ----------------------------------------------------------------------------------------------------------


def test_a_loop_forces_the_next_block_to_the_verifier_once_and_output_goes_on() -> None:
    decoder = looping(3)
    request = decide(decoder, 0, C)
    assert (request.new_ids, request.draft_ids) == ((A, B) * 4, (A, B, A, B))
    assert (decoder.stats.blocks, decoder.stats.escalated, decoder.stats.forced_by_loop) == (3, 1, 1)
    for _ in range(3):
        propose(decoder, 4, 5, 6, 7)  # the new text is skipped again, loops or not
        assert isinstance(decoder.next(), Draft)
    assert decoder.stats.forced_by_loop == 1


def test_a_loop_found_in_mid_block_is_not_forgotten_by_the_end_of_it() -> None:
    decoder = start(gate=Never(), draft_length=FixedDraftLength(5), limit=100)
    propose(decoder, A, B, A, B, A)
    propose(decoder, B, A, B, C, C)
    propose(decoder, C, A, C, A, A)
    assert isinstance(decoder.next(), Verify)
    assert decoder.stats.forced_by_loop == 1


def test_a_loop_that_the_verifier_confirms_is_put_before_it_again_only_when_it_has_gone_on() -> None:
    decoder = looping(3)
    decide(decoder, 4, A)
    propose(decoder, B, A, B, A)  # 9 more since the last look: a loop again, seen after this block
    assert decoder.next() == Draft(4)
    propose(decoder, B, A, B, A)
    assert isinstance(decoder.next(), Verify)
    assert decoder.stats.forced_by_loop == 2


def test_a_block_that_the_gate_escalates_anyway_is_not_called_forced() -> None:
    decoder = looping(2, gate=Script([False, False, True]))
    propose(decoder, A, B, A, B)
    assert isinstance(decoder.next(), Verify)
    assert (decoder.stats.escalated, decoder.stats.forced_by_loop) == (1, 0)


def test_a_loop_across_blocks_none_of_which_repeats() -> None:
    four = [38035, 15946, 3837, 78685]
    decoder = start(gate=Never(), draft_length=FixedDraftLength(5), limit=100)
    for b in range(4):
        propose(decoder, *[four[(5 * b + i) % 4] for i in range(5)])
    assert isinstance(decoder.next(), Verify)
    assert decoder.stats.forced_by_loop == 1


def test_on_loop_stop_ends_the_output_and_says_so() -> None:
    decoder = looping(2, on_loop="stop")
    ended(decoder, "loop", *(A, B) * 4)


def test_on_loop_ignore_does_nothing() -> None:
    decoder = looping(20, on_loop="ignore")
    assert decoder.next() == Draft(4)
    assert decoder.stats.forced_by_loop == 0


def test_on_loop_sample_asks_for_one_token_at_random_and_counts_it() -> None:
    decoder = start(has_verifier=False, on_loop="sample", draft_length=FixedDraftLength(5), limit=30)
    propose(decoder, A, B, A, B, A)
    propose(decoder, B, A, B, A, B)
    assert decoder.sequence.generated == [A, B] * 4  # what follows the loop was drafted in vain
    assert decoder.next() == Draft(2, leave_loop=True, model_only=True)
    decoder.drafted([Proposal(C, left_loop=True), Proposal(A)])
    assert decoder.next() == Draft(5, model_only=True)
    propose(decoder, B, A, B, A, B)
    balanced(decoder)
    assert (decoder.stats.loop_sampled, decoder.stats.edge_tokens) == (1, 15)
    assert decoder.next() == Draft(5, model_only=True)
    propose(decoder, A, B, A, B, A)
    assert decoder.sequence.generated == [A, B] * 4 + [C] + [A, B] * 4  # a new loop, so another token at random
    assert decoder.next() == Draft(3, leave_loop=True, model_only=True)


def test_after_a_repair_loops_are_sought_in_what_takes_the_place_of_the_old() -> None:
    decoder = looping(3, scope="repair")
    decide(decoder, 0, C)
    assert decoder.sequence.generated == [C]
    for _ in range(3):
        propose(decoder, A, B, A, B)
    assert isinstance(decoder.next(), Verify)
    assert decoder.stats.forced_by_loop == 2


def test_a_repair_that_confirms_a_loop_does_not_force_the_next_block_too() -> None:
    decoder = looping(3, scope="repair")
    decide(decoder, 12, A)
    propose(decoder, B, C, 4, 5)
    assert isinstance(decoder.next(), Draft)
    assert decoder.stats.forced_by_loop == 1


# A bad peer -----------------------------------------------------------------------------------------------------

BAD = [Verdict(2, 1, 7), Verdict(0, 1, 7), Verdict(1, 4, 7), Verdict(1, -1, 7)]


@pytest.mark.parametrize("bad", BAD)
def test_a_verdict_that_answers_something_else_is_refused(bad: Verdict) -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    decoder.next()
    with pytest.raises(StateError, match="does not answer"):
        decoder.decided(bad)
    assert decoder.sequence.pending == [1, 2, 3]
    assert decoder.sequence.generated == []


def test_an_unrequested_verdict_is_refused() -> None:
    decoder = start()
    with pytest.raises(StateError):
        decoder.decided(Verdict(1, 0, 7))
    propose(decoder, 1, 2, 3)
    decide(decoder, 1, 7)
    with pytest.raises(StateError):
        decoder.decided(Verdict(1, 1, 7))  # the same answer, delivered twice
    assert decoder.sequence.generated == [1, 7]


@pytest.mark.parametrize("bad", BAD)
def test_a_refused_verdict_leaves_the_question_open(bad: Verdict) -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    request, stats = decoder.next(), replace(decoder.stats)
    with pytest.raises(StateError):
        decoder.decided(bad)
    assert decoder.next() == request
    assert decoder.stats == stats


def test_near_ties_are_positions_of_the_output() -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    decide(decoder, 3, 4, near_ties=(1,))
    propose(decoder, 5, 6, 7)
    decide(decoder, 1, 8, near_ties=(0, 1))
    assert decoder.near_ties == {1, 4, 5}


# Events ---------------------------------------------------------------------------------------------------------


def test_events_of_a_round() -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    provisional = [("provisional", n, n + 1) for n in range(3)]
    assert kinds(decoder.events()) == provisional
    decide(decoder, 1, 7)
    events = decoder.events()
    assert kinds(events) == [("confirmed", 0, 1), ("revised", 1, 7)]
    assert [event.source for event in events] == [Source.ACCEPTED, Source.CORRECTION]
    assert decoder.events() == []


def test_a_bonus_revises_nothing() -> None:
    decoder = start()
    propose(decoder, 1, 2, 3)
    decide(decoder, 3, 7)
    assert kinds(decoder.events())[3:] == [("confirmed", n, t) for n, t in enumerate([1, 2, 3, 7])]


# Any schedule ---------------------------------------------------------------------------------------------------


def alone(following: Model, rules: StopRules) -> tuple[str, list[int]]:
    """Plain decoding with one model."""
    ids = list(PROMPT)
    while True:
        ids.append(following(ids))
        if reason := find_finish_reason(rules, ids[2:], letters):
            return reason, ids[2:]


@settings(max_examples=150, deadline=None)
@given(worlds, st.booleans(), st.sampled_from(["escalate", "ignore"]))
def test_exact_gates_reproduce_the_target_whatever_the_schedule(world: dict, always: bool, on_loop: str) -> None:
    gate = Always() if always else Trigger(Script(world["answers"]))
    plan = Plan(world["rules"], gate, Exact(), world["draft_length"], True, on_loop)  # type: ignore[arg-type]
    drafter, target = models(world)
    decoder, consumer, reason = run_loop(plan, drafter, target)
    assert (reason, decoder.sequence.generated) == alone(target, world["rules"])
    assert consumer.shown[: consumer.final] == decoder.sequence.generated
    assert decoder.stats.edge_tokens == 0


@settings(max_examples=200, deadline=None)
@given(worlds, st.sampled_from(["block", "repair"]), st.sampled_from(["escalate", "stop", "ignore"]))
def test_skip_gates_keep_the_books_and_the_events_straight(world: dict, scope: str, on_loop: str) -> None:
    plan = Plan(world["rules"], Script(world["answers"]), Exact(), world["draft_length"], True, on_loop, scope)  # type: ignore[arg-type]
    drafter, target = models(world)
    decoder, consumer, reason = run_loop(plan, drafter, target)
    output = decoder.sequence.generated
    assert consumer.shown[: consumer.final] == output
    assert 1 <= len(output) <= world["rules"].max_new_tokens
    ends = [find_finish_reason(world["rules"], output[:n], letters) for n in range(1, len(output) + 1)]
    assert ends[:-1] == [None] * (len(output) - 1)
    assert ends[-1] == (None if reason == "loop" else reason)
    if scope == "repair":  # whatever a verdict stands behind is the target's own
        settled = len(output) - next((n for n, s in enumerate(reversed(decoder.sequence.sources)) if s.by_cloud), 0)
        by_cloud = any(source.by_cloud for source in decoder.sequence.sources)
        assert not by_cloud or output[:settled] == alone(target, replace(world["rules"], max_new_tokens=settled))[1]
        assert consumer.settled == (output[:settled] if by_cloud else [])
    else:
        assert consumer.settled == output


@settings(max_examples=200, deadline=None)
@given(worlds, st.sampled_from(["block", "repair"]), st.integers(0, 6))
def test_once_the_cloud_is_lost_everything_is_settled_as_it_comes(world: dict, scope: str, verdicts: int) -> None:
    plan = Plan(world["rules"], Script(world["answers"]), Exact(), world["draft_length"], True, "ignore", scope)  # type: ignore[arg-type]
    decoder, consumer, _ = run_loop(plan, *models(world), verdicts=verdicts)
    if decoder.stats.cloud_lost:
        assert consumer.settled == decoder.sequence.generated


@settings(max_examples=60, deadline=None)
@given(worlds, st.sampled_from(["sample", "stop", "ignore"]))
def test_edge_only_reproduces_the_drafter_but_for_loops(world: dict, on_loop: str) -> None:
    plan = Plan(world["rules"], Always(), Exact(), world["draft_length"], False, on_loop)  # type: ignore[arg-type]
    drafter, target = models(world)
    decoder, consumer, reason = run_loop(plan, drafter, target)
    assert consumer.shown[: consumer.final] == decoder.sequence.generated
    if reason != "loop" and not decoder.stats.loop_sampled:
        assert (reason, decoder.sequence.generated) == alone(drafter, world["rules"])
    assert decoder.stats.cloud_tokens == 0


def test_a_trigger_gate_leaves_at_most_so_many_tokens_provisional() -> None:
    """Counted by single tokens: 64 pending ones ask for a verdict, 63 do not."""
    decoder = start(gate=Trigger(Never()), draft_length=FixedDraftLength(1), limit=200)
    pending = []
    while not isinstance(decoder.next(), Verify):
        propose(decoder, A)
        pending.append(decoder.sequence.pending_count)
    assert pending == list(range(1, MAX_PROVISIONAL + 1))


@pytest.mark.parametrize("drafted", [1, 2])
def test_a_block_cut_short_by_a_lost_cloud_counts_once(drafted: int) -> None:
    """Its tokens stand; the next token begins a block of its own, with all its length."""
    decoder = start()
    propose(decoder, *[A] * drafted)
    assert decoder.stats.blocks == 1
    decoder.on_verifier_lost()
    assert decoder.sequence.generated == [A] * drafted
    assert decoder.next() == Draft(3, model_only=True)
    propose(decoder, B, B, B)
    assert decoder.stats.blocks == 2
    assert decoder.sequence.generated == [A] * drafted + [B] * 3
