"""Decoding options: the choices about drafting and verification, and which of them fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final, Self

from outrider.config import DEFAULT_K, DecodingMode, DriverName, OnCloudLoss, OnLoop, Privacy, Scope, check_choice
from outrider.decoding.draft_length import parse_draft_length
from outrider.decoding.gate import Always, Gate
from outrider.decoding.gate import gate as parse_gate
from outrider.decoding.loop_detection import DEFAULT_LOOP_RULE, LoopRule
from outrider.decoding.loop_detection import parse_loop_rule as parse_loop_rule
from outrider.errors import SettingsError
from outrider.sampling.acceptance import AcceptanceRule, Exact, parse_acceptance_rule

UNUSED: Final[Mapping[DecodingMode, tuple[str, ...]]] = {
    "speculative": (),
    "edge-only": ("gate", "accept", "scope", "driver", "on_cloud_loss", "privacy"),
    "cloud-only": ("gate", "k", "accept", "scope", "driver"),
}


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """The options of speculative decoding, named and described as `SpeculativeDecoder`'s arguments.

    None for on_loop or on_cloud_loss is a default that depends on the gate and on the models; see `resolve`.
    """

    gate: str | Gate = "always"
    k: int | str = DEFAULT_K
    accept: str = "exact"
    scope: Scope = "block"
    on_loop: OnLoop | None = None
    loop_rule: str = DEFAULT_LOOP_RULE
    driver: DriverName = "sequential"
    on_cloud_loss: OnCloudLoss | None = None
    privacy: Privacy = "audio"

    @cached_property
    def parsed_gate(self) -> Gate:
        """The gate that `gate` names; reads a gate file. Raises SettingsError or DataError."""
        return parse_gate(self.gate) if isinstance(self.gate, str) else self.gate

    @cached_property
    def acceptance_rule(self) -> AcceptanceRule:
        """The rule that `accept` names. Raises SettingsError."""
        return parse_acceptance_rule(self.accept)

    @cached_property
    def parsed_loop_rule(self) -> LoopRule:
        """The rule that `loop_rule` states. Raises SettingsError."""
        return parse_loop_rule(self.loop_rule)

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments for `SpeculativeDecoder`, with the gate parsed: a gate file is read once."""
        return {each.name: getattr(self, each.name) for each in fields(DecodingOptions)} | {"gate": self.parsed_gate}

    def for_mode(self, mode: DecodingMode) -> Self:
        """Return the options with those that `mode` does not use at their defaults."""
        unused: dict[str, Any] = {name: getattr(DecodingOptions, name) for name in UNUSED[mode]}
        if mode == "edge-only" and self.on_loop == "escalate":
            unused["on_loop"] = None
        if mode == "cloud-only" and self.on_cloud_loss == "edge-only":
            unused["on_cloud_loss"] = None
        return replace(self, **unused)

    def resolve(self, *, has_drafter: bool, has_verifier: bool, remote: bool) -> ResolvedOptions:
        """Validate the options for the models that are there, and fill in the defaults. Needs no model.

        By default, a decoder that loses the cloud goes on without it only if its gate skips blocks anyway.
        remote: the verifier is across a network.

        Raises:
            SettingsError: an unknown value, or options that contradict each other or would do nothing.
        """
        self.check_values()
        self._check_sides(has_drafter, has_verifier, remote)
        skips = has_drafter and not self.parsed_gate.exact
        resolved = {
            "on_loop": self.on_loop or ("escalate" if has_verifier else "sample"),
            "on_cloud_loss": self.on_cloud_loss or ("edge-only" if skips else "fail"),
        }
        return ResolvedOptions(**self.keywords() | resolved)

    def check_values(self) -> None:
        """Raise SettingsError for a value that its option does not have, whatever the other options are."""
        check_choice("scope", self.scope, Scope)
        check_choice("driver", self.driver, DriverName)
        check_choice("privacy", self.privacy, Privacy)
        if self.on_loop is not None:
            check_choice("on_loop", self.on_loop, OnLoop)
        if self.on_cloud_loss is not None:
            check_choice("on_cloud_loss", self.on_cloud_loss, OnCloudLoss)
        parse_draft_length(self.k)
        for parsed in ("parsed_gate", "acceptance_rule", "parsed_loop_rule"):
            getattr(self, parsed)

    def _check_sides(self, has_drafter: bool, has_verifier: bool, remote: bool) -> None:
        """Raise SettingsError for options that contradict each other or the models."""
        gate, accept, on_loop, on_cloud_loss = self.parsed_gate, self.acceptance_rule, self.on_loop, self.on_cloud_loss
        if self.privacy != "audio" and not has_verifier:
            raise SettingsError(f"privacy {self.privacy!r}: there is no verifier to keep anything from")
        if on_cloud_loss is not None and not remote:
            raise SettingsError(f"on_cloud_loss {on_cloud_loss!r}: this verifier is not across a network")
        if self.driver == "pipelined" and not (has_drafter and remote):
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
        if self.scope == "repair" and gate.exact:
            raise SettingsError("scope 'repair' is for gates that skip blocks; this one leaves nothing to repair")


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(DecodingOptions):
    """Validated options for the models that are there, without an open default."""

    gate: Gate
    on_loop: OnLoop
    on_cloud_loss: OnCloudLoss

    @property
    def lossless(self) -> bool:
        """True if an output that verdicts decide throughout has the target's distribution.

        With rejection sampling that needs an exact gate: verifying only the blocks that a gate selects biases it.
        """
        rule = self.acceptance_rule
        return rule.lossless and (self.gate.exact or not rule.needs_q)
