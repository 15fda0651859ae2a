"""Drivers: they execute the decoder's actions and return the results to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from outrider.decoding.actions import Done, Draft, Verify
from outrider.decoding.decoder import Decoder, Event
from outrider.edge.drafter import Proposer
from outrider.edge.round_observer import RoundObserver
from outrider.edge.verifier_session import VerifierSession
from outrider.errors import StateError
from outrider.sampling.acceptance import Verdict

log = logging.getLogger(__name__)

VerifyFunction = Callable[[Verify], Verdict | None]  # None: the cloud is lost, and the edge continues alone


def sequential(
    decoder: Decoder, drafter: Proposer | None, verify: VerifyFunction | None, observer: RoundObserver | None = None
) -> Iterator[Event]:
    """Draft a block, wait for its verdict, and so on. Edge-only without `verify`, cloud-only without `drafter`."""
    while True:
        action = decoder.next()
        if drafter is not None:
            drafter.rollback_to(decoder.context_length)
        yield from decoder.events()
        match action:
            case Done():
                return
            case Draft() if drafter is not None:
                _draft(decoder, drafter, action, observer)
            case Verify() if verify is not None:
                _verify(decoder, verify, action, observer)
            case _:
                raise StateError(f"{action} needs a drafter or verifier that is missing")


def pipelined(
    decoder: Decoder, drafter: Proposer, session: VerifierSession, observer: RoundObserver | None = None
) -> Iterator[Event]:
    """Draft ahead during the wait for a verdict. A correct guess of the bonus token hides the round trip."""

    def verify(request: Verify) -> Verdict | None:
        pending = session.submit(request)
        while not pending.done() and (action := decoder.ahead()) is not None:
            if not (proposals := drafter.draft(decoder.context, action)):
                break
            decoder.drafted_ahead(proposals)
        return pending.result()

    return sequential(decoder, drafter, verify, observer)


def _draft(decoder: Decoder, drafter: Proposer, action: Draft, observer: RoundObserver | None) -> None:
    started = observer.clock() if observer is not None else 0.0
    proposals = drafter.draft(decoder.context, action)
    if observer is not None:
        observer.record_draft(proposals, started, lookup_only=action.lookup_only)
    decoder.drafted(proposals)


def _verify(decoder: Decoder, verify: VerifyFunction, request: Verify, observer: RoundObserver | None) -> None:
    started = observer.clock() if observer is not None else 0.0
    verdict = verify(request)
    if verdict is None:
        decoder.on_verifier_lost()
        return
    log.debug("verdict %d: %d of %d accepted", verdict.round, verdict.accepted, len(request.draft_ids))
    if observer is not None:
        observer.record_verdict(verdict, started)
    decoder.decided(verdict)
