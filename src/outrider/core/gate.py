"""The gate: how sure the drafter was of a block, and whether the verifier should look at it.

Signals of a drafted token are taken from the drafter's own row (float32), after temperature and before penalties
and filters, natural logarithms:

    entropy   H(q) in nats          escalate when above the threshold
    margin    q₁ − q₂               escalate when *below* (the only signal that is high when sure)
    maxprob   1 − q₁                above
    logprob   −log q(d)             above

A block's signal is that of its least sure token (`entropy:1.5`), or the mean (`entropy.mean:1.5`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.config import plain_number
from outrider.core.sampling import tempered
from outrider.errors import SettingsError

Name = Literal["entropy", "margin", "maxprob", "logprob"]
NAMES: tuple[Name, ...] = ("entropy", "margin", "maxprob", "logprob")


@dataclass(frozen=True)
class Signals:
    """How sure the drafter was of one token."""

    entropy: float
    margin: float
    maxprob: float
    logprob: float


@dataclass(frozen=True)
class Decision:
    """Whether a block goes to the verifier, and why."""

    escalate: bool
    reason: str


class Gate(Protocol):
    """`exact` gates keep the output the target's own: they verify all, or only choose when to verify."""

    @property
    def needs_signals(self) -> bool: ...

    @property
    def exact(self) -> bool: ...

    def decide(self, block: Seq[Signals]) -> Decision: ...


def measure(row: Tensor, token: int, temperature: float) -> Signals:
    """The signals of `token`, drawn from the raw logits `row` (float32 [V]); temperature 0 counts as 1."""
    logq = torch.log_softmax(tempered(row, temperature), -1)
    best = torch.topk(logq, min(2, logq.shape[-1])).values.exp()
    entropy = -float(torch.dot(logq.exp(), torch.clamp(logq, min=torch.finfo(logq.dtype).min)))
    second = float(best[1]) if len(best) == 2 else 0.0
    return Signals(max(entropy, 0.0), float(best[0]) - second, 1.0 - float(best[0]), -float(logq[token]))


@dataclass(frozen=True)
class Always:
    needs_signals = False
    exact = True

    def decide(self, block: Seq[Signals]) -> Decision:
        return Decision(True, "always")

    def __str__(self) -> str:
        return "always"


@dataclass(frozen=True)
class Never:
    needs_signals = False
    exact = False

    def decide(self, block: Seq[Signals]) -> Decision:
        return Decision(False, "never")

    def __str__(self) -> str:
        return "never"


@dataclass(frozen=True)
class Threshold:
    """Escalates a block that is less sure than `limit`."""

    signal: Name
    limit: float
    mean: bool = False
    needs_signals = True
    exact = False

    def decide(self, block: Seq[Signals]) -> Decision:
        value = self._value([getattr(token, self.signal) for token in block])
        if self.signal == "margin":
            return self._decision(value < self.limit, value, "<" if value < self.limit else ">=")
        return self._decision(value > self.limit, value, ">" if value > self.limit else "<=")

    def _decision(self, unsure: bool, value: float, sign: str) -> Decision:
        name = f"{self.signal}.mean" if self.mean else self.signal
        return Decision(unsure, f"{name} {value:.3g} {sign} {self.limit:g}")

    def _value(self, values: list[float]) -> float:
        if not values:
            return math.inf if self.signal != "margin" else -math.inf
        if self.mean:
            return sum(values) / len(values)
        return min(values) if self.signal == "margin" else max(values)

    def __str__(self) -> str:
        return f"{self.signal}{'.mean' if self.mean else ''}:{plain_number(self.limit)}"


@dataclass(frozen=True)
class AnyOf:
    """Escalates when any part does."""

    parts: tuple[Gate, ...]
    exact = False

    @property
    def needs_signals(self) -> bool:
        return any(part.needs_signals for part in self.parts)

    def decide(self, block: Seq[Signals]) -> Decision:
        decisions = [part.decide(block) for part in self.parts]
        return next((d for d in decisions if d.escalate), decisions[0])

    def __str__(self) -> str:
        return "|".join(map(str, self.parts))


@dataclass(frozen=True)
class Trigger:
    """Only chooses *when* to verify: what it passes stays provisional until a verdict, so the result stays exact."""

    inner: Gate
    exact = True

    @property
    def needs_signals(self) -> bool:
        return self.inner.needs_signals

    def decide(self, block: Seq[Signals]) -> Decision:
        return self.inner.decide(block)

    def __str__(self) -> str:
        return f"trigger:{self.inner}"


def gate(spec: str) -> Gate:
    """The gate that a text names: always, never, entropy:1.5, margin.mean:0.3, entropy:1.5|logprob:2, trigger:….

    Raises:
        SettingsError: an unknown signal, or a threshold that is missing or not a finite number ≥ 0.
    """
    if not isinstance(spec, str):
        raise SettingsError(f"a gate is a text such as entropy:1.5, not {spec!r}")
    prefix, _, rest = spec.partition(":")
    if prefix == "trigger":
        inner = gate(rest)
        if isinstance(inner, Trigger):
            raise SettingsError(f"gate {spec!r}: trigger: is said once")
        return Trigger(inner)
    parts = tuple(_single(part.strip(), spec) for part in spec.split("|"))
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, (Always, Never)) for part in parts):
        raise SettingsError(f"gate {spec!r}: always and never stand alone; | joins thresholds")
    return AnyOf(parts)


def _single(text: str, spec: str) -> Gate:
    if text in ("always", "never"):
        return Always() if text == "always" else Never()
    name, _, limit = text.partition(":")
    signal, _, mode = name.partition(".")
    if signal not in NAMES or mode not in ("", "mean", "max"):
        raise SettingsError(
            f"gate {spec!r}: expected always, never, or SIGNAL:THRESHOLD with SIGNAL one of {', '.join(NAMES)} "
            "(each also as SIGNAL.mean), joined by |, optionally after trigger:"
        )
    return Threshold(signal, _threshold(limit, spec), mean=mode == "mean")


def _threshold(text: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"gate {spec!r}: {text!r} is not a number; write for example entropy:1.5") from None
    if not (math.isfinite(value) and value >= 0):
        raise SettingsError(f"gate {spec!r}: a threshold is a finite number, 0 or more")
    return value
