"""Whose traces these are: what the run.json beside them says, against what a gate file made of them would say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.config import OWN, GenerationSettings, ModelId
from outrider.errors import SettingsError
from outrider.files import read_json

UNSAID = object()
Key = tuple[str, ...]


def check_origin(traces: Path, *, edge: ModelId, cloud: ModelId, settings: GenerationSettings) -> bool:
    """Whether a run.json beside the traces says that they are this pair's, decoded so; False where none says anything.

    What it does not say is not compared; k is not either, as traces are of single tokens.

    Raises:
        SettingsError: it says otherwise; the first key that differs is named, with both values.
        DataError: it cannot be read.
    """
    path = traces.with_name("run.json")
    if not path.exists():
        return False
    said = _configuration(path)
    known = [(key, _at(said, key), now) for key, now in _stamped(edge, cloud, settings)]
    for key, was, now in known:
        if was not in (UNSAID, now):
            raise SettingsError(
                f"{path}: configuration.{'.'.join(key)} is {was!r} for these traces, and {now!r} was asked for: "
                "a gate is calibrated with the options that its traces were taken with"
            )
    return any(was is not UNSAID for _, was, _ in known)


def _configuration(path: Path) -> Any:
    return _at(read_json(path), ("configuration",))


def _stamped(edge: ModelId, cloud: ModelId, settings: GenerationSettings) -> Iterator[tuple[Key, Any]]:
    """What the gate file would say, by its place in run.json's configuration."""
    for side, model in (("edge", edge), ("cloud", cloud)):
        yield ("models", side, "name"), model.name
        yield ("models", side, "vocabulary"), model.fingerprint
    for name, value in asdict(settings).items():
        if name != OWN:
            yield ("generation", name), list(value) if isinstance(value, tuple) else value


def _at(value: Any, key: Key) -> Any:
    for name in key:
        value = value.get(name, UNSAID) if isinstance(value, dict) else UNSAID
    return value
