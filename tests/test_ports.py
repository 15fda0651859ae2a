"""A reserved port is its server's alone, however often the server leaves it."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from tests.support.ports import ReservedPort

SOURCES = 500  # sockets that get ports from the system meanwhile


def test_a_server_leaves_and_takes_a_reserved_port_again() -> None:
    with ReservedPort() as port:
        for _ in range(3):
            with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


def test_no_other_socket_gets_a_reserved_port() -> None:
    with ReservedPort() as port, ExitStack() as stack:
        for n in range(SOURCES):
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, n % 2)
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] != port
