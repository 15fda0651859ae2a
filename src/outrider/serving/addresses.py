"""Addresses to listen on: parsing, and checks that public ones are protected."""

from __future__ import annotations

import ipaddress
import re
import socket

from outrider.errors import SettingsError, quote

_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^\s:/\[\]]*)):(?P<port>[0-9]{1,5})")


def check_listen(host: str, *, tls: bool, tokens: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without TLS and tokens, unless `insecure` accepts it.

    `host` is a name, an address, "" (every interface) or "unix:PATH".

    Raises:
        SettingsError: TLS or tokens are missing, or the name does not resolve.
    """
    measures = (("TLS (--tls-cert/--tls-key)", tls), ("a token (--tokens FILE)", tokens))
    missing = " and ".join(name for name, given in measures if not given)
    if missing and not insecure and not is_local(host):
        raise SettingsError(
            f"{host or 'every interface'} can be reached from other machines, without {missing}: "
            "give that, listen on 127.0.0.1, or accept it with --insecure"
        )


def check_metrics_address(host: str, *, insecure: bool) -> None:
    """Refuse to serve metrics, which have no login, beyond this machine, unless `insecure` accepts it.

    Raises:
        SettingsError: other machines could read them, or the name does not resolve.
    """
    if not insecure and not is_local(host):
        raise SettingsError(
            f"metrics at {host or 'every interface'} could be read from other machines: listen on 127.0.0.1, or accept "
            "it with --insecure"
        )


def parse_address(text: str) -> tuple[str, int]:
    """Parse "host:7070", "[::1]:7070" (the host without brackets) or ":7070" (host "", every interface).

    Port 0 lets the system choose.

    Raises:
        SettingsError: the text has another form, or its port is above 65535.
    """
    found = _ADDRESS.fullmatch(text)
    if not found or not _is_ipv6(found["v6"]):
        raise SettingsError(
            f"{quote(text)} is not an address: write HOST:PORT, such as 127.0.0.1:7070, [::1]:7070 or :7070"
        )
    port = int(found["port"])
    if port > 65535:
        raise SettingsError(f"{quote(text)}: a port must be between 0 and 65535, as in 127.0.0.1:7070")
    return found["v6"] or found["name"], port


def is_local(host: str) -> bool:
    """Return whether only this machine can reach a host: a unix socket, or a name with loopback addresses alone.

    Raises:
        SettingsError: the name does not resolve.
    """
    if host.startswith("unix:"):
        return True
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{host} is not an address of this machine: it does not resolve") from error
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def _is_ipv6(text: str | None) -> bool:
    """Return whether the text in brackets is an IPv6 address. None: there are no brackets, which is fine."""
    try:
        return text is None or bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
