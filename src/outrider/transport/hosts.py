"""Conversion of host names to the notations of DNS, HTTP and certificates."""

from __future__ import annotations


def ascii_host(host: str) -> str:
    """Return the host in ASCII: international names in Punycode, addresses and plain names unchanged.

    Raises:
        ValueError: the name cannot be encoded: a label is empty, too long, or has an invalid character.
    """
    if not host.isprintable():
        raise ValueError("a character in it cannot be printed")
    if host.isascii() and ":" in host:
        return host
    return host.encode("idna").decode("ascii")


def peer_name(host: str) -> str:
    """Return the host as in certificates and the :authority header, where IPv6 addresses have no zone."""
    return ascii_host(host).partition("%")[0]


def bracket_host(host: str) -> str:
    """Return the host as written before a port: an IPv6 address in brackets, any other host unchanged."""
    return f"[{host}]" if ":" in host else host
