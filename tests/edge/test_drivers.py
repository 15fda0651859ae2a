"""The driver under random schedules: the invariant after every round, and everything closed at every end."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Result, SpeculativeDecoder, StateError, local
from outrider.config import GenerationSettings
from outrider.decoding.actions import Draft, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder, Event
from outrider.decoding.draft_length import FixedDraftLength, parse_draft_length
from outrider.decoding.gate import Always, Gate
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules
from outrider.edge.drafter import Drafter
from outrider.edge.drivers import sequential
from outrider.edge.generation import Generation
from outrider.edge.verifier_session import VerifierSession
from outrider.engines.base import CachedSequence, Prompt
from outrider.sampling.acceptance import Verdict, parse_acceptance_rule
from outrider.sampling.policy import Policy
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import HashRows, OracleEngine, ScriptedEngine, ScriptedVerifier, blend, plain
from tests.support.generation import Scheduled, block

V = 24
PROMPT = (3, 1, 4, 1, 5)
TARGET, OTHER = HashRows(1, V), HashRows(2, V)


class Watched:
    """One generation made of its parts; `run` checks the invariants at every event."""

    def __init__(self, draft: ScriptedEngine, gate: Gate, k: int | str, scope: Any, **options: Any) -> None:
        wanted = GenerationSettings(**options)
        self.draft, self.target = draft, ScriptedEngine(TARGET, V, eos_ids=(0,))
        plan = Plan(
            StopRules(wanted.max_new_tokens, (0,)),
            gate,
            parse_acceptance_rule("exact"),
            parse_draft_length(k),
            True,
            "escalate",
            scope,
        )
        self.decoder = Decoder(PROMPT, plan)
        self.policy = Policy.build(wanted, (0,), V, len(PROMPT))
        reader = CachedSequence(draft, Prompt(PROMPT), "drafter")
        self.drafter = Drafter(reader, self.policy, needs_signals=plan.draft_length.needs_signals, needs_q=False)
        self.verifier = LocalVerifier(self.target)
        params = SessionParams(wanted, "exact", V)
        self.link = VerifierSession(self.verifier, lambda verifier: verifier.open(Prompt(PROMPT), params))
        self.cached_len: list[int] = []  # what the verifier has been told or has said, and rows were asked for
        self.audited = self.disagreed = 0

    def judge(self, request: Verify) -> Verdict:
        verdict = self.link.verify(request)
        self.audited += len(request.new_ids)
        ids = self.decoder.sequence.ids
        for n in range(request.base_length - len(request.new_ids), request.base_length):
            self.disagreed += self.choice(ids[:n]) != ids[n]
        self.cached_len = [*ids[: request.base_length], *request.draft_ids[: verdict.accepted], verdict.next_token]
        return verdict

    def choice(self, ids: list[int]) -> int:
        return self.policy.distribution(TARGET(tuple(ids)), ids, len(ids)).token

    def run(self) -> list[Event]:
        events = []
        for event in sequential(self.decoder, self.drafter, self.judge):
            events.append(event)
            self.check()
        self.check()
        self.drafter.close()
        self.link.close()
        return events

    def check(self) -> None:
        """Each cache holds a proper prefix of its side's tokens, and both sides have the same ones."""
        sequence = self.decoder.sequence
        for slot in self.draft.slots.values():
            assert slot.tokens == sequence.ids[: len(slot.tokens)]
            assert len(slot.tokens) < len(sequence.ids)
        for slot in self.target.slots.values():
            assert slot.tokens == self.cached_len[: len(slot.tokens)]
            assert len(slot.tokens) < len(self.cached_len)
        committed = sequence.ids[: sequence.committed_length]
        assert committed == [*PROMPT, *sequence.generated]
        shared = min(len(self.cached_len), len(committed))
        assert self.cached_len[:shared] == committed[:shared], "the two sides disagree about a committed token"


