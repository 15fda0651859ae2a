"""Scripted pairs whose drafters deceive: how sure they are says little, or the contrary, or what no trace shows.

Target and drafter are functions of the text so far, as models are: behind its own wrong token a live drafter meets
another text than the one that a trace is taken along. Each request is a seed of its own. A `Suite` calibrates on one
half of the requests and decodes the other half live, with the real `Decoder`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from benchmarks.live import Watched, realised
from outrider.config import GenerationSettings, Loss
from outrider.decoding.actions import Done, Draft, Plan, Proposal, Verify
from outrider.decoding.calibrated_gate import Calibrated
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import FixedDraftLength
from outrider.decoding.gate import SIGNAL_NAMES, Signals, Threshold
from outrider.decoding.gate_file import GateFile, ModelId
from outrider.decoding.gate_parsing import gate as parse_gate
from outrider.decoding.risk_estimate import AuditTrail
from outrider.decoding.stopping import StopRules
from outrider.errors import DataError
from outrider.planning.blocks import direction
from outrider.planning.calibrate import calibrate
from outrider.planning.traces import Trace
from outrider.sampling.acceptance import Exact, Verdict

EOS, VOCAB, LIMIT, K = 0, 40, 40, 5
SOMEONE = ModelId("scripted", "scripted")
SETTINGS = GenerationSettings(max_new_tokens=LIMIT)
Text = tuple[int, ...]  # what was generated so far


def chance(seed: int, purpose: int, text: Text) -> float:
    """A number in [0, 1) for a place in a text: by its length and its last three tokens."""
    return zlib.crc32(b"%d %d %d %d %d %d" % (seed, purpose, len(text), *(0, 0, 0, *text)[-3:])) / 2**32


@dataclass(frozen=True)
class Place:
    """What a drafter meets: behind how many tokens of its own that were wrong (`strayed`: since the last of them, or
    None), and whether it would have erred on the token before, had the text not been the target's (`corrected`)."""

    at: int
    draw: float
    errs: bool
    strayed: int | None
    corrected: bool


@dataclass(frozen=True)
class Pair:
    """A request of a scripted pair. uncertainty: between 0 and 1, of the token drafted at a place.

    rate: how often the drafter errs, by the place. period: the target's text repeats itself with it. ends: it errs by
    ending the text; misses: it never ends the text.
    """

    seed: int
    uncertainty: Callable[[Place], float]
    rate: Callable[[int, float], float]
    period: int | None = None
    ends: bool = False
    misses: bool = False
    known: dict[Text, tuple[int, Signals]] = field(default_factory=dict)

    def target(self, text: Text) -> int:
        if len(text) >= 8 and chance(self.seed, 1, text) < 0.04:
            return EOS
        if self.period is not None and len(text) >= self.period and chance(self.seed, 2, text) < 0.97:
            return text[-self.period]
        return 1 + int(chance(self.seed, 3, text) * (VOCAB - 1))

    def errs(self, text: Text) -> bool:
        if self.misses and self.target(text) == EOS:
            return True
        return chance(self.seed, 4, text) < self.rate(len(text), chance(self.seed, 5, ()))

    def draft(self, text: Text) -> tuple[int, Signals]:
        if text not in self.known:
            self.known[text] = self._draft(text)
        return self.known[text]

    def _draft(self, text: Text) -> tuple[int, Signals]:
        said, errs = self.target(text), self.errs(text)
        other = EOS if self.ends and said != EOS else 1 + said % (VOCAB - 1)
        uncertainty = self.uncertainty(
            Place(len(text), chance(self.seed, 6, text), errs, self._strayed(text), self._spared(text))
        )
        entropy, margin, maxprob = (
            uncertainty * self._blur(n, text) for n in range(3)
        )  # no signal knows what another does
        return other if errs else said, Signals(2 * entropy, 1 - margin, maxprob, uncertainty)

    def _blur(self, signal: int, text: Text) -> float:
        return 0.7 + 0.3 * chance(self.seed, 7 + signal, text)

    def _strayed(self, text: Text) -> int | None:
        behind = (n for n in range(1, min(len(text), 8) + 1) if self.target(text[:-n]) != text[-n])
        return next(behind, None)

    def _spared(self, text: Text) -> bool:
        return bool(text) and self.target(text[:-1]) == text[-1] and self.errs(text[:-1])


