"""`k auto`: what it learns on the way changes when verdicts are asked for, and never the output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.k_sweep import Case, find, rate
from outrider import SpeculativeDecoder, connect, local
from outrider.decoding.actions import Plan, Proposal
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import AdaptiveDraftLength, ConfidenceStop, NextTokens
from outrider.decoding.draft_source import DraftSource
from outrider.decoding.gate import Gate, Signals
from outrider.decoding.gate_parsing import gate
from outrider.decoding.speculation_switch import SpeculationSwitch
from outrider.decoding.stopping import StopRules
from outrider.edge.round_observer import RoundObserver
from outrider.sampling.acceptance import AcceptanceRule, Exact, Verdict, parse_acceptance_rule
from outrider.verifiers.local import LocalVerifier
from tests.support.cloud_server import serving
from tests.support.fakes import FarVerifier, HashRows, ScriptedEngine, blend, reference_output

V = 24
PROMPT = [3, 1, 4, 1, 5]
TARGET, OTHER = HashRows(1, V), HashRows(2, V)

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
SMALL = [
    Case(*costs, driver)
    for costs in (("geometric:0.8", 10, 0.1), ("calibrated:0.85", 5, 0.02), ("bursty:20", 2, 0.0))
    for driver in ("sequential", "pipelined")
]


def test_auto_is_never_far_behind_the_best_fixed_k() -> None:
    """A part of benchmarks/k_sweep.py, in virtual time: the same figures on every machine."""
    ratios = {str(case): find(case, 256, range(4), LENGTHS).ratio for case in SMALL}
    assert min(ratios.values()) >= 0.95, ratios


def test_a_confidence_stop_that_learns_nothing_would_be_seen() -> None:
    case = Case("geometric:0.8", 10, 0.1, "sequential")
    assert rate(case, ConfidenceStop(), 256, range(2)) < 0.9 * rate(case, AdaptiveDraftLength(), 256, range(2))


# Never the output -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def jumpy_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that make no sense: whatever is learnt from them must not show."""
    ticks = (20 * n + n * n % 17 for n in count())
    monkeypatch.setattr(RoundObserver.__init__, "__defaults__", (lambda: float(next(ticks)),))


@settings(max_examples=60)
@given(
    share=st.sampled_from((0.0, 0.1, 0.25, 0.5, 1.0)),
    spec=st.sampled_from(("always", "trigger:entropy:1.5", "trigger:never")),
    wanted=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 60),
            "temperature": st.sampled_from((0.0, 1.0)),
            "seed": st.integers(0, 9),
            "repetition_penalty": st.sampled_from((1.0, 1.2)),
        }
    ),
)
def test_exact_output_does_not_depend_on_what_was_learnt(share: float, spec: str, wanted: dict[str, Any]) -> None:
    target = ScriptedEngine(TARGET, V, eos_ids=(0,))
    decoder = SpeculativeDecoder(ScriptedEngine(blend(TARGET, OTHER, share), V), local(target), k="auto", gate=spec)
    for _ in range(3):
        result = decoder.generate(PROMPT, **wanted)
        assert result.token_ids == reference_output(TARGET, PROMPT, V, eos=(0,), **wanted)
        assert result.guarantee == "exact"


@pytest.mark.parametrize(
    "modes", [{"gate": "entropy:1.5"}, {"accept": "rank:3"}, {"accept": "residual"}, {"gate": "never"}]
)
def test_no_clock_decides_on_an_output_that_depends_on_the_cut(modes: dict[str, str]) -> None:
    def outputs() -> Iterator[list[int]]:
        draft, target = ScriptedEngine(blend(TARGET, OTHER, 0.3), V), ScriptedEngine(TARGET, V)
        decoder = SpeculativeDecoder(draft, local(target), k="auto", **modes)  # type: ignore[arg-type]
        for seed in (1, 1, 2, 1):
            yield decoder.generate(PROMPT, max_new_tokens=50, temperature=1.0, seed=seed).token_ids
        assert decoder.draft_length is not None
        assert decoder.draft_length.controller is not None
        assert decoder.draft_length.controller.token_costs == {}

    first, again, _, last = outputs()
    assert first == again == last


def test_the_edge_alone_drafts_by_confidence() -> None:
    decoder = SpeculativeDecoder(ScriptedEngine(TARGET, V), k="auto")
    result = decoder.generate(PROMPT, max_new_tokens=40)
    assert len(result.token_ids) == 40
    assert result.guarantee == "edge-only"


