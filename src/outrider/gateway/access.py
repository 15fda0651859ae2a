"""Access control: API keys, host names, and limits on request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.requests import Request

from outrider.errors import SettingsError
from outrider.gateway.errors import RequestError
from outrider.serving.addresses import is_local
from outrider.serving.tokens import Tokens

JSON = "application/json"
MULTIPART = "multipart/form-data"
MAX_LENGTH_DIGITS = 18  # of a Content-Length
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Access:
    """Access settings of a gateway.

    keys: the accepted API keys. None admits every client. max_body: bytes. hosts: the accepted names in the Host
    header, None for any. They prevent DNS rebinding, where the name of another site resolves to this machine.
    body_s: seconds that a body may take to arrive. origins: sites whose pages may send requests.
    """

    keys: Tokens | None = None
    max_body: int = 16 * 2**20
    hosts: frozenset[str] | None = None
    body_s: float = 60.0
    origins: frozenset[str] = frozenset()

    def authenticate(self, request: Request) -> str:
        """Return the client of a request: the key's name, else the peer's address.

        Raises:
            RequestError: the host is not accepted, or the API key is missing or unknown.
        """
        self.check_host(request)
        if self.keys is None:
            # IPv4 addresses lose the prefix that they have on a dual-stack socket.
            return request.client.host.removeprefix("::ffff:") if request.client is not None else "local"
        name = self.keys.identity(_bearer(request.headers.getlist("authorization")))
        if name is None:
            raise _unauthorized("unknown API key: this gateway does not accept it")
        return name

    def check_host(self, request: Request) -> None:
        """Raise RequestError for a Host header that is not accepted, or for two of them.

        A request without the header (HTTP/1.0) is allowed, because browsers always send it.
        """
        named = request.headers.getlist("host")
        if self.hosts is None or not named:
            return
        if len(named) > 1 or _without_port(named[0]) not in self.hosts:
            message = "the Host header does not name this gateway: use one of its own addresses"
            raise RequestError(message, code="unknown_host", status=403)

    async def read_body(self, request: Request, reserve: Callable[[int], None], media_type: str = JSON) -> bytes:
        """Return the request's body. reserve: called with the size of each part before it is stored. It may raise.

        Raises:
            RequestError: the content type is not `media_type`, a page of another site sends a form, or the body is too
            long or too slow. Its rest is not read.
            ClientDisconnect: the client has disconnected.
        """
        _check_headers(request, self.max_body, media_type)
        if media_type != JSON and self.keys is None:
            self._check_origin(request)
        try:
            async with asyncio.timeout(self.body_s):
                return await _read_parts(request, self.max_body, reserve)
        except TimeoutError:
            message = f"the body did not arrive within {self.body_s:g} s"
            raise RequestError(message, code="too_slow", status=408) from None

    def _check_origin(self, request: Request) -> None:
        """Refuse a page of another site: browsers send its forms without a CORS preflight request."""
        origin = request.headers.get("origin")
        own = {f"{scheme}://{request.headers.get('host', '')}" for scheme in ("http", "https")}
        if origin is not None and origin not in self.origins | own:
            message = "pages of this site may not send forms to this gateway: allow it with --allow-origin"
            raise RequestError(message, code="unknown_origin", status=403)


def check_listen(host: str, *, keys: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without API keys, unless `insecure` accepts it.

    Raises:
        SettingsError: other machines could reach it, or the name does not resolve.
    """
    if not keys and not insecure and not is_local(host):
        raise SettingsError(
            f"{host or 'every interface'} can be reached from other machines, without API keys: "
            "give --api-keys FILE, listen on 127.0.0.1, or accept it with --insecure"
        )


def allowed_hosts(host: str, *, keys: bool) -> frozenset[str] | None:
    """Return `Access.hosts` for an address: any name with API keys, or if other machines can reach the address."""
    if keys or not is_local(host):
        return None
    return LOCAL_HOSTS | {f"[{host}]" if ":" in host else host.lower()}


def _check_headers(request: Request, limit: int, media_type: str) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "Content-Encoding is not supported: send the request uncompressed"
        raise RequestError(message, code="unsupported_media_type", status=415)
    if kind != media_type:  # for types other than JSON, browsers send no CORS preflight across sites
        raise RequestError(f"send the request as {media_type}", code="unsupported_media_type", status=415)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > limit):
        raise _too_large(limit)


async def _read_parts(request: Request, limit: int, reserve: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        reserve(len(part))
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes, the limit", code="too_large", status=413)


def _bearer(values: Iterable[str]) -> str:
    given = list(values)
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("an API key is required: send one `Authorization: Bearer KEY`")
    return key.strip()


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() and (":" not in name or name.endswith("]")) else host.lower()
