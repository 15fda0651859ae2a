"""The gate: the drafter's confidence in a block, and the decision to verify (escalate) or skip it.

Signals of a drafted token come from the drafter's logits (float32), after temperature and before logits processors and
filters, with natural logarithms:

    entropy   H(q) in nats          escalates above the threshold
    margin    q₁ − q₂               escalates below the threshold
    maxprob   1 − q₁                escalates above the threshold
    logprob   −log q(d)             escalates above the threshold

The signal of a block is that of its least confident token (`entropy:1.5`), or the mean (`entropy.mean:1.5`).

`calibrated:FILE` is a threshold that planning/calibrate.py found for a risk budget. A random share of the blocks that
it would skip is verified all the same: its audits.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.config import PER_REQUEST_SETTING, GateFile, GenerationSettings, Scope, format_number, read_gate_file
from outrider.decoding.loop_detection import DEFAULT_RULE, LoopRule
from outrider.errors import DataError, SettingsError
from outrider.sampling.sampler import Signals as Signals
from outrider.sampling.sampler import apply_temperature, uniforms

SignalName = Literal["entropy", "margin", "maxprob", "logprob"]
SIGNAL_NAMES: tuple[SignalName, ...] = ("entropy", "margin", "maxprob", "logprob")
NO_MEAN_GATE = (
    "the mean over a block cannot be calibrated: no trace shows a live drafter's signals after its own wrong token. "
    f"Calibrate one of {', '.join(SIGNAL_NAMES)}, which take a block's least confident token"
)

MAX_UNREPAIRED = 128  # skipped tokens after which scope "repair" requests a verdict


@dataclass(frozen=True)
class Decision:
    """The decision on a block and its reason. escalate: the block goes to the verifier."""

    escalate: bool
    reason: str


class Gate(Protocol):
    """The policy that selects the blocks to verify."""

    @property
    def needs_signals(self) -> bool:
        """True if the gate reads the signals of drafted tokens."""
        ...

    @property
    def exact(self) -> bool:
        """True if every token is verified in the end, so that the output is the target's own."""
        ...

    def decide(self, block: Seq[Signals]) -> Decision:
        """Decide on a block by the signals of its tokens."""
        ...


def compute_signals(logits: Tensor, token: int, temperature: float) -> Signals:
    """Return the signals of `token`, drawn from raw logits (float32 [V]). Temperature 0 counts as 1."""
    logq = torch.log_softmax(apply_temperature(logits, temperature), -1)
    best = torch.topk(logq, min(2, logq.shape[-1])).values.exp()
    entropy = -float(torch.dot(logq.exp(), torch.clamp(logq, min=torch.finfo(logq.dtype).min)))
    second = float(best[1]) if len(best) == 2 else 0.0
    return Signals(max(entropy, 0.0), float(best[0]) - second, 1.0 - float(best[0]), -float(logq[token]))


@dataclass(frozen=True)
class Always:
    """Verify every block."""

    needs_signals = False
    exact = True

    def decide(self, block: Seq[Signals]) -> Decision:
        """Escalate."""
        return Decision(True, "always")

    def __str__(self) -> str:
        return "always"


@dataclass(frozen=True)
class Never:
    """Verify no block."""

    needs_signals = False
    exact = False

    def decide(self, block: Seq[Signals]) -> Decision:
        """Skip."""
        return Decision(False, "never")

    def __str__(self) -> str:
        return "never"


@dataclass(frozen=True)
class Threshold:
    """Verify a block if its signal shows less confidence than `limit`."""

    signal: SignalName
    limit: float
    mean: bool = False
    needs_signals = True
    exact = False

    def decide(self, block: Seq[Signals]) -> Decision:
        """Compare the block's signal with the threshold."""
        value = self.value(block)
        if self.signal == "margin":
            return self._decision(value < self.limit, value, "<" if value < self.limit else ">=")
        return self._decision(value > self.limit, value, ">" if value > self.limit else "<=")

    def _decision(self, escalate: bool, value: float, sign: str) -> Decision:
        name = f"{self.signal}.mean" if self.mean else self.signal
        return Decision(escalate, f"{name} {value:.3g} {sign} {self.limit:g}")

    def value(self, block: Seq[Signals]) -> float:
        """Return the block's signal. A block without tokens has the least possible confidence."""
        values = [getattr(token, self.signal) for token in block]
        if not values:
            return math.inf if self.signal != "margin" else -math.inf
        if self.mean:
            return sum(values) / len(values)
        return min(values) if self.signal == "margin" else max(values)

    def __str__(self) -> str:
        return f"{self.signal}{'.mean' if self.mean else ''}:{format_number(self.limit)}"


