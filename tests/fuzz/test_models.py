"""The fuzzer of model folders, for some seconds; and the seeds that have found something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import models

FOUND: tuple[int, ...] = ()


def test_damaged_checkpoints_load_or_are_refused_by_name() -> None:
    tried, findings = models.run(15.0, seed=1)
    assert tried
    assert not findings


@pytest.mark.parametrize("seed", FOUND)
def test_earlier_findings_stay_fixed(seed: int, tmp_path: Path) -> None:
    assert models.attempt(seed, tmp_path) is None
