"""A generation goes by who was there when it began, whatever comes later."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from tests.engines.tiny import engine

from fakes import rest
from outrider import SpeculativeDecoder
from outrider.core.acceptance import Verdict
from outrider.core.decoder import Verify
from outrider.edge.pair import Pair
from outrider.errors import CloudLost, PromptError
from outrider.verifiers.base import Description
from outrider.verifiers.local import LocalVerifier
from outrider.wire.ledger import Ledger


class Late(LocalVerifier):
    """Not there until it is told to be."""

    there = False

    def describe(self, edge: Description | None = None) -> Description:
        if not self.there:
            raise CloudLost("nobody answers")
        return super().describe(edge)

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        answer: Future[Verdict] = Future()
        answer.set_result(self.verify(session, request))
        return answer

    def ledger(self, session: int) -> Ledger:
        return Ledger()


def test_who_comes_later_is_no_part_of_what_has_begun() -> None:
    draft, cloud = engine("qwen2"), Late(engine("qwen2"))
    decoder = SpeculativeDecoder(draft, cloud, on_cloud_loss="edge-only", k=3)
    early = decoder.stream([3, 4, 5], max_new_tokens=8, ignore_eos=True)
    cloud.there = True
    assert decoder.generate([3, 4, 5], max_new_tokens=8, ignore_eos=True).guarantee == "exact"
    result = rest(early)
    assert (result.guarantee, result.stats.cloud_lost, result.stats.cloud_tokens) == ("edge-only", True, 0)


def test_what_was_there_does_not_change() -> None:
    cloud = Late(engine("qwen2"))
    pair = Pair(engine("qwen2"), cloud, "edge-only")
    before = pair.meet()
    cloud.there = True
    after = pair.meet()
    assert (len(before.sides), before.whole, len(after.sides), after.whole) == (1, False, 2, True)
    assert pair.meet() is after


def test_both_must_hold_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = engine("qwen2"), engine("llama")
    monkeypatch.setattr(small, "max_length", 10)
    pair = Pair(small, LocalVerifier(large), "fail")
    with pytest.raises(PromptError, match="holds 10"):
        SpeculativeDecoder(small, LocalVerifier(large)).generate([1, 2, 3], max_new_tokens=8)
    assert len(pair.now.sides) == 2
