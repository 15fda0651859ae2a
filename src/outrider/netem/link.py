"""A relay between clients and one target, through a network of given conditions."""

from __future__ import annotations

import asyncio
import socket

from outrider.errors import SettingsError
from outrider.netem.conditions import MAX_SECONDS, Conditions
from outrider.netem.connection import RelayConnection, RelayProtocol
from outrider.netem.link_state import LinkState

NO_CONDITIONS = Conditions()
ACCEPT_ITERATIONS = 3  # iterations of the event loop between accepting a socket and connection_made


class Link:
    """A relay to host:port that counts bytes and emulates network conditions.

    All connections share one bottleneck per direction, first come, first served. Bytes are never lost, changed or
    reordered. Delays are exact to a millisecond each way, the event loop's resolution. Bytes count when they are
    written to the outgoing socket. If the target refuses or dies, the client's connection is aborted. `seed` seeds the
    jitter. A link belongs to one event loop.

    Raises:
        SettingsError: an invalid port.
    """

    def __init__(self, host: str, port: int, conditions: Conditions = NO_CONDITIONS, *, seed: int = 0) -> None:
        if not 0 < port < 65536:
            raise SettingsError(f"port {port}: expected 1 to 65535")
        self.connections = 0  # accepted so far
        self.port: int | None = None  # set by `start`
        self._address = (host, port)
        self._state = LinkState(conditions, seed)
        self._servers: list[asyncio.Server] = []
        self._open_connections: set[RelayConnection] = set()
        self._blocked = self._closed = False

    @property
    def up(self) -> int:
        """Number of bytes forwarded from clients to the target."""
        return self._state.up.byte_count

    @property
    def down(self) -> int:
        """Number of bytes forwarded from the target to clients."""
        return self._state.down.byte_count

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes in the delay lines of all connections. DelayLine bounds it."""
        return sum(connection.buffered_bytes for connection in self._open_connections)

    @property
    def conditions(self) -> Conditions:
        """Present conditions. New ones apply to bytes that have not passed the bottleneck."""
        return self._state.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        """Set the conditions."""
        self._state.set_conditions(conditions)
        self._reschedule()

    async def start(self, listen: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on TCP. With port 0 the system chooses a free one. `port` holds it afterwards.

        Raises:
            OSError: the address cannot be listened on.
        """
        server = await asyncio.get_running_loop().create_server(self._accept, listen, port)
        self.port = server.sockets[0].getsockname()[1]
        self._add_server(server)

    async def connect(self) -> socket.socket:
        """Return a non-blocking socket that is connected to the target through this link.

        Raises:
            OSError: the target cannot be connected to, or the link is blocked or closed.
        """
        near, far = socket.socketpair()
        near.setblocking(False)
        connection = self._connection()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection.client, far)
            await connection.connected()
        except BaseException:
            connection.cut()
            near.close()
            raise
        return near

    async def close(self) -> None:
        """Close listeners and connections, and wait until their sockets are closed. A second call does nothing."""
        self._closed = True
        await self._stop_accepting()
        closing = [connection.closed for connection in self._open_connections]
        self.cut()
        await asyncio.gather(*closing)
        for server in self._servers:
            await server.wait_closed()

    def cut(self) -> None:
        """Abort all present connections (RST). New ones are accepted."""
        for connection in list(self._open_connections):
            connection.cut()

    def stall(self, seconds: float) -> None:
        """Hold all bytes back for a time, in both directions. None are lost.

        Raises:
            SettingsError: a time that is negative, not finite, or longer than a day.
        """
        if not 0 <= seconds <= MAX_SECONDS:
            raise SettingsError(f"a stall of {seconds:g} s: expected 0 s to a day ({MAX_SECONDS:g} s)")
        self._state.stall(seconds)
        self._reschedule()

    def block(self, blocked: bool) -> None:
        """Block or unblock the link. Blocking cuts present connections, and new ones are aborted at once."""
        self._blocked = blocked
        if blocked:
            self.cut()

    async def _stop_accepting(self) -> None:
        """Close the listeners, after asyncio has registered clients accepted last. A closed server would leak them."""
        loop = asyncio.get_running_loop()
        for listener in [listener for server in self._servers for listener in server.sockets]:
            loop.remove_reader(listener.fileno())
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        for server in self._servers:
            server.close()

    def _add_server(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        self._state.set_conditions(self.conditions)  # restarts the time between stalls

    def _reschedule(self) -> None:
        for connection in self._open_connections:
            connection.reschedule()

    def _accept(self) -> RelayProtocol:
        return self._connection().client

    def _connection(self) -> RelayConnection:
        return RelayConnection(self._state, self._address, self._register, self._open_connections.discard)

    def _register(self, connection: RelayConnection) -> bool:
        """Register a new client. Return whether its connection may stay."""
        self.connections += 1
        self._open_connections.add(connection)
        return not (self._blocked or self._closed)
