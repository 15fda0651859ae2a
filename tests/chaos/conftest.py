"""The bundled pair in this process, and servers of it in others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.engines.load import load_engine
from tests.support.forked_clouds import Cloud, Nursery
from tests.support.locked_engine import Guarded


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    said = nursery.said()
    nursery.close()
    assert "Traceback" not in said, said


@pytest.fixture(scope="session")
def edge() -> Guarded:
    return Guarded(load_engine("demo:edge", dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def target() -> Guarded:
    return Guarded(load_engine("demo:cloud", dtype="float32", device="cpu"))


@pytest.fixture
def cloud(nursery: Nursery) -> Iterator[Cloud]:
    cloud = nursery.cloud()
    yield cloud
    cloud.close()
