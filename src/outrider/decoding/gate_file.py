"""Gate files: the results of `outrider calibrate`, with the models and settings that they are for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from outrider.config import GenerationSettings, Loss
from outrider.decoding.draft_length import MAX_K
from outrider.errors import DataError, SettingsError, quote
from outrider.files import read_json
from outrider.numeric import is_integer, is_number

GATE_FILE_VERSION = 3
OLD_VERSION_HINT = (
    ". The budget of older files does not hold live. Make a new file from the same traces: "
    "outrider calibrate TRACES --out FILE, with the options that the file was made with"
)
DIGEST_MISMATCH = (
    "it was changed after it was calibrated, so its budget is void: the digest does not match the other keys. "
    "Make a new file: outrider calibrate TRACES --out FILE"
)


@dataclass(frozen=True)
class ModelId:
    """A model's name in a file. fingerprint: the hash of its vocabulary. quantization: as in `ModelInfo`."""

    name: str
    fingerprint: str
    quantization: str | None = None

    def __post_init__(self) -> None:
        for key in ("name", "fingerprint", "quantization"):
            value = getattr(self, key)
            good = (isinstance(value, str) and value != "") or (value is None and key == "quantization")
            _require_data(good, f"{key} is a text that is not empty, not {quote(value)}")


@dataclass(frozen=True)
class SignalFit:
    """The loosest threshold of a signal within the risk budget, None if there is none, with its risk and escalation."""

    signal: str
    threshold: float | None
    risk: float
    escalation: float

    def __post_init__(self) -> None:
        _require_data(isinstance(self.signal, str), f"signal is a text, not {quote(self.signal)}")
        limit = self.threshold
        good = limit is None or (is_number(limit) and limit >= 0)
        _require_data(good, f"threshold is a finite number, 0 or more, or null, not {quote(limit)}")
        _check_fractions(self, "risk", "escalation")


@dataclass(frozen=True)
class GateFile:
    """The contents of a gate file: the result of `outrider calibrate`, and the models it is for.

    gate: the threshold, as text. epsilon: the risk budget. loss: the quantity whose expected share is bounded:
    "outputs" that differ from the target's, or "tokens" of the target's output that a run does not reproduce, from the
    first difference to its end. traces: the number that set the threshold. risk: their mean loss there, which bounds
    that of live runs. escalation: verified blocks ÷ blocks, audits included, on the traces. audit: the share of skipped
    blocks that are verified at random. settings: of the traces. signals: the figures of each signal, on traces of their
    own.

    Raises:
        DataError: a value is out of range. The message names the key.
    """

    gate: str
    epsilon: float
    loss: Loss
    k: int
    traces: int
    risk: float
    escalation: float
    audit: float
    edge: ModelId
    cloud: ModelId
    settings: GenerationSettings
    signals: tuple[SignalFit, ...] = ()

    def __post_init__(self) -> None:
        _require_data(isinstance(self.gate, str), f"gate is a text such as entropy:0.3, not {quote(self.gate)}")
        good = is_number(self.epsilon) and 0 < self.epsilon < 1
        _require_data(good, f"epsilon is above 0 and below 1, not {quote(self.epsilon)}")
        losses = get_args(Loss)
        _require_data(self.loss in losses, f"loss is one of {', '.join(losses)}, not {quote(self.loss)}")
        good = is_integer(self.k) and 1 <= self.k <= MAX_K
        _require_data(good, f"k is a whole number from 1 to {MAX_K}, not {quote(self.k)}")
        good = is_integer(self.traces) and self.traces >= 1
        _require_data(good, f"traces is a whole number, 1 or more, not {quote(self.traces)}")
        _check_fractions(self, "risk", "escalation", "audit")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary with version and digest."""
        value = {"version": GATE_FILE_VERSION, **asdict(self)}
        return {**value, "digest": _digest(value)}

    @classmethod
    def from_json(cls, value: Any) -> GateFile:
        """Read the contents of a gate file.

        Raises:
            DataError: it is not a gate file of this version, or was changed. The message names the key.
        """
        _require_data(isinstance(value, dict), f"expected an object, not {quote(value)}")
        version = value.get("version")
        known = f"version {quote(version)}: this outrider reads version {GATE_FILE_VERSION}"
        same = is_integer(version) and version == GATE_FILE_VERSION
        _require_data(same, known + (OLD_VERSION_HINT if version in (1, 2) else ""))
        rest = {key: value[key] for key in value if key != "digest"}
        values = _require_keys(cls, {key: rest[key] for key in rest if key != "version"})
        _require_data(isinstance(values["signals"], list), f"signals is a list, not {quote(values['signals'])}")
        values["signals"] = tuple(
            _parse_field(f"signals[{n}]", SignalFit, row) for n, row in enumerate(values["signals"])
        )
        for side in ("edge", "cloud"):
            values[side] = _parse_model(side, values[side])
        values["settings"] = _parse_settings(values["settings"])
        file = cls(**values)
        _require_data("digest" in value, "digest is missing")
        _require_data(value["digest"] == _digest(rest), DIGEST_MISMATCH)
        return file


def read_gate_file(path: str | Path) -> GateFile:
    """Read a gate file.

    Raises:
        DataError: the file cannot be read, or is not a gate file. The message names file and key.
    """
    value = read_json(path)
    try:
        return GateFile.from_json(value)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _digest(value: Mapping[str, Any]) -> str:
    """Return the checksum of a gate file's other keys, in any order. It does not protect against forgery."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _require_keys(kind: type, value: Any) -> dict[str, Any]:
    """Return a JSON object with exactly the keys of a dataclass, or raise DataError."""
    _require_data(isinstance(value, dict), f"expected an object, not {quote(value)}")
    names = [f.name for f in fields(kind)]
    unknown, missing = sorted(set(value) - set(names)), [name for name in names if name not in value]
    _require_data(not unknown, f"unknown key {', '.join(unknown)}: expected {', '.join(names)}")
    _require_data(not missing, f"{', '.join(missing)} is missing")
    return dict(value)


def _parse_field(where: str, kind: Any, value: Any) -> Any:
    try:
        return kind(**_require_keys(kind, value))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _parse_model(where: str, value: Any) -> ModelId:
    """Return a model of a gate file. Files from before there was a quantisation lack that key."""
    return _parse_field(where, ModelId, {"quantization": None, **value} if isinstance(value, dict) else value)


def _parse_settings(value: Any) -> GenerationSettings:
    _require_data(isinstance(value, dict), f"settings: expected an object, not {quote(value)}")
    try:
        return GenerationSettings.build(value)
    except SettingsError as error:
        raise DataError(f"settings: {error}") from error


def _check_fractions(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _require_data(is_number(value) and 0 <= value <= 1, f"{name} is between 0 and 1, not {quote(value)}")


def _require_data(condition: bool, message: str) -> None:
    if not condition:
        raise DataError(message)