drafting = st.one_of(
    st.builds(
        lambda share: ScriptedEngine(blend(TARGET, OTHER, share), V), st.sampled_from((0.0, 0.1, 0.25, 0.5, 1.0))
    ),
    st.builds(
        lambda errors: OracleEngine(5, plain(TARGET, PROMPT, V, max_new_tokens=40), V, errors),
        st.sets(st.integers(0, 39)),
    ),
)
options_of = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 40),
        "repetition_penalty": st.sampled_from((1.0, 1.2)),
        "no_repeat_ngram_size": st.sampled_from((0, 0, 2)),
        "ignore_eos": st.just(False),
        "temperature": st.sampled_from((0.0, 1.0)),
        "seed": st.integers(0, 9),
    }
).flatmap(
    lambda given: st.sampled_from((0, 1, 4) if given["repetition_penalty"] != 1.0 else (0,)).map(
        lambda window: {**given, "repetition_window": window}
    )
)
ks = st.sampled_from((1, 2, 3, 5, 8, "auto"))


@settings(max_examples=150)
@given(draft=drafting, k=ks, answers=st.lists(st.booleans(), max_size=30), options=options_of)
def test_a_trigger_gate_at_any_time_leaves_the_output_alone(
    draft: ScriptedEngine, k: int | str, answers: list[bool], options: dict[str, Any]
) -> None:
    run = Watched(draft, Scheduled(answers, exact=True), k, "block", **options)
    run.run()
    assert run.decoder.sequence.generated == plain(TARGET, PROMPT, V, eos=(0,), **options)
    assert all(source.by_cloud for source in run.decoder.sequence.sources)
    assert draft.refed == run.target.refed == 0
    assert not draft.open_slots
    assert not run.target.open_slots


@settings(max_examples=200)
@given(
    draft=drafting,
    k=ks,
    answers=st.lists(st.booleans(), max_size=30),
    scope=st.sampled_from(("block", "repair")),
    options=options_of,
)
def test_a_skip_gate_at_any_time_keeps_both_sides_in_step(
    draft: ScriptedEngine, k: int | str, answers: list[bool], scope: str, options: dict[str, Any]
) -> None:
    """Every token with a verdict behind it is the target's choice given what stands before it, skipped or not."""
    run = Watched(draft, Scheduled(answers), k, scope, **options)
    run.run()
    sequence, stats = run.decoder.sequence, run.decoder.stats
    for n, source in enumerate(sequence.sources, len(PROMPT)):
        if source.by_cloud:
            assert run.choice(sequence.ids[:n]) == sequence.ids[n]
    if scope == "repair":
        clouds = [source.by_cloud for source in sequence.sources]
        assert clouds == sorted(clouds, reverse=True), "what a verdict has seen is repaired up to there"
        assert stats.audited == 0
    else:
        assert (stats.audited, stats.disagreed) == (run.audited, run.disagreed)
    assert 0 not in sequence.generated[:-1], "nothing follows EOS"
    assert len(sequence.generated) <= options["max_new_tokens"]
    assert not draft.open_slots
    assert not run.target.open_slots


@settings(max_examples=80)
@given(
    draft=drafting,
    k=ks,
    answers=st.lists(st.booleans(), max_size=30),
    mode=st.sampled_from(("trigger", "block", "repair")),
    options=options_of,
)
def test_events_replayed_give_the_output(
    draft: ScriptedEngine, k: int | str, answers: list[bool], mode: str, options: dict[str, Any]
) -> None:
    """Someone who sees nothing but events ends with the tokens of the result."""
    scope = "repair" if mode == "repair" else "block"
    run = Watched(draft, Scheduled(answers, exact=mode == "trigger"), k, scope, **options)
    seen: list[int] = []
    final: set[int] = set()
    for event in run.run():
        if event.kind == "revised":
            del seen[event.index :]
        if event.index == len(seen):
            seen.append(event.token)
        assert seen[event.index] == event.token
        if event.kind != "provisional":
            final = {n for n in final if n < event.index} | {event.index}
    output = run.decoder.sequence.generated
    assert seen[: len(output)] == output
    assert final == set(range(len(output)))


# The loop over nothing, and other ends ----------------------------------------------------------------------------


