"""What a vLLM server generates by itself: the reference for what comes of verifying with it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from outrider.engines.base import Prompt
from outrider.verifiers.llm_server.session import _media


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def model_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


def completion(port: int, ids: Sequence[int], tokens: int, penalty: float = 1.0, **params: Any) -> list[int]:
    """Greedy, through the endpoint that everyone uses."""
    body = {
        "model": model_of(port),
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "repetition_penalty": penalty,
        "return_token_ids": True,
        **params,
    }
    return list(post(port, "/v1/completions", body)["choices"][0]["token_ids"])


def caption(port: int, prompt: Prompt, placeholder: int, tokens: int, penalty: float) -> list[int]:
    """Greedy, of a recording."""
    target: Any = type("Target", (), {"placeholder": placeholder})
    media = _media(prompt, target)
    assert media is not None
    ids = [t for key, run in groupby(prompt.ids) for t in ([key] if key == placeholder else run)]
    body = {
        "model": model_of(port),
        "token_ids": ids,
        "content_parts": [{"type": "audio_url", "url": media.url}],
        "sampling_params": {"temperature": 0, "max_tokens": tokens, "repetition_penalty": penalty},
    }
    return list(post(port, "/inference/v1/generate", body)["choices"][0]["token_ids"])
