"""The gate: the drafter's confidence in a block, and the decision to verify (escalate) or skip it.

Signals of a drafted token come from the drafter's logits (float32), after temperature and before logits processors and
filters, with natural logarithms:

    entropy   H(q) in nats          escalates above the threshold
    margin    q₁ − q₂               escalates below the threshold
    maxprob   1 − q₁                escalates above the threshold
    logprob   −log q(d)             escalates above the threshold

The signal of a block is that of its least confident token (`entropy:1.5`), or the mean (`entropy.mean:1.5`).

`gate_parsing.py` makes a gate of its text. A gate with a risk budget is in `calibrated_gate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.config import format_number
from outrider.sampling.sampler import Signals as Signals
from outrider.sampling.sampler import apply_temperature

SignalName = Literal["entropy", "margin", "maxprob", "logprob"]
SIGNAL_NAMES: tuple[SignalName, ...] = ("entropy", "margin", "maxprob", "logprob")

MAX_UNREPAIRED = 128  # skipped tokens after which scope "repair" requests a verdict


@dataclass(frozen=True)
class Decision:
    """The decision on a block and its reason. escalate: the block goes to the verifier."""

    escalate: bool
    reason: str


class Gate(Protocol):
    """The policy that selects the blocks to verify."""

    @property
    def needs_signals(self) -> bool:
        """True if the gate reads the signals of drafted tokens."""
        ...

    @property
    def exact(self) -> bool:
        """True if every token is verified in the end, so that the output is the target's own."""
        ...

    def decide(self, block: Seq[Signals]) -> Decision:
        """Decide on a block by the signals of its tokens."""
        ...


def compute_signals(logits: Tensor, token: int, temperature: float) -> Signals:
    """Return the signals of `token`, drawn from raw logits (float32 [V]). Temperature 0 counts as 1."""
    logq = torch.log_softmax(apply_temperature(logits, temperature), -1)
    best = torch.topk(logq, min(2, logq.shape[-1])).values.exp()
    entropy = -float(torch.dot(logq.exp(), torch.clamp(logq, min=torch.finfo(logq.dtype).min)))
    second = float(best[1]) if len(best) == 2 else 0.0
    return Signals(max(entropy, 0.0), float(best[0]) - second, 1.0 - float(best[0]), -float(logq[token]))


def least_confident(block: Seq[Signals], signal: SignalName) -> float:
    """Return the signal of a block's least confident token, or the least possible confidence for an empty one."""
    values: list[float] = [getattr(token, signal) for token in block]
    return min(values, default=-math.inf) if signal == "margin" else max(values, default=math.inf)


@dataclass(frozen=True)
class Always:
    """Verify every block."""

    needs_signals = False
    exact = True

    def decide(self, block: Seq[Signals]) -> Decision:
        """Escalate."""
        return Decision(True, "always")

    def __str__(self) -> str:
        return "always"


@dataclass(frozen=True)
class Never:
    """Verify no block."""

    needs_signals = False
    exact = False

    def decide(self, block: Seq[Signals]) -> Decision:
        """Skip."""
        return Decision(False, "never")

    def __str__(self) -> str:
        return "never"


@dataclass(frozen=True)
class Threshold:
    """Verify a block if its signal shows less confidence than `limit`."""

    signal: SignalName
    limit: float
    mean: bool = False
    needs_signals = True
    exact = False

    def decide(self, block: Seq[Signals]) -> Decision:
        """Compare the block's signal with the threshold."""
        value = self.value(block)
        if self.signal == "margin":
            return self._decision(value < self.limit, value, "<" if value < self.limit else ">=")
        return self._decision(value > self.limit, value, ">" if value > self.limit else "<=")

    def _decision(self, escalate: bool, value: float, sign: str) -> Decision:
        name = f"{self.signal}.mean" if self.mean else self.signal
        return Decision(escalate, f"{name} {value:.3g} {sign} {self.limit:g}")

    def value(self, block: Seq[Signals]) -> float:
        """Return the block's signal. A block without tokens has the least possible confidence."""
        if self.mean and block:
            return float(sum(getattr(token, self.signal) for token in block)) / len(block)
        return least_confident(block, self.signal)

    def __str__(self) -> str:
        return f"{self.signal}{'.mean' if self.mean else ''}:{format_number(self.limit)}"


@dataclass(frozen=True)
class AnyOf:
    """Verify a block if any of several gates does."""

    gates: tuple[Gate, ...]
    exact = False

    @property
    def needs_signals(self) -> bool:
        """True if a part reads signals."""
        return any(part.needs_signals for part in self.gates)

    def decide(self, block: Seq[Signals]) -> Decision:
        """Escalate with the reason of the first part that does."""
        decisions = [part.decide(block) for part in self.gates]
        return next((d for d in decisions if d.escalate), decisions[0])

    def __str__(self) -> str:
        return "|".join(map(str, self.gates))


@dataclass(frozen=True)
class Trigger:
    """Select when to verify. Skipped blocks stay provisional until a verdict, so the output stays exact."""

    inner: Gate
    exact = True

    @property
    def needs_signals(self) -> bool:
        """True if the inner gate reads signals."""
        return self.inner.needs_signals

    def decide(self, block: Seq[Signals]) -> Decision:
        """Decide as the inner gate does."""
        return self.inner.decide(block)

    def __str__(self) -> str:
        return f"trigger:{self.inner}"
