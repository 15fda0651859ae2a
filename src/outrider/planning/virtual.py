"""A clock of our own, and what moves it: a drafter, a cloud and a network that cost time but take none.

The decoder and the drivers that run between them are those that run live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.config import DriverName
from outrider.core.acceptance import Verdict
from outrider.core.actions import Draft, Proposal, Verify
from outrider.core.decoder import Decoder, Event
from outrider.core.gate import Signals
from outrider.edge.drivers import pipelined, sequential
from outrider.edge.lessons import Lessons
from outrider.errors import SettingsError
from outrider.netem.conditions import Conditions
from outrider.planning.costs import ID_BYTES, OPEN_BYTES, TRANSPORT_DOWN, Costs
from outrider.planning.traces import Trace
from outrider.verifiers.session import AUDITED
from outrider.wire.frames import HEADER
from outrider.wire.ledger import PREFIX_BYTES
from outrider.wire.messages import pack_verdict, pack_verify

WINDOW = 65_535  # bytes that HTTP/2 lets under way before the other side says that it has room (RFC 9113, 6.9.2)
FRAMING = PREFIX_BYTES + HEADER
NO_TOKEN = 2**20  # what is drafted beyond the end of a text, where nobody knows


@dataclass
class Clock:
    """Seconds since the start."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Flight:
    """A verdict on its way: there at `arrives`."""

    clock: Clock
    arrives: float
    verdict: Verdict

    def done(self) -> bool:
        return self.clock.now >= self.arrives

    def result(self) -> Verdict:
        self.clock.now = max(self.clock.now, self.arrives)
        return self.verdict


class Far(Protocol):
    """A cloud in virtual time."""

    def submit(self, request: Verify) -> Flight: ...


def drive(
    decoder: Decoder,
    drafter: Any,
    far: Far | None,
    clock: Callable[[], float],
    driver: DriverName = "sequential",
    stream: Callable[[Verify], Verdict] | None = None,
) -> Iterator[Event]:
    """The live driver of that name between scripted parts. stream: cloud-only verdicts, in place of `far`."""
    lessons = Lessons(decoder, clock)
    if driver == "pipelined" and far is not None and drafter is not None:
        link: Any = far
        return pipelined(decoder, drafter, link, lessons)
    return sequential(
        decoder, drafter, stream if far is None else lambda request: far.submit(request).result(), lessons
    )


@dataclass
class Line:
    """One way: what is sent waits for what was sent before it, then for half a round trip."""

    bits_per_s: float | None
    rtt_s: float
    bytes: int = 0
    free_at: float = 0.0

    def arrival(self, size: int, now: float) -> float:
        """When the last of `size` bytes, sent `now`, is there. What exceeds a window waits for room."""
        self.bytes += size
        start = max(now, self.free_at)
        rest, window_s = (size - 1) // WINDOW, self._seconds(WINDOW)
        self.free_at = start + self._seconds(size) + rest * max(0.0, self.rtt_s - window_s)
        return self.free_at + self.rtt_s / 2

    def _seconds(self, size: int) -> float:
        return size * 8 / self.bits_per_s if self.bits_per_s else 0.0


class ScriptedDrafter:
    """Proposes what the trace says for the position, whatever the text is by now.

    Behind its end `beyond` is proposed, as unsure as the last token was.
    """

    def __init__(self, trace: Trace, costs: Costs, clock: Clock, *, ends: frozenset[int], beyond: int, sure: bool):
        self._trace, self._costs, self._clock, self._ends = trace, costs, clock, ends
        self._beyond, self._sure, self._first = beyond, sure, True
        self.seconds = 0.0

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        proposals: list[Proposal] = []
        for n in range(action.count):
            proposals.append(self._propose(len(ids) - 1 + n))
            if proposals[-1].token in self._ends:
                break
        seconds = self._costs.drafting_s(len(proposals), first=self._first, sure=self._sure)
        self._first = False
        self.seconds += seconds
        self._clock.spend(seconds)
        return proposals

    def settle(self, length: int) -> None:
        """No cache to roll back."""

    def _propose(self, at: int) -> Proposal:
        trace, known = self._trace, at < len(self._trace.draft)
        signals: Signals = trace.signals[min(at, len(trace.signals) - 1)]
        return Proposal(trace.draft[at] if known else self._beyond, signals if self._sure else None)


