"""HTTP with one host, JSON in and out, through a line that counts the bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from outrider.wire.hosts import bracketed, peer_name
from outrider.wire.status import Disconnected, Untrusted
from outrider.wire.tls import ClientTls
from outrider.wire.worker import Line

Json = dict[str, Any]
AT_ONCE = 256  # requests in flight to one host
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
    """token: sent as a bearer token with every request. deadline: seconds for `get`. To be used in the line's loop.

    Raises (every request):
        Untrusted: the server's certificate is not what it must be, or it speaks no TLS.
        Disconnected: no connection, or it broke before the answer was complete.
        TimeoutError: no complete answer within the time.
    """

    def __init__(
        self, line: Line, host: str, port: int, tls: ClientTls | None, token: str | None, deadline: float = 30.0
    ) -> None:
        self._deadline = deadline
        self.line, self.name = line, f"{bracketed(host)}:{port}"
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
            verify: Any = self._tls.context() if self._tls is not None else True
            limits = httpx2.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
            transport = httpx2.AsyncHTTPTransport(uds=self.line.path, verify=verify, limits=limits)
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
        except httpx2.RequestError as error:
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

    def _trouble(self, error: httpx2.RequestError) -> Disconnected:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return Untrusted(f"its certificate: {cause.verify_message}")
            if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN:
                return Untrusted("it does not speak TLS")
            cause = cause.__cause__ or cause.__context__
        return Disconnected(self.line.link.trouble or str(error) or type(error).__name__)


def encoded(body: Json) -> bytes:
    return json.dumps(body).encode()


def _object(data: bytes) -> Json:
    """The JSON object in a body; empty for anything else."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
