"""An emulated network: a transport that connects to each host through a link."""

from __future__ import annotations

import socket

from outrider.netem.conditions import Conditions
from outrider.netem.link import Link


class EmulatedNetwork:
    """A network with one emulated link per host and port. Use it in one event loop."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._links: dict[tuple[str, int], Link] = {}

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a socket that is connected to the host through its link.

        Raises:
            OSError: the host cannot be connected to.
        """
        if (host, port) not in self._links:
            self._links[host, port] = Link(host, port, self._conditions)
        return await self._links[host, port].connect()

    async def close(self) -> None:
        """Cut all connections."""
        for link in self._links.values():
            await link.close()