@dataclass
class ScriptedCloud:
    """Exact verdicts by position, after the network, the queue and the verifier's time.

    queue_s: before each verdict. end: the target's token behind the end of the trace.
    """

    trace: Trace
    costs: Costs
    clock: Clock
    net: Conditions
    queue_s: float
    end: int
    busy_s: float = 0.0
    media_bytes: int = 0
    up: Line = field(init=False)
    down: Line = field(init=False)
    _stream_at: float = 0.0

    def __post_init__(self) -> None:
        check_steady(self.net)
        self.up, self.down = Line(self.net.up, self.net.rtt), Line(self.net.down, self.net.rtt)

    def submit(self, request: Verify) -> Flight:
        count = len(request.new_ids) + len(request.draft_ids)
        there = self._reach(request)
        compute = self.costs.computing_s(count, first=request.round == 1)
        verdict = self._judge(request, compute)
        ready = there + self.queue_s + compute + self.costs.per_round_overhead_s
        return Flight(self.clock, self._return(verdict, len(request.draft_ids), ready), verdict)

    def stream(self, request: Verify) -> Verdict:
        """Cloud-only: asked once; token after token comes when the target has it."""
        if request.round == 1:
            self._stream_at = self._reach(request) + self.costs.per_round_overhead_s
        compute = self.costs.streaming_s(first=request.round == 1)
        verdict = self._judge(request, compute)
        self._stream_at += self.queue_s + compute
        return Flight(self.clock, self._return(verdict, 0, self._stream_at), verdict).result()

    def said(self, at: int) -> int:
        """The target's token at a position of its output."""
        return self.trace.target[at] if at < len(self.trace.target) else self.end

    def _reach(self, request: Verify) -> float:
        """When the request is with the verifier; the first one opens the session and brings the recording."""
        size = FRAMING + pack_verify(self._placed(request)).ByteSize()
        if request.round == 1:
            self.media_bytes = self.trace.media_bytes
            prompt = 0 if self.media_bytes else ID_BYTES * self.trace.prompt_tokens  # placeholders are folded
            size += OPEN_BYTES + prompt + self.media_bytes
        return self.up.arrival(size, self.clock.now)

    def _return(self, verdict: Verdict, drafts: int, at: float) -> float:
        return self.down.arrival(FRAMING + TRANSPORT_DOWN + pack_verdict(verdict, drafts).ByteSize(), at)

    def _placed(self, request: Verify) -> Verify:
        """As it would be sent: the decoder's prompt here is one token."""
        return replace(request, base_length=request.base_length - 1 + self.trace.prompt_tokens)

    def _judge(self, request: Verify, compute: float) -> Verdict:
        self.busy_s += compute
        at = request.base_length - 1
        skipped = request.new_ids[-AUDITED:]
        first = at - len(skipped)
        disagreed = sum(token != self.said(first + n) for n, token in enumerate(skipped))
        wrong = (n for n, token in enumerate(request.draft_ids) if token != self.said(at + n))
        accepted = next(wrong, len(request.draft_ids))
        said = self.said(at + accepted)
        return Verdict(request.round, accepted, said, (), len(skipped), disagreed, self.queue_s, compute)


def check_steady(net: Conditions) -> None:
    """Raise SettingsError for a network that is not the same at all times."""
    changing = {"jitter": net.jitter, "stall": net.stall_every, "cut": net.cut_after}
    named = [name for name, value in changing.items() if value]
    if named:
        raise SettingsError(f"a simulated network has rtt and bandwidth only, not {', '.join(named)}: {net}")
