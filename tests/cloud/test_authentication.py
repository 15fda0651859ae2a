"""Tokens, identities, and where a service may listen."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from pathlib import Path

import grpc
import pytest

from outrider.cloud.authentication import Unauthenticated, authenticate
from outrider.errors import CloudError, SettingsError
from outrider.serving.addresses import check_listen, parse_address
from outrider.serving.tokens import Tokens
from outrider.transport.tls import ServerTls
from tests.support.certificates import Authority

LAB, HOME = "l" * 20, "h" * 20


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens.load(write(tmp_path / "tokens", f"lab {LAB}\nhome {HOME}\n"))


class TestTokens:
    def test_each_token_has_its_name(self, tokens: Tokens) -> None:
        assert tokens.identity(LAB) == "lab"
        assert tokens.identity(HOME) == "home"

    @pytest.mark.parametrize(
        "wrong", ["", "lab", LAB[:-1], LAB + "l", LAB.upper(), f"{LAB} ", "词" * 20, "\ud800" * 20]
    )
    def test_an_unknown_token_has_no_identity(self, tokens: Tokens, wrong: str) -> None:
        assert tokens.identity(wrong) is None

    def test_comments_blank_lines_tabs_and_a_byte_order_mark_are_fine(self, tmp_path: Path) -> None:
        text = f"\ufeff# who may\n\n  # indented\nlab\t{LAB}  \r\n   \n研究室  {HOME}"
        tokens = Tokens.load(write(tmp_path / "tokens", text))
        assert (tokens.identity(LAB), tokens.identity(HOME)) == ("lab", "研究室")

    def test_every_entry_is_compared_whichever_matches(self, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[int] = []
        original = hmac.compare_digest

        def counting(one: bytes, other: bytes) -> bool:
            compared.append(len(one))
            return original(one, other)

        monkeypatch.setattr("outrider.serving.tokens.hmac.compare_digest", counting)
        for token in (LAB, HOME, "short", "x" * 500):
            compared.clear()
            tokens.identity(token)
            assert compared == [32, 32]  # digests: as long for any token

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (f"lab {LAB}\nhome\n", "line 2: expected `NAME TOKEN`, found 1"),
            (f"lab {LAB} # mine\n", "line 1: expected `NAME TOKEN`, found 4"),
            (f"# first\n\nlab {LAB}\nlab {HOME}\n", "line 4: the name was given before"),
            (f"lab {LAB}\nhome {LAB}\n", "line 2: the token was given before"),
            ("lab 123456789012345\n", "line 1: the token is shorter than 16"),
            (f"lab {'词' * 20}\n", "line 1: a token may contain ASCII"),
            (f"lab {'a' * 20}\x07\n", "line 1: a token may contain ASCII"),
            (f"l\x07b {LAB}\n", "line 1: expected `NAME TOKEN`"),
            ("", "holds no token"),
            ("# nothing\n\n", "holds no token"),
        ],
    )
    def test_a_bad_file_is_refused_by_line(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(SettingsError, match=message) as caught:
            Tokens.load(write(tmp_path / "tokens", text))
        assert str(tmp_path / "tokens") in str(caught.value)

    def test_sixteen_characters_are_enough(self, tmp_path: Path) -> None:
        assert Tokens.load(write(tmp_path / "tokens", "lab 1234567890123456")).identity("1234567890123456") == "lab"

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="nowhere cannot be read: No such file"):
            Tokens.load(tmp_path / "nowhere")
        with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
            Tokens.load(tmp_path)

    def test_a_file_that_is_no_text_is_named_and_not_quoted(self, tmp_path: Path) -> None:
        path = write(tmp_path / "tokens", "")
        path.write_bytes(b"lab " + LAB.encode() + b"\xff\n")
        with pytest.raises(SettingsError, match="is not UTF-8 text") as caught:
            Tokens.load(path)
        assert caught.value.__cause__ is None

    @pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
    def test_a_file_open_to_others_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = write(tmp_path / "tokens", f"lab {LAB}\n")
        path.chmod(mode)
        with pytest.raises(SettingsError, match=f"chmod 600 {path}"):
            Tokens.load(path)
        path.chmod(0o400)
        Tokens.load(path)

    @pytest.mark.parametrize(
        "text",
        [
            "{s}\n",
            "{s} lab\n",
            "{s} {s} {s}\n",
            "a {s}\na {t}\n",
            "a {s}\nb {s}\n",
            "{s} {s}\n{s} {t}\n",
            "a {s}词\n",
        ],
    )
    def test_no_error_quotes_the_file(self, tmp_path: Path, text: str) -> None:
        """Columns swapped included: a name may be the secret."""
        with pytest.raises(SettingsError) as caught:
            Tokens.load(write(tmp_path / "tokens", text.format(s=LAB, t=HOME)))
        assert LAB not in str(caught.value)
        assert HOME not in str(caught.value)

    def test_neither_repr_nor_memory_holds_a_token(self, tokens: Tokens) -> None:
        assert repr(tokens) == "Tokens(2 identities)"
        assert LAB not in str(vars(tokens))


class TestIdentity:
    def test_a_bearer_token_names_its_identity(self, tokens: Tokens) -> None:
        metadata = (("user-agent", "x"), ("authorization", f"Bearer {LAB}"))
        assert authenticate({}, metadata, tokens) == "lab"

    @pytest.mark.parametrize("value", [f"bearer {HOME}", f"BEARER  {HOME} "])
    def test_the_scheme_is_of_any_case(self, tokens: Tokens, value: str) -> None:
        assert authenticate({}, (("Authorization", value),), tokens) == "home"

    @pytest.mark.parametrize(
        "metadata",
        [
            None,
            (),
            (("authorization", ""),),
            (("authorization", LAB),),
            (("authorization", "Bearer"),),
            (("authorization", "Bearer "),),
            (("authorization", f"Basic {LAB}"),),
            (("authorization", f"Bearer {LAB}x"),),
            (("authorization", f"Bearer {LAB}".encode()),),
            (("authorization", f"Bearer {LAB}"), ("authorization", f"Bearer {HOME}")),
            (("x-authorization", f"Bearer {LAB}"),),
        ],
    )
    def test_anything_else_is_refused_and_not_quoted(self, tokens: Tokens, metadata: object) -> None:
        with pytest.raises(Unauthenticated) as caught:
            authenticate({}, metadata, tokens)  # type: ignore[arg-type]
        assert isinstance(caught.value, CloudError)
        assert LAB not in str(caught.value)

    def test_a_certificate_does_not_replace_the_token(self, tokens: Tokens) -> None:
        auth = {"x509_common_name": [b"edge"]}
        with pytest.raises(Unauthenticated):
            authenticate(auth, (), tokens)
        assert authenticate(auth, (("authorization", f"Bearer {LAB}"),), tokens) == "lab"

    @pytest.mark.parametrize(
        ("auth", "identity"),
        [
            ({}, "anonymous"),
            ({"transport_security_type": [b"ssl"]}, "anonymous"),
            ({"x509_common_name": [b"edge"], "x509_subject_alternative_name": [b"other"]}, "cert:edge"),
            ({"x509_common_name": [b""], "x509_subject_alternative_name": [b"a.example", b"b"]}, "cert:a.example"),
            ({"x509_common_name": ["研究室".encode()]}, "cert:研究室"),
            ({"x509_common_name": [b"\xff"]}, "cert:\\xff"),
        ],
    )
    def test_without_tokens_the_certificate_speaks(self, auth: dict[str, list[bytes]], identity: str) -> None:
        assert authenticate(auth, None, None) == identity

    def test_nameless_certificates_are_told_apart(self) -> None:
        one, other = (authenticate({"x509_pem_cert": [pem]}, (), None) for pem in (b"one", b"other"))
        assert one.startswith("cert:sha256:")
        assert one != other

    def test_a_token_sent_to_a_service_without_tokens_is_not_an_identity(self) -> None:
        assert authenticate({}, (("authorization", f"Bearer {LAB}"),), None) == "anonymous"


def credentials(ca: Path, cert: Path | None = None, key: Path | None = None) -> grpc.ChannelCredentials:
    """What gRPC's own client shows; ours has no part in this."""
    own = [None if path is None else path.read_bytes() for path in (key, cert)]
    return grpc.ssl_channel_credentials(ca.read_bytes(), *own)


