"""Continue's autocompletion against a gateway with the bundled pair: its requests to `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.clients.conftest import Pair, auth
from tests.clients.drivers.continue_autocomplete import FILL_IN, STOPS, SUFFIX
from tests.clients.processes import Client, RunningClient, running_client
from tests.support.scripted_gateway import Script, result_of, serving, spoken

pytestmark = pytest.mark.clients

PREFIX = "total = 0\nfor number in range(10):\n    "


@pytest.fixture(scope="module")
def client() -> Iterator[RunningClient]:
    with running_client(Client("continue", "continue_autocomplete")) as running:
        yield running


def test_the_models_are_listed(client: RunningClient, pair: Pair) -> None:
    assert client.do("models", **pair.task) == ["outrider"]


def test_the_text_is_the_api_s(client: RunningClient, pair: Pair) -> None:
    body = {"model": "outrider", "prompt": FILL_IN.format(PREFIX, SUFFIX), "max_tokens": 30, "temperature": 0.01}
    body["stop"] = STOPS
    answer = httpx2.post(f"{pair.url}/v1/completions", json=body, headers=auth(), timeout=None).json()
    text = client.do("complete", **pair.task, prompt=PREFIX, max_tokens=30)["text"]
    assert text
    assert text == answer["choices"][0]["text"]


def test_a_stop_string_ends_the_text_before_itself(client: RunningClient) -> None:
    pieces = ("sum += ", "number\n``", "`\nThat is")  # an output ends with the token that completes a stop string
    with serving(Script(spoken(*pieces), result_of("".join(pieces), len(pieces), "stop"))) as running:
        text = client.do("complete", url=f"{running.url}/v1", key="none", prompt=PREFIX)["text"]
    assert text == "sum += number\n"


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"model": "nonesuch"}, 404), ({"prompt": "word " * 5000}, 400), ({"key": "not-the-key-of-this-gateway"}, 401)],
)
def test_an_error_has_its_status(client: RunningClient, pair: Pair, wrong: dict[str, Any], status: int) -> None:
    assert client.do("complete", **{**pair.task, "prompt": PREFIX, **wrong})["error"]["status"] == status


def test_the_next_key_press_cancels_and_frees_the_slot(client: RunningClient, pair: Pair) -> None:
    pair.check_cancellation(client, PREFIX)
