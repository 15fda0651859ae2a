"""A gateway with the bundled pair, and the clients in their processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest

from tests.clients.processes import CLIENTS, Client, RunningClient, running_client
from tests.support.gateway_process import running_gateway
from tests.support.processes import wait_until

KEY = "a-key-that-is-long-enough"
# A round trip of 0.2 s makes the longest answer take half a minute at least, so that a client can cancel it.
SLOW_AND_LONG = ("--net", "rtt=200ms", "--ignore-eos", "--on-loop", "ignore")
LONGEST = 1900  # tokens, of a window of 2,048


@dataclass(frozen=True)
class Pair:
    """A gateway with a pair of models. url: without /v1."""

    url: str

    @property
    def task(self) -> dict[str, str]:
        """Return the fields of a task that name the server."""
        return {"url": f"{self.url}/v1", "key": KEY}

    def check_cancellation(self, client: RunningClient, prompt: str) -> None:
        """Check that a client's cancellation ends its generation, and frees the slot."""
        before = self._disconnects()
        first = client.do("cancel", **self.task, prompt=prompt, max_tokens=LONGEST)
        assert isinstance(first, str), first
        assert first
        wait_until(lambda: httpx2.get(f"{self.url}/health").json()["active"] == 0)
        assert self._disconnects() == before + 1  # the answer has not come to its end

    def _disconnects(self) -> float:
        """Return the number of clients that have disconnected before an answer's end."""
        text = httpx2.get(f"{self.url}/metrics", headers=auth()).text
        lines = [line for line in text.splitlines() if line.startswith("outrider_edge_disconnects_total")]
        return float(lines[0].split()[-1])


def auth() -> dict[str, str]:
    """Return the header with the API key."""
    return {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"me {KEY}\n")
    keys.chmod(0o600)
    with running_gateway("--api-keys", str(keys), *SLOW_AND_LONG) as (url, _):
        yield Pair(url)


@pytest.fixture(
    scope="session",
    params=[pytest.param(each, id=each.name, marks=pytest.mark.xdist_group(each.name)) for each in CLIENTS],
)
def client(request: pytest.FixtureRequest) -> Iterator[RunningClient]:
    """One client after the other, each with all tests that need one, in one process of pytest."""
    chosen: Client = request.param
    with running_client(chosen) as running:
        yield running
