"""Events of a growing output: tokens become provisional, confirmed or revised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.decoding.sequence import Source
from outrider.decoding.token_logprob import TokenLogprob
from outrider.sampling.logprobs import Logprobs
from outrider.sampling.sampler import Signals

EventKind = Literal["provisional", "confirmed", "revised"]


@dataclass(frozen=True)
class Event:
    """A change of one token, as in `StreamEvent`. `index` counts generated tokens from 0.

    The end of the output voids tokens that are still provisional.
    """

    kind: EventKind
    index: int
    token: int
    source: Source
    signals: Signals | None = field(default=None, compare=False)
    settled: int = field(default=0, compare=False)
    logprobs: Logprobs | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StreamEvent:
    """A change of one token, with its text.

    kind: provisional (drafted), confirmed, or revised. A revised token replaces the one at `index` and voids every
    token after it. text: the piece that the token adds, empty while a character is incomplete. source: the side that
    decided the token. signals: the drafter's confidence, None for the verifier's own tokens and where no signals were
    requested. settled: the number of tokens that are final. These are all confirmed tokens, but with `scope` "repair"
    only those before the last verdict until the cloud is lost. It never decreases. logprob: the token's, if the setting
    `logprobs` requests it, from the target for a verified token and else from the drafter.
    """

    kind: EventKind
    index: int
    token_id: int
    text: str
    source: Source
    signals: Signals | None = None
    settled: int = 0
    logprob: TokenLogprob | None = None
