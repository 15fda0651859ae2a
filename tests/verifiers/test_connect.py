"""The texts that name a cloud."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import CloudLost, SettingsError, connect
from outrider.transport.hosts import peer_name
from outrider.verifiers.connect import CloudAddress, parse_cloud_address


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("none", CloudAddress("none")),
        ("local:demo", CloudAddress("local", "demo:cloud")),
        ("local:demo:edge", CloudAddress("local", "demo:edge")),
        ("local:/models/a:b", CloudAddress("local", "/models/a:b")),
        ("grpc://cloud:7070", CloudAddress("grpc", hosts=(("cloud", 7070),))),
        ("grpc://cloud.example.org:7070/", CloudAddress("grpc", hosts=(("cloud.example.org", 7070),))),
        ("grpc://[::1]:7070", CloudAddress("grpc", hosts=(("::1", 7070),))),
        ("grpc://127.0.0.1:1", CloudAddress("grpc", hosts=(("127.0.0.1", 1),))),
        ("vllm://a:8000", CloudAddress("vllm", hosts=(("a", 8000),))),
        ("vllm://a:8000,b:8001", CloudAddress("vllm", hosts=(("a", 8000), ("b", 8001)))),
        ("vllm://b:8000,a:8000,b:8001/", CloudAddress("vllm", hosts=(("b", 8000), ("a", 8000), ("b", 8001)))),
        ("vllm://[::1]:8000", CloudAddress("vllm", hosts=(("::1", 8000),))),
        ("vllm://[fe80::1%1]:1,10.0.0.1:65535", CloudAddress("vllm", hosts=(("fe80::1%1", 1), ("10.0.0.1", 65535)))),
        ("grpc://[fe80::1%eth0]:7070", CloudAddress("grpc", hosts=(("fe80::1%eth0", 7070),))),
        ("grpc://bücher.example:7070", CloudAddress("grpc", hosts=(("bücher.example", 7070),))),
        ("vllm://例え.テスト:1", CloudAddress("vllm", hosts=(("例え.テスト", 1),))),
        ("sglang://h:1", CloudAddress("sglang", hosts=(("h", 1),))),
        ("sglang://h:1/", CloudAddress("sglang", hosts=(("h", 1),))),
    ],
)
def test_addresses_are_parsed(text: str, target: CloudAddress) -> None:
    assert parse_cloud_address(text) == target
    assert target.is_remote == text.startswith(("grpc", "vllm", "sglang"))


names = st.from_regex(r"[a-z0-9-]{1,6}(\.[a-z0-9]{1,3})?\.?", fullmatch=True) | st.ip_addresses(v=6).map("[{}]".format)
ports = st.integers(1, 65535)
lists = st.lists(st.tuples(names, ports), min_size=1, max_size=5, unique=True)


@given(st.sampled_from(["vllm", "sglang"]), lists, st.sampled_from(["", "/"]))
def test_replicas_are_named_in_the_order_given(kind: str, hosts: list[tuple[str, int]], slash: str) -> None:
    text = f"{kind}://" + ",".join(f"{name}:{port}" for name, port in hosts) + slash
    assert parse_cloud_address(text).hosts == tuple((name.strip("[]"), port) for name, port in hosts)
    again = f"{kind}://" + ",".join(f"{name}:{port}" for name, port in [*hosts, hosts[0]])
    with pytest.raises(SettingsError, match="named twice"):
        parse_cloud_address(again)


odd = st.text("grpcvlmsan:/,[]@.%1 ", max_size=20)
known = st.builds(str.__add__, st.sampled_from(["grpc://", "vllm://", "sglang://"]), st.text("a1:,[]/@ ", max_size=12))


@settings(max_examples=200)
@given(
    st.one_of(st.text(max_size=30), odd, known).filter(lambda text: text != "none" and not text.startswith("local:"))
)
def test_any_other_text_is_refused_or_an_address(text: str) -> None:
    try:
        target = parse_cloud_address(text)
    except SettingsError:
        return
    assert text.startswith(f"{target.kind}://")
    assert target.is_remote
    assert target.hosts
    for host, port in target.hosts:
        assert host
        assert not set(host) & set(" ,/@[]")
        assert 0 < port < 65536


@pytest.mark.parametrize(
    "text",
    [
        "vllm:",
        "vllm://",
        "vllm:///",
        "vllm://,",
        "vllm://a:1,",
        "vllm://,a:1",
        "vllm://a:1,,b:1",
        "vllm://a:1,/",
        "vllm://a:1//",
        "vllm://a:1/v1",
        "vllm://a:1/,b:1",
        "vllm://a:1, b:1",
        "vllm://a:1;b:1",
        "vllm://a",
        "vllm://a:",
        "vllm://a:1,b",
        "vllm://:8000",
        "vllm://a:0",
        "vllm://a:1,b:65536",
        "vllm://a:-1",
        "vllm://a:1,b:x",
        "vllm://a:000001",
        "vllm://::1:8000",
        "vllm://[]:8000",
        "vllm://[::1]",
        "vllm://user@a:1",
        "vllm://a:1,sglang://b:1",
        "vllm:a:1",
        "VLLM://a:1",
        "https://a:1",
        "sglang://h:99999",
    ],
)
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected grpc://HOST:PORT, vllm://HOST:PORT"):
        parse_cloud_address(text)


@pytest.mark.parametrize(
    "host",
    ["[::g]", "[1.2.3.4]", "[fe80::1%]", "[host]", "a..b", ".", "x" * 64 + ".example", "ü" * 64, "a.\u2060", "a\x00b"],
)
@pytest.mark.parametrize("kind", ["grpc", "vllm"])
def test_a_host_that_can_be_none_is_named(kind: str, host: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_cloud_address(f"{kind}://{host}:7070")
    assert repr(host.strip("[]"))[1:-1] in str(caught.value)


@pytest.mark.parametrize(
    ("host", "sent"),
    [("bücher.example", "xn--bcher-kva.example"), ("fe80::1%eth0", "fe80::1"), ("Cloud.example.", "Cloud.example.")],
)
def test_hosts_are_sent_as_http_and_certificates_have_them(host: str, sent: str) -> None:
    assert peer_name(host) == sent


@pytest.mark.parametrize("target", ["grpc://[::1]:1", "grpc://bücher.invalid:1", "grpc://[fe80::1%lo]:1"])
def test_a_cloud_is_named_as_it_was_typed(target: str) -> None:
    verifier = connect(target, patience=0.1)
    with pytest.raises(CloudLost, match=f"^{re.escape(target)} cannot be reached"), verifier:  # type: ignore[union-attr]
        verifier.probe()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["vllm://a:1,a:1", "sglang://a:1,b:1,a:1", "vllm://[::1]:1,[::1]:1", "vllm://a:1,a:01"]
)
def test_a_replica_is_named_once(text: str) -> None:
    with pytest.raises(SettingsError, match="a replica is named twice"):
        parse_cloud_address(text)


def test_grpc_takes_one_host() -> None:
    with pytest.raises(SettingsError, match="grpc takes one"):
        parse_cloud_address("grpc://a:1,b:1")


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("none", {"token": "x"}, "token"),
        ("grpc://127.0.0.1:1", {"dtype": "float32"}, "dtype"),
        ("grpc://127.0.0.1:1", {"retries": 3}, "retries"),
        ("grpc://127.0.0.1:1", {"deadline": "soon"}, "deadline"),
        ("grpc://127.0.0.1:1", {"deadline": True}, "deadline"),
        ("grpc://127.0.0.1:1", {"patience": float("inf")}, "patience"),
        ("grpc://127.0.0.1:1", {"net": "rtt=fast"}, "rtt"),
        ("grpc://127.0.0.1:1", {"token": "a", "token_file": "b"}, "both"),
        ("grpc://127.0.0.1:1", {"cert": "/no/such.pem", "key": "/no/such.key"}, "/no/such"),
        ("grpc://cloud.example:1", {"token": "a-token-that-is-long-enough"}, "unencrypted"),
        ("grpc://localhost.example:1", {"token": "a-token-that-is-long-enough"}, "unencrypted"),
        ("grpc://127.0.0.1:1", {"token": "two\nlines"}, "token"),
        ("vllm://127.0.0.1:1", {"dtype": "float32"}, "vllm://… takes no dtype"),
        ("vllm://127.0.0.1:1,127.0.0.1:2", {"model": "x", "api_key": "y"}, "takes no api_key, model"),
        ("sglang://127.0.0.1:1", {"api_key": "x"}, "sglang://… takes no api_key"),
        ("vllm://127.0.0.1:1", {"deadline": 0}, "deadline"),
        ("vllm://127.0.0.1:1", {"net": "rtt=fast"}, "rtt"),
        ("vllm://127.0.0.1:1", {"token": "a b"}, "token"),
        ("vllm://127.0.0.1:1", {"token_file": "/no/such/file"}, "/no/such/file"),
        ("vllm://127.0.0.1:1", {"ca": "/no/such.pem"}, "/no/such"),
    ],
)
def test_options_that_cannot_be_used_are_named(target: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        connect(target, **options)


TOKEN = "a-token-that-is-long-enough"


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("far", ["cloud.example", "10.0.0.1", "[2001:db8::1]", "localhost.example"])
def test_no_replica_gets_a_token_unencrypted(kind: str, far: str, at: int) -> None:
    hosts = ["127.0.0.1:1", "localhost:2", "[::1]:3"]
    hosts[at] = f"{far}:4"
    with pytest.raises(SettingsError, match=re.escape(f"a token for {far.strip('[]')} would cross the network")):
        connect(f"{kind}://{','.join(hosts)}", token=TOKEN)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("vllm://127.0.0.1:1,localhost:2,[::1]:3", {"token": TOKEN}),
        ("vllm://cloud.example:1,127.0.0.1:2", {"token": TOKEN, "tls": True}),
        ("sglang://cloud.example:1,other.example:1", {"net": "rtt=10ms", "deadline": 3, "patience": 0.5}),
        ("grpc://cloud.example:1", {"token": TOKEN, "tls": True}),
    ],
)
def test_connecting_sends_nothing_yet(target: str, options: dict[str, Any]) -> None:
    verifier: Any = connect(target, **options)
    try:
        assert verifier.name == target
    finally:
        verifier.disconnect()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_other_peoples_servers_are_named_where_a_verifier_is_printed(kind: str) -> None:
    verifier: Any = connect(f"{kind}://a.example:1,b.example:2", token=TOKEN, tls=True)
    try:
        assert repr(verifier) == f"<LlmServerVerifier {kind}://a.example:1,b.example:2>"
    finally:
        verifier.disconnect()


def test_what_is_expected_tells_of_replicas() -> None:
    with pytest.raises(SettingsError, match=re.escape("vllm://HOST:PORT[,HOST:PORT...]")):
        parse_cloud_address("http://a:1")


@pytest.mark.parametrize("content", ["", "\n", "two words", "t\u00f6ken-that-is-long-enough"])
def test_a_token_file_holds_one_word(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match="token"):
        connect("grpc://127.0.0.1:1", token_file=str(tmp_path / "token"))


def test_a_byte_order_mark_is_no_part_of_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xef\xbb\xbf" + TOKEN.encode() + b"\r\n")
    verifier: Any = connect("grpc://127.0.0.1:1", token_file=str(tmp_path / "token"))
    with verifier:
        assert dict(verifier.connection._channel._common_headers)[b"authorization"] == f"Bearer {TOKEN}".encode()
