"""What the user hears when the cloud's address is another service's, or the token is not known: in words of theirs."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider import CloudLost, CloudRefused, SettingsError, connect
from outrider.serving.tokens import Tokens
from outrider.transport.tls import ServerTls
from tests.support.certificates import Authority
from tests.support.cloud_server import serving
from tests.support.fakes import HashRows, ScriptedEngine

TOKENS = Tokens({"lab": hashlib.sha256(b"l" * 20).digest()})


@contextmanager
def saying(*parts: bytes) -> Iterator[int]:
    """A server that says this to every client, whatever it hears, and hangs up; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(65536)
                for part in parts:
                    client.sendall(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def refusal(target: str, **options: Any) -> str:
    """Patience is long: what cannot be mended is not tried again."""
    with connect(target, patience=60.0, **options) as verifier, pytest.raises(CloudRefused) as caught:  # type: ignore[union-attr]
        verifier.probe()  # type: ignore[union-attr]
    return str(caught.value)


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",),
        (b"HTT", b"P/1.1 ", b"404 Not Found\r\n\r\n"),
        (b"HTTP/1.0 505 HTTP Version Not Supported\r\n\r\n",),
    ],
)
def test_a_port_that_speaks_http_1_is_named(parts: tuple[bytes, ...]) -> None:
    with saying(*parts) as port:
        message = refusal(f"grpc://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in message
    assert "speaks HTTP/1." in message
    assert "not gRPC" in message
    assert "vllm://" in message


@pytest.mark.parametrize("start", [b"<!DOCTYPE HTML>", b"220 mail.example ESMTP\r\n", b"\x1b]0;owned\x07 and more"])
def test_a_port_that_speaks_something_else_is_named(start: bytes) -> None:
    with saying(start) as port:
        message = refusal(f"grpc://127.0.0.1:{port}")
    assert f"grpc://127.0.0.1:{port}: the server speaks another protocol than gRPC" in message
    assert message.isprintable()


@pytest.mark.parametrize(
    "record", [b"\x15\x03\x03\x00\x02\x02\x46", b"\x15\x03\x01\x00\x02\x02\x16", b"\x16\x03\x03\x00\x7a" + bytes(122)]
)
def test_a_port_that_speaks_tls_is_named(record: bytes) -> None:
    with saying(record) as port:
        assert "speaks TLS: give --tls or --ca FILE" in refusal(f"grpc://127.0.0.1:{port}")


def test_a_token_that_is_missing_or_unknown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 20)
    with serving(ScriptedEngine(HashRows(1, 32), 32), tokens=TOKENS) as served:
        target = f"grpc://{served.address}"
        assert "it requires a token, give --token-file FILE" in refusal(target)
        for options in ({"token": "x" * 20}, {"token_file": str(file)}):
            message = refusal(target, **options)
            assert "--token-file" in message
            assert "authorization" not in message
            assert "x" * 20 not in message


def test_a_token_without_encryption_names_the_options() -> None:
    with pytest.raises(SettingsError, match=r"add --tls or --ca FILE \(in Python tls=True or ca=FILE\)"):
        connect("grpc://cloud.example:1", token="x" * 20)


def test_tls_that_is_spoken_by_one_side_only(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.server()
    engine = ScriptedEngine(HashRows(1, 32), 32)
    with serving(engine, tls=ServerTls(issued.cert, issued.key)) as served:
        with connect(f"grpc://{served.address}", patience=0.2) as verifier, pytest.raises(CloudLost) as caught:  # type: ignore[union-attr]
            verifier.probe()  # type: ignore[union-attr]
        assert "give --tls or --ca FILE" in str(caught.value)
    with serving(engine) as served:
        verifier = connect(f"grpc://{served.address}", patience=0.2, ca=str(authority.ca))
        with verifier, pytest.raises(CloudLost, match="not to speak TLS"):  # type: ignore[union-attr]
            verifier.probe()  # type: ignore[union-attr]
