"""Virtual time: a clock, and a simulated drafter, cloud and network that advance it.

The decoder and the drivers between them are those of a live run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.config import DriverName
from outrider.decoding.actions import Draft, Proposal, Verify
from outrider.decoding.decoder import Decoder, Event
from outrider.edge.drivers import pipelined, sequential
from outrider.edge.round_observer import RoundObserver
from outrider.errors import SettingsError
from outrider.netem.conditions import Conditions
from outrider.planning.costs import ID_BYTES, OPEN_BYTES, TRANSPORT_DOWN, StepCosts
from outrider.planning.traces import Trace
from outrider.protocol.messages import pack_verdict, pack_verify
from outrider.sampling.acceptance import Verdict
from outrider.sampling.sampler import Signals
from outrider.transport.byte_counts import PREFIX_BYTES
from outrider.transport.frames import FRAME_HEADER_SIZE
from outrider.verifiers.session import MAX_AUDITED

WINDOW = 65_535  # initial flow-control window of HTTP/2, in bytes (RFC 9113, 6.9.2)
FRAMING = PREFIX_BYTES + FRAME_HEADER_SIZE
UNKNOWN_TOKEN = 2**20  # drafted beyond the end of a trace


@dataclass
class Clock:
    """Virtual seconds since the start."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


@dataclass(frozen=True)
class InFlight:
    """A verdict in flight, which arrives at `arrives`."""

    clock: Clock
    arrives: float
    verdict: Verdict

    def done(self) -> bool:
        """Return whether the verdict has arrived."""
        return self.clock.now >= self.arrives

    def result(self) -> Verdict:
        """Advance the clock to the arrival and return the verdict."""
        self.clock.now = max(self.clock.now, self.arrives)
        return self.verdict


class SimulatedVerifier(Protocol):
    """A cloud in virtual time."""

    def submit(self, request: Verify) -> InFlight:
        """Send a request and return its verdict in flight."""
        ...


def run_driver(
    decoder: Decoder,
    drafter: Any,
    verifier: SimulatedVerifier | None,
    clock: Callable[[], float],
    driver: DriverName = "sequential",
) -> Iterator[Event]:
    """Run the live driver of that name."""
    observer = RoundObserver(decoder, clock)
    if driver == "pipelined" and verifier is not None and drafter is not None:
        link: Any = verifier
        return pipelined(decoder, drafter, link, observer)
    verify = None if verifier is None else lambda request: verifier.submit(request).result()
    return sequential(decoder, drafter, verify, observer)


@dataclass
class SimulatedLink:
    """One direction of a link. A message waits for earlier messages, then takes half a round trip."""

    bits_per_s: float | None
    rtt_s: float
    bytes: int = 0
    free_at: float = 0.0

    def arrival(self, size: int, now: float) -> float:
        """Return the arrival time of a message sent `now`. Bytes beyond a flow-control window wait for its update."""
        self.bytes += size
        start = max(now, self.free_at)
        rest, window_s = (size - 1) // WINDOW, self._seconds(WINDOW)
        self.free_at = start + self._seconds(size) + rest * max(0.0, self.rtt_s - window_s)
        return self.free_at + self.rtt_s / 2

    def _seconds(self, size: int) -> float:
        return size * 8 / self.bits_per_s if self.bits_per_s else 0.0


