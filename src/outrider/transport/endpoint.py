"""One host that a client connects to: TCP connections whose bytes are counted at the socket, below TLS."""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.staggered import staggered_race
from collections.abc import Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Protocol

from outrider.transport.byte_counts import ByteAccounting
from outrider.transport.hosts import ascii_host

HEAD_START = 0.25  # s before the next address of a host is tried as well (RFC 8305, 5)


class Network(Protocol):
    """The way from this process to its hosts."""

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connected, non-blocking stream socket.

        Raises:
            OSError: no connection could be made.
        """
        ...

    async def close(self) -> None:
        """Release what the connections needed besides their sockets."""
        ...


class Tcp:
    """The network of this machine."""

    async def connect(self, host: str, port: int) -> socket.socket:
        """Connect to the first address that answers. IPv6 and IPv4 take turns (happy eyeballs, RFC 8305)."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        attempts = [partial(_connect, *address) for address in _interleave(found)]
        connected, _, errors = await staggered_race(attempts, HEAD_START)
        if connected is None:
            raise OSError("; ".join(dict.fromkeys(_reason(error) for error in errors if isinstance(error, OSError))))
        return connected

    async def close(self) -> None:
        pass


TCP = Tcp()


class Endpoint:
    """A host and port, and the counts of its connections. Use it in one event loop.

    up, down: bytes that its sockets have sent and received. accounting: how sessions share these. connections: number
    made so far. trouble: why the last attempt to connect failed; None once one has succeeded. cut: whether all further
    attempts fail.
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
            OSError: no connection could be made; the message is the reason alone.
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
    """A socket that adds each byte to the counts of its endpoint.

    The methods are those that asyncio's selector event loop calls. TLS lies above them.
    """

    def __init__(self, connected: socket.socket, endpoint: Endpoint) -> None:
        super().__init__(connected.family, connected.type, connected.proto, connected.detach())
        self._endpoint = endpoint

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        self._endpoint.down += len(data)
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, size, flags)
        self._endpoint.down += count
        return count

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self._endpoint.up += count
        return count

    def sendmsg(self, *args: Any) -> int:
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
    """Order addresses so that their families take turns, each in the order of the resolver."""
    families = dict.fromkeys(address[0] for address in found)
    columns = [[address for address in found if address[0] == family] for family in families]
    return [address for address in chain(*zip_longest(*columns)) if address is not None]


def _reason(error: OSError) -> str:
    """Return the message of the system. That of asyncio only names the address."""
    if error.errno is not None and error.errno > 0:  # errors of name resolution have negative numbers
        return os.strerror(error.errno)
    return error.strerror or str(error)
