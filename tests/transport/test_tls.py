"""Certificates: a real handshake for each arrangement, and a named refusal for each mistake."""

from __future__ import annotations

import asyncio
import codecs
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

from outrider import connect
from outrider.errors import SettingsError
from outrider.transport.channel import Channel
from outrider.transport.status import Disconnected
from outrider.transport.tls import CLIENT_KEY_TYPES, ClientTls, ServerTls, _validity_period, check_key_type
from tests.support.certificates import DAY, Authority, private_pem

METHOD = "/test/Who"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def serving(tls: ServerTls) -> Iterator[str]:
    """A server that answers with its caller's common name; its address."""

    def who(_: bytes, context: grpc.ServicerContext) -> bytes:
        return b",".join(context.auth_context().get("x509_common_name", []))

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(who)

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[Handler()])
        port = server.add_secure_port("127.0.0.1:0", tls.credentials())
        server.start()
        try:
            yield f"localhost:{port}"
        finally:
            server.stop(None).wait()


def ask(address: str, tls: ClientTls) -> bytes:
    host, _, port = address.partition(":")

    async def work() -> bytes:
        loop = asyncio.get_running_loop()
        dial = partial(loop.create_connection, host=host, port=int(port), ssl=tls.context(), server_hostname=host)
        channel = Channel(dial, address)
        try:
            return await channel.unary(METHOD, b"", 10)
        finally:
            await channel.close()

    return asyncio.run(work())


def test_a_server_is_recognised(authority: Authority) -> None:
    issued = authority.server()
    tls = ServerTls(issued.cert, issued.key)
    assert not tls.is_mutual
    with serving(tls) as address:
        assert ask(address, ClientTls(authority.ca)) == b""


def test_another_authoritys_server_is_refused(authority: Authority, tmp_path: Path) -> None:
    issued = authority.server()
    with (
        serving(ServerTls(issued.cert, issued.key)) as address,
        pytest.raises(Disconnected, match="certificate verify"),
    ):
        ask(address, ClientTls(Authority(tmp_path, "other-ca").ca))


def test_mutual_tls_knows_the_client(authority: Authority) -> None:
    issued, edge = authority.server(), authority.client("edge-7")
    tls = ServerTls(issued.cert, issued.key, authority.ca)
    assert tls.is_mutual
    with serving(tls) as address:
        assert ask(address, ClientTls(authority.ca, edge.cert, edge.key)) == b"edge-7"


def test_mutual_tls_refuses_a_client_without_a_certificate(authority: Authority) -> None:
    issued = authority.server()
    with serving(ServerTls(issued.cert, issued.key, authority.ca)) as address, pytest.raises(Disconnected):
        ask(address, ClientTls(authority.ca))


def test_mutual_tls_refuses_another_authoritys_client(authority: Authority, tmp_path: Path) -> None:
    issued, stranger = authority.server(), Authority(tmp_path, "other-ca").client()
    with serving(ServerTls(issued.cert, issued.key, authority.ca)) as address, pytest.raises(Disconnected):
        ask(address, ClientTls(authority.ca, stranger.cert, stranger.key))


def test_this_systems_authorities_are_the_default_and_everything_is_verified(authority: Authority) -> None:
    for context in (ClientTls().context(), ClientTls(authority.ca).context()):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert len(ClientTls(authority.ca).context().get_ca_certs()) == 1


def test_a_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    issued, nowhere = authority.server(), tmp_path / "nowhere.pem"
    for arguments in ((nowhere, issued.key), (issued.cert, nowhere), (issued.cert, issued.key, nowhere)):
        with pytest.raises(SettingsError, match=r"nowhere\.pem cannot be read: No such file"):
            ServerTls(*arguments)
    with pytest.raises(SettingsError, match=r"nowhere\.pem cannot be read"):
        ClientTls(nowhere)


def test_a_folder_is_no_file(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        ClientTls(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(range(256))])
def test_a_file_that_is_not_pem_is_named(authority: Authority, tmp_path: Path, content: bytes) -> None:
    issued, other = authority.server(), tmp_path / "other.pem"
    other.write_bytes(content)
    with pytest.raises(SettingsError, match=r"other\.pem holds no PEM certificate"):
        ServerTls(other, issued.key)
    with pytest.raises(SettingsError, match=r"other\.pem is not a usable PEM private key"):
        ServerTls(issued.cert, other)
    with pytest.raises(SettingsError, match=r"other\.pem holds no PEM certificate"):
        ServerTls(issued.cert, issued.key, other)


@pytest.mark.parametrize("body", ["AAAA", "not base64!", "é"])
def test_a_damaged_certificate_is_named(tmp_path: Path, body: str) -> None:
    path = tmp_path / "damaged.pem"
    path.write_text(f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"damaged\.pem holds a damaged certificate"):
        ClientTls(path)