# Plain decoding ---------------------------------------------------------------------------------------------------


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the switch change its mind after each token or two. Returns its decisions."""
    decisions: list[bool] = []

    def should_speculate(*_: object) -> bool:
        decisions.append(len(decisions) % 5 > 2)
        return decisions[-1]

    monkeypatch.setattr(SpeculationSwitch, "should_speculate", should_speculate)
    return decisions


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
def test_changes_between_stream_and_speculation_keep_the_output(driver: Any, changes: list[bool]) -> None:
    drafter, wanted = ScriptedEngine(blend(TARGET, OTHER, 0.2), V), {"max_new_tokens": 60, "ignore_eos": True}
    with serving(ScriptedEngine(TARGET, V, eos_ids=(0,))) as served, connect(f"grpc://{served.address}") as cloud:  # type: ignore[union-attr]
        decoder = SpeculativeDecoder(drafter, cloud, k="auto", driver=driver)
        for _ in range(3):
            result = decoder.generate(PROMPT, **wanted)
            assert result.token_ids == reference_output(TARGET, PROMPT, V, **wanted)
            assert result.guarantee == "exact"
        assert result.ledger["up"]["generate"] > 0
        assert result.ledger["up"]["verify"] > 0
    assert True in changes
    assert False in changes


@pytest.mark.parametrize("spec", ["always", "trigger:never"])
def test_plain_decoding_does_not_draft(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptiveDraftLength, "tokens_to_draft", lambda *_: NextTokens(0))
    drafter = ScriptedEngine(TARGET, V)
    decoder = SpeculativeDecoder(drafter, local(ScriptedEngine(TARGET, V)), k="auto", gate=spec)
    result = decoder.generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == reference_output(TARGET, PROMPT, V, max_new_tokens=20)
    assert (drafter.forwards, result.stats.rounds, result.stats.blocks) == (0, 20, 20)


def test_the_edge_alone_drafts_though_plain_decoding_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculationSwitch, "should_speculate", lambda *_: False)
    losses = range(4, 10**9)
    cloud = FarVerifier(LocalVerifier(ScriptedEngine(TARGET, V)), losses=losses)
    decoder = SpeculativeDecoder(ScriptedEngine(TARGET, V), cloud, k="auto", on_cloud_loss="edge-only")
    result = decoder.generate(PROMPT, max_new_tokens=40)
    assert result.stats.cloud_lost
    assert len(result.token_ids) == 40


# What is told -----------------------------------------------------------------------------------------------------


def start(spec: str = "always", accept: AcceptanceRule | None = None) -> tuple[Decoder, AdaptiveDraftLength]:
    parsed: Gate = gate(spec)
    auto = AdaptiveDraftLength()
    plan = Plan(StopRules(100, ()), parsed, accept or Exact(), auto, has_verifier=True, on_loop="ignore")
    return Decoder(PROMPT, plan), auto


def play(decoder: Decoder, waits: list[float], *, step: float = 0.01) -> None:
    """Rounds of two tokens, both accepted, at the given times; the prompt takes ten times as long."""
    now = [0.0]
    observer = RoundObserver(decoder, lambda: now[0])
    for n, wait in enumerate(waits, 1):
        while not hasattr(action := decoder.next(), "draft_ids"):
            began = now[0]
            now[0] += step if decoder.stats.drafted else 10 * step
            proposals = [Proposal(7, Signals(0.0, 0.0, 0.0, 0.6))]
            observer.record_draft(proposals, began)
            decoder.drafted(proposals)
        began = now[0]
        now[0] += wait
        verdict = Verdict(n, len(action.draft_ids), 8)  # type: ignore[union-attr]
        observer.record_verdict(verdict, began)
        decoder.decided(verdict)


def test_the_time_of_the_prompt_is_no_pace() -> None:
    decoder, auto = start()
    play(decoder, [5.0, 0.1, 0.1])
    assert auto.controller.times.draft_seconds() == pytest.approx(0.01)
    assert auto.controller.times.fixed(0.0) == pytest.approx(0.1)
    assert auto.controller.acceptance.rate_of(DraftSource.MODEL) > 0.7


def test_the_first_draft_of_each_source_is_not_timed() -> None:
    """A draft model that follows prompt lookup prefills the whole prompt in its first draft."""
    decoder, auto = start()
    now = [0.0]
    observer = RoundObserver(decoder, lambda: now[0])
    for match_length, seconds in ((3, 0.5), (3, 0.001), (0, 9.0), (0, 0.2), (3, 0.001)):
        began, now[0] = now[0], now[0] + seconds
        proposals = [Proposal(7, match_length=match_length)]
        observer.record_draft(proposals, began)
        decoder.drafted(proposals)
    times = auto.controller.times
    assert times.draft_seconds(DraftSource.LOOKUP) == pytest.approx(0.001)
    assert times.draft_seconds(DraftSource.MODEL) == pytest.approx(0.2)


def test_learned_costs_outlive_the_generation() -> None:
    decoder = SpeculativeDecoder(
        ScriptedEngine(blend(TARGET, OTHER, 0.1), V), local(ScriptedEngine(TARGET, V)), k="auto"
    )
    decoder.generate(PROMPT, max_new_tokens=40)
    assert decoder.draft_length is not None
    assert decoder.draft_length.controller is not None
    assert decoder.draft_length.controller.token_costs


@pytest.mark.parametrize(("spec", "accept"), [("entropy:9", "exact"), ("always", "rank:3")])
def test_nothing_is_told_where_the_cut_matters(spec: str, accept: str) -> None:
    decoder, auto = start(spec, parse_acceptance_rule(accept))
    observer = RoundObserver(decoder, lambda: 1.0)
    for _ in range(2):  # the first one is not timed in any case
        observer.record_draft([Proposal(7)], 0.0)
    observer.record_verdict(Verdict(2, 0, 1), 0.0)
    assert not auto.controller.times.is_ready
    rates = [auto.controller.acceptance.rate_of(source) for source in DraftSource]
    assert rates == [AdaptiveDraftLength().controller.acceptance.rate_of(source) for source in DraftSource]
