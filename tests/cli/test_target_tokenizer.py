"""`outrider generate --target-tokenizer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cli.generate import run_generate
from outrider.cli.options import Models, Run
from outrider.errors import ModelError, SettingsError


@pytest.mark.parametrize(
    "models", [Models("demo", "local:demo"), Models("lookup", "grpc://127.0.0.1:1"), Models("none")]
)
def test_it_is_refused_where_it_has_no_effect(models: Models) -> None:
    with pytest.raises(SettingsError, match="--target-tokenizer is for an edge model and a cloud across a network"):
        run_generate(None, "1 2", False, Run(models), target_tokenizer="demo")


def test_a_missing_tokenizer_is_found_before_a_model_is_loaded(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ModelError, match="missing"):
        run_generate(None, "1 2", False, Run(Models("demo", "grpc://127.0.0.1:1")), target_tokenizer=missing)
