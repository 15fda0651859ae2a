"""The bundled pair in this process, and servers of it in others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.engines.load import load_engine
from tests.support.forked_clouds import Cloud, CloudForker
from tests.support.locked_engine import LockedEngine


@pytest.fixture(scope="session")
def nursery() -> Iterator[CloudForker]:
    nursery = CloudForker()
    yield nursery
    said = nursery.said()
    nursery.close()
    assert "Traceback" not in said, said


@pytest.fixture(scope="session")
def edge() -> LockedEngine:
    return LockedEngine(load_engine("demo:edge", dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def target() -> LockedEngine:
    return LockedEngine(load_engine("demo:cloud", dtype="float32", device="cpu"))


@pytest.fixture
def cloud(nursery: CloudForker) -> Iterator[Cloud]:
    cloud = nursery.cloud()
    yield cloud
    cloud.close()