def often(share: float) -> Callable[[int, float], float]:
    return lambda at, request: share


def sure_after_its_error(place: Place) -> float:
    """Unsure where the text corrects it, sure behind its own error, sure of the error itself."""
    return 0.05 * place.draw + (0.8 if place.corrected else 0.0)


def sure_for_long(place: Place) -> float:
    """The longer ago its error, the less sure again."""
    if place.strayed is not None:
        return 0.02 * place.strayed * place.draw
    return 0.9 if place.corrected else 0.2 * place.draw


def drifting(place: Place) -> float:
    return (0.6 - 0.5 * place.at / LIMIT) * place.draw


def periodic(place: Place) -> float:
    return 0.9 if place.at % 5 == 3 else 0.1 * place.draw


def at_the_end_of_blocks(place: Place) -> float:
    return 0.7 if place.corrected and place.strayed is None else 0.1 * place.draw


def contrary(place: Place) -> float:
    """Surer where it errs."""
    return 0.3 * place.draw if place.errs else 0.2 + 0.5 * place.draw


def in_steps(place: Place) -> float:
    """Two values only, which no trace holds to the last digit."""
    return 0.70000049 if place.errs and place.draw < 0.6 else 0.12345678


def honest(place: Place) -> float:
    return min(1.0, (0.3 + 0.7 * place.draw) if place.errs else 0.4 * place.draw**2)


def honest_until_it_errs(place: Place) -> float:
    return 0.0 if place.strayed is not None else honest(place)


PAIRS: dict[str, Callable[[int], Pair]] = {
    "sure after its error": lambda seed: Pair(seed, sure_after_its_error, often(0.03)),
    "sure for long": lambda seed: Pair(seed, sure_for_long, often(0.03)),
    "drifting": lambda seed: Pair(seed, drifting, lambda at, request: 0.1 * at / LIMIT),
    "periodic": lambda seed: Pair(seed, periodic, lambda at, request: 0.15 if at % 7 == 2 else 0.002),
    "at the end of blocks": lambda seed: Pair(
        seed, at_the_end_of_blocks, lambda at, _: 0.1 if at % K == K - 1 else 0.0
    ),
    "two kinds of requests": lambda seed: Pair(seed, sure_after_its_error, lambda _, kind: 0.3 if kind < 0.04 else 0.0),
    "loops": lambda seed: Pair(seed, honest, often(0.03), period=3),
    "loops of its own": lambda seed: Pair(seed, sure_after_its_error, often(0.02), period=2),
    "ends too early": lambda seed: Pair(seed, contrary, often(0.02), ends=True),
    "misses the end": lambda seed: Pair(seed, honest_until_it_errs, often(0.01), misses=True),
    "contrary": lambda seed: Pair(seed, contrary, often(0.01)),
    "in steps": lambda seed: Pair(seed, in_steps, often(0.01)),
    "honest": lambda seed: Pair(seed, honest, often(0.02)),
}


def trace(pair: Pair) -> Trace:
    """Teacher-forced, as `planning/trace_recorder.py` takes it."""
    text: Text = ()
    while (not text or text[-1] != EOS) and len(text) < LIMIT:
        text += (pair.target(text),)
    drafts, signals = zip(*(pair.draft(text[:n]) for n in range(len(text))), strict=True)
    return Trace(str(pair.seed), 1, text, drafts, tuple(_rounded(signals)))


def _rounded(signals: Seq[Signals]) -> Iterator[Signals]:
    """As a file holds them."""
    for each in signals:
        yield Signals(*(round(getattr(each, name), 6) for name in SIGNAL_NAMES))


@dataclass(frozen=True)
class Live:
    """A live output, and what its audits showed."""

    ids: Text
    escalated: int
    blocks: int
    audited: int
    disagreed: int
    trail: AuditTrail
    reason: str


