"""The certificates and keys of client and server, checked before the first connection."""

from __future__ import annotations

import codecs
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import SettingsError
from outrider.files import WIDE_MARKS, check_private

if TYPE_CHECKING:
    import grpc

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY_MISMATCH = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # OpenSSL's reasons
_UTC_TIME, _OID, _VERSION = 0x17, 0x06, 0xA0  # DER tags
_EC = "2a8648ce3d0201"
_KEY_TYPES = {  # by object identifier, in DER
    "2a864886f70d010101": "RSA",
    "2a864886f70d01010a": "RSA-PSS",
    "2a8648ce380401": "DSA",
    "2b6570": "Ed25519",
    "2b6571": "Ed448",
    "2a8648ce3d030107": "ECDSA P-256",
    "2b81040022": "ECDSA P-384",
    "2b81040023": "ECDSA P-521",
    "2b81040021": "ECDSA P-224",
    "2b8104000a": "ECDSA secp256k1",
}
CLIENT_KEY_TYPES = ("RSA", "ECDSA P-256", "ECDSA P-384")  # accepted from a client by a grpcio server
SERVER_KEY_TYPES = (*CLIENT_KEY_TYPES, "ECDSA P-521", "Ed25519")  # usable by a grpcio server itself


class ServerTls:
    """The server's certificate and key and, for mutual TLS, the certificate authority of its clients, as PEM files.

    Raises:
        SettingsError: a file is missing, unreadable, not PEM, encrypted, not valid today, or of a type that gRPC does
            not support, or the key does not fit the certificate or is readable by other users of the machine.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._pair = _load_pair(cert, key)
        check_key_type(cert, SERVER_KEY_TYPES)
        self._client_ca = None if client_ca is None else _load_authorities(client_ca)
        if client_ca is not None:
            check_key_type(client_ca, SERVER_KEY_TYPES, authorities=True)

    @property
    def is_mutual(self) -> bool:
        """Return whether a client needs a certificate."""
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a grpcio server."""
        import grpc  # the edge imports this module, and does not need grpcio

        return grpc.ssl_server_credentials([self._pair], self._client_ca, require_client_auth=self.is_mutual)