@dataclass(frozen=True)
class AnyOf:
    """Verify a block if any of several gates does."""

    gates: tuple[Gate, ...]
    exact = False

    @property
    def needs_signals(self) -> bool:
        """True if a part reads signals."""
        return any(part.needs_signals for part in self.gates)

    def decide(self, block: Seq[Signals]) -> Decision:
        """Escalate with the reason of the first part that does."""
        decisions = [part.decide(block) for part in self.gates]
        return next((d for d in decisions if d.escalate), decisions[0])

    def __str__(self) -> str:
        return "|".join(map(str, self.gates))


@dataclass(frozen=True)
class Trigger:
    """Select when to verify. Skipped blocks stay provisional until a verdict, so the output stays exact."""

    inner: Gate
    exact = True

    @property
    def needs_signals(self) -> bool:
        """True if the inner gate reads signals."""
        return self.inner.needs_signals

    def decide(self, block: Seq[Signals]) -> Decision:
        """Decide as the inner gate does."""
        return self.inner.decide(block)

    def __str__(self) -> str:
        return f"trigger:{self.inner}"


class ModelIdentity(Protocol):
    """A model's name and vocabulary."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def fingerprint(self) -> str:
        """The hash of its vocabulary."""
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

        Lossy verdicts void the budget. So do another k, vocabulary, loop rule or setting, and the verdicts that scope
        "repair" requests within long outputs, which calibration does not replay. Another model name is a warning, as
        the model may be the same. lossy: the reasons for lossy verdicts, as in "with accept exact, not …".
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
    return [f.name for f in fields(settings) if f.name != PER_REQUEST_SETTING or settings.temperature > 0]


def _changed_settings(was: GenerationSettings, now: GenerationSettings) -> list[str]:
    """Return the settings that differ."""
    pairs = [(name, getattr(was, name), getattr(now, name)) for name in calibrated_settings(was)]
    return [f"{name} {before!r}, not {after!r}" for name, before, after in pairs if before != after]


def gate(spec: str) -> Gate:
    """Parse a gate: always, never, entropy:1.5, margin.mean:0.3, entropy:1.5|logprob:2, trigger:….

    `calibrated:FILE` is the gate that a calibration wrote to a file.

    Raises:
        SettingsError: the signal is unknown, or the threshold is missing or not a finite number ≥ 0.
        DataError: the gate file is invalid.
    """
    if not isinstance(spec, str):
        raise SettingsError(f"a gate is a text such as entropy:1.5, not {spec!r}")
    prefix, _, rest = spec.partition(":")
    if prefix == "calibrated":
        return _load_calibrated(rest, spec)
    if prefix == "trigger":
        return _parse_trigger(rest, spec)
    gates = tuple(_parse_single(part.strip(), spec) for part in spec.split("|"))
    if len(gates) == 1:
        return gates[0]
    if any(isinstance(part, (Always, Never)) for part in gates):
        raise SettingsError(f"gate {spec!r}: always and never stand alone; | joins thresholds")
    return AnyOf(gates)


def _parse_trigger(rest: str, spec: str) -> Trigger:
    """Parse the gate of a trigger. Refuse a calibrated one before its file is read."""
    if rest.startswith("calibrated:"):
        raise SettingsError(f"gate {spec!r}: a trigger skips no block, so it cannot hold a calibrated gate")
    if rest.startswith("trigger:"):
        raise SettingsError(f"gate {spec!r}: trigger: is given twice")
    return Trigger(gate(rest))


def _load_calibrated(path: str, spec: str) -> Calibrated:
    if not path:
        raise SettingsError(f"gate {spec!r} names no file; write for example calibrated:gate.json")
    file = read_gate_file(path)
    try:
        inner = _parse_single(file.gate, file.gate)
    except SettingsError as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(inner, Threshold):
        raise DataError(f"{path}: gate {file.gate!r} is not the threshold of one signal")
    if inner.mean:
        raise DataError(f"{path}: gate {file.gate!r}: {NO_MEAN_GATE}")
    return Calibrated(inner, file, path)


def _parse_single(text: str, spec: str) -> Gate:
    if text in ("always", "never"):
        return Always() if text == "always" else Never()
    name, _, limit = text.partition(":")
    signal, _, mode = name.partition(".")
    if signal not in SIGNAL_NAMES or mode not in ("", "mean", "max"):
        raise SettingsError(
            f"gate {spec!r}: expected always, never, or SIGNAL:THRESHOLD with SIGNAL one of {', '.join(SIGNAL_NAMES)} "
            "(each also as SIGNAL.mean), joined by |, optionally after trigger:; or calibrated:FILE alone"
        )
    return Threshold(signal, _parse_threshold(limit, spec), mean=mode == "mean")


def _parse_threshold(text: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"gate {spec!r}: {text!r} is not a number; write for example entropy:1.5") from None
    if not (math.isfinite(value) and value >= 0):
        raise SettingsError(f"gate {spec!r}: a threshold is a finite number, 0 or more")
    return value
