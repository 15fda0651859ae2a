"""Check of the origin of traces: the run.json beside them against the models and settings of the gate file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.config import GenerationSettings, ModelId
from outrider.decoding.calibrated_gate import calibrated_settings
from outrider.errors import SettingsError
from outrider.files import read_json

MISSING = object()
Key = tuple[str, ...]


def check_provenance(traces: Path, *, edge: ModelId, cloud: ModelId, settings: GenerationSettings) -> bool:
    """Return whether a run.json beside the traces confirms their models and settings, False if it has none of them.

    Fields that it lacks are not compared. k is not compared either, because traces are of single tokens.

    Raises:
        SettingsError: a field differs. The message names it with both values.
        DataError: run.json cannot be read.
    """
    path = traces.with_name("run.json")
    if not path.exists():
        return False
    recorded = _lookup(read_json(path), ("configuration",))
    expected_fields = _expected_fields(edge, cloud, settings)
    comparisons = [(key, _lookup_recorded(recorded, key), expected) for key, expected in expected_fields]
    for key, found, expected in comparisons:
        if found not in (MISSING, expected):
            raise SettingsError(
                f"{path}: configuration.{'.'.join(key)} is {found!r} for these traces, and {expected!r} here: a "
                "gate is calibrated with the options that its traces were taken with"
            )
    return any(found is not MISSING for _, found, _ in comparisons)


def _expected_fields(edge: ModelId, cloud: ModelId, settings: GenerationSettings) -> Iterator[tuple[Key, Any]]:
    """Yield the values of the gate file with their paths in run.json's configuration."""
    for side, model in (("edge", edge), ("cloud", cloud)):
        yield ("models", side, "name"), model.name
        yield ("models", side, "vocabulary"), model.fingerprint
        yield ("models", side, "quantization"), model.quantization
    for name in calibrated_settings(settings):
        value = getattr(settings, name)
        yield ("generation", name), list(value) if isinstance(value, tuple) else value


def _lookup_recorded(recorded: Any, key: Key) -> Any:
    """Return a field of run.json. A model without the field was recorded before models could be quantised."""
    found = _lookup(recorded, key)
    if found is MISSING and key[-1] == "quantization" and _lookup(recorded, (*key[:-1], "name")) is not MISSING:
        return None
    return found


def _lookup(value: Any, key: Key) -> Any:
    for name in key:
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return value
