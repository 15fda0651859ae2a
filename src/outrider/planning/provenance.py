"""Whose traces these are: what the run.json beside them says, against what a gate file made of them would say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.config import GenerationSettings, ModelId
from outrider.decoding.gate import calibrated_settings
from outrider.errors import SettingsError
from outrider.files import read_json

MISSING = object()
Key = tuple[str, ...]


def check_provenance(traces: Path, *, edge: ModelId, cloud: ModelId, settings: GenerationSettings) -> bool:
    """Whether a run.json beside the traces says that they are this pair's, decoded so; False where none says anything.

    What it does not say is not compared; k is not either, as traces are of single tokens.

    Raises:
        SettingsError: it says otherwise; the first key that differs is named, with both values.
        DataError: it cannot be read.
    """
    path = traces.with_name("run.json")
    if not path.exists():
        return False
    recorded = _configuration(path)
    comparisons = [(key, _lookup(recorded, key), expected) for key, expected in _expected_fields(edge, cloud, settings)]
    for key, found, expected in comparisons:
        if found not in (MISSING, expected):
            raise SettingsError(
                f"{path}: configuration.{'.'.join(key)} is {found!r} for these traces, and {expected!r} was asked for: "
                "a gate is calibrated with the options that its traces were taken with"
            )
    return any(found is not MISSING for _, found, _ in comparisons)


def _configuration(path: Path) -> Any:
    return _lookup(read_json(path), ("configuration",))


def _expected_fields(edge: ModelId, cloud: ModelId, settings: GenerationSettings) -> Iterator[tuple[Key, Any]]:
    """What the gate file would say, by its place in run.json's configuration."""
    for side, model in (("edge", edge), ("cloud", cloud)):
        yield ("models", side, "name"), model.name
        yield ("models", side, "vocabulary"), model.fingerprint
    for name in calibrated_settings(settings):
        value = getattr(settings, name)
        yield ("generation", name), list(value) if isinstance(value, tuple) else value


def _lookup(value: Any, key: Key) -> Any:
    for name in key:
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return value
