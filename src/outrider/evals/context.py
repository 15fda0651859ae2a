"""The models and settings of a run: its modes, and the contents of its run.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.config import GenerationSettings
from outrider.evals import baselines, environment
from outrider.evals.baselines import Assistance, TransformersBaseline
from outrider.evals.manifest import Item
from outrider.evals.modes import OURS, Encoder, Mode, Setup, build, item_prompt, select_modes
from outrider.evals.runner import Tracer
from outrider.evals.store import Row
from outrider.planning.trace_recorder import Recorder
from outrider.verifiers.local import LocalVerifier


@dataclass(frozen=True)
class EvalContext:
    """The models of a run, loaded once for all modes, and the decoding settings. draft or verifier may be None."""

    draft: Any
    verifier: Any
    setup: Setup
    assistance: Assistance

    @property
    def target(self) -> Any:
        """Return the verifier's engine if it is in this process, else None."""
        return self.verifier.engine if isinstance(self.verifier, LocalVerifier) else None

    @property
    def settings(self) -> GenerationSettings:
        """Return the generation settings."""
        return GenerationSettings.build(self.setup.generation)

    def modes(self, names: Sequence[str], requested: Sequence[str]) -> tuple[list[Mode], dict[str, str]]:
        """Build the modes of these names. Returns them, and the reasons for those that transformers cannot run.

        Raises:
            SettingsError: a requested mode cannot run.
        """
        kept, left_out = select_modes(
            requested, lambda name: self._unsupported_reason(name) if name in names else "not chosen"
        )
        left_out = {name: reason for name, reason in left_out.items() if name in names}
        encoder = Encoder(self.draft, self.target)
        return [self._mode(name, encoder) for name in kept], left_out

    def _unsupported_reason(self, name: str) -> str | None:
        return None if name in OURS else baselines.unsupported_reason(name, self.draft, self.target)

    def _mode(self, name: str, encoder: Encoder) -> Mode:
        if name in OURS:
            return build(name, self.draft, self.verifier, self.setup, encoder)
        assistant = self.draft if name == "assisted" else None
        return TransformersBaseline(self.target, encoder, self.settings, assistant, self.assistance)

    def tracer(self) -> Tracer:
        """Return the function that records an item's trace."""
        recorder = Recorder(self.draft, self.verifier, self.settings)
        return lambda item: recorder.trace(item.id, item_prompt(item)).to_json()

    def models(self) -> dict[str, Any]:
        """Return the descriptions of edge and cloud."""
        edge = None if self.draft is None else environment.model(self.draft)
        if self.target is not None:
            return {"edge": edge, "cloud": environment.model(self.target)}
        if self.verifier is None:
            return {"edge": edge, "cloud": None}
        from outrider.verifiers.local import describe

        cloud = self.verifier.describe(None if self.draft is None else describe(self.draft))
        return {"edge": edge, "cloud": {"name": cloud.name, "vocabulary": cloud.fingerprint}}


def describe_run(
    context: EvalContext, data: str, items: Sequence[Item], modes: Sequence[Mode], left_out: dict[str, str], **more: Any
) -> Row:
    """Return the contents of run.json. more: further fields of the configuration."""
    configuration = {
        "data": {"name": data, "items": len(items), "hash": environment.data_hash(items)},
        "modes": [mode.name for mode in modes],
        "left_out": left_out,
        "generation": asdict(context.settings),
        "speculation": asdict(context.setup.options),
        "gate_file": _gate_file(str(context.setup.options.gate)),
        "repeatable": context.setup.repeatable,
        "assistance": asdict(context.assistance),
        "models": context.models(),
        **more,
    }
    return {
        "format": 1,
        "configuration": configuration,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
    }


def _gate_file(gate: str) -> str | None:
    """Return a hash of the file of a calibrated gate, None for other gates."""
    kind, _, path = gate.partition(":")
    return environment.file_hash(Path(path)) if kind == "calibrated" else None
