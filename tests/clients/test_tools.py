"""Tools with unmodified clients: the call, its result, and the answer, with scripted outputs of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.gateway.defaults import Defaults
from outrider.gateway.tool_parsers import HERMES
from outrider.gateway.tools import ToolSupport
from tests.clients.drivers.protocol import WEATHER
from tests.clients.processes import RunningClient
from tests.support.scripted_gateway import Running, Script, result_of, serving, spoken

pytestmark = pytest.mark.clients

PROMPT = "Is it warm in Rome and in Oslo?"
CALL = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'


def script(text: str) -> Script:
    """Return the script of an output in pieces of five characters."""
    pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
    return Script(spoken(*pieces), result_of(text, len(pieces)))


def output(prompt: Any) -> Script:
    """Call the tool for two cities, and answer with the results."""
    results = [message["content"] for message in prompt.messages if message["role"] == "tool"]
    return script("It is " + " and ".join(results) if results else "\n".join(map(CALL.format, WEATHER)))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with serving(output, defaults=Defaults(tools=ToolSupport(HERMES, "<tool_call>\n"))) as running:
        yield running


@pytest.mark.parametrize("way", ["tools", "stream_tools"])
def test_the_tool_is_called_and_its_result_answered(client: RunningClient, gateway: Running, way: str) -> None:
    before = len(gateway.scheduler.asked)
    answer = client.do(way, url=f"{gateway.url}/v1", key="none", prompt=PROMPT)
    assert "error" not in answer, answer["error"]
    assert answer["calls"] == [["weather", {"city": city}] for city in WEATHER]
    assert answer["answer"] == "It is " + " and ".join(WEATHER.values())
    first, second = (prompt for _, prompt, *_ in gateway.scheduler.asked[before:])
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool", "tool"]
    assert second.messages[0] == first.messages[0] == {"role": "user", "content": PROMPT}
    (tool,) = first.tools
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["description"].endswith("Return the weather of a city.")  # LlamaIndex adds the signature
    assert tool["function"]["parameters"]["required"] == ["city"]
    assert second.tools == first.tools
