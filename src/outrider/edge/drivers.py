"""Drivers: they do what the decoder asks for, and hand back what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.core.acceptance import Verdict
from outrider.core.decoder import Decoder, Done, Draft, Event, Verify
from outrider.edge.drafter import Drafter
from outrider.errors import StateError
from outrider.verifiers.base import Verifier

Judge = Callable[[Verify], Verdict]


class Link:
    """The session with the verifier, opened by the first block that is escalated and not before."""

    def __init__(self, verifier: Verifier, open_session: Callable[[Verifier], int]) -> None:
        self._verifier, self._open = verifier, open_session
        self._session: int | None = None
        self._stream: Iterator[Verdict] | None = None

    @property
    def session(self) -> int:
        if self._session is None:
            self._session = self._open(self._verifier)
        return self._session

    def verify(self, request: Verify) -> Verdict:
        return self._verifier.verify(self.session, request)

    def generate(self, request: Verify) -> Verdict:
        """The next verdict of cloud-only decoding, as one stream for the whole output."""
        if self._stream is None:
            self._stream = self._verifier.generate(self.session)
        verdict = next(self._stream, None)
        if verdict is None:
            raise StateError("the verifier ended its stream before the output was complete")
        return verdict

    def close(self) -> None:
        if self._session is not None:
            self._verifier.close(self._session)


def sequential(decoder: Decoder, drafter: Drafter | None, judge: Judge | None) -> Iterator[Event]:
    """Draft, wait for the verdict, draft on. Edge-only without `judge`, cloud-only without `drafter`."""
    while not isinstance(action := decoder.next(), Done):
        yield from decoder.events()  # blocks that the gate let pass
        match action:
            case Draft() if drafter is not None:
                decoder.drafted(drafter.draft(decoder.sequence.ids, action))
            case Verify() if judge is not None:
                decoder.decided(judge(action))
            case _:
                raise StateError(f"{action} was asked of nobody")
        if drafter is not None:
            drafter.settle(len(decoder.sequence.ids))
        yield from decoder.events()
    yield from decoder.events()
