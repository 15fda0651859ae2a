"""Who may use the service: tokens, the identity behind a request, and the addresses it may listen on."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from outrider.errors import CloudError, SettingsError
from outrider.files import check_private

SHORTEST_TOKEN = 16  # characters
ANONYMOUS = "anonymous"
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^\s:/\[\]]*)):(?P<port>[0-9]{1,5})")

Metadata = Iterable[tuple[str, str | bytes]]


class Unauthenticated(CloudError):
    """The caller did not say who it is, or is not known here. The message never repeats what it sent."""


class Tokens:
    """The tokens that the service accepts, as SHA-256 digests: the texts are not kept.

    No message and no repr quotes the file, names included: with the two columns swapped, a name is the secret.
    """

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    def __repr__(self) -> str:
        return f"Tokens({len(self._digests)} identities)"

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """From a text file with one `NAME TOKEN` a line; blank lines and lines that begin with # are skipped.

        Raises:
            SettingsError: the file cannot be read, can be read by others, holds no token, or has a line that is
                malformed, repeats a name or a token, or whose token is shorter than 16 characters.
        """
        digests: dict[str, bytes] = {}
        for number, line in enumerate(_read_private(path).splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, token = _parse_line(line, f"{path}, line {number}")
            if name in digests:
                raise SettingsError(f"{path}, line {number}: the name was given before; each name has one token")
            if _digest(token) in digests.values():
                raise SettingsError(f"{path}, line {number}: the token was given before; each name has its own")
            digests[name] = _digest(token)
        if not digests:
            raise SettingsError(f"{path} holds no token: write one `NAME TOKEN` a line")
        return cls(digests)

    def identity(self, token: str) -> str | None:
        """The name that the token belongs to, or None. Takes equally long whichever entry matches, if any."""
        given, found = _digest(token), None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def identity_of(auth: Mapping[str, Iterable[bytes]], metadata: Metadata | None, tokens: Tokens | None) -> str:
    """Who sends a request: the token's name, else "cert:…" under mutual TLS, else "anonymous".

    `auth` and `metadata` are `auth_context()` and `invocation_metadata()` of grpc.aio's ServicerContext. Where tokens
    are used, one is required even of a caller with a certificate.

    Raises:
        Unauthenticated: tokens are used, and the request carries none, more than one, or one that is not known.
    """
    if tokens is None:
        return _certificate_identity(auth) or ANONYMOUS
    name = tokens.identity(_bearer_token(metadata or ()))
    if name is None:
        raise Unauthenticated("the token is not known to this service")
    return name


def check_listen(host: str, *, tls: bool, tokens: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without TLS and tokens, unless `insecure` accepts it.

    `host` is a name, an address, "" (every interface) or "unix:PATH".

    Raises:
        SettingsError: what is missing, and the options that give it; or a name that does not resolve.
    """
    measures = (("TLS (--tls-cert/--tls-key)", tls), ("a token (--tokens FILE)", tokens))
    missing = " and ".join(name for name, given in measures if not given)
    if missing and not insecure and not is_local(host):
        raise SettingsError(
            f"{host or 'every interface'} can be reached from other machines, without {missing}: "
            "give that, listen on 127.0.0.1, or accept it with --insecure"
        )


def check_metrics(host: str, *, insecure: bool) -> None:
    """Refuse to serve metrics, which have no login, beyond this machine, unless `insecure` accepts it.

    Raises:
        SettingsError: it would; or a name that does not resolve.
    """
    if not insecure and not is_local(host):
        raise SettingsError(
            f"metrics at {host or 'every interface'} could be read from other machines: listen on 127.0.0.1, or accept "
            "it with --insecure"
        )


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:7070", "[::1]:7070" (the host without brackets) or ":7070" (host "", every interface).

    Raises:
        SettingsError: anything else, with examples; a port above 65535. Port 0 lets the system choose.
    """
    found = _ADDRESS.fullmatch(text)
    if not found or not _is_v6(found["v6"]):
        raise SettingsError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:7070, [::1]:7070 or :7070")
    port = int(found["port"])
    if port > 65535:
        raise SettingsError(f"{text!r}: a port is between 0 and 65535, as in 127.0.0.1:7070")
    return found["v6"] or found["name"], port


def _read_private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            check_private(path, file.fileno())
            return file.read()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:  # its message would quote the file
        raise SettingsError(f"{path} is no UTF-8 text") from None


def _parse_line(line: str, where: str) -> tuple[str, str]:
    words = line.split()
    if len(words) != 2 or not words[0].isprintable():
        raise SettingsError(f"{where}: expected `NAME TOKEN`, found {len(words)} word(s)")
    name, token = words
    if len(token) < SHORTEST_TOKEN:
        raise SettingsError(f"{where}: the token is shorter than {SHORTEST_TOKEN} characters")
    if not (token.isascii() and token.isprintable()):  # metadata could not carry it
        raise SettingsError(f"{where}: a token is made of ASCII letters, digits and signs")
    return name, token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _bearer_token(metadata: Metadata) -> str:
    values = [value for key, value in metadata if key.lower() == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated("a token is required: send one `authorization: Bearer TOKEN`")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the authorization is no bearer token: send `authorization: Bearer TOKEN`")
    return token.strip()


def _certificate_identity(auth: Mapping[str, Iterable[bytes]]) -> str | None:
    """The common name, else the first alternative name, else the digest: never one identity for all the nameless."""
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for name in auth.get(key, ()):
            if name:
                return "cert:" + name.decode("utf-8", "backslashreplace")
    for certificate in auth.get("x509_pem_cert", ()):
        return "cert:sha256:" + hashlib.sha256(certificate).hexdigest()
    return None


def is_local(host: str) -> bool:
    """Whether only this machine can reach it: a unix socket, or a name all of whose addresses are loopback."""
    if host.startswith("unix:"):
        return True
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{host} is no address of this machine: it does not resolve") from error
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def _is_v6(text: str | None) -> bool:
    """True without brackets: then there is nothing to check."""
    try:
        return text is None or bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