def test_a_truncated_certificate_is_damaged(authority: Authority) -> None:
    lines = authority.ca.read_text().splitlines()
    authority.ca.write_text("\n".join([*lines[:3], lines[-1]]))
    with pytest.raises(SettingsError, match="damaged certificate"):
        ClientTls(authority.ca)


def test_certificate_and_key_swapped_names_the_file(authority: Authority) -> None:
    issued = authority.server()
    with pytest.raises(SettingsError, match=r"localhost\.key holds no PEM certificate"):
        ServerTls(issued.key, issued.cert)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    one, other = authority.server("one"), authority.server("other")
    with pytest.raises(SettingsError, match=r"other\.key does not belong to the certificate .*one\.crt"):
        ServerTls(one.cert, other.key)
    with pytest.raises(SettingsError, match=r"other\.key does not belong to the certificate .*one\.crt"):
        ClientTls(None, one.cert, other.key)


def test_a_key_of_another_kind_is_refused(authority: Authority) -> None:
    issued = authority.server()
    issued.key.write_bytes(private_pem(rsa.generate_private_key(65537, 2048)))
    with pytest.raises(SettingsError, match="does not belong to the certificate"):
        ServerTls(issued.cert, issued.key)


def test_an_encrypted_key_is_refused_without_asking_for_its_passphrase(authority: Authority) -> None:
    issued = authority.server()
    issued.key.write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    with pytest.raises(SettingsError, match=r"localhost\.key is encrypted"):
        ServerTls(issued.cert, issued.key)


def test_certificate_and_key_come_together(authority: Authority) -> None:
    issued = authority.client()
    for arguments in ((None, issued.cert, None), (None, None, issued.key)):
        with pytest.raises(SettingsError, match="are given together"):
            ClientTls(*arguments)


def test_an_expired_certificate_is_refused_with_its_date(authority: Authority) -> None:
    issued = authority.server(end=datetime.now(UTC) - 2 * DAY)
    day = (datetime.now(UTC) - 2 * DAY).strftime("%Y-%m-%d")
    with pytest.raises(SettingsError, match=rf"localhost\.crt expired on {day} "):
        ServerTls(issued.cert, issued.key)


def test_a_certificate_of_the_future_is_refused(authority: Authority) -> None:
    issued = authority.server(begin=datetime.now(UTC) + DAY, end=datetime.now(UTC) + 2 * DAY)
    with pytest.raises(SettingsError, match=r"localhost\.crt is not valid before"):
        ServerTls(issued.cert, issued.key)


def test_a_bundle_may_hold_old_authorities_but_not_only_those(authority: Authority, tmp_path: Path) -> None:
    old = Authority(tmp_path, "old-ca", end=datetime.now(UTC) - DAY)
    with pytest.raises(SettingsError, match=r"old-ca\.pem expired"):
        ClientTls(old.ca)
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# 机构\n".encode() + old.ca.read_bytes() + authority.ca.read_bytes())
    ClientTls(bundle)


def test_only_the_first_certificate_of_a_chain_is_ours(authority: Authority, tmp_path: Path) -> None:
    old = Authority(tmp_path, "old-ca", end=datetime.now(UTC) - DAY)
    issued = authority.server()
    own = issued.cert.read_bytes()
    issued.cert.write_bytes(own + old.ca.read_bytes())
    ServerTls(issued.cert, issued.key)
    expired = authority.server(end=datetime.now(UTC) - DAY)
    expired.cert.write_bytes(expired.cert.read_bytes() + authority.ca.read_bytes())
    with pytest.raises(SettingsError, match="expired"):
        ServerTls(expired.cert, expired.key)


@pytest.mark.parametrize("year", [1949, 1950, 1999, 2000, 2049, 2050, 2120])
def test_dates_are_read_as_cryptography_reads_them(authority: Authority, year: int) -> None:
    """RFC 5280: years up to 2049 have two digits, later ones four."""
    issued = authority.server(begin=datetime(1950, 1, 1), end=datetime(max(year, 1950), 6, 1, 2, 3, 4))
    certificate = x509.load_pem_x509_certificate(issued.cert.read_bytes())
    found = _validity_period(ssl.PEM_cert_to_DER_cert(issued.cert.read_text()))
    assert found == (certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def test_dates_of_long_names_are_found(tmp_path: Path) -> None:
    """Names beyond 127 bytes make DER's lengths take more than one byte."""
    issued = Authority(tmp_path, "x" * 60).server("y" * 60, tuple(f"host-{i}.example" for i in range(30)))
    begin, end = _validity_period(ssl.PEM_cert_to_DER_cert(issued.cert.read_text()))
    assert begin < datetime.now(UTC) < end


# Kinds of keys --------------------------------------------------------------------------------------------------


def self_signed(folder: Path, key: Any, name: str = "odd") -> tuple[Path, Path]:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 7, now - DAY, now + DAY)
    builder = builder.add_extension(x509.BasicConstraints(True, None), True)
    hashed = None if isinstance(key, (ed448.Ed448PrivateKey, ed25519.Ed25519PrivateKey)) else hashes.SHA256()
    cert, secret = folder / f"{name}.crt", folder / f"{name}.key"
    cert.write_bytes(builder.sign(key, hashed).public_bytes(serialization.Encoding.PEM))
    secret.touch(0o600)
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, secret


