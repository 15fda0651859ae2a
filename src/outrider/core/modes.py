"""Which settings go together: found out before any model is loaded."""

from __future__ import annotations

from outrider.config import DriverName, OnCloudLoss, OnLoop, Privacy, Scope, check_choice
from outrider.core.acceptance import Exact, Rule
from outrider.core.gate import Always, Gate
from outrider.errors import SettingsError


def check_modes(
    gate: Gate,
    accept: Rule,
    scope: str,
    on_loop: str | None,
    driver: str,
    on_cloud_loss: str | None,
    privacy: str,
    *,
    has_drafter: bool,
    has_verifier: bool,
    remote: bool,
) -> None:
    """Raise SettingsError where settings contradict each other or would do nothing; needs no model.

    remote: the verifier is asked across a network.
    """
    check_choice("scope", scope, Scope)
    check_choice("driver", driver, DriverName)
    check_choice("privacy", privacy, Privacy)
    if privacy != "audio" and not has_verifier:
        raise SettingsError(f"privacy {privacy!r}: there is no verifier to keep anything from")
    if on_loop is not None:
        check_choice("on_loop", on_loop, OnLoop)
    if on_cloud_loss is not None:
        check_choice("on_cloud_loss", on_cloud_loss, OnCloudLoss)
        if not remote:
            raise SettingsError(f"on_cloud_loss {on_cloud_loss!r}: this verifier is not across a network")
    if driver == "pipelined" and not (has_drafter and remote):
        raise SettingsError("driver 'pipelined' needs a drafter, and a verifier across a network")
    if on_cloud_loss == "edge-only" and not has_drafter:
        raise SettingsError("on_cloud_loss 'edge-only' needs a drafter to go on with")
    if not has_drafter and not has_verifier:
        raise SettingsError("neither a drafter nor a verifier: there is no model to generate with")
    if not has_verifier and on_loop == "escalate":
        raise SettingsError("on_loop 'escalate' needs a verifier to escalate to")
    if has_verifier and on_loop == "sample":
        raise SettingsError("on_loop 'sample' is for edge-only decoding: with a verifier, escalate")
    if not has_verifier and not isinstance(gate, Always):
        raise SettingsError(f"gate {gate} has no verifier to decide about")
    if not has_drafter and not isinstance(gate, Always):
        raise SettingsError(f"gate {gate} has no drafter to judge")
    if not (has_drafter and has_verifier) and not isinstance(accept, Exact):
        raise SettingsError(f"accept {accept} is about drafts and verdicts: it needs a drafter and a verifier")
    if scope == "repair" and gate.exact:
        raise SettingsError("scope 'repair' is for gates that skip blocks; this one leaves nothing to repair")


def settled_loss(on_cloud_loss: OnCloudLoss | None, gate: Gate, *, has_drafter: bool) -> OnCloudLoss:
    """What a lost cloud leads to, where it was not said: a gate that skips accepts the edge's word, others do not."""
    return on_cloud_loss or ("edge-only" if has_drafter and not gate.exact else "fail")
