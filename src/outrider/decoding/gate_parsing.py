"""Gates from their texts, such as `always`, `entropy:1.5` or `calibrated:FILE`."""

from __future__ import annotations

import math

from outrider.decoding.calibrated_gate import NO_MEAN_GATE, Calibrated
from outrider.decoding.gate import SIGNAL_NAMES, Always, AnyOf, Gate, Never, Threshold, Trigger
from outrider.decoding.gate_file import read_gate_file
from outrider.errors import DataError, SettingsError, quote


def gate(spec: str) -> Gate:
    """Parse a gate: always, never, entropy:1.5, margin.mean:0.3, entropy:1.5|logprob:2, trigger:….

    `calibrated:FILE` is the gate that a calibration wrote to a file.

    Raises:
        SettingsError: the signal is unknown, or the threshold is missing or not a finite number ≥ 0.
        DataError: the gate file is invalid.
    """
    if not isinstance(spec, str):
        raise SettingsError(f"a gate is a text such as entropy:1.5, not {quote(spec)}")
    prefix, _, rest = spec.partition(":")
    if prefix == "calibrated":
        return _load_calibrated(rest, spec)
    if prefix == "trigger":
        return _parse_trigger(rest, spec)
    gates = tuple(_parse_single(part.strip(), spec) for part in spec.split("|"))
    if len(gates) == 1:
        return gates[0]
    if any(isinstance(part, (Always, Never)) for part in gates):
        raise SettingsError(f"gate {quote(spec)}: always and never stand alone; | joins thresholds")
    return AnyOf(gates)


def _parse_trigger(rest: str, spec: str) -> Trigger:
    """Parse the gate of a trigger. Refuse a calibrated one before its file is read."""
    if rest.startswith("calibrated:"):
        raise SettingsError(f"gate {quote(spec)}: a trigger skips no block, so it cannot hold a calibrated gate")
    if rest.startswith("trigger:"):
        raise SettingsError(f"gate {quote(spec)}: trigger: is given twice")
    return Trigger(gate(rest))


def _load_calibrated(path: str, spec: str) -> Calibrated:
    if not path:
        raise SettingsError(f"gate {quote(spec)} names no file; write for example calibrated:gate.json")
    file = read_gate_file(path)
    try:
        inner = _parse_single(file.gate, file.gate)
    except SettingsError as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(inner, Threshold):
        raise DataError(f"{path}: gate {quote(file.gate)} is not the threshold of one signal")
    if inner.mean:
        raise DataError(f"{path}: gate {quote(file.gate)}: {NO_MEAN_GATE}")
    return Calibrated(inner, file, path)


def _parse_single(text: str, spec: str) -> Gate:
    if text in ("always", "never"):
        return Always() if text == "always" else Never()
    name, _, limit = text.partition(":")
    signal, _, mode = name.partition(".")
    if signal not in SIGNAL_NAMES or mode not in ("", "mean", "max"):
        raise SettingsError(
            f"gate {quote(spec)}: expected always, never, or SIGNAL:THRESHOLD with SIGNAL one of "
            f"{', '.join(SIGNAL_NAMES)} (each also as SIGNAL.mean), joined by |, optionally after trigger:; or "
            "calibrated:FILE alone"
        )
    return Threshold(signal, _parse_threshold(limit, spec), mean=mode == "mean")


def _parse_threshold(text: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(
            f"gate {quote(spec)}: {quote(text)} is not a number; write for example entropy:1.5"
        ) from None
    if not (math.isfinite(value) and value >= 0):
        raise SettingsError(f"gate {quote(spec)}: a threshold is a finite number, 0 or more")
    return value
