"""A gate with a budget: its file, its audits, and what results may promise under it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import SpeculativeDecoder, local
from outrider.config import GenerationSettings
from outrider.decoding.actions import Done, Draft, Plan, Proposal, Verify
from outrider.decoding.calibrated_gate import Calibrated
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import FixedDraftLength
from outrider.decoding.gate import Decision, Signals, Threshold
from outrider.decoding.gate_file import GateFile, ModelId, SignalFit, _digest, read_gate_file
from outrider.decoding.gate_parsing import gate
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules
from outrider.edge.generation import GenerationContext
from outrider.errors import CloudLost, DataError, SettingsError
from outrider.sampling.acceptance import Exact, Verdict
from outrider.verifiers.base import Verifier
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import HashRows, ScriptedEngine, blend
from tests.support.tiny_text_models import engine, tokens

VOCAB = 40
SURE, UNSURE = Signals(0.0, 1.0, 0.0, 0.0), Signals(9.0, 0.0, 1.0, 9.0)
MODEL = ModelId("scripted", f"scripted-{VOCAB}")
FILE = GateFile(
    gate="entropy:1.5",
    epsilon=0.02,
    loss="tokens",
    k=4,
    traces=60,
    risk=0.003,
    escalation=0.4,
    audit=0.25,
    edge=MODEL,
    cloud=MODEL,
    settings=GenerationSettings(max_new_tokens=24),
    signals=(SignalFit("entropy", 1.5, 0.003, 0.4), SignalFit("margin", None, 0.0, 1.0)),
)


def calibrated(**changes: Any) -> Calibrated:
    file = replace(FILE, **changes)
    inner = gate(file.gate)
    assert isinstance(inner, Threshold)
    return Calibrated(inner, file, "gate.json")


def written(path: Path, change: Callable[[dict[str, Any]], Any] = lambda value: value, *, sign: bool = True) -> str:
    """Write a changed file. sign: with the digest of what it says then."""
    value = json.loads(json.dumps(FILE.to_json()))
    changed = change(value)
    changed = value if changed is None else changed
    if sign and isinstance(changed, dict):
        changed["digest"] = _digest({key: changed[key] for key in changed if key != "digest"})
    (path / "gate.json").write_text(json.dumps(changed), encoding="utf-8")
    return str(path / "gate.json")


CHANGED = "it was changed after it was calibrated, so its budget is void"


# The file -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_gate_file(written(tmp_path)) == FILE


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Change one value, deep inside."""

    def change(value: Any) -> None:
        *way, last, new = path
        for key in way:
            value = value[key]
        value[last] = new

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("gate", "entropy:5.0"),
        put("gate", "margin:1.5"),
        put("epsilon", 0.9),
        put("loss", "outputs"),
        put("k", 5),
        put("traces", 61),
        put("risk", 0.95),
        put("risk", 0),
        put("audit", 0.0),
        put("edge", "name", "other"),
        put("cloud", "fingerprint", "other"),
        put("settings", "max_new_tokens", 25),
        put("signals", 0, "threshold", 1.4),
        put("signals", []),
        put("digest", "0" * 32),
        put("digest", None),
    ],
)
def test_a_change_by_hand_is_refused(tmp_path: Path, change: Any) -> None:
    name = written(tmp_path, change, sign=False)
    with pytest.raises(DataError, match=CHANGED) as caught:
        gate(f"calibrated:{name}")
    assert str(caught.value).startswith(f"{name}: ")


def test_a_file_without_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="digest is missing"):
        read_gate_file(written(tmp_path, drop("digest"), sign=False))


def test_a_file_from_before_models_could_be_quantized_is_one_of_plain_models(tmp_path: Path) -> None:
    def older(value: dict[str, Any]) -> None:
        del value["edge"]["quantization"], value["cloud"]["quantization"]

    assert read_gate_file(written(tmp_path, older)) == FILE


@pytest.mark.parametrize("value", ["", 8, False])
def test_a_quantization_in_a_file_is_a_name_or_null(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match="cloud: quantization is a text"):
        read_gate_file(written(tmp_path, put("cloud", "quantization", value)))