class TestOverGrpc:
    """The same with the auth context and metadata that grpc.aio really gives."""

    def who(
        self, server: ServerTls | None, client: grpc.ChannelCredentials | None, tokens: Tokens | None, *token: str
    ) -> str:
        return asyncio.run(self._who(server, client, tokens, *token))

    async def _who(
        self,
        server_tls: ServerTls | None,
        client_tls: grpc.ChannelCredentials | None,
        tokens: Tokens | None,
        *token: str,
    ) -> str:
        async def answer(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
            try:
                return authenticate(context.auth_context(), context.invocation_metadata(), tokens).encode()
            except Unauthenticated as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
                raise

        class Handler(grpc.GenericRpcHandler):
            def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
                return grpc.unary_unary_rpc_method_handler(answer)

        server = grpc.aio.server(handlers=[Handler()])
        if server_tls is None or client_tls is None:
            channel = grpc.aio.insecure_channel(f"localhost:{server.add_insecure_port('127.0.0.1:0')}")
        else:
            port = server.add_secure_port("127.0.0.1:0", server_tls.credentials())
            channel = grpc.aio.secure_channel(f"localhost:{port}", client_tls)
        await server.start()
        metadata = [("authorization", f"Bearer {text}") for text in token]
        try:
            async with channel:
                return (await channel.unary_unary("/test/Who")(b"", metadata=metadata, timeout=300)).decode()
        finally:
            await server.stop(None)

    def test_calls_without_tls_are_identified_by_their_token(self, tokens: Tokens) -> None:
        assert self.who(None, None, None) == "anonymous"
        assert self.who(None, None, tokens, LAB) == "lab"

    def test_a_refusal_reaches_the_caller(self, tokens: Tokens) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="unknown token") as caught:
            self.who(None, None, tokens, "x" * 20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    def test_calls_with_a_client_certificate_are_identified_by_its_name(self, tmp_path: Path, tokens: Tokens) -> None:
        authority = Authority(tmp_path)
        issued = authority.server()
        one_way = ServerTls(issued.cert, issued.key)
        mutual = ServerTls(issued.cert, issued.key, authority.ca)
        named, nameless = authority.client("edge-7"), authority.client("")
        assert self.who(one_way, credentials(authority.ca), None) == "anonymous"
        client = credentials(authority.ca, named.cert, named.key)
        assert self.who(mutual, client, None) == "cert:edge-7"
        assert self.who(mutual, client, tokens, HOME) == "home"
        assert self.who(mutual, credentials(authority.ca, nameless.cert, nameless.key), None).startswith("cert:sha256:")

    def test_a_certificate_known_by_its_host(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        issued, edge = authority.server(), authority.client("", ("edge.example",))
        server = ServerTls(issued.cert, issued.key, authority.ca)
        assert self.who(server, credentials(authority.ca, edge.cert, edge.key), None) == "cert:edge.example"


PUBLIC = ["0.0.0.0", "::", "", "0", "192.0.2.7", "2001:db8::1", "::ffff:0.0.0.0", "::ffff:192.0.2.7"]


class TestListening:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "unix:/run/outrider.sock"])
    def test_this_machine_needs_nothing(self, host: str) -> None:
        check_listen(host, tls=False, tokens=False, insecure=False)

    @pytest.mark.parametrize("host", PUBLIC)
    def test_beyond_it_what_is_missing_is_named(self, host: str) -> None:
        with pytest.raises(SettingsError, match=r"without TLS \(--tls-cert/--tls-key\) and a token \(--tokens FILE\):"):
            check_listen(host, tls=False, tokens=False, insecure=False)
        with pytest.raises(SettingsError, match=r"without TLS \(--tls-cert/--tls-key\): .* --insecure"):
            check_listen(host, tls=False, tokens=True, insecure=False)
        with pytest.raises(SettingsError, match=r"without a token \(--tokens FILE\): .* --insecure"):
            check_listen(host, tls=True, tokens=False, insecure=False)

    @pytest.mark.parametrize("host", PUBLIC)
    def test_with_both_or_by_explicit_wish_it_may(self, host: str) -> None:
        check_listen(host, tls=True, tokens=True, insecure=False)
        check_listen(host, tls=False, tokens=False, insecure=True)

    @pytest.mark.parametrize("other", ["192.0.2.7", "2001:db8::1"])
    def test_a_nameis_local_only_if_all_its_addresses_are(self, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
        found = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("127.0.0.1", other)]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
        with pytest.raises(SettingsError, match="two-faced can be reached"):
            check_listen("two-faced", tls=False, tokens=False, insecure=False)

    @pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
    def test_a_name_that_does_not_resolve_is_refused(self, host: str) -> None:
        with pytest.raises(SettingsError, match="does not resolve"):
            check_listen(host, tls=False, tokens=False, insecure=False)


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("127.0.0.1:7070", ("127.0.0.1", 7070)),
            ("cloud.example:0", ("cloud.example", 0)),
            ("[::1]:7070", ("::1", 7070)),
            ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
            (":7070", ("", 7070)),
            ("h:65535", ("h", 65535)),
        ],
    )
    def test_addresses_are_read(self, text: str, address: tuple[str, int]) -> None:
        assert parse_address(text) == address

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "7070",
            "localhost",
            "localhost:",
            "::1:7070",
            "::1",
            "[::1]",
            "[]:7070",
            "[localhost]:7070",
            "[127.0.0.1]:7070",
            "h:65536",
            "h:99999",
            "h:" + "9" * 5000,
            "h:-1",
            "h:+1",
            "h:７０",
            "h:70 ",
            " h:70",
            "a b:70",
            "grpc://h:7070",
            "h/x:7070",
            "h:70\n",
        ],
    )
    def test_anything_else_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(SettingsError, match=r"127\.0\.0\.1:7070"):
            parse_address(text)
