"""What the gateway's tests share: the bundled pair, its cloud as a service, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from outrider import SpeculativeDecoder, load_engine, local
from outrider.gateway.decoder_pool import DecoderPool
from outrider.verifiers.connect import connect
from tests.support.cloud_server import Served, serving

PROMPTS = ("你好", "Hello there", "The bird sings, and", "rain", "一只狗", "Music plays", "水", "a door")


@cache
def edge() -> Any:
    return load_engine("demo:edge")


@cache
def said(way: str, prompt: str, length: int) -> tuple[int, ...]:
    """What each way says, one at a time, without a pool or a network."""
    draft, verifier = (edge(), None) if way == "edge-only" else (None, local(target()))
    return tuple(SpeculativeDecoder(draft, verifier).generate(prompt, max_new_tokens=length).token_ids)


@cache
def target() -> Any:
    return load_engine("demo:cloud")


@contextmanager
def clouded(**options: Any) -> Iterator[Served]:
    """The bundled pair's larger model as a service."""
    with serving(load_engine("demo:cloud"), slots=16, max_length=512, **options) as served:
        yield served


def reach(served: Served, **options: Any) -> Callable[[str], Any]:
    """How a pool reaches it."""
    return lambda net: connect(f"grpc://{served.address}", net=net, **{"patience": 5.0, "deadline": 10.0, **options})


@contextmanager
def pooled(served: Served | None, **options: Any) -> Iterator[DecoderPool]:
    pool = DecoderPool(edge(), None if served is None else reach(served, **options))
    try:
        yield pool
    finally:
        pool.close()
