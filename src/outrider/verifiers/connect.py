"""Parse a cloud address and connect to its verifier."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast

from outrider.config import check_type
from outrider.engines.load import load_engine
from outrider.errors import DataError, SettingsError, quote
from outrider.files import decode_text
from outrider.numeric import as_number, is_number
from outrider.transport.endpoint import TCP, Network
from outrider.transport.hosts import ascii_host
from outrider.verifiers.base import Verifier
from outrider.verifiers.local import LocalVerifier

if TYPE_CHECKING:
    from outrider.netem.conditions import Conditions
    from outrider.verifiers.llm_server.backend import Backend

EXPECTED_FORMS = (
    "expected grpc://HOST:PORT, vllm://HOST:PORT[,HOST:PORT...], sglang://HOST:PORT[,HOST:PORT...], local:MODEL or none"
)
Kind = Literal["none", "local", "grpc", "vllm", "sglang"]
REMOTE = ("grpc", "vllm", "sglang")
_ADDRESS = re.compile(r"(\[(?P<v6>[^\s/@,\[\]]+)\]|(?P<name>[^\s:/@,\[\]]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class CloudAddress:
    """A parsed `--cloud` address. hosts: (host, port) of each replica."""

    kind: Kind
    model: str = ""
    hosts: tuple[tuple[str, int], ...] = ()

    @property
    def is_remote(self) -> bool:
        """Return whether the verifier is reached over a network."""
        return self.kind in REMOTE


def parse_cloud_address(text: str) -> CloudAddress:
    """Parse "grpc://host:port", "vllm://a:8000,b:8000", "sglang://host:port", "local:MODEL" or "none".

    Raises:
        SettingsError: the text has another form.
    """
    if not isinstance(text, str):
        raise SettingsError(f"a cloud is a text such as grpc://host:7070 or local:MODEL, not {quote(text)}")
    if text == "none":
        return CloudAddress("none")
    kind, _, rest = text.partition(":")
    if kind == "local":
        if not rest.strip():
            raise SettingsError("cloud local: needs a model after the colon")
        return CloudAddress("local", "demo:cloud" if rest == "demo" else rest)
    if kind not in REMOTE or not rest.startswith("//"):
        raise SettingsError(f"cloud {quote(text)}: {EXPECTED_FORMS}")
    hosts = tuple(_parse_host(part, text) for part in rest.removeprefix("//").removesuffix("/").split(","))
    if kind == "grpc" and len(hosts) > 1:
        raise SettingsError(f"cloud {quote(text)}: several replicas are for vllm and sglang; grpc takes one")
    if len(set(hosts)) < len(hosts):
        raise SettingsError(f"cloud {quote(text)}: a replica is named twice")
    return CloudAddress(cast(Kind, kind), hosts=hosts)


def _parse_host(text: str, address_text: str) -> tuple[str, int]:
    address = _ADDRESS.fullmatch(text)
    if address is None or not 0 < int(address["port"]) < 65536:
        raise SettingsError(f"cloud {quote(address_text)}: {EXPECTED_FORMS}")
    host = address["v6"] or address["name"]
    try:
        if address["v6"]:
            ipaddress.IPv6Address(host)  # also accepts a zone, such as fe80::1%eth0
        else:
            ascii_host(host)
    except ValueError as error:
        raise SettingsError(f"cloud {quote(address_text)}: {quote(host)} is not a valid host: {error}") from error
    return host, int(address["port"])


def connect(target: str, **options: Any) -> Verifier | None:
    """Return the verifier at an address, or None for "none". No request is sent yet.

    "local:MODEL" takes the options of `load_engine`. "grpc://HOST:PORT" is a running `outrider cloud`.
    "vllm://HOST:PORT[,HOST:PORT…]" and "sglang://…" are one or more servers of the same model. The options of these
    three are token or token_file, tls=True (the system's certificate authorities) or ca (a PEM file), cert and key for
    mutual TLS, net for an emulated network such as "rtt=50ms,bw=2Mbit", and deadline and patience in seconds.

    Raises:
        SettingsError: the address has another form, or does not take an option.
        ModelError: the local model cannot be loaded.
    """
    parsed = parse_cloud_address(target)
    if parsed.kind == "none":
        _reject_options(options, "cloud none")
        return None
    if parsed.kind == "local":
        return LocalVerifier(load_engine(parsed.model, **options))
    names = {"token", "token_file", "tls", "ca", "cert", "key", "net", "deadline", "patience"}
    _reject_options(options.keys() - names, f"cloud {parsed.kind}://…")
    return _connect_remote(parsed, **options)


def _reject_options(names: Iterable[str], cloud: str) -> None:
    if names:
        raise SettingsError(f"{cloud} takes no {', '.join(sorted(names))}")


def _connect_remote(
    target: CloudAddress,
    *,
    token: str | None = None,
    token_file: str | None = None,
    tls: bool = False,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    net: str | Conditions | None = None,
    deadline: float = 30.0,
    patience: float = 10.0,
) -> Verifier:
    from outrider.transport.tls import CLIENT_KEY_TYPES, ClientTls, check_key_type

    check_type("tls", tls, bool, "True or False")
    check_type("token", token, (str, NoneType), "a text")
    for name, file in {"token_file": token_file, "ca": ca, "cert": cert, "key": key}.items():
        check_type(name, file, (str, Path, NoneType), "the path of a file")
    deadline, patience = as_number(deadline), as_number(patience)
    for name, seconds in (("deadline", deadline), ("patience", patience)):
        if not is_number(seconds) or seconds <= 0:
            raise SettingsError(f"{name} is a number of seconds above 0, not {quote(seconds)}")
    if token is not None and token_file is not None:
        raise SettingsError("token and token_file are both given: give one of them")
    token = _read_token(token_file) if token_file is not None else token
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token and token):
        where = f"{token_file}: " if token_file is not None else ""
        raise SettingsError(f"{where}a token is one word of ASCII letters, digits and signs, without a name before it")
    encrypted = tls or any(name is not None for name in (ca, cert, key))
    for host, _ in target.hosts:
        if token is not None and not encrypted and not _is_loopback(host):
            raise SettingsError(
                f"a token for {host} would cross the network unencrypted: add --tls or --ca FILE "
                "(in Python tls=True or ca=FILE)"
            )
    paths = [None if name is None else Path(name) for name in (ca, cert, key)]
    network = TCP if net is None else _emulate(net)
    secured = ClientTls(*paths) if encrypted else None
    if target.kind == "grpc" and paths[1] is not None:
        check_key_type(paths[1], CLIENT_KEY_TYPES)
    common: dict[str, Any] = {"tls": secured, "token": token, "deadline": deadline, "retry_timeout": patience}
    if target.kind == "grpc":
        from outrider.verifiers.remote.verifier import RemoteVerifier

        return RemoteVerifier(*target.hosts[0], network=network, **common)
    from outrider.verifiers.llm_server.verifier import LlmServerVerifier

    backend: Backend
    if target.kind == "vllm":
        from outrider.verifiers.llm_server.vllm import VllmBackend

        backend = VllmBackend()
    else:
        from outrider.verifiers.llm_server.sglang import SglangBackend

        backend = SglangBackend()
    return LlmServerVerifier(backend, target.hosts, network=network, **common)


def _emulate(net: str | Conditions) -> Network:
    """Return an emulated network with these conditions. Empty conditions give the machine's own network."""
    from outrider.netem.conditions import Conditions, parse_conditions

    found = net if isinstance(net, Conditions) else parse_conditions(net)
    if found == Conditions():
        return TCP
    from outrider.netem.emulator import EmulatedNetwork

    return EmulatedNetwork(found)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, which may resolve to another address later
        return False


def _read_token(file: str) -> str:
    try:
        return decode_text(Path(file).read_bytes(), file).strip()
    except OSError as error:
        raise SettingsError(f"cannot read a token from {file}: {error.strerror}") from error
    except DataError:  # its message would quote the secret
        raise SettingsError(f"{file} does not hold a token: it is not UTF-8 text") from None
