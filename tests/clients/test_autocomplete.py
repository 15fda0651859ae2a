"""Continue's autocompletion against a gateway with the bundled pair: its requests to `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.clients.conftest import Pair, auth
from tests.clients.drivers.continue_autocomplete import FILL_IN, STOPS, SUFFIX
from tests.clients.processes import Client, RunningClient, running_client

pytestmark = pytest.mark.clients

PREFIX = "total = 0\nfor number in range(10):\n    "


@pytest.fixture(scope="module")
def client() -> Iterator[RunningClient]:
    with running_client(Client("continue", "continue_autocomplete")) as running:
        yield running


def test_the_models_are_listed(client: RunningClient, pair: Pair) -> None:
    assert client.do("models", **pair.task) == ["outrider"]


def test_the_text_is_the_api_s_until_a_stop_string(client: RunningClient, pair: Pair) -> None:
    body = {"model": "outrider", "prompt": FILL_IN.format(PREFIX, SUFFIX), "max_tokens": 30, "temperature": 0.01}
    answer = httpx2.post(f"{pair.url}/v1/completions", json=body, headers=auth(), timeout=None).json()
    text = answer["choices"][0]["text"]
    assert text
    ends = [text.index(stop) for stop in STOPS if stop in text]
    expected = text[: min(ends, default=len(text))]
    assert client.do("complete", **pair.task, prompt=PREFIX, max_tokens=30)["text"] == expected


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"model": "nonesuch"}, 404), ({"prompt": "word " * 5000}, 400), ({"key": "not-the-key-of-this-gateway"}, 401)],
)
def test_an_error_has_its_status(client: RunningClient, pair: Pair, wrong: dict[str, Any], status: int) -> None:
    assert client.do("complete", **{**pair.task, "prompt": PREFIX, **wrong})["error"]["status"] == status


def test_the_next_key_press_cancels_and_frees_the_slot(client: RunningClient, pair: Pair) -> None:
    pair.check_cancellation(client, PREFIX)
