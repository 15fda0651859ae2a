"""A service for all tests of a file that leave it as it was, and streams to it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.support.cloud_server import Served, serving
from tests.support.cloud_service import Held, clear
from tests.support.raw_stream import RawStream


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving(Held(padding=4)) as served:
        yield served


@pytest.fixture(scope="module")
def shared_channel(shared: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared.address) as channel:
        yield channel


@pytest.fixture
def channel(shared: Served, shared_channel: grpc.Channel) -> Iterator[grpc.Channel]:
    """Afterwards, nothing is left of what was opened through it."""
    yield shared_channel
    clear(shared)


@pytest.fixture
def stream(channel: grpc.Channel) -> Iterator[RawStream]:
    with RawStream(channel) as stream:
        yield stream
