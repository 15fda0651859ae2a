"""Provenance of traces: compare the run.json next to them with a command's models and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.config import GenerationSettings
from outrider.decoding.calibrated_gate import calibrated_settings
from outrider.edge.model_pair import ModelPair
from outrider.engines.base import Engine
from outrider.errors import DataError, SettingsError, quote
from outrider.files import read_json
from outrider.verifiers.base import ModelInfo, Verifier
from outrider.verifiers.local import LocalVerifier

MISSING = object()
_ADDRESS = re.compile(r" at [a-z]+://\S+$")
Key = tuple[str, ...]
Description = dict[str, Any]


# Descriptions -----------------------------------------------------------------------------------------------


def describe_engine(engine: Engine) -> Description:
    """Describe an engine: identity of its weights and vocabulary, dtype, quantisation and device."""
    return {
        "name": engine.name,
        "vocabulary": engine.fingerprint,
        "dtype": str(getattr(engine, "dtype", "")).removeprefix("torch."),
        "quantization": getattr(engine, "quantization", None),
        "device": str(getattr(engine, "device", "")),
        "identity": getattr(engine, "identity", None),  # last, because messages name the first difference
    }


def describe_remote(model: ModelInfo) -> Description:
    """Describe a model across a network, as far as it is known."""
    return {"name": model.name, "vocabulary": model.fingerprint, "quantization": model.quantization}


def describe_pair(draft: Engine, verifier: Verifier) -> tuple[Description, Description]:
    """Describe edge and cloud as run.json does.

    Raises:
        VocabularyMismatch: they do not share a vocabulary.
    """
    target = ModelPair(draft, verifier, "fail").state.target
    if isinstance(verifier, LocalVerifier):
        return describe_engine(draft), describe_engine(verifier.engine)
    return describe_engine(draft), describe_remote(target)


# Comparison -------------------------------------------------------------------------------------------------


def check_provenance(traces: Path, *, edge: Description, cloud: Description, settings: GenerationSettings) -> bool:
    """Compare the run.json next to traces with a command's models and settings. Return False if it records neither.

    edge, cloud: the models' descriptions (`describe_pair`). Fields that either side lacks are not compared, nor are the
    device and k: a trace holds single tokens.

    Raises:
        SettingsError: a field differs. The message names it with both values.
        DataError: run.json cannot be read, or has no configuration.
    """
    path = traces.with_name("run.json")
    if not path.exists():
        return False
    run = read_json(path)
    recorded = run.get("configuration") if isinstance(run, dict) else None
    if not isinstance(recorded, dict):
        raise DataError(f"{path}: expected an object with a configuration, as `outrider eval` writes it")
    expected_fields = _expected_fields(edge, cloud, settings)
    comparisons = [(key, _lookup_recorded(recorded, key), expected) for key, expected in expected_fields]
    for key, found, expected in comparisons:
        if found not in (MISSING, expected):
            raise SettingsError(
                f"{path}: configuration.{'.'.join(key)} is {quote(found)} for these traces, and {quote(expected)} "
                "here: give the options that the traces were taken with"
            )
    return any(found is not MISSING for _, found, _ in comparisons)


def _expected_fields(edge: Description, cloud: Description, settings: GenerationSettings) -> Iterator[tuple[Key, Any]]:
    """Yield the values of the command with their paths in run.json's configuration."""
    for side, model in (("edge", edge), ("cloud", cloud)):
        for name, value in model.items():
            is_unknown = name == "identity" and value is None
            if name != "device" and not is_unknown:
                yield ("models", side, name), _without_address(value) if name == "name" else value
    given = json.loads(json.dumps(asdict(settings)))
    yield from ((("generation", name), given[name]) for name in calibrated_settings(settings))


def _lookup_recorded(recorded: Any, key: Key) -> Any:
    """Return a field of run.json. A model without the field was recorded before models could be quantised."""
    found = _lookup(recorded, key)
    if key[-1] == "name":
        return _without_address(found)
    if found is MISSING and key[-1] == "quantization" and _lookup(recorded, (*key[:-1], "name")) is not MISSING:
        return None
    return found


def _without_address(name: Any) -> Any:
    """Return the name of a model without the address of its cloud, at which another run may listen elsewhere."""
    return _ADDRESS.sub("", name) if isinstance(name, str) else name


def _lookup(value: Any, key: Key) -> Any:
    for name in key:
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return value
