"""Settings that contradict each other are refused by name, before any model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.acceptance import Exact, Residual
from outrider.core.gate import Always, gate
from outrider.core.modes import check_modes, settled_loss
from outrider.errors import SettingsError

EDGE_ONLY = {"has_verifier": False, "remote": False}
CLOUD_ONLY = {"has_drafter": False}
GATE = gate("entropy:1")


def check(**changes: Any) -> None:
    """Check a drafter and a remote verifier with the default settings, but for the changes."""
    given: dict[str, Any] = {
        "gate": Always(),
        "accept": Exact(),
        "scope": "block",
        "on_loop": None,
        "driver": "sequential",
        "on_cloud_loss": None,
        "privacy": "audio",
        "has_drafter": True,
        "has_verifier": True,
        "remote": True,
    }
    check_modes(**{**given, **changes})


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
        {"gate": GATE, "accept": Residual()},
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
        ({"privacy": "tokens", **EDGE_ONLY}, "privacy 'tokens': there is no verifier"),
        ({"on_cloud_loss": "fail", "remote": False}, "on_cloud_loss 'fail': this verifier is not across a network"),
        ({"driver": "pipelined", "remote": False}, "driver 'pipelined' needs a drafter, and a verifier across"),
        ({"driver": "pipelined", **CLOUD_ONLY}, "driver 'pipelined' needs a drafter, and a verifier across"),
        ({"on_cloud_loss": "edge-only", **CLOUD_ONLY}, "on_cloud_loss 'edge-only' needs a drafter"),
        ({**CLOUD_ONLY, **EDGE_ONLY}, "neither a drafter nor a verifier"),
        ({"on_loop": "escalate", **EDGE_ONLY}, "on_loop 'escalate' needs a verifier"),
        ({"on_loop": "sample"}, "on_loop 'sample' is for edge-only decoding"),
        ({"gate": GATE, **EDGE_ONLY}, "gate entropy:1 has no verifier"),
        ({"gate": GATE, **CLOUD_ONLY}, "gate entropy:1 has no drafter"),
        ({"accept": Residual(), **EDGE_ONLY}, "it needs a drafter and a verifier"),
        ({"accept": Residual(), **CLOUD_ONLY}, "it needs a drafter and a verifier"),
        ({"scope": "repair"}, "scope 'repair' is for gates that skip blocks"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check(**changes)


@pytest.mark.parametrize(
    ("spec", "has_drafter", "expected"),
    [("always", True, "fail"), ("entropy:1", True, "edge-only"), ("entropy:1", False, "fail")],
)
def test_a_lost_cloud_fails_unless_a_gate_may_skip_blocks(spec: str, has_drafter: bool, expected: str) -> None:
    assert settled_loss(None, gate(spec), has_drafter=has_drafter) == expected
    assert settled_loss("fail", gate(spec), has_drafter=has_drafter) == "fail"
    assert settled_loss("edge-only", gate(spec), has_drafter=has_drafter) == "edge-only"
