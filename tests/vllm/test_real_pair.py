"""Qwen2.5-Coder 0.5B drafts for 1.5B on a real vLLM server, in float32. The pair lies in .cache/models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import SpeculativeDecoder, connect, load_engine
from outrider.prompts.chat import encode
from tests.support import vllm_requests
from tests.support.vllm_process import CLOUD, EDGE, OPEN, ROOT, Start

pytestmark = pytest.mark.vllm

PROMPTS = Path(__file__).with_name("prompts.json")
TOKENS = 6


@pytest.fixture(scope="module")
def port(start: Start) -> int:
    for folder in (EDGE, CLOUD):
        if not folder.is_dir():
            pytest.skip(f"{folder.relative_to(ROOT)} is not there: docs/structure.md says how to make it")
    server = start(CLOUD, *OPEN)
    server.wait()
    return server.port


def test_equal_to_what_the_server_generates(port: int) -> None:
    """20 prompts of Spec-Bench (Apache-2.0), every k, with and without a penalty.

    A difference may begin at a near tie only; all are counted.
    """
    edge = load_engine(str(EDGE), dtype="float32")
    equal, near = 0, 0
    with connect(f"vllm://127.0.0.1:{port}", deadline=300.0) as verifier:
        for text in json.loads(PROMPTS.read_text(encoding="utf-8")):
            ids = list(encode(edge, [{"role": "user", "content": text}]).ids)
            for penalty in (1.0, 1.1):
                expected = vllm_requests.completion(port, ids, TOKENS, penalty)
                for k in (1, 3, 5, 8):
                    out = SpeculativeDecoder(edge, verifier, k=k).generate(
                        ids, max_new_tokens=TOKENS, repetition_penalty=penalty
                    )
                    parted = _first_difference(out.token_ids, expected)
                    assert parted is None or parted in out.near_ties, (text, k, penalty)
                    equal, near = equal + (parted is None), near + (parted is not None)
    print(f"equal {equal}, parted at a reported near tie {near}")  # noqa: T201
    assert equal + near == 160


def _first_difference(one: list[int], other: list[int]) -> int | None:
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