class ClientTls:
    """The certificate authority of the server (None: those of this system), and an optional client certificate.

    Raises:
        SettingsError: as for ServerTls, or only one of certificate and key is given.
    """

    def __init__(self, ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> None:
        self._context = _client_context(ca)
        if cert is not None and key is not None:
            _load_pair(cert, key)
            self._context.load_cert_chain(cert, key, password="")
        elif cert is not None or key is not None:
            raise SettingsError(f"{cert or key}: a client's certificate and its key are given together")

    def context(self) -> ssl.SSLContext:
        """Return the TLS context, which requires a valid certificate for the server's name."""
        return self._context


def _client_context(ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificates and names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accepts an authority that is not a root, as gRPC does
    context.set_alpn_protocols(["h2"])
    if ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(cadata=b"".join(_certificates(ca, _load_authorities(ca))))
    return context


def _load_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Return key and certificate chain, in grpcio's order."""
    chain, secret = _read(cert), _read(key)
    _check_validity(cert, _certificates(cert, chain)[:1])  # the others are those of authorities
    if b"ENCRYPTED" in secret:
        raise SettingsError(f"{key} is encrypted, which gRPC cannot open: give the key without a passphrase")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")  # "": no prompt on a terminal
    except ssl.SSLError as error:
        if error.reason in _KEY_MISMATCH:
            raise SettingsError(f"{key} does not belong to the certificate {cert}") from error
        raise SettingsError(f"{key} is not a usable PEM private key for {cert} ({error.reason})") from error
    with key.open("rb") as file:
        check_private(key, file.fileno(), "a private key")
    return secret, chain


def _load_authorities(path: Path) -> bytes:
    data = _read(path)
    _check_validity(path, _certificates(path, data))
    return data


def _read(path: Path) -> bytes:
    """Return a PEM file's bytes without a byte-order mark, at which gRPC's parser stops (OpenSSL skips it)."""
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    if data.startswith(WIDE_MARKS) or b"-\0-\0" in data:
        raise SettingsError(f"{path} is UTF-16 or UTF-32 text: save it as UTF-8 or ASCII")
    if codecs.BOM_UTF8 + b"-----" in data:  # the parsers would skip that block without an error
        raise SettingsError(f"{path} has a byte-order mark between its PEM blocks: remove it")
    return data


def check_key_type(path: Path, key_types: tuple[str, ...], *, authorities: bool = False) -> None:
    """Refuse a certificate with another type of key. In a file of several authorities one supported key is enough.

    Raises:
        SettingsError: the message has the file, its key type, and the supported types.
    """
    found = [_key_type(certificate) for certificate in _certificates(path, _read(path))]
    if not set(found if authorities else found[:1]) & set(key_types):
        raise SettingsError(
            f"{path}: its key is {found[0]}, which gRPC cannot use here: it takes {', '.join(key_types)}"
        )


def _key_type(certificate: bytes) -> str:
    """Return the type of a certificate's public key.

    RFC 5280, 4.1: the key follows the subject and has the form {{algorithm, parameters}, key}.
    """
    algorithm, *parameters = _parse_der(_parse_der(_signed_fields(certificate)[5][1])[0][1])
    oid = algorithm[1].hex()
    if oid != _EC:
        return _KEY_TYPES.get(oid, f"of an unknown kind (object identifier {oid})")
    tag, curve = parameters[0] if parameters else (0, b"")
    return _KEY_TYPES.get(curve.hex(), "ECDSA on another curve" if tag == _OID else "ECDSA with explicit parameters")


def _certificates(path: Path, data: bytes) -> list[bytes]:
    """Return the certificates of a PEM file as DER, after parsing them with OpenSSL."""
    try:
        found = [ssl.PEM_cert_to_DER_cert(text.decode("ascii")) for text in _CERTIFICATE.findall(data)]
        if found:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=b"".join(found))
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(f"{path} holds a damaged certificate") from error
    if not found:
        raise SettingsError(f"{path} holds no PEM certificate (-----BEGIN CERTIFICATE-----)")
    return found


def _check_validity(path: Path, certificates: list[bytes]) -> None:
    """Check that at least one certificate is valid now. Bundles of authorities may contain expired ones."""
    now, periods = datetime.now(UTC), [_validity_period(certificate) for certificate in certificates]
    if any(begin <= now <= end for begin, end in periods):
        return
    begin, end = max(periods, key=lambda period: period[1])
    problem = f"expired on {end:%Y-%m-%d %H:%M}" if end < now else f"is not valid before {begin:%Y-%m-%d %H:%M}"
    raise SettingsError(f"{path} {problem} UTC; it is {now:%Y-%m-%d %H:%M} UTC here")


def _validity_period(certificate: bytes) -> tuple[datetime, datetime]:
    """Return notBefore and notAfter. The standard library provides them for a peer's certificate only.

    RFC 5280, 4.1: Certificate ::= {tbs, …} and tbs ::= {[0] version (optional), serial, signature algorithm, issuer,
    validity {notBefore, notAfter}, …}. The bytes are well-formed, since OpenSSL has parsed them.
    """
    begin, end = (_parse_time(tag, text) for tag, text in _parse_der(_signed_fields(certificate)[3][1]))
    return begin, end


def _signed_fields(certificate: bytes) -> list[tuple[int, bytes]]:
    """Return the signed fields: serial, signature algorithm, issuer, validity, subject, public key, extensions."""
    (_, outer), *_ = _parse_der(certificate)
    (_, tbs), *_ = _parse_der(outer)
    return [part for part in _parse_der(tbs) if part[0] != _VERSION]


def _parse_der(der: bytes) -> list[tuple[int, bytes]]:
    """Return the consecutive (tag, content) pairs in DER bytes."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:  # long form: the low bits are the number of length bytes
            long = size & 0x7F
            size, at = int.from_bytes(der[at : at + long], "big"), at + long
        found.append((tag, der[at : at + size]))
        at += size
    return found


def _parse_time(tag: int, text: bytes) -> datetime:
    """Parse a UTCTime (two-digit years are 1950 to 2049) or a GeneralizedTime, in the only form of RFC 5280."""
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
