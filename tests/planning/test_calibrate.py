"""Calibration: the loss is what the decoder would do, never falls, and the budget holds on requests not seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.live import realised
from outrider.api import local
from outrider.cli.app import app
from outrider.cli.calibrate import _show, load_descriptions, run_calibrate
from outrider.cli.options import Models
from outrider.config import GenerationSettings, Loss
from outrider.decoding.actions import Done, Draft, Plan, Proposal
from outrider.decoding.calibrated_gate import Calibrated, draw_audits
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import FixedDraftLength
from outrider.decoding.gate import SIGNAL_NAMES, Signals, Threshold
from outrider.decoding.gate_file import GateFile, read_gate_file
from outrider.decoding.gate_parsing import gate
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules
from outrider.errors import DataError, SettingsError
from outrider.planning.blocks import build_blocks, direction, end_tokens, replay, replay_gate, worst_losses
from outrider.planning.calibrate import (
    apply_loss,
    calibrate,
    candidates,
    min_traces,
    monotone,
    split,
    write_gate_file,
)
from outrider.planning.provenance import describe_engine
from outrider.planning.traces import Trace
from outrider.sampling.acceptance import Exact, Verdict
from tests.support import adversaries
from tests.support.calibration_requests import CLOUD, EDGE, EOS, request, requests, write_requests
from tests.support.tiny_text_models import engine

REPEATS = 80


def found(traces: list[Trace], epsilon: float = 0.1, k: int = 3, **more: Any) -> GateFile:
    given = {"edge": EDGE, "cloud": CLOUD, "settings": GenerationSettings(), "loss": "tokens", **more}
    return calibrate(traces, epsilon=epsilon, k=k, **given)


# The loss is what the decoder would do ------------------------------------------------------------------------------


def decode(trace: Trace, policy: Any, k: int, on_loop: Any = "ignore") -> Decoder:
    """The decoder itself on a trace: drafts and verdicts by position."""
    size = len(trace.target)
    plan = Plan(
        StopRules(size, end_tokens(trace)), policy, Exact(), FixedDraftLength(k), has_verifier=True, on_loop=on_loop
    )
    decoder = Decoder([1] * trace.prompt_tokens, plan)
    while not isinstance(action := decoder.next(), Done):
        at = decoder.context_length - trace.prompt_tokens
        if isinstance(action, Draft):
            ahead = range(at, at + action.count)
            decoder.drafted([Proposal(trace.draft[n], trace.signals[n]) for n in ahead])
            continue
        base = action.base_length - trace.prompt_tokens
        truth = trace.target[base:]
        stands = 0
        while stands < len(action.draft_ids) and action.draft_ids[stands] == truth[stands]:
            stands += 1
        decoder.decided(Verdict(action.round, stands, truth[stands] if stands < len(truth) else 0))
    return decoder


def loss_of(decoder: Decoder, trace: Trace) -> float:
    """The share of the target's output from the first wrong edge token on."""
    edge = [n for n, source in enumerate(decoder.sequence.sources) if source is Source.EDGE]
    wrong = (n for n in edge if decoder.sequence.generated[n] != trace.target[n])
    return 1 - next(wrong, len(trace.target)) / len(trace.target)


LEVELS = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.7, 1.0])  # few, so that thresholds meet values exactly


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    size = draw(st.integers(1, 14))
    tokens = st.integers(1, 4)
    target = draw(st.lists(tokens, min_size=size, max_size=size))
    draft = [t if draw(st.integers(0, 3)) else draw(tokens) for t in target]
    rows = draw(st.lists(st.tuples(LEVELS, LEVELS, LEVELS, LEVELS), min_size=size, max_size=size))
    return Trace("t", draw(st.integers(1, 3)), tuple(target), tuple(draft), tuple(Signals(*row) for row in rows))


@st.composite
def looping(draw: st.DrawFn) -> Trace:
    """A trace whose target repeats itself."""
    phrase = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    target = tuple(phrase * draw(st.integers(4, 9)) + draw(st.lists(st.integers(1, 3), max_size=6)) + [EOS])
    draft = tuple(t if draw(st.integers(0, 5)) else 4 for t in target)
    uncertainty = [draw(LEVELS) for _ in target]
    return Trace("t", 1, target, draft, tuple(Signals(u, 1 - u, u, u) for u in uncertainty))


