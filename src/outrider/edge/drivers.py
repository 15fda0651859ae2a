"""Drivers: they do what the decoder asks for, and hand back what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from outrider.core.acceptance import Verdict
from outrider.core.actions import Done, Draft, Verify
from outrider.core.decoder import Decoder, Event
from outrider.edge.drafter import Drafter
from outrider.edge.lessons import Lessons
from outrider.edge.link import Link
from outrider.errors import StateError

log = logging.getLogger(__name__)

Judge = Callable[[Verify], Verdict | None]  # None: the cloud is lost, and the edge is to go on alone


def sequential(
    decoder: Decoder, drafter: Drafter | None, judge: Judge | None, lessons: Lessons | None = None
) -> Iterator[Event]:
    """Draft, wait for the verdict, draft on. Edge-only without `judge`, cloud-only without `drafter`."""
    while True:
        action = decoder.next()
        if drafter is not None:
            drafter.settle(decoder.context_length)
        yield from decoder.events()
        match action:
            case Done():
                return
            case Draft() if drafter is not None:
                _draft(decoder, drafter, action, lessons)
            case Verify() if judge is not None:
                _verify(decoder, judge, action, lessons)
            case _:
                raise StateError(f"{action} was asked of nobody")


def pipelined(decoder: Decoder, drafter: Drafter, link: Link, lessons: Lessons | None = None) -> Iterator[Event]:
    """The same, but draft on while the verdict is in flight: a right guess costs no round trip."""

    def judge(request: Verify) -> Verdict | None:
        pending = link.submit(request)
        while not pending.done() and (action := decoder.ahead()) is not None:
            decoder.drafted_ahead(drafter.draft(decoder.context, action))
        return pending.result()

    return sequential(decoder, drafter, judge, lessons)


def _draft(decoder: Decoder, drafter: Drafter, action: Draft, lessons: Lessons | None) -> None:
    started = lessons.clock() if lessons is not None else 0.0
    proposals = drafter.draft(decoder.context, action)
    if lessons is not None:
        lessons.drafted(len(proposals), started)
    decoder.drafted(proposals)


def _verify(decoder: Decoder, judge: Judge, request: Verify, lessons: Lessons | None) -> None:
    started = lessons.clock() if lessons is not None else 0.0
    verdict = judge(request)
    if verdict is None:
        decoder.lose_verifier()
        return
    log.debug("verdict %d: %d of %d accepted", verdict.round, verdict.accepted, len(request.draft_ids))
    if lessons is not None:
        lessons.decided(verdict, started)
    decoder.decided(verdict)