def test_the_order_of_the_keys_is_free(tmp_path: Path) -> None:
    name = written(tmp_path, lambda value: dict(sorted(value.items())), sign=False)
    assert read_gate_file(name) == FILE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: [value], "expected an object"),
        (lambda value: 5, "expected an object, not 5"),
        (drop("version"), "version None: this outrider reads version 3"),
        (put("version", 1), "version 1"),
        (
            put("version", 2),
            "version 2: this outrider reads version 3. The budget of older .* outrider calibrate TRACES",
        ),
        (put("version", 4), "version 4: this outrider reads version 3$"),
        (put("version", 3.0), r"version 3\.0: this outrider reads version 3$"),
        (put("gate", "entropy.mean:0.3"), r"gate 'entropy\.mean:0\.3': the mean over a block cannot be calibrated"),
        (put("colour", "red"), "unknown key colour: expected gate, epsilon"),
        (drop("epsilon"), "epsilon is missing"),
        (drop("signals"), "signals is missing"),
        (put("gate", 5), "gate is a text"),
        (put("gate", "always"), "gate 'always' is not the threshold of one signal"),
        (put("gate", "entropy:1|margin:1"), "gate 'entropy:1|margin:1'"),
        (put("gate", "calibrated:gate.json"), "gate 'calibrated:gate.json'"),
        (put("gate", "entropy:-1"), "gate 'entropy:-1'"),
        (put("epsilon", 0), "epsilon is above 0 and below 1"),
        (put("epsilon", 1), "epsilon is above 0 and below 1"),
        (put("epsilon", "0.1"), "epsilon is above 0 and below 1, not '0.1'"),
        (put("epsilon", float("nan")), "epsilon is above 0"),
        (put("loss", "words"), "loss is one of outputs, tokens, not 'words'"),
        (put("loss", ["tokens"]), "loss is one of outputs, tokens"),
        (put("k", 0), "k is a whole number from 1 to 64"),
        (put("k", "auto"), "k is a whole number from 1 to 64"),
        (put("k", True), "k is a whole number"),
        (put("traces", 0), "traces is a whole number"),
        (put("risk", -0.1), "risk is between 0 and 1"),
        (put("escalation", 1.1), "escalation is between 0 and 1"),
        (put("audit", 2), "audit is between 0 and 1"),
        (put("audit", None), "audit is between 0 and 1"),
        (put("edge", "small"), "edge: expected an object"),
        (put("edge", "name", ""), "edge: name is a text"),
        (drop("cloud", "fingerprint"), "cloud: fingerprint is missing"),
        (put("cloud", "size", 7), "cloud: unknown key size"),
        (put("settings", []), "settings: expected an object"),
        (put("settings", "top_z", 1), "settings: unknown setting top_z"),
        (put("settings", "temperature", -1), "settings: temperature is 0"),
        (put("signals", {}), "signals is a list"),
        (put("signals", 1, {}), r"signals\[1\]: signal, threshold, risk, escalation is missing"),
        (put("signals", 0, "threshold", -1), r"signals\[0\]: threshold is"),
        (put("signals", 0, "risk", 7), r"signals\[0\]: risk is between"),
    ],
)
def test_every_fault_names_file_and_key(tmp_path: Path, change: Any, message: str) -> None:
    name = written(tmp_path, change)
    with pytest.raises(DataError, match=message.replace("|", r"\|")) as caught:
        gate(f"calibrated:{name}")
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "gate.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"gate\.json"):
        gate(f"calibrated:{path}")


# The gate -----------------------------------------------------------------------------------------------------------


def test_it_decides_as_its_threshold_and_is_not_exact(tmp_path: Path) -> None:
    name = written(tmp_path)
    made = gate(f"calibrated:{name}")
    assert isinstance(made, Calibrated)
    assert (made.exact, made.needs_signals, made.budget) == (False, True, 0.02)
    assert made.decide([SURE]) == Decision(False, "entropy 0 <= 1.5")
    assert made.decide([SURE, UNSURE]).escalate
    assert gate(str(made)) == made