@settings(max_examples=200, deadline=None)
@given(
    traces() | looping(),
    st.integers(1, 6),
    st.sampled_from(SIGNAL_NAMES),
    st.booleans(),
    LEVELS,
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
)
def test_the_replay_of_whole_blocks_is_the_decoder(
    trace: Trace, k: int, name: str, mean: bool, limit: float, audit: float, loops: bool
) -> None:
    threshold = Threshold(name, limit, mean)  # type: ignore[arg-type]
    policy = Calibrated(threshold, replace(found_once(), audit=audit), "f", key=7)
    decoder = decode(trace, policy, k, "escalate" if loops else "ignore")
    table = build_blocks([trace], k, audit, seed=7)
    one = replay(table, table.uncertainty(threshold, whole=True), np.array([direction(threshold) * limit]), loops=loops)
    assert one.losses[0, 0] == pytest.approx(loss_of(decoder, trace))
    if loops and one.losses[0, 0]:
        return  # another text has other loops
    assert one.escalation[0] == pytest.approx(decoder.stats.escalated / decoder.stats.blocks)
    edge = decoder.sequence.sources.count(Source.EDGE) + len(trace.target) - len(decoder.sequence.sources)
    assert one.edge_shares[0, 0] == pytest.approx(edge / len(trace.target))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(list(adversaries.PAIRS)),
    st.sampled_from(SIGNAL_NAMES),
    st.floats(0, 1.2),
    st.data(),
)
def test_the_replay_by_prefixes_is_never_below_a_live_run(
    seed: int, pair: str, name: str, limit: float, data: st.DataObject
) -> None:
    """Behind a wrong token of its own the live drafter's signals may be anything."""
    request, on_loop = adversaries.PAIRS[pair](seed), data.draw(st.sampled_from(["escalate", "ignore", "stop"]))
    scope, k = data.draw(st.sampled_from(["block", "repair"])), data.draw(st.integers(1, 8))
    trace, threshold = adversaries.trace(request), Threshold(name, limit + 5e-7)  # type: ignore[arg-type]
    policy = Calibrated(threshold, replace(found_once(), audit=0.2), "f")
    key = policy.with_audit_key(0, [request.seed]).key
    ran = adversaries.live(request, policy, k, on_loop=on_loop, scope=scope)
    table = build_blocks([trace], k)
    table = replace(table, audits=np.append(draw_audits(key, np.arange(len(trace.target)), 0.2), True))
    bound = worst_losses(table, table.uncertainty(threshold), np.array([direction(threshold) * threshold.limit]))[0, 0]
    target = trace.target[: len(ran.ids)] if on_loop == "stop" and ran.reason == "loop" else trace.target
    assert realised(ran.ids, target, "tokens") <= bound + 1e-12


def found_once() -> GateFile:
    return GateFile("entropy:1", 0.1, "tokens", 3, 9, 0.0, 0.5, 0.0, EDGE, CLOUD, GenerationSettings())


def test_many_traces_and_limits_at_once_are_each_by_itself() -> None:
    some, threshold = requests(20), Threshold("logprob", 0.0)
    table = build_blocks(some, 4, 0.1, seed=3)
    limits = candidates(table.uncertainty(threshold), threshold)[::7]
    together = replay(table, table.uncertainty(threshold), limits)
    for n, trace in enumerate(some):
        for column, limit in enumerate(limits):
            alone = replay_gate([trace], Threshold("logprob", float(limit)), 4, 0.1, seed=3 + n)
            assert alone.losses[0, 0] == pytest.approx(together.losses[n, column])


def test_an_end_that_the_edge_invents_costs_all_that_was_to_come() -> None:
    sure = (Signals(0.0, 1.0, 0.0, 0.0),) * 6
    trace = Trace("t", 1, (1, 2, 3, 4, 5, EOS), (1, EOS, 3, 4, 5, EOS), sure)
    assert replay_gate([trace], Threshold("entropy", 0.5), 3).losses[0, 0] == pytest.approx(5 / 6)


