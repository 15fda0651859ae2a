"""A small run of `outrider eval`, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import report_sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    report_sample.small(folder)
    return folder