@pytest.mark.parametrize(
    ("spec", "message"), [("calibrated:", "names no file"), ("entropy:1|calibrated:{}", "calibrated:FILE alone")]
)
def test_a_calibrated_gate_needs_a_file_and_stands_alone(spec: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        gate(spec)


def test_a_trigger_has_no_budget(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"a trigger skips no block, so it cannot hold a calibrated gate"):
        gate(f"trigger:calibrated:{written(tmp_path)}")


# Audits -------------------------------------------------------------------------------------------------------------


def run(policy: Any, signals: Signals, size: int = 400, on_loop: Any = "ignore") -> Decoder:
    """A drafter that is always right, and as sure as said."""
    plan = Plan(StopRules(size), policy, Exact(), FixedDraftLength(4), has_verifier=True, on_loop=on_loop)
    decoder = Decoder([1], plan)
    while not isinstance(action := decoder.next(), Done):
        if isinstance(action, Draft):
            decoder.drafted([Proposal(decoder.context_length + n, signals) for n in range(action.count)])
        else:
            assert isinstance(action, Verify)
            size = len(action.draft_ids)
            decoder.decided(Verdict(action.round, size, decoder.context_length, audited=len(action.new_ids)))
    return decoder


def test_skipped_blocks_are_audited_at_the_rate_of_the_file() -> None:
    runs = [run(calibrated().with_audit_key(seed, [1, 2, 3]), SURE) for seed in range(20)]
    blocks, audits = (sum(getattr(r.stats, name) for r in runs) for name in ("blocks", "forced_by_audit"))
    assert blocks > 1800
    assert audits / blocks == pytest.approx(0.25, abs=0.04)
    assert all(r.stats.escalated == r.stats.forced_by_audit > 0 for r in runs)
    skipped = sum(r.sequence.sources.count(Source.EDGE) for r in runs)
    assert sum(r.stats.audited for r in runs) > 0.9 * skipped  # all but what follows the last audit


def test_without_a_share_nothing_is_audited_and_with_all_of_it_everything() -> None:
    assert run(calibrated(audit=0.0), SURE).stats.escalated == 0
    everything = run(calibrated(audit=1.0), SURE).stats
    assert everything.escalated == everything.blocks == everything.forced_by_audit


def test_what_the_gate_escalates_itself_is_no_audit() -> None:
    stats = run(calibrated(audit=1.0), UNSURE).stats
    assert (stats.escalated, stats.forced_by_audit) == (stats.blocks, 0)


def drawn(policy: Calibrated) -> list[bool]:
    return [policy.is_audited_at(position) for position in range(64)]


def test_audits_are_those_of_the_generation() -> None:
    policy = calibrated()
    same = drawn(policy.with_audit_key(3, [1, 2], b"sound"))
    assert drawn(policy.with_audit_key(3, [1, 2], b"sound")) == same
    others = [
        policy.with_audit_key(4, [1, 2], b"sound"),
        policy.with_audit_key(3, [1, 3], b"sound"),
        policy.with_audit_key(3, [1, 2], b"noise"),
    ]
    assert all(drawn(other) != same for other in others)


# What results promise -----------------------------------------------------------------------------------------------


def scripted(share: float) -> tuple[ScriptedEngine, LocalVerifier]:
    """A pair; share 0 is a perfect drafter."""
    target, other = HashRows(1, VOCAB), HashRows(2, VOCAB)
    return ScriptedEngine(blend(target, other, share), VOCAB), local(ScriptedEngine(target, VOCAB))


def decoder_with(policy: Calibrated, share: float = 0.3, **more: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(*scripted(share), gate=policy, **{"k": 4, "on_loop": "ignore", **more})


def generate(decoder: SpeculativeDecoder, prompt: int = 1, **settings: Any) -> Any:
    return decoder.generate([prompt, 2, 3], **{"max_new_tokens": 24, **settings})


def test_what_was_skipped_within_the_budget_is_bounded() -> None:
    result = generate(decoder_with(calibrated(gate="entropy:3.1")))
    assert 0 < result.stats.edge_tokens < 24
    assert (result.guarantee, result.warnings) == ("bounded", [])
    out = json.loads(json.dumps(result.to_json()))
    assert set(out["risk"]) == {"budget", "loss", "audited", "disagreed", "estimate", "low", "high", "results"}
    assert (out["risk"]["budget"], out["risk"]["audited"]) == (0.02, result.stats.audited)


def test_what_the_gate_left_to_the_edge_as_a_whole_is_bounded_too() -> None:
    result = generate(decoder_with(calibrated(gate="entropy:99", audit=0.0)))
    assert (result.stats.cloud_tokens, result.guarantee) == (0, "bounded")
    assert result.risk.estimate is None


def test_what_was_verified_throughout_is_exact() -> None:
    assert generate(decoder_with(calibrated(gate="entropy:0"))).guarantee == "exact"


@pytest.mark.parametrize("accept", ["rank:2", "residual"])
def test_another_acceptance_rule_voids_the_budget(accept: str) -> None:
    result = generate(decoder_with(calibrated(gate="entropy:3.1"), accept=accept))
    assert result.guarantee == "best-effort"
    reason = f"the gate was calibrated with accept exact, not {accept}: its budget is not promised"
    assert reason in result.warnings


def test_a_cloud_without_the_recording_voids_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_with(calibrated(gate="entropy:3.1"))
    monkeypatch.setattr(GenerationContext, "hides_audio", lambda context, prompt: True)
    result = generate(decoder)
    assert result.guarantee == "best-effort"
    assert any(
        "for a cloud that gets the recording, not with privacy tokens: its budget" in each for each in result.warnings
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 5}, "calibrated with k 5, not 4: its budget is not promised"),
        ({"edge": replace(MODEL, fingerprint="x")}, "with another vocabulary on the edge: its budget is not promised"),
        (
            {"cloud": replace(MODEL, fingerprint="x")},
            "with another vocabulary on the cloud: its budget is not promised",
        ),
        (
            {"edge": replace(MODEL, quantization="int8")},
            "with quantization int8 on the edge, not none: its budget is not promised",
        ),
        (
            {"cloud": replace(MODEL, quantization="int8")},
            "with quantization int8 on the cloud, not none: its budget is not promised",
        ),
        (
            {"settings": GenerationSettings(max_new_tokens=30)},
            "with max_new_tokens 30, not 24: its budget is not promised",
        ),
        (
            {"settings": GenerationSettings(max_new_tokens=24, stop=("a",))},
            "with stop ('a',), not (): its budget is not",
        ),
    ],
)
def test_another_k_vocabulary_quantization_or_setting_voids_the_budget(changes: dict[str, Any], message: str) -> None:
    result = generate(decoder_with(calibrated(gate="entropy:3.1", **changes)))
    assert result.guarantee == "best-effort"
    assert [message in warning for warning in result.warnings] == [True]