def test_only_what_stands_before_a_disagreement_tells_how_sure_a_block_is() -> None:
    entropies = (0.1, 0.2, 9.0, 0.1, 0.1, 0.1)
    trace = Trace(
        "t",
        1,
        (1, 2, 3, 4, 5, EOS),
        (1, 0, 3, 4, 5, EOS),
        tuple(Signals(e, 1.0, 0.0, 0.0) for e in entropies),
    )
    gate = Threshold("entropy", 0.5)
    assert replay_gate([trace], gate, 3).losses[0, 0] == pytest.approx(5 / 6)
    table = build_blocks([trace], 3)
    assert replay(table, table.uncertainty(gate, whole=True), np.array([0.5])).losses[0, 0] == 0.0


def test_a_threshold_lies_where_rounding_does_not_decide() -> None:
    met = np.array([0.0, 1e-6, 0.25, 0.5, 0.5, np.inf])
    limits = candidates(met, Threshold("entropy", 0.0))
    assert limits.tolist() == pytest.approx([5e-7, 0.1250005, 0.3750005, 0.5000005], abs=1e-9)
    margins = candidates(-met, Threshold("margin", 0.0))
    assert margins.tolist() == pytest.approx([-0.3749995, -0.1250005, -5e-7, 0.0], abs=1e-9)


# Monotone -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(traces(), min_size=1, max_size=4), st.integers(1, 6), st.sampled_from(SIGNAL_NAMES), st.booleans())
def test_the_loss_never_falls_and_covers_the_real_one(some: list[Trace], k: int, name: str, mean: bool) -> None:
    threshold = Threshold(name, 0.0, mean)  # type: ignore[arg-type]
    table = build_blocks(some, k)
    limits = candidates(table.uncertainty(threshold), threshold)
    assert (np.diff(limits) > 0).all()
    raw = replay(table, table.uncertainty(threshold), limits).losses
    covered = monotone(raw)
    assert (np.diff(covered, axis=1) >= 0).all()
    assert (covered >= raw).all()
    assert ((raw >= 0) & (covered <= 1)).all()


def test_the_raw_loss_can_fall() -> None:
    """Why the running maximum is min_traces: a looser gate moves a later block's start."""
    entropies = (0.1, 0.1, 0.2, 0.0, 0.9, 0.0)
    signals = tuple(Signals(e, 1.0, 0.0, 0.0) for e in entropies)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        target = (1, 2, 3, 4, 5, 6)
        draft = tuple(t if rng.random() < 0.6 else 0 for t in target)
        trace = Trace("t", 1, target, draft, tuple(signals[n] for n in rng.permutation(6)))
        table, threshold = build_blocks([trace], 2), Threshold("entropy", 0.0)
        raw = replay(table, table.uncertainty(threshold), candidates(table.uncertainty(threshold), threshold)).losses
        if (np.diff(raw, axis=1) < 0).any():
            return
    pytest.fail("no such trace was met")


# The budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "epsilon", "count"), [("tokens", 0.05, 60), ("tokens", 0.1, 20), ("outputs", 0.2, 40)]
)
def test_the_expected_loss_of_unseen_requests_is_within_the_budget(loss: Loss, epsilon: float, count: int) -> None:
    """Many calibrations, each judged on fresh requests; a refusal verifies all, which loses nothing."""
    rng, losses, skipped = np.random.default_rng(1), [], 0.0
    for n in range(REPEATS):
        some = [request(rng) for _ in range(count)]
        fresh = [request(rng) for _ in range(20)]
        try:
            made = gate(found(some, epsilon, seed=n, loss=loss).gate)
        except DataError:
            losses.append(0.0)
            continue
        assert isinstance(made, Threshold)
        ran = replay_gate(fresh, made, 3, 0.05, seed=10_000 * n)
        losses.append(float(apply_loss(ran.losses, loss).mean()))
        skipped += 1 - float(ran.escalation[0])
    assert np.mean(losses) - 2.6 * np.std(losses) / np.sqrt(len(losses)) <= epsilon
    assert np.mean(losses) > epsilon / 10  # and the budget is used
    assert skipped > REPEATS / 20