def parts(output: list[int], k: int = 3) -> tuple[Decoder, Drafter, OracleEngine]:
    plan = Plan(StopRules(len(output)), Always(), parse_acceptance_rule("exact"), FixedDraftLength(k), True, "ignore")
    engine = OracleEngine(len(PROMPT), output, V)
    policy = Policy.build(GenerationSettings(), (), V, len(PROMPT))
    drafter = Drafter(CachedSequence(engine, Prompt(PROMPT), "drafter"), policy, needs_signals=False, needs_q=False)
    return Decoder(PROMPT, plan), drafter, engine


def test_the_session_is_opened_by_the_first_escalated_block() -> None:
    output = list(range(1, 13))
    draft = OracleEngine(len(PROMPT), output, V)
    for gate, opened in ((Scheduled([False] * 9), 0), (Scheduled([False, False, True, False]), 1), (Always(), 1)):
        verifier = ScriptedVerifier(output, V)
        decoder = SpeculativeDecoder(draft, verifier, k=3, gate=gate, on_loop="ignore")
        result = decoder.generate(list(PROMPT), max_new_tokens=12)
        assert result.token_ids == output
        assert len(verifier.opened) == len(verifier.closed) == opened
        assert result.guarantee == {0: "edge-only", 1: "best-effort"}[opened] if gate != Always() else "exact"


def test_requests_carry_round_base_and_what_is_new() -> None:
    output = list(range(1, 13))
    verifier = ScriptedVerifier(output, V)
    gate = Scheduled([True, False, False, True])
    draft = OracleEngine(len(PROMPT), output, V, errors=(1,))
    SpeculativeDecoder(draft, verifier, k=2, gate=gate, on_loop="ignore").generate(list(PROMPT), max_new_tokens=12)
    first, second = verifier.requests[:2]
    assert first == Verify(1, 5, (), (1, 3))
    assert second == Verify(2, 11, (3, 4, 5, 6), (7, 8))


def test_an_action_that_nobody_can_do_is_a_state_error() -> None:
    decoder, drafter, _ = parts([1, 2, 3])
    with pytest.raises(StateError, match=r"Draft.* needs a drafter or verifier that is missing"):
        list(sequential(decoder, None, lambda request: Verdict(1, 0, 1)))
    with pytest.raises(StateError, match=r"Verify.* needs a drafter or verifier that is missing"):
        list(sequential(decoder, drafter, None))


def test_a_verdict_on_another_block_is_refused_and_the_right_one_still_counts() -> None:
    decoder, drafter, _ = parts([1, 2, 3, 4, 5, 6, 7, 8])
    decoder.drafted(block(drafter, decoder.sequence.ids, 3))
    asked = decoder.next()
    assert isinstance(asked, Verify)
    for verdict in (Verdict(0, 1, 5), Verdict(2, 1, 5), Verdict(1, 4, 5), Verdict(1, -1, 5)):
        with pytest.raises(StateError, match="does not answer"):
            decoder.decided(verdict)
        assert decoder.next() == asked
        assert decoder.sequence.pending == [1, 2, 3]
    decoder.decided(Verdict(1, 3, 4))
    assert decoder.sequence.generated == [1, 2, 3, 4]
    with pytest.raises(StateError, match="does not answer"):
        decoder.decided(Verdict(1, 3, 4))
    assert decoder.sequence.generated == [1, 2, 3, 4]


def test_asking_what_is_next_changes_nothing() -> None:
    decoder, drafter, _ = parts([1, 2, 3, 4, 5, 6, 7, 8])
    for _ in range(3):
        assert decoder.next() == Draft(3)
    decoder.drafted(block(drafter, decoder.sequence.ids, 3))
    asked = [decoder.next() for _ in range(3)]
    assert asked[0] is asked[1] is asked[2]
    assert decoder.stats.rounds == decoder.stats.blocks == decoder.stats.escalated == 1


# The drafter ------------------------------------------------------------------------------------------------------


