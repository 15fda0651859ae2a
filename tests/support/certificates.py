"""A throw-away certificate authority, for tests that speak TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """PEM files of a certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; its own is `ca`, a PEM file. All files lie in `folder`, named after their common name."""

    def __init__(self, folder: Path, name: str = "test-ca", end: datetime | None = None) -> None:
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates, CRLs
        certificate = (
            self._builder(self._name, self._key, datetime.now(UTC) - 30 * DAY, end)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def server(
        self,
        name: str = "localhost",
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        begin: datetime | None = None,
        end: datetime | None = None,
    ) -> Issued:
        return self._issue(name, hosts, ExtendedKeyUsageOID.SERVER_AUTH, begin, end)

    def client(self, name: str = "edge", hosts: tuple[str, ...] = ()) -> Issued:
        """`name` "" leaves the common name out."""
        return self._issue(name, hosts, ExtendedKeyUsageOID.CLIENT_AUTH, None, None)

    def _issue(
        self,
        name: str,
        hosts: tuple[str, ...],
        purpose: x509.ObjectIdentifier,
        begin: datetime | None,
        end: datetime | None,
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(name), key, begin, end).add_extension(x509.ExtendedKeyUsage([purpose]), False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        issued = Issued(self._folder / f"{name or 'nameless'}.crt", self._folder / f"{name or 'nameless'}.key")
        certificate = builder.sign(self._key, hashes.SHA256())
        issued.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        issued.key.touch(0o600)
        issued.key.write_bytes(private_pem(key))
        return issued

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime | None, end: datetime | None
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin or datetime.now(UTC) - 20 * DAY)
            .not_valid_after(end or datetime.now(UTC) + DAY)
        )


def private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, passphrase: bytes = b"") -> bytes:
    """A private key as PEM; encrypted if a passphrase is given."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
