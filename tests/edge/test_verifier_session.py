"""The loss of the cloud: at any call, under either driver, whatever was asked to happen then."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationSettings, OnCloudLoss
from outrider.decoding.actions import Plan, Verify
from outrider.decoding.decoder import Decoder
from outrider.decoding.gate import Always
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules
from outrider.edge.drivers import sequential
from outrider.edge.verifier_session import PipelinedVerifier, VerifierSession
from outrider.engines.base import Prompt
from outrider.errors import CloudLost, CloudRefused
from outrider.sampling.acceptance import Exact, Verdict
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import FarVerifier, ScriptedEngine, ScriptedVerifier, blend, reference_output
from tests.support.generation import LOOPY, OTHER, PROMPT, TARGET, Case, Generation, V

FOR_EVER = 10**9
DRIVERS = ("sequential", "pipelined")
GATES: tuple[Any, ...] = ("always", "trigger:never", ("trigger", [False, True] * 9), ("skip", [True, False, False] * 9))


def case(gate: Any = "always", **changes: Any) -> Case:
    options = {"max_new_tokens": 26, "ignore_eos": True, **changes.pop("options", {})}
    return Case(lambda: ScriptedEngine(blend(TARGET, OTHER, 0.2), V), gate=gate, options=options, **changes)


def start(driver: str, which: Case, losses: Collection[int], on_loss: OnCloudLoss, **more: Any) -> Generation:
    return Generation(which, driver, polls=(4, 0, 7), losses=losses, on_loss=on_loss, **more)


def calls(driver: str, which: Case) -> int:
    return start(driver, which, (), "fail").run().verifier.calls


# At every call ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("driver", DRIVERS)
def test_fail_lets_it_through_and_closes_everything(driver: str, gate: Any) -> None:
    for at in range(calls(driver, case(gate))):
        run = start(driver, case(gate), range(at, FOR_EVER), "fail")
        with pytest.raises(CloudLost, match=f"call {at} was lost"):
            run.run()
        assert run.verifier.calls == at + 1, "asked once"
        assert not run.draft.open_slots
        assert not run.target.open_slots


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("heard", [False, True])
def test_wait_comes_to_the_same_output(driver: str, gate: Any, heard: bool, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = start(driver, case(gate), (), "wait").run()
    for at in range(undisturbed.verifier.calls):
        caplog.clear()
        run = start(driver, case(gate), range(at, at + 3), "wait", heard=heard).run()
        assert run.said() == undisturbed.said()
        assert not run.decoder.stats.cloud_lost
        assert run.verifier.calls == undisturbed.verifier.calls + 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING], "one for one loss"
        assert f"call {at} was lost; retrying" in caplog.text


def test_every_loss_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    start("pipelined", case(), (1, 3, 4), "wait").run()
    assert [record.getMessage()[:6] for record in caplog.records] == ["call 1", "call 3"]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("driver", DRIVERS)
def test_edge_only_goes_on_alone_and_says_so(driver: str, gate: Any) -> None:
    for at in range(calls(driver, case(gate))):
        run = start(driver, case(gate), range(at, FOR_EVER), "edge-only").run()
        alone(run)
        assert run.decoder.stats.drafted == run.draft.forwards
        assert run.verifier.calls == at + 1, "the verifier is not spoken to again"


def alone(run: Generation) -> None:
    """Whatever the cloud decided is the target's, the rest is the drafter's own continuation."""
    stats, ids = run.decoder.stats, run.decoder.sequence.ids
    assert stats.cloud_lost
    assert run.guarantee == "edge-only"
    assert len(run.tokens) == run.case.wanted.max_new_tokens or run.reason != "length"
    assert stats.cloud_tokens + stats.edge_tokens == len(run.tokens)
    for n, source in enumerate(run.sources, len(PROMPT)):
        rows = run.case.target if source.by_cloud else run.draft.rows
        choice = run.policy.distribution(rows(tuple(ids[:n])), ids, n).token
        assert source is Source.SAMPLED or choice == ids[n]
    assert stats.drafted <= run.draft.forwards, "without a verifier, the rest of a block after an end is not counted"
    assert run.draft.refed == 0 or stats.loop_sampled
    assert not run.draft.open_slots
    assert not run.target.open_slots


@settings(max_examples=150)
@given(
    driver=st.sampled_from(DRIVERS),
    at=st.integers(0, 12),
    gate=st.sampled_from(GATES),
    rows=st.sampled_from((TARGET, LOOPY)),
    options=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 60),
            "temperature": st.sampled_from((0.0, 1.0)),
            "ignore_eos": st.booleans(),
            "stop": st.sampled_from(((), ("a", "bc"))),
        }
    ),
    more=st.fixed_dictionaries({"k": st.sampled_from((1, 4, "auto")), "scope": st.just("block")}),
    on_loop=st.sampled_from(("escalate", "stop", "ignore")),
    polls=st.lists(st.integers(0, 20), min_size=1, max_size=5),
)
def test_edge_only_at_any_time(
    driver: str, at: int, gate: Any, rows: Any, options: Any, more: Any, on_loop: str, polls: list[int]
) -> None:
    which = Case(
        lambda: ScriptedEngine(blend(rows, OTHER, 0.2), V), rows, gate, options=options, on_loop=on_loop, **more
    )
    run = Generation(which, driver, polls=polls, losses=range(at, FOR_EVER), on_loss="edge-only").run()
    if run.verifier.calls > at:
        alone(run)
    else:
        assert not run.decoder.stats.cloud_lost


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_loop_that_cannot_be_escalated_any_more_is_left_by_a_draw(driver: str) -> None:
    which = Case(lambda: ScriptedEngine(LOOPY, V), LOOPY, "never", options={"max_new_tokens": 60, "ignore_eos": True})
    run = start(driver, which, range(FOR_EVER), "edge-only").run()
    alone(run)
    assert run.decoder.stats.forced_by_loop == 1
    assert run.decoder.stats.loop_sampled >= 1


def test_repair_without_a_verdict_leaves_what_was_skipped() -> None:
    which = case(("skip", [False, False, True]), scope="repair")
    run = start("sequential", which, range(FOR_EVER), "edge-only").run()
    alone(run)
    assert set(run.sources) == {Source.EDGE}


# Other errors, and closing ----------------------------------------------------------------------------------------


class Says(FarVerifier):
    """A far verifier whose calls from the third on raise what it is told to."""

    error: BaseException = CloudRefused("another model")

    def _pass(self, reach: Any) -> None:
        super()._pass(reach)
        if self.calls > 2:
            raise self.error


@pytest.mark.parametrize("on_loss", ["fail", "wait", "edge-only"])
@pytest.mark.parametrize("error", [CloudRefused("another model"), KeyboardInterrupt(), RuntimeError("a bug")])
@pytest.mark.parametrize("driver", DRIVERS)
def test_other_errors_propagate(driver: str, on_loss: OnCloudLoss, error: BaseException) -> None:
    run = start(driver, case(), (), on_loss)
    run.verifier.__class__ = Says
    run.verifier.error = error  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        run.run()
    assert not run.draft.open_slots
    assert not run.target.open_slots


def test_waiting_can_be_interrupted() -> None:
    class Interrupted(ScriptedVerifier):
        attempts = 0

        def verify(self, session: int, request: Verify) -> Verdict:
            self.attempts += 1
            raise KeyboardInterrupt if self.attempts > 5 else CloudLost("no route")

    verifier = Interrupted([1], V)
    link = link_to(verifier, "wait")
    with pytest.raises(KeyboardInterrupt):
        link.verify(Verify(1, 5, (), (1,)))
    link.close()
    assert verifier.closed == [1]
    assert len(verifier.opened) == 1


class Hangs(ScriptedVerifier):
    error: Exception = CloudLost("gone")

    def close(self, session: int) -> None:
        raise self.error


def link_to(verifier: Any, on_loss: OnCloudLoss = "fail") -> VerifierSession:
    params = SessionParams(GenerationSettings(), "exact", V)
    return VerifierSession(verifier, lambda verifier: verifier.open(Prompt(PROMPT), params), on_loss)


def test_closing_masks_no_result_and_swallows_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    link = link_to(Hangs([1, 2], V))
    link.close()
    assert link.verify(Verify(1, 5, (), (1,))) == Verdict(1, 1, 2)
    link.close()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    Hangs.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        link.close()


def test_the_local_verifier_is_not_pipelined() -> None:
    assert isinstance(FarVerifier(ScriptedVerifier([], V)), PipelinedVerifier)
    assert not isinstance(LocalVerifier(ScriptedEngine(TARGET, V)), PipelinedVerifier)


# Cloud-only -------------------------------------------------------------------------------------------------------


def stream(losses: Collection[int], on_loss: OnCloudLoss) -> tuple[Decoder, FarVerifier]:
    plan = Plan(StopRules(12), Always(), Exact(), None, True, "ignore")
    decoder, verifier = Decoder(PROMPT, plan), FarVerifier(LocalVerifier(ScriptedEngine(TARGET, V)), losses=losses)
    link = link_to(verifier, on_loss)
    events: Iterator[Any] = sequential(decoder, None, link.verify)
    try:
        for _ in events:
            assert decoder.ahead() is None
    finally:
        link.close()
    return decoder, verifier


def test_a_stream_is_begun_again_behind_what_it_brought() -> None:
    right = reference_output(TARGET, PROMPT, V, max_new_tokens=12)
    for at in range(13):
        decoder, verifier = stream(range(at, at + 2), "wait")
        assert decoder.sequence.generated == right
        assert verifier.calls == 13 + 2
        with pytest.raises(CloudLost):
            stream((at,), "fail")
