"""The origin of traces: the run.json beside them, compared with the models and settings of a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.config import GenerationSettings
from outrider.decoding.calibrated_gate import calibrated_settings
from outrider.edge.model_pair import ModelPair
from outrider.engines.base import Engine
from outrider.errors import SettingsError, quote
from outrider.files import read_json
from outrider.verifiers.base import ModelInfo, Verifier
from outrider.verifiers.local import LocalVerifier

MISSING = object()
Key = tuple[str, ...]
Row = dict[str, Any]


# Descriptions -----------------------------------------------------------------------------------------------


def describe_engine(engine: Engine) -> Row:
    """Describe an engine: identity of its weights and vocabulary, dtype, quantisation and device."""
    return {
        "name": engine.name,
        "vocabulary": engine.fingerprint,
        "dtype": str(getattr(engine, "dtype", "")).removeprefix("torch."),
        "quantization": getattr(engine, "quantization", None),
        "device": str(getattr(engine, "device", "")),
        "identity": getattr(engine, "identity", None),  # last, because messages name the first difference
    }


def describe_remote(model: ModelInfo) -> Row:
    """Describe a model across a network, as far as it is known."""
    return {"name": model.name, "vocabulary": model.fingerprint, "quantization": model.quantization}


def describe_pair(draft: Engine, verifier: Verifier) -> tuple[Row, Row]:
    """Describe edge and cloud as run.json does.

    Raises:
        VocabularyMismatch: they do not share a vocabulary.
    """
    target = ModelPair(draft, verifier, "fail").state.target
    if isinstance(verifier, LocalVerifier):
        return describe_engine(draft), describe_engine(verifier.engine)
    return describe_engine(draft), describe_remote(target)


# Comparison -------------------------------------------------------------------------------------------------


def check_provenance(traces: Path, *, edge: Row, cloud: Row, settings: GenerationSettings) -> bool:
    """Return whether a run.json beside the traces confirms their models and settings, False if it has none of them.

    edge, cloud: the models' descriptions (`describe_pair`). Fields that they or run.json lack are not compared. The
    device is not compared either, nor is k, because traces are of single tokens.

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
                f"{path}: configuration.{'.'.join(key)} is {quote(found)} for these traces, and {quote(expected)} "
                "here: give the options that the traces were taken with"
            )
    return any(found is not MISSING for _, found, _ in comparisons)


def _expected_fields(edge: Row, cloud: Row, settings: GenerationSettings) -> Iterator[tuple[Key, Any]]:
    """Yield the values of the command with their paths in run.json's configuration."""
    for side, model in (("edge", edge), ("cloud", cloud)):
        known = {
            name: value for name, value in model.items() if name != "device" and (name, value) != ("identity", None)
        }
        yield from ((("models", side, name), value) for name, value in known.items())
    given = json.loads(json.dumps(asdict(settings)))
    yield from ((("generation", name), given[name]) for name in calibrated_settings(settings))


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
