"""A decoder driven by hand: scripted gates, proposals and verdicts, and the checks that hold after every step."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from outrider.decoding.actions import Done, Draft, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder, Event
from outrider.decoding.draft_length import ConfidenceStop, FixedDraftLength
from outrider.decoding.gate import Always, Decision, Never, Signals
from outrider.decoding.stopping import StopRules
from outrider.sampling.acceptance import Exact, Verdict

EOS = 9
PROMPT = [50, 51]
A, B, C = 1, 2, 3
Model = Callable[[list[int]], int]


@dataclass
class Script:
    """A gate that answers what the list says, then always `rest`."""

    answers: list[bool] = field(default_factory=list)
    rest: bool = False
    needs_signals = False
    exact = False

    def decide(self, block: object) -> Decision:
        return Decision(self.answers.pop(0) if self.answers else self.rest, "script")


def letters(ids: list[int]) -> str:
    return "".join(chr(96 + token) for token in ids)


BASIC = Plan(StopRules(20, (EOS,)), Always(), Exact(), FixedDraftLength(3), has_verifier=True, on_loop="escalate")


def start(**changes: object) -> Decoder:
    """A decoder of the basic plan: k = 3, gate always, 20 tokens. `stop`, `sentences` and `limit` set its rules."""
    rules = StopRules(changes.pop("limit", 20), (EOS,), changes.pop("stop", ()))  # type: ignore[arg-type]
    plan = replace(BASIC, stop_rules=rules, **changes)  # type: ignore[arg-type]
    return Decoder(PROMPT, plan, letters if rules.needs_text else None)


def propose(decoder: Decoder, *tokens: int) -> None:
    assert isinstance(decoder.next(), Draft)
    decoder.drafted([Proposal(token) for token in tokens])


def decide(decoder: Decoder, accepted: int, next_token: int, **more: object) -> Verify:
    request = decoder.next()
    assert isinstance(request, Verify)
    decoder.decided(Verdict(request.round, accepted, next_token, **more))  # type: ignore[arg-type]
    return request


def kinds(events: list[Event]) -> list[tuple[str, int, int]]:
    return [(event.kind, event.index, event.token) for event in events]


def ended(decoder: Decoder, reason: str, *output: int) -> None:
    """The end, and the books: no counter runs past it."""
    assert decoder.next() == Done(reason)  # type: ignore[arg-type]
    assert decoder.sequence.generated == list(output)
    assert decoder.sequence.pending == []
    balanced(decoder)


def balanced(decoder: Decoder) -> None:
    stats, output = decoder.stats, decoder.sequence.generated
    stats.count_sources(decoder.sequence.sources)
    assert stats.cloud_tokens + stats.edge_tokens == len(output)
    assert stats.accepted + stats.corrected + stats.bonus == stats.cloud_tokens
    assert stats.accepted <= stats.verified <= stats.drafted
    assert stats.corrected + stats.bonus <= stats.rounds
    assert stats.forced_by_loop <= stats.escalated <= stats.blocks


def looping(blocks: int, **changes: object) -> Decoder:
    """A drafter that says ABAB, a gate that never minds; `blocks` of four are drafted."""
    decoder = start(**{"gate": Never(), "draft_length": FixedDraftLength(4), "limit": 100, **changes})
    for _ in range(blocks):
        propose(decoder, A, B, A, B)
    return decoder


class Consumer:
    """What a naive reader of the events shows, how much of it is final, and what it was told that stays."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.final = 0
        self.settled: list[int] = []

    def take(self, event: Event) -> None:
        if event.kind == "revised":
            assert event.index < len(self.shown)
            del self.shown[event.index :]
            self.final = event.index
        if event.index == len(self.shown):
            self.shown.append(event.token)
        else:
            assert event.kind == "confirmed"
            assert self.shown[event.index] == event.token
        if event.kind != "provisional":
            self.final = max(self.final, event.index + 1)
        assert event.settled <= self.final
        assert self.shown[: len(self.settled)] == self.settled, "what was settled was taken back"
        assert event.settled >= len(self.settled)
        self.settled = self.shown[: event.settled]


class Cloud:
    """A verifier with its own copy of the tokens, as a remote one has: it checks every base length."""

    def __init__(self, target: Model) -> None:
        self.ids, self.target = list(PROMPT), target

    def judge(self, request: Verify) -> Verdict:
        assert len(self.ids) + len(request.new_ids) == request.base_length
        ids = [*self.ids, *request.new_ids]
        accepted = 0
        while accepted < len(request.draft_ids) and request.draft_ids[accepted] == self.target(ids):
            ids.append(request.draft_ids[accepted])
            accepted += 1
        self.ids = [*ids, self.target(ids)]
        return Verdict(request.round, accepted, self.ids[-1], audited=len(request.new_ids))


def chance(seed: int, ids: list[int], sides: int) -> int:
    return zlib.crc32(repr((seed, ids)).encode()) % sides


def model(seed: int, loopy: bool) -> Model:
    """A deterministic model over tokens 1–4 and a rare EOS; a loopy one likes to say what it said two tokens ago."""

    def following(ids: list[int]) -> int:
        if loopy and chance(seed, ids, 12):
            return ids[-2] if ids[-2] in (1, 2, 3, 4) else 1 + len(ids) % 2
        return EOS if not chance(seed + 1, ids, 30) else 1 + chance(seed + 2, ids, 4)

    return following


def mostly(target: Model, seed: int, sides: int) -> Model:
    """A drafter that differs from the target once in `sides` tokens."""
    return lambda ids: 1 + chance(seed, ids, 4) if not chance(seed + 3, ids, sides) else target(ids)


def run(plan: Plan, drafter: Model, target: Model, verdicts: int | None = None) -> tuple[Decoder, Consumer, str]:
    """The sequential driver, with every invariant checked after every step. verdicts: then the cloud is lost."""
    decoder, cloud, consumer = Decoder(PROMPT, plan, letters), Cloud(target), Consumer()
    while not isinstance(action := decoder.next(), Done):
        if isinstance(action, Draft):
            ids, proposals = list(decoder.sequence.ids), []
            for n in range(action.count):
                leave = action.leave_loop and n == 0
                ids.append(1 + chance(5, ids, 4) if leave else drafter(ids))
                proposals.append(Proposal(ids[-1], Signals(0.0, 1.0, 0.0, 0.2), left_loop=leave))
            decoder.drafted(proposals)
        elif action.round - 1 == verdicts:
            decoder.on_verifier_lost()
        else:
            decoder.decided(cloud.judge(action))
            committed = decoder.sequence.ids[: decoder.sequence.committed_length]
            assert cloud.ids[: len(committed)] == committed
        for event in decoder.events():
            consumer.take(event)
        balanced(decoder)
    for event in decoder.events():
        consumer.take(event)
    return decoder, consumer, action.reason


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "loopy": st.booleans(),
        "sides": st.integers(2, 12),
        "answers": st.lists(st.booleans(), max_size=25),
        "draft_length": st.sampled_from(
            [
                FixedDraftLength(1),
                FixedDraftLength(2),
                FixedDraftLength(5),
                ConfidenceStop(max_tokens=6, min_survival=0.4),
            ]
        ),
        "rules": st.builds(
            StopRules,
            st.integers(1, 45),
            st.just((EOS,)),
            st.sampled_from([(), ("abc",), ("dd", "acb")]),
        ),
    }
)


def models(world: dict) -> tuple[Model, Model]:
    target = model(world["seed"], world["loopy"])
    return mostly(target, world["seed"] + 7, world["sides"]), target