def test_another_model_name_gives_a_warning() -> None:
    result = generate(decoder_with(calibrated(gate="entropy:3.1", cloud=replace(MODEL, name="other"))))
    assert result.guarantee == "bounded"
    assert ["with other as the cloud, not scripted: its budget is promised only if" in w for w in result.warnings] == [
        True
    ]


def test_the_seed_is_the_requests_own() -> None:
    assert generate(decoder_with(calibrated(gate="entropy:3.1")), seed=7).warnings == []


def test_sampled_traces_are_of_their_own_seed() -> None:
    sampled = GenerationSettings(max_new_tokens=24, temperature=0.8, seed=3)
    made = calibrated(gate="entropy:3.1", settings=sampled)
    assert generate(decoder_with(made), temperature=0.8, seed=3).guarantee == "bounded"
    other = generate(decoder_with(made), temperature=0.8, seed=4)
    assert other.guarantee != "bounded"
    assert "with seed 3, not 4: its budget is not promised" in other.warnings[0]


@pytest.mark.parametrize(("limit", "word"), [(128, "bounded"), (129, "best-effort")])
def test_scope_repair_keeps_the_budget_where_no_verdict_is_asked_for_in_between(limit: int, word: str) -> None:
    made = calibrated(gate="entropy:3.1", settings=GenerationSettings(max_new_tokens=limit))
    result = generate(decoder_with(made, share=0.5, scope="repair"), max_new_tokens=limit)
    assert result.guarantee == word
    assert ["with scope block, not repair" in warning for warning in result.warnings] == [True] * (word != "bounded")


def test_another_loop_rule_voids_the_budget() -> None:
    made = calibrated(gate="entropy:3.1")
    result = generate(decoder_with(made, loop_rule="period=2,tail=8,extra=4"))
    assert result.guarantee == "best-effort"
    assert "the loop rule period=32,tail=8,extra=4, not period=2,tail=8,extra=4" in result.warnings[0]
    assert generate(decoder_with(made, loop_rule="period=32")).guarantee == "bounded"