def test_the_threshold_is_the_loosest_that_fits() -> None:
    some = requests(80)
    made = found(some, 0.05, seed=4)
    _, setting = split(len(some), 0.05, 4)
    threshold = gate(made.gate)
    assert isinstance(threshold, Threshold)
    assert made.traces == len(setting) == 60
    assert (made.traces * made.risk + 1) / (made.traces + 1) <= 0.05
    table = build_blocks([some[n] for n in setting], 3, 0.05, seed=4)
    limits = np.array([direction(threshold) * threshold.limit])
    ran = replay(table, table.uncertainty(threshold, whole=True), limits)
    assert ran.escalation[0] == pytest.approx(made.escalation)
    assert replay(table, table.uncertainty(threshold), limits).losses.mean() <= made.risk + 1e-9


def test_a_budget_of_outputs_is_the_stricter_one() -> None:
    some = requests(120)
    tokens, outputs = found(some, 0.1), found(some, 0.1, loss="outputs")
    assert (tokens.loss, outputs.loss) == ("tokens", "outputs")
    assert outputs.escalation > tokens.escalation
    _, setting = split(len(some), 0.1, 0)
    ran = replay_gate([some[n] for n in setting], gate(outputs.gate), 3, 0.05, seed=0)  # type: ignore[arg-type]
    assert (ran.losses > 0).mean() <= outputs.risk + 1e-9 <= 0.1


def test_the_signal_is_the_one_that_escalates_least_on_traces_of_its_own() -> None:
    """Only logprob knows where the drafter errs; the others are noise."""
    rng = np.random.default_rng(5)

    def told(trace: Trace) -> Trace:
        noise = rng.random((len(trace.target), 3)).tolist()
        rows = zip(noise, trace.agrees, strict=True)
        return replace(trace, signals=tuple(Signals(a, b, c, 0.0 if right else 5.0) for (a, b, c), right in rows))

    made = found([told(trace) for trace in requests(80)], 0.05)
    assert made.gate.startswith("logprob")
    assert [row.signal for row in made.signals] == list(SIGNAL_NAMES)
    assert min(made.signals, key=lambda row: row.escalation).signal == made.gate.partition(":")[0]


def test_the_same_traces_and_seed_give_the_same_gate() -> None:
    some = requests(60)
    assert found(some) == found(some)


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "setting"), [(0.02, 49), (0.05, 19), (0.1, 9), (0.5, 1), (0.9, 1)])
def test_too_few_traces_are_refused_with_how_many_it_takes(epsilon: float, setting: int) -> None:
    enough = min_traces(epsilon)
    assert len(split(enough, epsilon, 0)[1]) >= setting
    with pytest.raises(DataError, match=rf"{enough - 1} traces are too few .* record {enough} or more"):
        split(enough - 1, epsilon, 0)
    if enough > 2:
        assert enough - 1 - max((enough - 1) // 4, 1) < setting


def test_the_number_needed_is_found_at_once() -> None:
    assert 1.3e9 < min_traces(1e-9) < 1.4e9


def test_where_nothing_may_be_skipped_there_is_no_gate() -> None:
    wrong = [replace(trace, draft=(0,) * len(trace.target)) for trace in requests(40)]
    sure = [replace(trace, signals=(Signals(0.0, 1.0, 0.0, 0.0),) * len(trace.target)) for trace in wrong]
    with pytest.raises(DataError, match=r"no threshold of any signal keeps the risk at 0\.1 of tokens"):
        found(sure, audit=0.0)
    with pytest.raises(DataError, match=r"of outputs: take more traces, .* count the loss in tokens"):
        found(sure, audit=0.0, loss="outputs")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is above 0"),
        ({"epsilon": 1}, "epsilon is above 0 and below 1"),
        ({"epsilon": float("nan")}, "epsilon is between"),
        ({"k": 0}, "k is a whole number"),
        ({"k": "auto"}, "fixed k"),
        ({"audit": 1.5}, "audit is between"),
        ({"seed": -1}, "seed is a whole number"),
        ({"loss": "words"}, "loss 'words': expected one of outputs, tokens"),
        ({"signals": ["entropy.mean"]}, r"signal 'entropy\.mean': the mean over a block cannot be calibrated"),
        ({"signals": ["entropie"]}, "signal 'entropie': expected one of"),
    ],
)
def test_settings_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        found(requests(3), **values)


