"""Who may ask, from where, and how much they may send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.requests import Request

from outrider.errors import SettingsError
from outrider.gateway.errors import RequestError
from outrider.serving.addresses import is_local
from outrider.serving.tokens import Tokens

MEDIA_TYPE = "application/json"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Access:
    """The gateway's door.

    keys: the API keys that are taken; None takes everybody. max_body: bytes. hosts: the names under which the gateway
    may be addressed, None for any: a page of another site whose name is made to resolve to this machine (DNS
    rebinding) would otherwise be let in as one of ours. body_s: seconds that a body may take to come.
    """

    keys: Tokens | None = None
    max_body: int = 16 * 2**20
    hosts: frozenset[str] | None = None
    body_s: float = 60.0

    def authenticate(self, request: Request) -> str:
        """Whose turn a request takes: the key's name, else the peer's address.

        Raises:
            RequestError: the wrong host, or no key that is known.
        """
        self.check_host(request)
        if self.keys is None:
            return _peer_address(request)
        name = self.keys.identity(_bearer(request.headers.getlist("authorization")))
        if name is None:
            raise _unauthorized("the API key is not known to this gateway")
        return name

    def check_host(self, request: Request) -> None:
        """Raise Refused for a name that is not this gateway's, or for two names.

        A request without a Host header (HTTP/1.0) is allowed: no browser sends one.
        """
        named = request.headers.getlist("host")
        if self.hosts is None or not named:
            return
        if len(named) > 1 or _without_port(named[0]) not in self.hosts:
            raise RequestError(
                "this gateway is not known by the name in the Host header", code="unknown_host", status=403
            )

    async def read_body(self, request: Request, reserve: Callable[[int], None]) -> bytes:
        """Return the request's body. reserve: called with the size of each part before it is kept; it may refuse.

        Raises:
            RequestError: the content type is not JSON, or the body is too long or too slow. The rest is not awaited.
            ClientDisconnect: the client went away.
        """
        _check_headers(request, self.max_body)
        try:
            async with asyncio.timeout(self.body_s):
                return await _read_parts(request, self.max_body, reserve)
        except TimeoutError:
            raise RequestError(f"the body took over {self.body_s:g} s", code="too_slow", status=408) from None


def _peer_address(request: Request) -> str:
    """Return the peer's address. A socket of both families gives IPv4 addresses a prefix, which is removed."""
    return request.client.host.removeprefix("::ffff:") if request.client is not None else "local"


def check_listen(host: str, *, keys: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without API keys, unless `insecure` accepts it.

    Raises:
        SettingsError: it would; or a name that does not resolve.
    """
    if not keys and not insecure and not is_local(host):
        raise SettingsError(
            f"{host or 'every interface'} can be reached from other machines, without API keys: "
            "give --api-keys FILE, listen on 127.0.0.1, or accept it with --insecure"
        )


def allowed_hosts(host: str, *, keys: bool) -> frozenset[str] | None:
    """The names that `Access.hosts` takes: where a key is asked for, or others may come, any."""
    if keys or not is_local(host):
        return None
    return LOCAL_HOSTS | {f"[{host}]" if ":" in host else host.lower()}


def _check_headers(request: Request, limit: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(
            "send the request as it is, without Content-Encoding", code="unsupported_media_type", status=415
        )
    if kind != MEDIA_TYPE:  # another site's page could send other types without asking the browser first
        raise RequestError(f"send the request as {MEDIA_TYPE}", code="unsupported_media_type", status=415)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
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
    return RequestError(f"the body is larger than {limit} bytes, the most that is read", code="too_large", status=413)


def _bearer(values: Iterable[str]) -> str:
    values_list = list(values)
    scheme, _, key = values_list[0].partition(" ") if len(values_list) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("an API key is required: send one `Authorization: Bearer KEY`")
    return key.strip()


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() and (":" not in name or name.endswith("]")) else host.lower()
