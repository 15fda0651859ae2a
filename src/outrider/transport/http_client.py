"""An HTTP client for JSON over one counting endpoint."""

from __future__ import annotations

import asyncio
import json
import selectors
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpcore2
import httpx2
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream

from outrider.transport.endpoint import CountingSocket, Endpoint
from outrider.transport.hosts import bracket_host, peer_name
from outrider.transport.status import Disconnected, UntrustedServer
from outrider.transport.tls import ClientTls

Json = dict[str, Any]
MAX_CONNECTIONS = 256  # requests in flight to one host
IDLE = 5.0  # s for which an unused connection is kept
_NOT_TLS_REASONS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")  # OpenSSL's, not a TLS record


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP response.

    content: the JSON object in the body, empty for any other body. retry_after: seconds of the Retry-After header. up,
    down: bytes of the bodies of request and response. has_token: whether the request had a token.
    """

    status: int
    content: Json
    retry_after: float = 0.0
    up: int = 0
    down: int = 0
    has_token: bool = False

    @property
    def reason(self) -> str:
        """Return the server's error message with the HTTP status."""
        status = f"HTTP {self.status}"
        return status if self.error == status else f"{self.error} ({status})"

    @property
    def error(self) -> str:
        """Return the server's error message, or the HTTP status without one."""
        detail = self.content.get("error", self.content)
        message = detail.get("message") or detail.get("detail") if isinstance(detail, dict) else detail
        return str(message or f"HTTP {self.status}")


class HttpClient:
    """An HTTP client for one server. Use it in one event loop.

    token: sent as a bearer token with every request. deadline: seconds for `get`.

    Raises (every request):
        UntrustedServer: the server's certificate is invalid, or the server does not speak TLS.
        Disconnected: no connection could be made, or it broke before the response was complete.
        TimeoutError: the response was not complete in time.
    """

    def __init__(
        self, endpoint: Endpoint, host: str, port: int, tls: ClientTls | None, token: str | None, deadline: float = 30.0
    ) -> None:
        self._deadline = deadline
        self.endpoint, self.name = endpoint, f"{bracket_host(host)}:{port}"
        self._base = f"{'http' if tls is None else 'https'}://{bracket_host(peer_name(host))}:{port}"
        self._tls = tls
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client: httpx2.AsyncClient | None = None

    async def get(self, path: str) -> HttpResponse:
        """Send a GET request."""
        return await self._request("GET", path, None, self._deadline, {})

    async def post(
        self, path: str, body: Json | bytes, seconds: float, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send a POST request. body: a JSON object or its encoding. seconds: time limit."""
        data = body if isinstance(body, bytes) else encode_json(body)
        return await self._request("POST", path, data, seconds, headers or {})

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _get_client(self) -> httpx2.AsyncClient:
        if self._client is None:
            transport = _Transport(self.endpoint, None if self._tls is None else self._tls.context())
            self._client = httpx2.AsyncClient(transport=transport, headers=self._headers, timeout=None, trust_env=False)
        return self._client

    async def _request(
        self, method: str, path: str, body: bytes | None, seconds: float, headers: Mapping[str, str]
    ) -> HttpResponse:
        kind = {"content-type": "application/json"} if body is not None else {}
        try:
            async with asyncio.timeout(seconds):
                url, sent = self._base + path, {**kind, **headers}
                response = await self._get_client().request(method, url, content=body, headers=sent)
        except (httpx2.RequestError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise self._map_error(error) from error
        retry_after = response.headers.get("retry-after", "")
        content = response.content
        return HttpResponse(
            response.status_code,
            _parse_object(content),
            float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else 0.0,
            len(body or b""),
            len(content),
            bool(self._headers),
        )

    def _map_error(self, error: Exception) -> Disconnected:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return UntrustedServer(f"its certificate: {cause.verify_message}")
            if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS_REASONS:
                return UntrustedServer("it does not speak TLS")
            cause = cause.__cause__ or cause.__context__
        return Disconnected(self.endpoint.connect_error or str(error) or type(error).__name__)


class _Transport(httpx2.AsyncBaseTransport):
    """The transport of an httpx2 client over an endpoint's connections. It reads each response completely."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=IDLE,
            network_backend=_Backend(endpoint),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = httpcore2.URL(
            scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path
        )
        response = await self._pool.handle_async_request(
            httpcore2.Request(
                request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
            )
        )
        try:
            content = await response.aread()
        finally:
            await response.aclose()
        return httpx2.Response(response.status, headers=response.headers, content=content)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Backend(httpcore2.AsyncNetworkBackend):
    """The network backend of a connection pool over an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def connect_tcp(self, *_: object, **__: object) -> _Stream:
        try:
            connected = await self._endpoint.connect()
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        return _Stream(connected, await SocketStream.from_socket(connected))


class _Stream(httpcore2.AsyncNetworkStream):
    """One connection of a pool: an anyio stream over a counting socket. `HttpClient` enforces the time limits."""

    def __init__(self, connected: CountingSocket, stream: ByteStream) -> None:
        self._socket, self._stream = connected, stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _as_error(httpcore2.ReadError):
            try:
                return await self._stream.receive(max_bytes)
            except anyio.EndOfStream:
                return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if buffer:
            with _as_error(httpcore2.WriteError):
                await self._stream.send(buffer)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Stream:
        try:
            with _as_error(httpcore2.ConnectError):
                secured = await TLSStream.wrap(
                    self._stream, hostname=server_hostname, ssl_context=ssl_context, standard_compatible=False
                )
        except BaseException:
            await self.aclose()
            raise
        return _Stream(self._socket, secured)

    def get_extra_info(self, info: str) -> Any:
        """Return for "is_readable" whether the server has sent data or closed the connection, else None."""
        if info != "is_readable":
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))


@contextmanager
def _as_error(kind: type[Exception]) -> Iterator[None]:
    """Map the errors of a stream to an error of the pool. anyio's errors have the reason as their cause."""
    try:
        yield
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, ssl.SSLError) as error:
        cause = error.__cause__ or error
        raise kind(getattr(cause, "strerror", None) or str(cause) or "the connection was lost") from error


def encode_json(body: Json) -> bytes:
    """Encode a JSON object."""
    return json.dumps(body).encode()


def _parse_object(data: bytes) -> Json:
    """Return the JSON object in a body, or an empty one for any other content."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
