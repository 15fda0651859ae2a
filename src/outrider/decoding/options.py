"""Decoding options: the options of drafting and verification, their defaults and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final, Self

from outrider.config import DEFAULT_K, DecodingMode, DriverName, OnCloudLoss, OnLoop, Privacy, Scope, check_choice
from outrider.decoding.draft_length import parse_draft_length
from outrider.decoding.gate import Always, Gate
from outrider.decoding.gate_parsing import gate as parse_gate
from outrider.decoding.loop_detection import DEFAULT_LOOP_RULE, LoopRule
from outrider.decoding.loop_detection import parse_loop_rule as parse_loop_rule
from outrider.errors import SettingsError, quote
from outrider.sampling.acceptance import AcceptanceRule, Exact, parse_acceptance_rule

UNUSED: Final[Mapping[DecodingMode, tuple[str, ...]]] = {
    "speculative": (),
    "edge-only": ("gate", "accept", "scope", "driver", "on_cloud_loss", "privacy"),
    "cloud-only": ("gate", "k", "accept", "scope", "driver"),
}


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """The options of speculative decoding, named and described as `SpeculativeDecoder`'s arguments.

    None for on_loop or on_cloud_loss is a default that depends on the gate and the models (see `resolve`).
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
        """The parsed gate. Reads a gate file. Raises SettingsError or DataError."""
        if isinstance(self.gate, str):
            return parse_gate(self.gate)
        if not hasattr(self.gate, "exact"):
            raise SettingsError(f"gate is a text such as entropy:1.5, or a gate, not {quote(self.gate)}")
        return self.gate

    @cached_property
    def acceptance_rule(self) -> AcceptanceRule:
        """The parsed acceptance rule. Raises SettingsError."""
        return parse_acceptance_rule(self.accept)

    @cached_property
    def parsed_loop_rule(self) -> LoopRule:
        """The parsed loop rule. Raises SettingsError."""
        return parse_loop_rule(self.loop_rule)

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments for `SpeculativeDecoder`. The gate is parsed, so that its file is read once."""
        return {each.name: getattr(self, each.name) for each in fields(DecodingOptions)} | {"gate": self.parsed_gate}

    def for_mode(self, mode: DecodingMode) -> Self:
        """Return the options with those that `mode` does not use at their defaults."""
        unused: dict[str, Any] = {name: getattr(DecodingOptions, name) for name in UNUSED[mode]}
        if mode == "edge-only" and self.on_loop == "escalate":
            unused["on_loop"] = None
        if mode == "cloud-only" and self.on_cloud_loss == "edge-only":
            unused["on_cloud_loss"] = None
        return replace(self, **unused)

    def resolve(
        self, *, has_drafter: bool, has_verifier: bool, remote: bool, uses_lookup: bool = False
    ) -> ResolvedOptions:
        """Validate the options for the given sides and fill in the defaults. No model needs to be loaded.

        By default, a decoder that loses the cloud continues without it only if its gate skips blocks anyway.
        has_drafter: there is a draft model. remote: the verifier is across a network. uses_lookup: drafts come from
        prompt lookup, without a draft model or together with it.

        Raises:
            SettingsError: a value is unknown, or options contradict each other or have no effect.
        """
        self.check_values()
        if uses_lookup:
            self._check_lookup(has_drafter, has_verifier)
        self._check_sides(has_drafter or uses_lookup, has_verifier, remote)
        skips = has_drafter and not self.parsed_gate.exact
        resolved = {
            "on_loop": self.on_loop or ("escalate" if has_verifier else "sample"),
            "on_cloud_loss": self.on_cloud_loss or ("edge-only" if skips else "fail"),
        }
        return ResolvedOptions(**self.keywords() | resolved)

    def check_values(self) -> None:
        """Raise SettingsError for an invalid value of a single option."""
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

    def _check_lookup(self, has_drafter: bool, has_verifier: bool) -> None:
        """Raise SettingsError for options that prompt lookup does not support."""
        if not has_verifier:
            raise SettingsError(
                "prompt lookup (--edge lookup) cannot decode edge-only: it copies earlier tokens, and only a "
                "verifier's model decides whether they continue the text. Give a cloud, or a draft model alone"
            )
        if not isinstance(self.parsed_gate, Always):
            raise SettingsError(
                f"gate {self.gate} needs confidence signals, which prompt lookup does not provide: use gate always, or "
                "a draft model alone"
            )
        if self.on_cloud_loss == "edge-only" and not has_drafter:
            raise SettingsError(
                "on_cloud_loss 'edge-only' needs a draft model: prompt lookup cannot continue without the cloud. Use "
                "'fail' or 'wait', or --edge MODEL+lookup"
            )

    def _check_sides(self, has_drafter: bool, has_verifier: bool, remote: bool) -> None:
        """Raise SettingsError for options that contradict each other or the models."""
        gate, accept, on_loop, on_cloud_loss = self.parsed_gate, self.acceptance_rule, self.on_loop, self.on_cloud_loss
        if self.privacy != "audio" and not has_verifier:
            raise SettingsError(f"privacy {quote(self.privacy)} has no effect without a verifier")
        if on_cloud_loss is not None and not remote:
            raise SettingsError(f"on_cloud_loss {quote(on_cloud_loss)}: this verifier is not across a network")
        if self.driver == "pipelined" and not (has_drafter and remote):
            raise SettingsError("driver 'pipelined' needs a drafter, and a verifier across a network")
        if on_cloud_loss == "edge-only" and not has_drafter:
            raise SettingsError("on_cloud_loss 'edge-only' needs a drafter")
        if not has_drafter and not has_verifier:
            raise SettingsError("neither a drafter nor a verifier: there is no model to generate with")
        if not has_verifier and on_loop == "escalate":
            raise SettingsError("on_loop 'escalate' needs a verifier")
        if has_verifier and on_loop == "sample":
            raise SettingsError("on_loop 'sample' is for edge-only decoding: with a verifier, use 'escalate'")
        if not has_verifier and not isinstance(gate, Always):
            raise SettingsError(f"gate {gate} needs a verifier")
        if not has_drafter and not isinstance(gate, Always):
            raise SettingsError(f"gate {gate} needs a drafter")
        if not (has_drafter and has_verifier) and not isinstance(accept, Exact):
            raise SettingsError(f"accept {accept} needs a drafter and a verifier")
        if self.scope == "repair" and gate.exact:
            raise SettingsError(f"scope 'repair' needs a gate that skips blocks, and gate {gate} skips none")


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(DecodingOptions):
    """Validated options, without open defaults."""

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
