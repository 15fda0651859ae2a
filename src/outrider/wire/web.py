"""HTTP with one endpoint, JSON in and out. All bytes count, those of TLS as well."""

from __future__ import annotations

import asyncio
import json
import selectors
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import httpcore2
import httpx2
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream

from outrider.wire.endpoint import CountingSocket, Endpoint
from outrider.wire.hosts import bracketed, peer_name
from outrider.wire.status import Disconnected, Untrusted
from outrider.wire.tls import ClientTls

Json = dict[str, Any]
AT_ONCE = 256  # requests in flight to one host
IDLE = 5.0  # s for which an unused connection is kept
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")  # OpenSSL: what came is no TLS record


@dataclass(frozen=True)
class Reply:
    """status: HTTP's. content: the object in the body; empty where there is none. after: seconds to wait (Retry-After).

    up, down: bytes of the two bodies. identified: whether a token went with the request.
    """

    status: int
    content: Json
    after: float = 0.0
    up: int = 0
    down: int = 0
    identified: bool = False

    @property
    def reason(self) -> str:
        """What the server says is wrong, and HTTP's status, once."""
        status = f"HTTP {self.status}"
        return status if self.error == status else f"{self.error} ({status})"

    @property
    def error(self) -> str:
        """What the server says is wrong."""
        told = self.content.get("error", self.content)
        message = told.get("message") or told.get("detail") if isinstance(told, dict) else told
        return str(message or f"HTTP {self.status}")


class Web:
    """token: sent as a bearer token with every request. deadline: seconds for `get`. Use it in one event loop.

    Raises (every request):
        Untrusted: the server's certificate is not what it must be, or it speaks no TLS.
        Disconnected: no connection, or it broke before the answer was complete.
        TimeoutError: no complete answer within the time.
    """

    def __init__(
        self, endpoint: Endpoint, host: str, port: int, tls: ClientTls | None, token: str | None, deadline: float = 30.0
    ) -> None:
        self._deadline = deadline
        self.endpoint, self.name = endpoint, f"{bracketed(host)}:{port}"
        self._base = f"{'http' if tls is None else 'https'}://{bracketed(peer_name(host))}:{port}"
        self._tls = tls
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client: httpx2.AsyncClient | None = None

    async def get(self, path: str) -> Reply:
        return await self._request("GET", path, None, self._deadline, {})

    async def post(
        self, path: str, body: Json | bytes, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """body: an object, or what `encoded` made of one."""
        data = body if isinstance(body, bytes) else encoded(body)
        return await self._request("POST", path, data, seconds, headers or {})

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _open(self) -> httpx2.AsyncClient:
        if self._client is None:
            transport = _Transport(self.endpoint, None if self._tls is None else self._tls.context())
            self._client = httpx2.AsyncClient(transport=transport, headers=self._headers, timeout=None, trust_env=False)
        return self._client

    async def _request(
        self, method: str, path: str, body: bytes | None, seconds: float, headers: Mapping[str, str]
    ) -> Reply:
        kind = {"content-type": "application/json"} if body is not None else {}
        try:
            async with asyncio.timeout(seconds):
                answer = await self._open().request(
                    method, self._base + path, content=body, headers={**kind, **headers}
                )
        except (httpx2.RequestError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise self._trouble(error) from error
        after = answer.headers.get("retry-after", "")
        content = answer.content
        return Reply(
            answer.status_code,
            _object(content),
            float(after) if after.replace(".", "", 1).isdecimal() else 0.0,
            len(body or b""),
            len(content),
            bool(self._headers),
        )

    def _trouble(self, error: Exception) -> Disconnected:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return Untrusted(f"its certificate: {cause.verify_message}")
            if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN:
                return Untrusted("it does not speak TLS")
            cause = cause.__cause__ or cause.__context__
        return Disconnected(self.endpoint.trouble or str(error) or type(error).__name__)


class _Transport(httpx2.AsyncBaseTransport):
    """The transport of an httpx2 client whose connections an endpoint makes. It reads each answer to its end."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=AT_ONCE,
            max_keepalive_connections=AT_ONCE,
            keepalive_expiry=IDLE,
            network_backend=_Backend(endpoint),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = httpcore2.URL(
            scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path
        )
        answer = await self._pool.handle_async_request(
            httpcore2.Request(
                request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
            )
        )
        try:
            content = await answer.aread()
        finally:
            await answer.aclose()
        return httpx2.Response(answer.status, headers=answer.headers, content=content)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Backend(httpcore2.AsyncNetworkBackend):
    """Make the connections of a pool."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def connect_tcp(self, *_: object, **__: object) -> _Stream:
        try:
            connected = await self._endpoint.connect()
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        return _Stream(connected, await SocketStream.from_socket(connected))


class _Stream(httpcore2.AsyncNetworkStream):
    """One connection of a pool, as anyio's stream over a counting socket. `Web` sets the time limits."""

    def __init__(self, connected: CountingSocket, stream: ByteStream) -> None:
        self._socket, self._stream = connected, stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._stream.receive(max_bytes)
        except anyio.EndOfStream:
            return b""
        except _BROKEN as error:
            raise httpcore2.ReadError(_broken(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        try:
            await self._stream.send(buffer)
        except _BROKEN as error:
            raise httpcore2.WriteError(_broken(error)) from error

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Stream:
        try:
            secured = await TLSStream.wrap(
                self._stream, hostname=server_hostname, ssl_context=ssl_context, standard_compatible=False
            )
        except BaseException as error:
            await self.aclose()
            if isinstance(error, (*_BROKEN, ssl.SSLError)):
                raise httpcore2.ConnectError(_broken(error)) from error
            raise
        return _Stream(self._socket, secured)

    def get_extra_info(self, info: str) -> Any:
        """Return whether the server has sent something, or hung up, for "is_readable"; None for all else."""
        if info != "is_readable":
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))


_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


def _broken(error: Exception) -> str:
    """Return why a stream broke. An error of anyio has the reason as its cause."""
    cause = error.__cause__ or error
    return getattr(cause, "strerror", None) or str(cause) or "the connection was lost"


def encoded(body: Json) -> bytes:
    return json.dumps(body).encode()


def _object(data: bytes) -> Json:
    """The JSON object in a body; empty for anything else."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