def test_k_auto_voids_the_budget() -> None:
    result = generate(decoder_with(calibrated(gate="entropy:3.1"), k="auto"))
    assert result.guarantee == "best-effort"
    assert "k 4, not auto" in result.warnings[0]


class Failing:
    """A verifier that is lost after some verdicts."""

    def __init__(self, inner: Verifier, verdicts: int) -> None:
        self._inner, self._left = inner, verdicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def verify(self, session: int, request: Verify) -> Verdict:
        self._left -= 1
        if self._left < 0:
            raise CloudLost("gone")
        return self._inner.verify(session, request)


@pytest.mark.parametrize("verdicts", [0, 1, 2])
def test_no_edge_token_is_bounded_where_the_cloud_was_lost(verdicts: int) -> None:
    draft, target = scripted(0.3)
    policy = calibrated(gate="entropy:3.1")
    decoder = SpeculativeDecoder(draft, Failing(target, verdicts), gate=policy, k=4, on_loop="ignore")  # type: ignore[arg-type]
    result = generate(decoder)
    assert result.stats.cloud_lost
    assert result.guarantee == "edge-only"
    assert (result.risk.audited, result.risk.estimate) == (0, None)  # it says nothing about the gate
    assert not any("calibrated" in warning for warning in result.warnings)


def test_a_pair_of_real_engines() -> None:
    edge, cloud = engine("qwen2", 0), engine("qwen2", 1)
    pair = {"edge": ModelId(edge.name, edge.fingerprint), "cloud": ModelId(cloud.name, cloud.fingerprint)}
    policy = calibrated(gate="entropy:4", **pair)
    decoder = SpeculativeDecoder(edge, local(cloud), gate=policy, k=4)
    first = decoder.generate(tokens(8), max_new_tokens=24)
    assert (first.guarantee, first.warnings) == ("bounded", [])
    assert decoder.generate(tokens(8), max_new_tokens=24).token_ids == first.token_ids


def test_a_budget_does_not_hold_for_the_same_pair_with_a_quantized_target(monkeypatch: pytest.MonkeyPatch) -> None:
    edge, cloud = engine("qwen2", 0), engine("qwen2", 1)
    pair = {"edge": ModelId(edge.name, edge.fingerprint), "cloud": ModelId(cloud.name, cloud.fingerprint)}
    monkeypatch.setattr(cloud, "quantization", "int8")
    decoder = SpeculativeDecoder(edge, local(cloud), gate=calibrated(gate="entropy:4", **pair), k=4)
    result = decoder.generate(tokens(8), max_new_tokens=24)
    assert result.guarantee == "best-effort"
    assert "with quantization none on the cloud, not int8" in result.warnings[0]


def test_the_estimate_runs_over_all_results_of_a_decoder_and_warns_of_what_it_shows() -> None:
    decoder = decoder_with(calibrated(gate="entropy:99"), share=0.5)  # far from what any budget would allow
    results = [generate(decoder, prompt) for prompt in range(1, 13)]
    last = results[-1].risk
    assert last.audited == sum(result.stats.audited for result in results)
    assert last.disagreed == sum(result.stats.disagreed for result in results)
    assert last.results == 12
    assert 0.02 < last.low < last.estimate < last.high
    assert results[0].warnings == []  # one output does not show it yet
    assert "above the budget of 2 %" in results[-1].warnings[0]
    assert results[-1].guarantee == "bounded"  # the budget is what was promised; the warning says that it seems broken


def test_a_good_drafter_warns_of_nothing() -> None:
    decoder = decoder_with(calibrated(gate="entropy:99"), share=0.0)
    results = [generate(decoder, prompt) for prompt in range(1, 13)]
    assert results[-1].risk.audited > 50
    assert results[-1].risk.estimate == 0.0
    assert not any(result.warnings for result in results)


def test_every_prompt_is_audited_in_its_own_places() -> None:
    decoder = decoder_with(calibrated(gate="entropy:99"), share=0.0)
    audits = {tuple(s.by_cloud for s in generate(decoder, prompt).sources) for prompt in range(1, 9)}
    assert len(audits) > 4
    assert np.mean([any(audit) for audit in audits]) > 0.5
