"""Twenty interleaved conversations, a service with few slots: each turn equals one that was read from nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider import SpeculativeDecoder, load_engine
from outrider.engines.prefix_cache import unique_salt
from outrider.verifiers.local import LocalVerifier
from outrider.verifiers.remote.verifier import RemoteVerifier
from tests.support.cloud_server import serving

pytestmark = pytest.mark.network

CONVERSATIONS, TURNS, TOKENS = 20, 10, 4
RESTARTS = (45, 120)  # turns, of all conversations, before which the cloud is restarted


@pytest.mark.parametrize("mode", ["sequential", "pipelined", "cloud-only"])
def test_every_turn_equals_a_fresh_decoders(mode: str) -> None:
    edge, cloud = load_engine("demo:edge"), load_engine("demo:cloud")
    choice = random.Random(mode)
    fresh = SpeculativeDecoder(None, LocalVerifier(load_engine("demo:cloud")), reader=edge)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    turns = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    choice.shuffle(turns)
    reused = 0
    with serving(cloud, slots=3, max_length=512) as served, RemoteVerifier("127.0.0.1", served.port) as verifier:
        options: dict[str, Any] = {"reader": edge} if mode == "cloud-only" else {"k": 3, "driver": mode}
        decoder = SpeculativeDecoder(None if mode == "cloud-only" else edge, verifier, **options)
        for n, number in enumerate(turns):
            if n in RESTARTS:
                served.restart()
            history = histories[number]
            if len(history) > 8 and choice.random() < 0.2:  # the user edits an earlier message
                del history[choice.randrange(1, len(history)) :]
            history += [choice.randrange(10, edge.vocab_size - 10) for _ in range(choice.randrange(1, 8))]
            result = decoder.generate(history, max_new_tokens=TOKENS, ignore_eos=True)
            expected = fresh.generate(history, cache_salt=unique_salt(), max_new_tokens=TOKENS, ignore_eos=True)
            assert result.token_ids == expected.token_ids
            assert result.guarantee == "exact"
            reused += result.stats.cloud_cached_tokens
            history += result.token_ids
    assert reused
