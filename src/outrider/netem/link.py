"""A relay between clients and one target, through a network of given conditions."""

from __future__ import annotations

import asyncio
import socket

from outrider.errors import SettingsError
from outrider.netem.conditions import MAX_SECONDS, Conditions
from outrider.netem.connection import RelayConnection, RelayProtocol
from outrider.netem.link_state import LinkState

NO_CONDITIONS = Conditions()
ACCEPT_ITERATIONS = 3  # turns of the event loop that asyncio takes from accepting a socket to connection_made


class Link:
    """Forwards every connection to host:port, counts the bytes, and does to them what `conditions` says.

    All connections share the link: one bottleneck each way, first come, first served. Bytes are never lost, changed or
    reordered; delays are exact to a millisecond each way, the event loop's resolution. Bytes count when they are handed
    to the outgoing socket. A target that refuses or dies has the client's connection aborted. `seed` is the jitter's.
    To be used in one event loop only; see LinkThread for other threads.

    Raises:
        SettingsError: a port that is none.
    """

    def __init__(self, host: str, port: int, conditions: Conditions = NO_CONDITIONS, *, seed: int = 0) -> None:
        if not 0 < port < 65536:
            raise SettingsError(f"a port is between 1 and 65535, not {port}")
        self.connections = 0  # accepted so far
        self.port: int | None = None  # where it listens, after start
        self._address = (host, port)
        self._state = LinkState(conditions, seed)
        self._servers: list[asyncio.Server] = []
        self._open_connections: set[RelayConnection] = set()
        self._blocked = self._closed = False

    @property
    def up(self) -> int:
        """Bytes forwarded from clients to the target."""
        return self._state.up.byte_count

    @property
    def down(self) -> int:
        """Bytes forwarded from the target to clients."""
        return self._state.down.byte_count

    @property
    def buffered_bytes(self) -> int:
        """Bytes in the delay lines of all present connections; bounded, see DelayLine."""
        return sum(connection.buffered_bytes for connection in self._open_connections)

    @property
    def conditions(self) -> Conditions:
        """Assignable at any time: bytes that have not passed the bottleneck yet obey the new ones."""
        return self._state.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._state.set_conditions(conditions)
        self._reschedule()

    async def start(self, listen: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on TCP; port 0 is any free one, found in `port` afterwards.

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
        """RelayProtocol listener and connections, and wait until their sockets are closed; twice is once."""
        self._closed = True
        await self._stop_accepting()
        closing = [connection.closed for connection in self._open_connections]
        self.cut()
        await asyncio.gather(*closing)
        for server in self._servers:
            await server.wait_closed()

    def cut(self) -> None:
        """Abort all present connections (RST); new ones are accepted."""
        for connection in list(self._open_connections):
            connection.cut()

    def stall(self, seconds: float) -> None:
        """Nothing moves for so long, both ways; no byte is lost.

        Raises:
            SettingsError: a time that is negative, not finite, or longer than a day.
        """
        if not 0 <= seconds <= MAX_SECONDS:
            raise SettingsError(f"a stall takes between 0 s and a day ({MAX_SECONDS:g} s), not {seconds:g} s")
        self._state.stall(seconds)
        self._reschedule()

    def block(self, blocked: bool) -> None:
        """While blocked, there are no connections: present ones are cut and new ones aborted at once."""
        self._blocked = blocked
        if blocked:
            self.cut()

    async def _stop_accepting(self) -> None:
        """Close the listeners, once a client accepted a moment ago has turned up: a closed server loses its socket."""
        loop = asyncio.get_running_loop()
        for listener in [listener for server in self._servers for listener in server.sockets]:
            loop.remove_reader(listener.fileno())
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        for server in self._servers:
            server.close()

    def _add_server(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        self._state.set_conditions(self.conditions)  # the time between stalls counts from the start

    def _reschedule(self) -> None:
        for connection in self._open_connections:
            connection.reschedule()

    def _accept(self) -> RelayProtocol:
        return self._connection().client

    def _connection(self) -> RelayConnection:
        return RelayConnection(self._state, self._address, self._register, self._open_connections.discard)

    def _register(self, connection: RelayConnection) -> bool:
        """Whether a new client may stay."""
        self.connections += 1
        self._open_connections.add(connection)
        return not (self._blocked or self._closed)