def test_a_drafter_stops_at_eos_and_feeds_nothing_twice() -> None:
    engine = OracleEngine(len(PROMPT), [7, 8, 0, 9], V)
    policy = Policy.build(GenerationSettings(), (0,), V, len(PROMPT))
    drafter = Drafter(CachedSequence(engine, Prompt(PROMPT), "drafter"), policy, needs_signals=True, needs_q=False)
    proposals = block(drafter, PROMPT, 8, eos=(0,))
    assert [proposal.token for proposal in proposals] == [7, 8, 0]
    assert all(proposal.signals is not None and proposal.q is None for proposal in proposals)
    assert engine.fed == len(PROMPT) + 2
    drafter.rollback_to(len(PROMPT) + 1)
    assert engine.slots[engine.open_slots[0]].tokens == list(PROMPT)
    drafter.draft([*PROMPT, 7], Draft(1))
    assert engine.refed == 1, "one token, which had been rolled back"
    drafter.close()
    assert not engine.open_slots


class Slow(ScriptedEngine):
    """Takes `seconds` for every forward, on a clock that stands still otherwise."""

    seconds = now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def forward(self, slot: int, ids: Any, rows: int | None = None) -> torch.Tensor:
        self.now += self.seconds
        return super().forward(slot, ids, rows)