KEYS: dict[str, Any] = {
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "ECDSA P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ECDSA P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ECDSA P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
    "ECDSA secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "ECDSA P-224": lambda: ec.generate_private_key(ec.SECP224R1()),
    "ECDSA on another curve": lambda: ec.generate_private_key(ec.BrainpoolP256R1()),
    "DSA": lambda: dsa.generate_private_key(2048),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_kind_of_key_is_refused_exactly_where_grpc_cannot_serve_with_it(tmp_path: Path, kind: str) -> None:
    cert, key = self_signed(tmp_path, KEYS[kind]())
    with ThreadPoolExecutor(1) as pool:
        try:
            pair = [(key.read_bytes(), cert.read_bytes())]
            grpc.server(pool).add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
            usable = True
        except RuntimeError:
            usable = False
    if usable:
        ServerTls(cert, key)
    else:
        with pytest.raises(SettingsError, match=rf"odd\.crt: its key is {kind}, which gRPC cannot use"):
            ServerTls(cert, key)


def test_rsa_pss_is_refused_by_name(tmp_path: Path, authority: Authority) -> None:
    """cryptography cannot make such a key: the identifier in an RSA certificate is changed."""
    cert, _key = self_signed(tmp_path, KEYS["RSA"]())
    der = ssl.PEM_cert_to_DER_cert(cert.read_text())
    pss = der.replace(bytes.fromhex("06092a864886f70d010101"), bytes.fromhex("06092a864886f70d01010a"))
    cert.write_text(ssl.DER_cert_to_PEM_cert(pss))
    with pytest.raises(SettingsError, match="its key is RSA-PSS, which gRPC cannot use"):
        check_key_type(cert, CLIENT_KEY_TYPES)


@pytest.mark.parametrize("kind", ["Ed448", "ECDSA secp256k1"])
def test_client_authorities_of_such_kinds_are_refused_unless_another_can_be_used(
    tmp_path: Path, authority: Authority, kind: str
) -> None:
    issued, (odd, _) = authority.server(), self_signed(tmp_path, KEYS[kind]())
    with pytest.raises(SettingsError, match=rf"odd\.crt: its key is {kind}"):
        ServerTls(issued.cert, issued.key, odd)
    odd.write_bytes(odd.read_bytes() + authority.ca.read_bytes())
    ServerTls(issued.cert, issued.key, odd)


@pytest.mark.parametrize("kind", ["Ed25519", "Ed448", "ECDSA P-521"])
def test_a_clients_certificate_that_no_grpc_server_takes_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    cert, key = self_signed(tmp_path, KEYS[kind]())
    with pytest.raises(SettingsError, match=rf"odd\.crt: its key is {kind}"):
        connect("grpc://127.0.0.1:1", cert=str(cert), key=str(key))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_private_key_that_others_can_read_is_refused(authority: Authority, mode: int) -> None:
    issued = authority.server()
    issued.key.chmod(mode)
    for tls in (ServerTls, lambda cert, key: ClientTls(None, cert, key)):
        with pytest.raises(SettingsError, match=r"localhost\.key, a private key, .* chmod 600 .*localhost\.key"):
            tls(issued.cert, issued.key)


def test_a_byte_order_mark_changes_nothing(authority: Authority) -> None:
    server, client = authority.server(), authority.client()
    for path in (authority.ca, server.cert, server.key, client.cert, client.key):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    with serving(ServerTls(server.cert, server.key, authority.ca)) as address:
        assert ask(address, ClientTls(authority.ca, client.cert, client.key)) == b"edge"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_wide_text_is_refused_by_name(authority: Authority, encoding: str, which: str) -> None:
    server, client = authority.server(), authority.client()
    for path in {"cert": [server.cert, client.cert], "key": [server.key, client.key], "ca": [authority.ca]}[which]:
        path.write_bytes(path.read_text().encode(encoding))
    with pytest.raises(SettingsError, match="UTF-16 or UTF-32 text: save it as"):
        ServerTls(server.cert, server.key, authority.ca)
    with pytest.raises(SettingsError, match="UTF-16 or UTF-32 text: save it as"):
        ClientTls(authority.ca, client.cert, client.key)


def test_a_byte_order_mark_inside_a_chain_is_refused(authority: Authority) -> None:
    server = authority.server()
    server.cert.write_bytes(server.cert.read_bytes() + codecs.BOM_UTF8 + authority.ca.read_bytes())
    with pytest.raises(SettingsError, match="byte-order mark between its PEM blocks"):
        ServerTls(server.cert, server.key)
