"""What a pair's steps take, and what its frames weigh: what a simulation is told of the machines and the wire."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from outrider.errors import SettingsError
from outrider.planning.validation import at_least_zero, positive

ID_BYTES = 3  # one id of a vocabulary below 2^21, on the wire (MATHS, "Bytes")
OPEN_BYTES = 300  # of the opening frame and its headers (docs/protocol.md; 289 to 302 for the bundled clips)
TRANSPORT_DOWN = 26  # bytes: the two window updates that a gRPC server sends with most of its messages


@dataclass(frozen=True)
class StepCosts:
    """Seconds. A token that is drafted; a verdict on n tokens (what the verifier reads of drafts and skipped ones).

    draft_s, signals_s: of one drafted token, and of saying how sure the drafter was, where gate or k ask for it.
    verify_s, verify_per_token_s: of a verdict, and of each token in it. draft_prefill_s, verify_prefill_s: what the
    first step of each side takes longer, its prompt read; a recording's encoding included. per_round_overhead_s: what
    a request takes beyond computing and the network (processes, serialization). stream_s: of a token of cloud-only
    decoding, which asks once for all of them; by default, that of a verdict on nothing.
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
        """Of `count` tokens. first: nothing was drafted before; with_signals: with signals."""
        each = self.draft_s + (self.signals_s if with_signals else 0.0)
        return count * each + (self.draft_prefill_s if first else 0.0)

    def computing_s(self, count: int, *, first: bool) -> float:
        """The verifier's own time for a verdict on `count` tokens."""
        return self.verify_s + count * self.verify_per_token_s + (self.verify_prefill_s if first else 0.0)

    def streaming_s(self, *, first: bool) -> float:
        """The verifier's own time for a token that nobody drafted, in a stream."""
        each = self.verify_s if self.stream_s is None else self.stream_s
        return each + (self.verify_prefill_s if first else 0.0)


def median_costs(several: list[StepCosts]) -> StepCosts:
    """Field by field.

    Raises:
        SettingsError: there are none.
    """
    if not several:
        raise SettingsError("no costs were measured")
    found: dict[str, Any] = {
        field.name: _median([getattr(one, field.name) for one in several]) for field in fields(StepCosts)
    }
    return StepCosts(**found)


def _median(values: list[float | None]) -> float | None:
    """Of those that were measured; None where none was."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def md1_wait_s(utilisation: float, service_s: float) -> float:
    """Mean wait before a server that others keep busy: ρ·s / (2(1 − ρ)), Pollaczek–Khinchine with constant service.

    Raises:
        SettingsError: a utilisation outside 0 to 1, or 1 itself, where the queue never ends.
    """
    at_least_zero(utilisation=utilisation, service_s=service_s)
    if not utilisation < 1.0 or math.isinf(service_s):
        raise SettingsError(f"utilisation is at least 0 and below 1, not {utilisation!r}")
    return utilisation * service_s / (2.0 * (1.0 - utilisation))