class SimulatedDrafter:
    """Proposes the trace's draft of each position, independent of the text.

    Beyond the end of the trace it proposes `filler`, with the signals of the last token.
    """

    def __init__(
        self, trace: Trace, costs: StepCosts, clock: Clock, *, ends: frozenset[int], filler: int, with_signals: bool
    ):
        self._trace, self._costs, self._clock, self._ends = trace, costs, clock, ends
        self._filler, self._with_signals, self._first = filler, with_signals, True
        self.seconds = 0.0

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Draft a block and advance the clock."""
        proposals: list[Proposal] = []
        for n in range(action.count):
            proposals.append(self._propose(len(ids) - 1 + n))
            if proposals[-1].token in self._ends:
                break
        seconds = self._costs.drafting_s(len(proposals), first=self._first, with_signals=self._with_signals)
        self._first = False
        self.seconds += seconds
        self._clock.spend(seconds)
        return proposals

    def rollback_to(self, length: int) -> None:
        """Ignore the roll-back, as there is no cache."""

    def _propose(self, at: int) -> Proposal:
        trace, known = self._trace, at < len(self._trace.draft)
        signals: Signals = trace.signals[min(at, len(trace.signals) - 1)]
        return Proposal(trace.draft[at] if known else self._filler, signals if self._with_signals else None)


@dataclass
class SimulatedCloud:
    """Returns exact verdicts by position, after the time of the network, the queue and the verifier.

    queue_s: wait before each verdict. end: the target's token beyond the end of the trace.
    """

    trace: Trace
    costs: StepCosts
    clock: Clock
    net: Conditions
    queue_s: float
    end: int
    busy_s: float = 0.0
    media_bytes: int = 0
    up: SimulatedLink = field(init=False)
    down: SimulatedLink = field(init=False)
    _stream_at: float | None = None  # the end of the last streamed token's computation, None without a stream

    def __post_init__(self) -> None:
        check_constant(self.net)
        self.up, self.down = SimulatedLink(self.net.up, self.net.rtt), SimulatedLink(self.net.down, self.net.rtt)

    def submit(self, request: Verify) -> InFlight:
        """Verify a block, or stream the next token if there is no block."""
        count = len(request.new_ids) + len(request.draft_ids)
        if not count:
            return self._stream(request)
        self._stream_at = None
        arrival = self._send(request)
        compute = self.costs.computing_s(count, first=request.round == 1)
        verdict = self._verify(request, compute)
        ready = arrival + self.queue_s + compute + self.costs.per_round_overhead_s
        return InFlight(self.clock, self._return(verdict, len(request.draft_ids), ready), verdict)

    def _stream(self, request: Verify) -> InFlight:
        """Return the next token of plain decoding. A stream takes one request in all."""
        start, begins = self._stream_at, self._stream_at is None
        if start is None:
            start = self._send(request) + self.costs.per_round_overhead_s
        compute = self.costs.streaming_s(first=request.round == 1)
        verdict = self._verify(request, compute)
        self._stream_at = start + self.queue_s + compute
        return InFlight(self.clock, self._return(verdict, 0, self._stream_at, answers=begins), verdict)

    def target_token(self, at: int) -> int:
        """Return the target's token at a position of its output."""
        return self.trace.target[at] if at < len(self.trace.target) else self.end

    def _send(self, request: Verify) -> float:
        """Return the arrival time of a request. The first one also opens the session and carries the recording."""
        size = FRAMING + pack_verify(self._to_wire(request)).ByteSize()
        if request.round == 1:
            self.media_bytes = self.trace.media_bytes
            prompt = (
                0 if self.media_bytes else ID_BYTES * self.trace.prompt_tokens
            )  # placeholders are run-length encoded
            size += OPEN_BYTES + prompt + self.media_bytes
        return self.up.arrival(size, self.clock.now)

    def _return(self, verdict: Verdict, drafts: int, at: float, *, answers: bool = True) -> float:
        """Return the arrival time of a verdict. answers: a request arrived before it, which updates the windows."""
        transport = TRANSPORT_DOWN if answers else 0
        return self.down.arrival(FRAMING + transport + pack_verdict(verdict, drafts).ByteSize(), at)

    def _to_wire(self, request: Verify) -> Verify:
        """Return the request as it would be sent. The prompt of the simulated decoder is a single token."""
        return replace(request, base_length=request.base_length - 1 + self.trace.prompt_tokens)

    def _verify(self, request: Verify, compute: float) -> Verdict:
        self.busy_s += compute
        at = request.base_length - 1
        skipped = request.new_ids[-MAX_AUDITED:]
        first = at - len(skipped)
        disagreed = sum(token != self.target_token(first + n) for n, token in enumerate(skipped))
        wrong = (n for n, token in enumerate(request.draft_ids) if token != self.target_token(at + n))
        accepted = next(wrong, len(request.draft_ids))
        expected = self.target_token(at + accepted)
        return Verdict(request.round, accepted, expected, (), len(skipped), disagreed, self.queue_s, compute)


def check_constant(net: Conditions) -> None:
    """Raise SettingsError for a network that varies in time."""
    varying = {"jitter": net.jitter, "stall": net.stall_every, "cut": net.cut_after}
    unsupported = [name for name, value in varying.items() if value]
    if unsupported:
        raise SettingsError(f"a simulated network has rtt and bandwidth only, not {', '.join(unsupported)}: {net}")