@pytest.mark.parametrize(("seconds", "pieces"), [(0.001, [1, 4, 5]), (0.03, [1, 1, 1])])
def test_the_first_token_comes_alone_and_of_a_slow_drafter_every_one(
    seconds: float, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Slow(TARGET, V)
    monkeypatch.setattr("outrider.edge.drafter.time", engine)
    engine.seconds = seconds
    policy = Policy.build(GenerationSettings(), (), V, len(PROMPT))
    drafter = Drafter(CachedSequence(engine, Prompt(PROMPT), "drafter"), policy, needs_signals=False, needs_q=False)
    ids, found = list(PROMPT), []
    for count in (5, 4, 5):
        found.append(drafter.draft(ids, Draft(count)))
        ids += [proposal.token for proposal in found[-1]]
    assert [len(piece) for piece in found] == pieces
    assert ids[len(PROMPT) :] == plain(TARGET, PROMPT, V, max_new_tokens=sum(pieces))
    assert seconds <= drafter.prefill_seconds < drafter.seconds


def test_a_loop_is_left_by_one_random_draw_among_the_best() -> None:
    """The block goes on from there greedily; the draw depends on the seed, and on nothing else."""
    policy = {seed: Policy.build(GenerationSettings(seed=seed), (), V, len(PROMPT)) for seed in range(30)}
    best = TARGET(PROMPT).topk(5).indices.tolist()
    drawn = set()
    for seed in range(30):
        blocks = []
        for _ in range(2):
            reader = CachedSequence(ScriptedEngine(TARGET, V), Prompt(PROMPT), "drafter")
            drafter = Drafter(reader, policy[seed], needs_signals=False, needs_q=False)
            blocks.append(block(drafter, PROMPT, 3, leave_loop=True))
        assert blocks[0] == blocks[1]
        tokens = [proposal.token for proposal in blocks[0]]
        assert [proposal.left_loop for proposal in blocks[0]] == [True, False, False]
        assert tokens[1:] == plain(TARGET, (*PROMPT, tokens[0]), V, max_new_tokens=2)
        drawn.add(tokens[0])
    assert drawn <= set(best)
    assert len(drawn) > 1


# Closing ----------------------------------------------------------------------------------------------------------


class Fails(ScriptedEngine):
    """Its n-th forward raises."""

    at = 0

    def forward(self, slot: int, ids: Any, rows: int | None = None) -> torch.Tensor:
        if self.forwards == self.at:
            raise RuntimeError("broken")
        return super().forward(slot, ids, rows)


def pair(draft: type[ScriptedEngine] = ScriptedEngine, target: type[ScriptedEngine] = ScriptedEngine) -> tuple:
    return draft(blend(TARGET, OTHER, 0.25), V), target(TARGET, V)


@pytest.mark.parametrize("gate", ["always", "trigger:entropy:1", "entropy:1"])
@pytest.mark.parametrize("side", [0, 1])
def test_slots_are_closed_after_an_error_in_any_forward(side: int, gate: str) -> None:
    for at in range(30):
        engines = pair(Fails, ScriptedEngine) if side == 0 else pair(ScriptedEngine, Fails)
        engines[side].at = at
        decoder = SpeculativeDecoder(engines[0], local(engines[1]), k=3, gate=gate)
        try:
            decoder.generate(list(PROMPT), max_new_tokens=20)
        except RuntimeError:
            assert engines[side].forwards == at
        assert not engines[0].open_slots
        assert not engines[1].open_slots
    assert at == 29


def test_a_closed_stream_ends_its_generation_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer Pythons keep the inner generator alive for a while after the outer one was closed."""
    kept, events = [], Generation.events
    monkeypatch.setattr(Generation, "events", lambda run: kept.append(events(run)) or kept[-1])
    draft, target = pair()
    stream = SpeculativeDecoder(draft, local(target), k=3).stream(list(PROMPT), max_new_tokens=20)
    next(stream)
    stream.close()
    assert inspect.getgeneratorstate(kept[0]) == inspect.GEN_CLOSED
    assert not draft.open_slots


def test_slots_are_closed_after_an_abandoned_stream() -> None:
    for count in range(1, 12):
        draft, target = pair()
        stream = SpeculativeDecoder(draft, local(target), k=3).stream(list(PROMPT), max_new_tokens=20)
        for _ in range(count):
            next(stream)
        assert draft.open_slots
        stream.close()
        assert not draft.open_slots
        assert not target.open_slots


def test_a_stream_that_was_never_begun_opens_nothing() -> None:
    draft, target = pair()
    SpeculativeDecoder(draft, local(target)).stream(list(PROMPT)).close()
    assert not draft.opened
    assert not target.opened


def test_a_session_that_cannot_be_opened_leaves_no_slot() -> None:
    class Refuses(ScriptedVerifier):
        def open(self, prompt: Prompt, params: SessionParams) -> int:
            raise StateError("full")

    draft, _ = pair()
    with pytest.raises(StateError, match="full"):
        SpeculativeDecoder(draft, Refuses([], V), k=3).generate(list(PROMPT), max_new_tokens=5)
    assert not draft.open_slots


def test_a_stream_says_what_generate_says() -> None:
    draft, target = pair()
    decoder = SpeculativeDecoder(draft, local(target), k=3)
    whole = decoder.generate(list(PROMPT), max_new_tokens=20)
    stream = decoder.stream(list(PROMPT), max_new_tokens=20)
    tokens: dict[int, int] = {}
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            streamed: Result = end.value
            break
        if event.kind != "provisional":
            tokens[event.index] = event.token_id
    assert list(tokens.values()) == streamed.token_ids == whole.token_ids
    assert streamed.sources == whole.sources


# Counting ---------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    draft=drafting,
    k=ks,
    gate=st.sampled_from(("always", "never", "trigger:entropy:1.5", "entropy:1.5", "margin:0.3|logprob:1")),
    limit=st.integers(1, 40),
)
def test_the_counters_add_up(draft: ScriptedEngine, k: int | str, gate: str, limit: int) -> None:
    target = ScriptedEngine(TARGET, V, eos_ids=(0,))
    result = SpeculativeDecoder(draft, local(target), k=k, gate=gate).generate(list(PROMPT), max_new_tokens=limit)
    stats, sources = result.stats, result.sources
    assert stats.cloud_tokens + stats.edge_tokens == len(result.token_ids) == len(sources)
    assert stats.accepted + stats.corrected + stats.bonus == stats.cloud_tokens
    assert stats.accepted == sources.count(Source.ACCEPTED) <= stats.verified <= stats.drafted
    assert stats.edge_tokens == sources.count(Source.EDGE)
    assert stats.corrected + stats.bonus <= stats.rounds <= stats.corrected + stats.bonus + 1
    assert stats.rounds == stats.escalated <= stats.blocks
    assert stats.forced_by_loop <= stats.escalated
    assert (result.guarantee == "exact") == (stats.edge_tokens == 0)
    assert (result.guarantee == "edge-only") == (stats.cloud_tokens == 0)
    assert 0 <= stats.ttft_s <= stats.total_s


def test_proposals_past_the_end_of_the_block_are_not_taken() -> None:
    decoder, _, _ = parts([1, 2, 3, 4, 5], k=3)
    decoder.drafted([Proposal(token) for token in (1, 2, 3, 4, 5, 6)])
    assert decoder.sequence.pending == [1, 2, 3]
    assert decoder.stats.drafted == 3
