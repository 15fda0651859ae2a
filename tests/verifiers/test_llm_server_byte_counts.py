"""What a session with other people's servers cost, to the byte that the sockets counted."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import SpeculativeDecoder, connect
from outrider.verifiers.llm_server.verifier import LlmServerVerifier
from tests.support.fake_llm_server import Fault, Model, cloud, edge
from tests.support.fake_vllm import VllmServer

SOON = (("retry-after", "0.01"),)


def total(verifier: LlmServerVerifier) -> tuple[int, int]:
    endpoints = [replica.client.endpoint for replica in verifier.replicas]
    return sum(endpoint.up for endpoint in endpoints), sum(endpoint.down for endpoint in endpoints)


@pytest.mark.parametrize("options", [{}, {"scale_out": 403}, {"runner": "v1"}], ids=str)
def test_the_ledgers_add_up_to_what_the_links_counted(options: dict[str, Any]) -> None:
    with (
        VllmServer(Model(cloud()), **options) as one,
        VllmServer(Model(cloud()), **options) as two,
        connect(f"{one.address},127.0.0.1:{two.port}") as verifier,
    ):
        decoder = SpeculativeDecoder(edge(), verifier, k=3)
        results = [decoder.generate([20 + n, 30], max_new_tokens=12) for n in range(4)]
        one.faults.append(Fault("", 503, headers=SOON, skip=1))
        two.faults.append(Fault("", cut=True, skip=1))
        results += [decoder.generate([20 + n, 30], max_new_tokens=12) for n in range(4)]
        assert sum(result.stats.bytes_up for result in results) == total(verifier)[0]
        assert sum(result.stats.bytes_down for result in results) == total(verifier)[1]
        for result in results:
            assert sum(result.ledger["up"].values()) == result.stats.bytes_up
            assert set(result.ledger["up"]) <= {"request", "transport"}
            assert set(result.ledger["down"]) <= {"answer", "transport"}
        first = results[1].ledger  # the first one's has the meeting in it
        assert first["up"]["request"] > first["up"]["transport"] / 4 > 0
