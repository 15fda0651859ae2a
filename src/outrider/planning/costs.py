"""Durations of a pair's steps and sizes of its frames, as the simulator uses them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from outrider.errors import SettingsError, quote
from outrider.planning.validation import at_least_zero, positive

ID_BYTES = 3  # varint of a token id below 2^21 (docs/design/maths.md, "Bytes")
OPEN_BYTES = 300  # opening frame with its headers (docs/protocol.md): 289 to 302 for the bundled clips
TRANSPORT_DOWN = 26  # bytes of the two window updates that a gRPC server sends for a request


@dataclass(frozen=True)
class StepCosts:
    """Durations of the steps of a pair, in seconds.

    draft_s: one drafted token. signals_s: its confidence signals, if the gate or the draft length needs them.
    verify_s, verify_per_token_s: a verdict, and each token that the verifier reads for it. draft_prefill_s,
    verify_prefill_s: additional time of the first step of each side, for the prompt and the encoding of a recording.
    per_round_overhead_s: a request's time outside of computation and network (processes, serialization). stream_s: one
    token of streamed cloud-only decoding, by default `verify_s`.
    """

    draft_s: float
    verify_s: float
    verify_per_token_s: float = 0.0
    draft_prefill_s: float = 0.0
    verify_prefill_s: float = 0.0
    per_round_overhead_s: float = 0.0
    signals_s: float = 0.0
    stream_s: float | None = None

    def __post_init__(self) -> None:
        at_least_zero(**{name: value for name, value in asdict(self).items() if value is not None})
        positive(draft_s=self.draft_s, verify_s=self.verify_s)

    def drafting_s(self, count: int, *, first: bool, with_signals: bool) -> float:
        """Return the time to draft `count` tokens. first: they follow the prompt."""
        each = self.draft_s + (self.signals_s if with_signals else 0.0)
        return count * each + (self.draft_prefill_s if first else 0.0)

    def computing_s(self, count: int, *, first: bool) -> float:
        """Return the verifier's time for a verdict on `count` tokens."""
        return self.verify_s + count * self.verify_per_token_s + (self.verify_prefill_s if first else 0.0)

    def streaming_s(self, *, first: bool) -> float:
        """Return the verifier's time for one token of streamed cloud-only decoding."""
        each = self.verify_s if self.stream_s is None else self.stream_s
        return each + (self.verify_prefill_s if first else 0.0)


def median_costs(several: list[StepCosts]) -> StepCosts:
    """Return the median of each field.

    Raises:
        SettingsError: the list is empty.
    """
    if not several:
        raise SettingsError("no step costs were measured")
    found: dict[str, Any] = {
        field.name: _median([getattr(one, field.name) for one in several]) for field in fields(StepCosts)
    }
    return StepCosts(**found)


def _median(values: list[float | None]) -> float | None:
    """Return the median of the measured values, or None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def md1_wait_s(utilisation: float, service_s: float) -> float:
    """Return the mean wait of an M/D/1 queue, ρ·s / (2(1 − ρ)) (Pollaczek–Khinchine).

    Raises:
        SettingsError: a utilisation below 0, or of 1 and more, where the queue grows without end.
    """
    at_least_zero(utilisation=utilisation, service_s=service_s)
    if not utilisation < 1.0 or math.isinf(service_s):
        raise SettingsError(f"utilisation is at least 0 and below 1, not {quote(utilisation)}")
    return utilisation * service_s / (2.0 * (1.0 - utilisation))
