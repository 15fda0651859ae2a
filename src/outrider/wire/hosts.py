"""Host names as users write them, and as DNS, HTTP and certificates carry them."""

from __future__ import annotations


def ascii_host(host: str) -> str:
    """The host in ASCII: international names in Punycode, addresses and plain names unchanged.

    Raises:
        ValueError: a name that cannot be encoded: a label that is empty, too long, or holds what no name may.
    """
    if not host.isprintable():
        raise ValueError("a character in it cannot be printed")
    if host.isascii() and ":" in host:
        return host
    return host.encode("idna").decode("ascii")


def peer_name(host: str) -> str:
    """The name that a certificate and HTTP's :authority hold: an IPv6 address without its zone."""
    return ascii_host(host).partition("%")[0]


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, any other host as it is: to be followed by a port."""
    return f"[{host}]" if ":" in host else host