def live(pair: Pair, gate: Calibrated, k: int = K, **plan: object) -> Live:
    """One request through the decoder, the drafter going on from its own tokens."""
    options = {"on_loop": "escalate", **plan}
    rules = StopRules(LIMIT, (EOS,))
    keyed = gate.with_audit_key(0, [pair.seed])
    decoder = Decoder([1], Plan(rules, keyed, Exact(), FixedDraftLength(k), has_verifier=True, **options))  # type: ignore[arg-type]
    while not isinstance(action := decoder.next(), Done):
        if isinstance(action, Draft):
            token, signals = pair.draft(tuple(decoder.context[1:]))
            decoder.drafted([Proposal(token, signals)])
        else:
            assert isinstance(action, Verify)
            decoder.decided(verdict(pair, action, tuple(decoder.context[1:])))
    stats = decoder.stats
    ids = tuple(decoder.sequence.generated)
    return Live(
        ids, stats.escalated, stats.blocks, stats.audited, stats.disagreed, decoder.audit_trail(), action.reason
    )


def verdict(pair: Pair, request: Verify, text: Text) -> Verdict:
    base = request.base_length - 1
    skipped = range(base - len(request.new_ids), base)
    disagreed = sum(pair.target(text[:n]) != text[n] for n in skipped)
    wrong = (n for n, token in enumerate(request.draft_ids) if pair.target(text[: base + n]) != token)
    accepted = next(wrong, len(request.draft_ids))
    said = pair.target(text[: base + accepted])
    return Verdict(request.round, accepted, said, audited=len(skipped), disagreed=disagreed)


def gate_of(file: GateFile) -> Calibrated:
    return Calibrated(cast(Threshold, parse_gate(file.gate)), file, "gate.json")


class Suite:
    """The requests of one scripted pair; what was decoded once is kept."""

    def __init__(self, name: str, requests: int) -> None:
        self.pairs = [PAIRS[name](1000 * zlib.crc32(name.encode()) + n) for n in range(requests)]
        self.traces = [trace(pair) for pair in self.pairs]
        self._known: dict[tuple[int, str], list[tuple[float, float, Live]]] = {}

    def calibrated(self, part: Seq[int], epsilon: float, loss: Loss, signal: str, seed: int) -> GateFile | None:
        """None where calibration refuses: nothing is skipped then."""
        some = [self.traces[n] for n in part]
        try:
            return calibrate(
                some,
                epsilon=epsilon,
                k=K,
                edge=SOMEONE,
                cloud=SOMEONE,
                settings=SETTINGS,
                loss=loss,
                seed=seed,
                signals=[signal],
            )
        except DataError:
            return None

    def risk(self, file: GateFile, part: Seq[int]) -> tuple[float, float]:
        """The realised mean loss, and the share of blocks that were escalated."""
        ran = [(n, self._live(n, file)) for n in part]
        losses = [realised(found.ids, self.traces[n].target, file.loss) for n, found in ran]
        return float(np.mean(losses)), sum(f.escalated for _, f in ran) / sum(f.blocks for _, f in ran)

    def _live(self, n: int, file: GateFile) -> Live:
        gate = gate_of(file)
        limit = direction(gate.inner) * gate.inner.limit
        known = self._known.setdefault((n, gate.inner.signal), [])
        found = next((run for low, high, run in known if low <= limit < high), None)
        if found is None:
            watched = Watched(gate.inner.signal, gate.inner.limit)
            found = live(self.pairs[n], replace(gate, inner=watched))
            known.append((*watched.met, found))  # type: ignore[arg-type]
        return found

    def splits(self, epsilon: float, loss: Loss, signal: str, count: int) -> tuple[float, float, int]:
        """Mean realised risk and escalation over random halves; how many refused."""
        risks, escalated, refused = [], [], 0
        for seed in range(count):
            order = np.random.default_rng(seed).permutation(len(self.traces)).tolist()
            file = self.calibrated(order[: len(order) // 2], epsilon, loss, signal, seed)
            refused += file is None
            risk, share = (0.0, 1.0) if file is None else self.risk(file, order[len(order) // 2 :])
            risks.append(risk)
            escalated.append(share)
        return float(np.mean(risks)), float(np.mean(escalated)), refused