# File and command -----------------------------------------------------------------------------------------------------


def test_the_file_says_what_was_found(tmp_path: Path) -> None:
    made = found(requests(60), settings=GenerationSettings(stop=("。",), repetition_penalty=1.1))
    write_gate_file(tmp_path / "gate.json", made)
    assert read_gate_file(tmp_path / "gate.json") == made
    read = gate(f"calibrated:{tmp_path / 'gate.json'}")
    assert isinstance(read, Calibrated)
    assert (str(read.inner), read.budget, read.file.audit) == (made.gate, 0.1, 0.05)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/gate\.json cannot be written"):
        write_gate_file(tmp_path / "nowhere" / "gate.json", found_once())


@pytest.mark.parametrize("as_json", [False, True])
def test_calibrate_command_writes_a_gate_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    file, out = tmp_path / "traces.jsonl", str(tmp_path / "gate.json")
    write_requests(file)
    sides = ({"name": m.name, "vocabulary": m.fingerprint, "quantization": None} for m in (EDGE, CLOUD))
    pair = {**dict(zip(("edge", "cloud"), sides, strict=True)), "settings": GenerationSettings()}
    assert run_calibrate(str(file), out, 0.1, 3, **pair, loss="tokens", json_output=as_json) == 0
    printed, made = capsys.readouterr().out, read_gate_file(out)
    if as_json:
        assert json.loads(printed) == {"file": out, **json.loads(Path(out).read_text(encoding="utf-8"))}
    else:
        assert all(word in printed for word in ("logprob", "maxprob", "escalated", made.gate, f"calibrated:{out}"))


def test_the_seed_of_the_command_is_that_of_the_traces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("outrider.cli.calibrate.load_descriptions", lambda models, network: (EDGE, CLOUD))
    monkeypatch.setattr(
        "outrider.cli.calibrate.run_calibrate",
        lambda traces, out, epsilon, k, edge, cloud, settings, **given: asked.update(given, settings=settings) or 0,
    )
    tokens = ["calibrate", "traces.jsonl", "--out", "gate.json", "--seed", "5", "--temperature", "0.8"]
    assert app(tokens, exit_on_error=False, print_error=False, result_action="return_value") == 0
    assert (asked["seed"], asked["settings"].seed, asked["settings"].temperature) == (5, 5, 0.8)


def test_the_pair_is_identified_as_a_run_would_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = engine("qwen2"), engine("llama")
    monkeypatch.setattr("outrider.cli.calibrate.load_drafter", lambda models: small)
    monkeypatch.setattr("outrider.cli.build.connect_verifier", lambda models, network: local(large))
    assert load_descriptions(Models()) == (describe_engine(small), describe_engine(large))
    with pytest.raises(SettingsError, match="give --edge and --cloud"):
        load_descriptions(Models(cloud="none"))


def test_audits_are_drawn_at_their_rate() -> None:
    places = np.arange(20_000)
    assert draw_audits(5, places, 0.05).mean() == pytest.approx(0.05, abs=0.006)
    assert (draw_audits(5, places, 0.05) != draw_audits(6, places, 0.05)).mean() == pytest.approx(
        2 * 0.05 * 0.95, abs=0.01
    )
    assert not draw_audits(5, places, 0.0).any()
    assert draw_audits(5, places, 1.0).all()


def test_what_is_shown_says_which_traces_chose_and_where_hardly_anything_is_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = found(requests(60))
    _show(replace(made, escalation=0.4), "gate.json", 60)
    printed = capsys.readouterr().out
    assert "on the 15 of 60 traces that chose the signal (the sentence below counts the other 45)" in printed
    assert "saves nearly nothing" not in printed
    _show(replace(made, escalation=0.91), "gate.json", 60)
    assert "91 % of blocks go to the cloud, audits included: it saves nearly nothing." in capsys.readouterr().out
