"""Simulation of traces in virtual time, with the real decoder and drivers, for any gate, k, network and load.

A trace holds the drafter's proposals along the target's own output. The limits of a simulation are:

- With an exact gate and a fixed k, the committed tokens, their sources and the number of rounds equal those of a live
  run. Drafts after a wrong token come from the trace too. They are never accepted, but a live drafter continues from
  its wrong token and may have other signals or end its block earlier. Counts of drafted tokens and trigger decisions
  differ by that much.
- After a gate has skipped a wrong token, the text has left the trace. The simulation continues by position: drafter and
  target produce the trace's tokens at each position. An end token that the edge skips follows one token later. A wrong
  end token of the edge ends the output.

Sampled loops (`--on-loop sample`) and acceptance rules other than exact are not simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

from outrider.config import DecodingMode, check_choice
from outrider.decoding.actions import Plan
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_buffer import MAX_PROVISIONAL
from outrider.decoding.draft_length import MAX_K, DraftLength, parse_draft_length
from outrider.decoding.gate import Always, Gate
from outrider.decoding.options import DecodingOptions
from outrider.decoding.risk_estimate import MISS_PROBABILITY, upper_bound
from outrider.decoding.stopping import StopRules
from outrider.errors import DataError, SettingsError, quote
from outrider.netem.conditions import Conditions
from outrider.planning.costs import StepCosts, md1_wait_s
from outrider.planning.traces import Trace
from outrider.planning.validation import at_least_zero, count
from outrider.planning.virtual_time import (
    UNKNOWN_TOKEN,
    Clock,
    SimulatedCloud,
    SimulatedDrafter,
    check_constant,
    run_driver,
)
from outrider.sampling.acceptance import Exact

MAX_OVERRUN = MAX_K + MAX_PROVISIONAL  # tokens that may be drafted beyond the end of a trace
NOT_SIMULATED = ("accept", "on_loop", "loop_rule", "on_cloud_loss", "privacy")


@dataclass(frozen=True)
class Setup(DecodingOptions):
    """The decoding to simulate. gate and k apply to mode "speculative" only.

    queue_s: wait before each verdict, in seconds. utilisation: load of the verifier by other sessions, which adds the
    mean wait of `md1_wait_s`. max_new_tokens: the limit of the live run. It does not lengthen a trace.
    """

    mode: DecodingMode = "speculative"
    net: Conditions = Conditions()
    queue_s: float = 0.0
    utilisation: float = 0.0
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, DecodingMode)
        self.check_values()
        for name in NOT_SIMULATED:
            if getattr(self, name) != getattr(DecodingOptions, name):
                raise SettingsError(f"{name} {quote(getattr(self, name))}: only the default is simulated")
        check_constant(self.net)
        at_least_zero(queue_s=self.queue_s)
        md1_wait_s(self.utilisation, 0.0)
        if self.max_new_tokens is not None:
            count(1, max_new_tokens=self.max_new_tokens)

    def wait_s(self, costs: StepCosts) -> float:
        """Return the wait before each verdict."""
        return self.queue_s + md1_wait_s(self.utilisation, costs.verify_s)


@dataclass(frozen=True)
class Outcome:
    """Result of one simulated output.

    disagreements: edge tokens that differ from the target's at their position. cloud_s: seconds of the verifier's work.
    draft_s: seconds of drafting, including drafting while a verdict was in flight.
    """

    tokens: int
    total_s: float
    ttft_s: float
    rounds: int
    blocks: int
    escalated: int
    drafted: int
    verified: int
    accepted: int
    cloud_tokens: int
    edge_tokens: int
    disagreements: int
    bytes_up: int
    bytes_down: int
    media_bytes: int
    cloud_s: float
    draft_s: float

    @property
    def skipped(self) -> int:
        """Return the number of blocks without a verdict."""
        return self.blocks - self.escalated

    @property
    def cloud_share(self) -> float:
        """Return the share of tokens that the cloud decided."""
        return self.cloud_tokens / self.tokens


@dataclass(frozen=True)
class Summary:
    """Summary of several outputs. Seconds and bytes are means over outputs, shares are over all tokens or blocks.

    disagreement: share of tokens that differ from the target's. disagreement_high: the same plus two standard errors
    over outputs. worst_disagreement: the largest share of a single output. changed_outputs: share of outputs that
    differ from the target's. changed_outputs_high: the upper end of its 95 % interval. at_home: share of outputs
    without a request to the cloud. bytes_up: includes recordings.
    """

    outputs: int
    tokens: float
    total_s: float
    ttft_s: float
    token_s: float
    rounds: float
    acceptance: float
    escalation: float
    cloud_share: float
    disagreement: float
    disagreement_high: float
    worst_disagreement: float
    changed_outputs: float
    changed_outputs_high: float
    at_home: float
    bytes_up: float
    bytes_down: float
    cloud_s: float


def end_tokens(traces: Seq[Trace]) -> frozenset[int]:
    """Return the tokens that only occur at the end of outputs, and of at least two if there are several."""
    last = Counter(trace.target[-1] for trace in traces)
    inside = {token for trace in traces for token in trace.target[:-1]}
    return frozenset(token for token, times in last.items() if token not in inside and times >= min(2, len(traces)))


def simulate(
    trace: Trace,
    setup: Setup,
    costs: StepCosts,
    *,
    ends: frozenset[int] = frozenset(),
    draft_length: DraftLength | None = None,
) -> Outcome:
    """Simulate one trace. ends: end tokens. draft_length: a controller with state from earlier traces."""
    run = _Simulation(trace, setup, costs, ends, draft_length or parse_draft_length(setup.k))
    return run.outcome()


def replay(traces: Seq[Trace], setup: Setup, costs: StepCosts, *, ends: frozenset[int] | None = None) -> list[Outcome]:
    """Simulate several traces in sequence, as one SpeculativeDecoder would. k "auto" adapts across them.

    ends: end tokens, by default those of `end_tokens`.

    Raises:
        DataError: no traces.
    """
    if not traces:
        raise DataError("there are no traces to replay")
    ends = end_tokens(traces) if ends is None else ends
    draft_length = parse_draft_length(setup.k)
    return [simulate(trace, setup, costs, ends=ends, draft_length=draft_length) for trace in traces]


def summarise(outcomes: Seq[Outcome]) -> Summary:
    """Summarise outcomes.

    Raises:
        DataError: no outcomes.
    """
    if not outcomes:
        raise DataError("there are no outcomes to summarise")
    changed = sum(outcome.disagreements > 0 for outcome in outcomes) / len(outcomes)
    total = {f.name: math.fsum(getattr(o, f.name) for o in outcomes) for f in fields(Outcome)}
    mean = {name: value / len(outcomes) for name, value in total.items()}
    return Summary(
        outputs=len(outcomes),
        tokens=mean["tokens"],
        total_s=mean["total_s"],
        ttft_s=mean["ttft_s"],
        token_s=total["total_s"] / total["tokens"],
        rounds=mean["rounds"],
        acceptance=total["accepted"] / total["verified"] if total["verified"] else 0.0,
        escalation=total["escalated"] / total["blocks"] if total["blocks"] else 0.0,
        cloud_share=total["cloud_tokens"] / total["tokens"],
        disagreement=total["disagreements"] / total["tokens"],
        disagreement_high=_upper_bound(outcomes, total["disagreements"] / total["tokens"]),
        worst_disagreement=max(outcome.disagreements / outcome.tokens for outcome in outcomes),
        changed_outputs=changed,
        changed_outputs_high=upper_bound(changed, len(outcomes), MISS_PROBABILITY / 2),
        at_home=sum(outcome.rounds == 0 for outcome in outcomes) / len(outcomes),
        bytes_up=mean["bytes_up"],
        bytes_down=mean["bytes_down"],
        cloud_s=mean["cloud_s"],
    )


def _upper_bound(outcomes: Seq[Outcome], share: float) -> float:
    """Return the share of wrong tokens plus two standard errors over outputs."""
    if len(outcomes) < 2:
        return 1.0
    tokens = math.fsum(outcome.tokens for outcome in outcomes)
    squares = math.fsum((outcome.disagreements - share * outcome.tokens) ** 2 for outcome in outcomes)
    return min(share + 2 * math.sqrt(squares * len(outcomes) / (len(outcomes) - 1)) / tokens, 1.0)


class _Simulation:
    """The simulation of one trace."""

    def __init__(
        self, trace: Trace, setup: Setup, costs: StepCosts, ends: frozenset[int], draft_length: DraftLength
    ) -> None:
        gate = setup.parsed_gate if setup.mode == "speculative" else Always()
        drafts, has_verifier = setup.mode != "cloud-only", setup.mode != "edge-only"
        self._trace, self._clock = trace, Clock()
        self._decoder = Decoder([0], _plan(trace, setup, ends, gate, draft_length if drafts else None))
        end = trace.target[-1] if trace.target[-1] in ends else UNKNOWN_TOKEN
        self._cloud = (
            SimulatedCloud(trace, costs, self._clock, setup.net, setup.wait_s(costs), end) if has_verifier else None
        )
        lossy = not (has_verifier and gate.exact)
        with_signals = has_verifier and (gate.needs_signals or draft_length.needs_signals)
        filler = end if lossy else UNKNOWN_TOKEN
        self._drafter = SimulatedDrafter(trace, costs, self._clock, ends=ends, filler=filler, with_signals=with_signals)
        self._drafts, self._driver = drafts, setup.driver

    def outcome(self) -> Outcome:
        """Run the simulation and return its result."""
        ttft = self._run()
        decoder, cloud, stats = self._decoder, self._cloud, self._decoder.stats
        stats.count_sources(decoder.sequence.sources)
        return Outcome(
            tokens=len(decoder.sequence.sources),
            total_s=self._clock.now,
            ttft_s=ttft,
            rounds=stats.rounds,
            blocks=stats.blocks,
            escalated=stats.escalated,
            drafted=stats.drafted,
            verified=stats.verified,
            accepted=stats.accepted,
            cloud_tokens=stats.cloud_tokens,
            edge_tokens=stats.edge_tokens,
            disagreements=self._disagreements(),
            bytes_up=cloud.up.bytes if cloud else 0,
            bytes_down=cloud.down.bytes if cloud else 0,
            media_bytes=cloud.media_bytes if cloud else 0,
            cloud_s=cloud.busy_s if cloud else 0.0,
            draft_s=self._drafter.seconds,
        )

    def _run(self) -> float:
        """Run to the end. Return the time of the first committed token."""
        cloud, first = self._cloud, None
        drafter = self._drafter if self._drafts else None
        for event in run_driver(self._decoder, drafter, cloud, self._clock, self._driver):
            if first is None and event.kind != "provisional":
                first = self._clock.now
        return first or 0.0

    def _disagreements(self) -> int:
        sequence, target = self._decoder.sequence, self._trace.target
        pairs = zip(sequence.generated, sequence.sources, target, strict=False)
        return sum(token != expected for token, source, expected in pairs if not source.by_cloud)


def _plan(trace: Trace, setup: Setup, ends: frozenset[int], gate: Gate, draft_length: DraftLength | None) -> Plan:
    """Return a plan that stops where the live run did: at an end token, or at the length of the trace."""
    length, limit = len(trace.target), setup.max_new_tokens
    if limit is not None and length > limit:
        raise SettingsError(f"trace {quote(trace.id)} has {length} tokens, more than max_new_tokens {limit}")
    if trace.target[-1] in ends:
        length = limit or length + MAX_OVERRUN
    has_verifier = setup.mode != "edge-only"
    rules = StopRules(length, tuple(ends))
    return Plan(rules, gate, Exact(), draft_length, has_verifier, "escalate" if has_verifier else "ignore", setup.scope)
