"""Decoding options: contradictions are refused by name, without a model; the defaults are the same everywhere."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from outrider.api import SpeculativeDecoder
from outrider.cli.build import build_options
from outrider.cli.options import Network, Speculation
from outrider.decoding.options import DecodingOptions
from outrider.errors import SettingsError
from outrider.integrations.transformers.generation import for_transformers

EDGE_ONLY = {"has_verifier": False, "remote": False}
CLOUD_ONLY = {"has_drafter": False}
GATE = "entropy:1"
SIDES = {"has_drafter": True, "has_verifier": True, "remote": True}


def check(**changes: Any) -> None:
    """Check a drafter and a remote verifier with the default options, but for the changes."""
    options = {name: value for name, value in changes.items() if name not in SIDES}
    DecodingOptions(**options).resolve(**SIDES | {name: changes[name] for name in SIDES if name in changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"driver": "pipelined"},
        {"remote": False},
        {"on_cloud_loss": "edge-only"},
        {"on_cloud_loss": "fail", **CLOUD_ONLY},
        {"on_loop": "escalate"},
        {"on_loop": "sample", **EDGE_ONLY},
        {"privacy": "tokens"},
        {"gate": GATE, "scope": "repair"},
        {"gate": GATE, "accept": "residual"},
        EDGE_ONLY,
        CLOUD_ONLY,
    ],
)
def test_settings_that_go_together_pass(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scope": "word"}, "scope 'word': expected one of block, repair"),
        ({"driver": "fast"}, "driver 'fast': expected one of .*pipelined"),
        ({"privacy": "all"}, "privacy 'all': expected one of .*audio"),
        ({"on_loop": "panic"}, "on_loop 'panic': expected one of escalate"),
        ({"on_cloud_loss": "hope"}, "on_cloud_loss 'hope': expected one of .*edge-only"),
        ({"privacy": "tokens", **EDGE_ONLY}, "privacy 'tokens' has no effect without a verifier"),
        ({"on_cloud_loss": "fail", "remote": False}, "on_cloud_loss 'fail': this verifier is not across a network"),
        ({"driver": "pipelined", "remote": False}, "driver 'pipelined' needs a drafter, and a verifier across"),
        ({"driver": "pipelined", **CLOUD_ONLY}, "driver 'pipelined' needs a drafter, and a verifier across"),
        ({"on_cloud_loss": "edge-only", **CLOUD_ONLY}, "on_cloud_loss 'edge-only' needs a drafter"),
        ({**CLOUD_ONLY, **EDGE_ONLY}, "neither a drafter nor a verifier"),
        ({"on_loop": "escalate", **EDGE_ONLY}, "on_loop 'escalate' needs a verifier"),
        ({"on_loop": "sample"}, "on_loop 'sample' is for edge-only decoding"),
        ({"gate": GATE, **EDGE_ONLY}, "gate entropy:1 needs a verifier"),
        ({"gate": GATE, **CLOUD_ONLY}, "gate entropy:1 needs a drafter"),
        ({"accept": "residual", **EDGE_ONLY}, "needs a drafter and a verifier"),
        ({"accept": "residual", **CLOUD_ONLY}, "needs a drafter and a verifier"),
        ({"scope": "repair"}, "scope 'repair' needs a gate that skips blocks"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check(**changes)


@pytest.mark.parametrize(
    ("gate", "has_drafter", "expected"),
    [
        ("always", True, "fail"),
        ("trigger:entropy:1", True, "fail"),
        ("entropy:1", True, "edge-only"),
        ("always", False, "fail"),
    ],
)
def test_a_lost_cloud_fails_unless_a_gate_may_skip_blocks(gate: str, has_drafter: bool, expected: str) -> None:
    sides = SIDES | {"has_drafter": has_drafter}
    assert DecodingOptions(gate=gate).resolve(**sides).on_cloud_loss == expected
    assert DecodingOptions(gate=gate, on_cloud_loss="wait").resolve(**sides).on_cloud_loss == "wait"


def test_a_loop_is_escalated_where_there_is_a_verifier() -> None:
    assert DecodingOptions().resolve(**SIDES).on_loop == "escalate"
    assert DecodingOptions().resolve(**SIDES | EDGE_ONLY).on_loop == "sample"
    assert DecodingOptions(on_loop="stop").resolve(**SIDES).on_loop == "stop"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "entropy"}, "gate 'entropy'"),
        ({"accept": "luck"}, "accept 'luck'"),
        ({"k": 0}, "k is a whole number from 1 to 64, or 'auto', not 0"),
        ({"loop_rule": "period=0"}, "loop_rule: period is between 1"),
    ],
)
def test_a_value_that_cannot_be_parsed_is_refused_whatever_the_models(changes: dict[str, Any], message: str) -> None:
    for sides in ({}, EDGE_ONLY, CLOUD_ONLY):
        with pytest.raises(SettingsError, match=message):
            check(**changes, **sides)


def test_a_mode_keeps_only_the_options_that_it_uses() -> None:
    shared: dict[str, Any] = {"on_loop": "escalate", "privacy": "tokens", "loop_rule": "period=2"}
    skipping: dict[str, Any] = {"gate": "entropy:1", "accept": "residual", "scope": "repair", "driver": "pipelined"}
    given = DecodingOptions(k=3, on_cloud_loss="edge-only", **shared, **skipping)
    assert given.for_mode("speculative") == given
    assert given.for_mode("edge-only") == DecodingOptions(k=3, loop_rule="period=2")
    assert given.for_mode("cloud-only") == DecodingOptions(**shared)
    assert DecodingOptions(on_cloud_loss="wait").for_mode("cloud-only").on_cloud_loss == "wait"


@pytest.mark.parametrize("surface", [SpeculativeDecoder, for_transformers])
def test_python_signatures_have_the_same_defaults(surface: Any) -> None:
    parameters = inspect.signature(surface).parameters
    shared = {each.name: each.default for each in fields(DecodingOptions) if each.name in parameters}
    assert shared.keys() >= {"gate", "k", "accept", "scope", "on_loop"}
    assert {name: parameters[name].default for name in shared} == shared


def test_the_command_line_has_the_same_defaults() -> None:
    assert build_options(Speculation(), Network()) == DecodingOptions()
