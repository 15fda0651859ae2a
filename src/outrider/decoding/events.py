"""What becomes of tokens, as it is told while an output grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.decoding.sequence import Source
from outrider.sampling.sampler import Signals

EventKind = Literal["provisional", "confirmed", "revised"]


@dataclass(frozen=True)
class Event:
    """A token became provisional, confirmed, or was revised; `index` counts generated tokens from 0.

    A revised event stands for its token *and* says that every token after it is void. What is still provisional when
    the output is done is void too. signals: how sure the drafter was of it, if it was drafted and that was measured.
    settled: how many generated tokens, from the first one, nothing can take back any more. It never falls.
    """

    kind: EventKind
    index: int
    token: int
    source: Source
    signals: Signals | None = field(default=None, compare=False)
    settled: int = field(default=0, compare=False)


@dataclass(frozen=True)
class StreamEvent:
    """What became of one token, as text.

    kind: provisional (drafted), confirmed, or revised (this token replaces the one at `index`, and every token after
    it is void). text: the piece that the token adds; empty while a character is incomplete. source: who decided it.
    signals: how sure the drafter was of it; None for the verifier's own tokens, and where nothing asked for signals.
    settled: how many tokens, from the first one, nothing can take back any more: all confirmed ones, but for `scope`
    repair, where a verdict must have passed over them, or the cloud be lost. It never falls.
    """

    kind: EventKind
    index: int
    token_id: int
    text: str
    source: Source
    signals: Signals | None = None
    settled: int = 0

    @classmethod
    def of(cls, event: Event, text: str) -> StreamEvent:
        """Return the event with the text that its token adds."""
        return cls(event.kind, event.index, event.token, text, event.source, event.signals, event.settled)
