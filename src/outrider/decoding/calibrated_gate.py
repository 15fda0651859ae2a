"""A gate with a risk budget: `calibrated:FILE`, its audits, and the fit of a run to its calibration.

`planning/calibrate.py` finds its threshold. A random share of the blocks that the gate would skip is verified all the
same: its audits.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from outrider.config import PER_REQUEST_SETTING, REPORT_SETTING, GenerationSettings, Scope
from outrider.decoding.gate import MAX_UNREPAIRED, SIGNAL_NAMES, Decision, Signals, Threshold
from outrider.decoding.gate_file import GateFile
from outrider.decoding.loop_detection import DEFAULT_RULE, LoopRule
from outrider.errors import quote
from outrider.sampling.sampler import uniforms

NO_MEAN_GATE = (
    "the mean over a block cannot be calibrated: no trace shows a live drafter's signals after its own wrong token. "
    f"Calibrate one of {', '.join(SIGNAL_NAMES)}, which take a block's least confident token"
)


class ModelIdentity(Protocol):
    """A model's name, vocabulary and quantisation."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def fingerprint(self) -> str:
        """The hash of its vocabulary."""
        ...

    @property
    def quantization(self) -> str | None:
        """The quantisation of its weights and KV cache when it was loaded, or None."""
        ...


@dataclass(frozen=True)
class CalibrationFit:
    """The fit of a run to its gate's calibration. bounded: the budget holds for the run."""

    bounded: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibrated:
    """A threshold with a risk budget. source: the file's name. key: selects the audits, see `with_audit_key`."""

    inner: Threshold
    file: GateFile
    source: str
    key: int = 0
    needs_signals = True
    exact = False

    @property
    def budget(self) -> float:
        """The risk budget."""
        return self.file.epsilon

    def decide(self, block: Seq[Signals]) -> Decision:
        """Compare the block's signal with the threshold. Audits are decided apart."""
        return self.inner.decide(block)

    def with_audit_key(self, seed: int, prompt_ids: Seq[int], audio_digest: bytes = b"") -> Calibrated:
        """Return the gate with the audits of one generation, drawn by its seed, prompt and recording."""
        digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8)
        digest.update(array("q", prompt_ids).tobytes() + audio_digest)
        return replace(self, key=int.from_bytes(digest.digest(), "little"))

    def is_audited_at(self, position: int) -> bool:
        """Return whether a block that begins after `position` generated tokens is audited."""
        return bool(draw_audits(self.key, np.array([position]), self.file.audit)[0])

    def check_fit(
        self,
        k: int | str,
        edge: ModelIdentity,
        cloud: ModelIdentity,
        settings: GenerationSettings,
        scope: Scope = "block",
        loop_rule: LoopRule = DEFAULT_RULE,
        lossy: Seq[str] = (),
    ) -> CalibrationFit:
        """Compare a run with the calibration.

        Lossy verdicts void the budget. So do another k, vocabulary, quantisation, loop rule or setting, and the
        verdicts that scope "repair" requests within long outputs, which calibration does not replay. Another model name
        is a warning, as the model may be the same. lossy: the reasons for lossy verdicts, as in "with accept exact, not
        …".
        """
        file = self.file
        voiding = [*lossy] if k == file.k else [*lossy, f"with k {file.k}, not {k}"]
        if scope == "repair" and settings.max_new_tokens > MAX_UNREPAIRED:
            voiding.append(
                f"with scope block, not repair (which keeps the budget up to max_new_tokens {MAX_UNREPAIRED})"
            )
        if loop_rule != DEFAULT_RULE:
            voiding.append(f"with the loop rule {DEFAULT_RULE}, not {loop_rule}")
        sides = (("edge", file.edge, edge), ("cloud", file.cloud, cloud))
        voiding += [
            f"with another vocabulary on the {s}" for s, was, now in sides if was.fingerprint != now.fingerprint
        ]
        voiding += [
            f"with quantization {was.quantization or 'none'} on the {s}, not {now.quantization or 'none'}"
            for s, was, now in sides
            if was.quantization != now.quantization
        ]
        voiding += [f"with {change}" for change in _changed_settings(file.settings, settings)]
        renamed = [f"with {was.name} as the {s}, not {now.name}" for s, was, now in sides if was.name != now.name]
        lines = [f"the gate was calibrated {reason}: its budget is not promised" for reason in voiding]
        lines += [
            f"the gate was calibrated {reason}: its budget is promised only if that is the same model"
            for reason in renamed
        ]
        return CalibrationFit(not voiding, tuple(lines))

    def __str__(self) -> str:
        return f"calibrated:{self.source}"


def draw_audits(key: int, positions: np.ndarray, share: float) -> np.ndarray:
    """Return bool [len(positions)], True for a random share that depends on key (below 2^64) and position alone."""
    return uniforms(key, 0, positions) < share


def calibrated_settings(settings: GenerationSettings) -> list[str]:
    """Return the names of the settings that a run must share with its calibration.

    Greedy traces hold for every seed. Sampled traces share the noise of their seed.
    """
    names = [f.name for f in fields(settings) if f.name != REPORT_SETTING]
    return [name for name in names if name != PER_REQUEST_SETTING or settings.temperature > 0]


def _changed_settings(was: GenerationSettings, now: GenerationSettings) -> list[str]:
    """Return the settings that differ."""
    pairs = [(name, getattr(was, name), getattr(now, name)) for name in calibrated_settings(was)]
    return [f"{name} {quote(before)}, not {quote(after)}" for name, before, after in pairs if before != after]
