"""TCP connections to one host, with bytes counted at the socket, below TLS."""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.staggered import staggered_race
from collections.abc import Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from outrider.transport.byte_counts import ByteAccounting
from outrider.transport.hosts import ascii_host

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

HEAD_START = 0.25  # s between connection attempts to the addresses of a host (RFC 8305, 5)


class Network(Protocol):
    """The network interface for connections. `outrider.netem` implements it with an emulated link."""

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connected, non-blocking stream socket.

        Raises:
            OSError: no connection could be made.
        """
        ...

    async def close(self) -> None:
        """Release all resources except the connected sockets."""
        ...


class Tcp:
    """The network of this machine."""

    async def connect(self, host: str, port: int) -> socket.socket:
        """Connect to the first address that answers. IPv6 and IPv4 alternate (happy eyeballs, RFC 8305)."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        attempts = [partial(_connect, *address) for address in _interleave(found)]
        connected, _, errors = await staggered_race(attempts, HEAD_START)
        if connected is None:
            raise OSError("; ".join(dict.fromkeys(_reason(error) for error in errors if isinstance(error, OSError))))
        return connected

    async def close(self) -> None:
        """Do nothing. There are no further resources."""


TCP = Tcp()


class Endpoint:
    """A host and port with the counts of its connections. Use it in one event loop.

    up, down: bytes sent and received by its sockets. accounting: assigns them to sessions. connections: number made so
    far. connect_error: why the last connection attempt failed, None after a success. cut: fail all further attempts.
    """

    def __init__(self, host: str, port: int, network: Network = TCP) -> None:
        self.up = self.down = self.connections = 0
        self.accounting = ByteAccounting()
        self.connect_error: str | None = None
        self.cut = False
        self._address, self._network = (ascii_host(host), port), network

    async def connect(self) -> CountingSocket:
        """Make a connection.

        Raises:
            OSError: no connection could be made. The message has the reason only.
        """
        try:
            if self.cut:
                raise OSError("the network is cut")
            connected = await self._network.connect(*self._address)
        except OSError as error:
            self.connect_error = _reason(error)
            raise OSError(self.connect_error) from error
        self.connect_error = None
        self.connections += 1
        return CountingSocket(connected, self)


class CountingSocket(socket.socket):
    """A socket that adds its bytes to the counts of an endpoint.

    It overrides the methods that asyncio's selector event loop calls. TLS is above them.
    """

    def __init__(self, connected: socket.socket, endpoint: Endpoint) -> None:
        super().__init__(connected.family, connected.type, connected.proto, connected.detach())
        self._endpoint = endpoint

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive and count."""
        data = super().recv(size, flags)
        self._endpoint.down += len(data)
        return data

    def recv_into(self, buffer: WriteableBuffer, size: int = 0, flags: int = 0) -> int:
        """Receive into a buffer and count."""
        count = super().recv_into(buffer, size, flags)
        self._endpoint.down += count
        return count

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send and count."""
        count = super().send(data, flags)
        self._endpoint.up += count
        return count

    def sendmsg(self, *args: Any) -> int:
        """Send several buffers and count."""
        count = super().sendmsg(*args)
        self._endpoint.up += count
        return count


async def _connect(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    attempt = socket.socket(family, kind, protocol)
    try:
        attempt.setblocking(False)
        await asyncio.get_running_loop().sock_connect(attempt, address)
    except BaseException:
        attempt.close()
        raise
    return attempt


def _interleave(found: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Order addresses with alternating families, each family in the resolver's order."""
    families = dict.fromkeys(address[0] for address in found)
    columns = [[address for address in found if address[0] == family] for family in families]
    return [address for address in chain(*zip_longest(*columns)) if address is not None]


def _reason(error: OSError) -> str:
    """Return the operating system's message, since asyncio's has only the address."""
    if error.errno is not None and error.errno > 0:  # errors of name resolution have negative numbers
        return os.strerror(error.errno)
    return error.strerror or str(error)
