"""The HTTP contract, with scripts in the models' place: statuses, streams, refusals, and clients that leave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from outrider import errors
from outrider.errors import (
    CloudLost,
    CloudRefused,
    ContextError,
    DecodingError,
    OutriderError,
    PromptError,
    SettingsError,
    StateError,
    VocabularyMismatch,
)
from outrider.gateway import connections, handlers, response_schema
from outrider.gateway.access import Access, allowed_hosts, check_listen
from outrider.gateway.errors import GenerationTimeout, QueueFull, ShuttingDown, to_error_response
from outrider.gateway.page_routes import PAGE_HEADERS
from outrider.gateway.server import bound
from outrider.gateway.upload_limiter import UploadLimiter
from outrider.serving.tokens import Tokens
from tests.support.processes import HANG_S, wait_until
from tests.support.scripted_gateway import Running, Script, event, result_of, serving, spoken

KEY = "a-key-that-is-long-enough"
HELLO: dict[str, Any] = {"model": "outrider", "messages": [{"role": "user", "content": "hello"}]}
JSON = {"content-type": "application/json"}


clients: list[openai.OpenAI] = []


def client(running: Running, key: str = "none") -> openai.OpenAI:
    clients.append(openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0))
    return clients[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while clients:
        clients.pop().close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> Tokens:
    (tmp_path / "keys").write_text(f"me {KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    return Tokens.load(tmp_path / "keys")


# Facts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        ("/health", response_schema.Health),
        ("/v1/models", response_schema.Models),
        ("/v1/models/outrider", response_schema.Model),
        ("/v1/outrider", response_schema.Overview),
    ],
)
def test_facts_are_what_the_document_says(plain: Running, path: str, reply: type[response_schema.Reply]) -> None:
    assert reply.model_validate_json(httpx2.get(plain.url + path).content)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/outrider", "/v1/outrider", "/metrics", "/"])
def test_whatever_can_be_read_answers_head_with_the_same_headers_and_no_body(plain: Running, path: str) -> None:
    full, head = httpx2.get(plain.url + path), httpx2.head(plain.url + path)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == full.headers["content-type"]
    assert "content-length" in head.headers


def test_head_needs_the_key_that_get_needs(keys: Tokens) -> None:
    with serving(access=Access(keys)) as running:
        assert httpx2.head(f"{running.url}/v1/models").status_code == 401
        assert httpx2.head(f"{running.url}/health").status_code == 200


def test_the_bundled_clips_are_listed_and_served(plain: Running) -> None:
    clips = [response_schema.Clip.model_validate(clip) for clip in httpx2.get(f"{plain.url}/demo/clips").json()]
    assert len(clips) == 12
    assert httpx2.get(plain.url + clips[0].url).content.startswith(b"OggS")
    assert httpx2.get(f"{plain.url}/demo/clips/clips.json").status_code == 404
    assert httpx2.get(f"{plain.url}/demo/clips/..%2f..%2fMODEL_CARD.md").status_code == 404


def test_the_page_may_ask_no_other_host(plain: Running) -> None:
    policy = httpx2.get(f"{plain.url}/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == "'none'"
    assert set(rules.values()) <= {"'self'", "'none'"}, "nothing inline, nobody else"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)])
def test_http_s_own_refusals_have_openai_s_shape(plain: Running, method: str, path: str, status: int) -> None:
    reply = httpx2.request(method, plain.url + path)
    assert reply.status_code == status
    assert response_schema.ErrorReply.model_validate_json(reply.content)


def test_figures_count_answers_and_tokens() -> None:
    with serving() as running:
        client(running).chat.completions.create(**HELLO)
        with pytest.raises(openai.NotFoundError):
            client(running).chat.completions.create(**{**HELLO, "model": "x"})
        figures = httpx2.get(f"{running.url}/metrics").text
    assert 'outrider_edge_requests_total{path="/v1/chat/completions",status="200"} 1.0' in figures
    assert 'outrider_edge_requests_total{path="/v1/chat/completions",status="404"} 1.0' in figures
    assert 'outrider_edge_tokens_total{source="accepted"} 3.0' in figures


# Errors -----------------------------------------------------------------------------------------------------


def leaves(kind: type[OutriderError]) -> list[type[OutriderError]]:
    return [kind, *(leaf for each in kind.__subclasses__() for leaf in leaves(each))]


@pytest.mark.parametrize("kind", [each for each in leaves(OutriderError) if each.__module__ == errors.__name__])
def test_every_error_has_a_status_of_its_own_and_none_from_bad_input_is_a_server_s(kind: type[OutriderError]) -> None:
    said = to_error_response(kind("a reason"))
    assert response_schema.ErrorReply.model_validate(said.body())
    is_cloud_s = issubclass(kind, CloudLost | CloudRefused | VocabularyMismatch)
    if issubclass(kind, errors.InputError | DecodingError) and not is_cloud_s:
        assert said.status == 400
    assert (said.type == "cloud_error") == is_cloud_s


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PromptError("no text"), openai.BadRequestError),
        (QueueFull("full", 2.2), openai.RateLimitError),
        (CloudLost("away"), openai.InternalServerError),
        (StateError("a bug"), openai.InternalServerError),
        (ShuttingDown(), openai.InternalServerError),
    ],
)
def test_what_fails_before_the_first_word_has_its_status_streaming_or_not(
    error: OutriderError, kind: type[openai.APIStatusError], stream: bool
) -> None:
    for script in (Script(refusal=error), Script(batches=[], end=error)):
        with serving(script) as running, pytest.raises(kind) as raised:
            client(running).chat.completions.create(**HELLO, stream=stream)
        assert str(error) in raised.value.message
        if isinstance(error, ShuttingDown):
            assert (raised.value.status_code, raised.value.code) == (503, "going_down")
        if isinstance(error, PromptError) and script.refusal is not None:
            assert (raised.value.param, raised.value.code) == ("messages", "unusable")
        if isinstance(error, QueueFull):
            assert raised.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (ContextError("a prompt of 3000 tokens: demo holds 2048"), "prompt", "context_length_exceeded"),
        (SettingsError("logit_bias: ids go up to 1023"), "logit_bias", "unusable"),
        (SettingsError("way 'speculative' needs a cloud, and this gateway has none"), "outrider.way", "unusable"),
        (
            SettingsError("net 'cut' with on_cloud_loss 'wait' would wait forever: choose another on_cloud_loss"),
            "outrider.net",
            "unusable",
        ),
    ],
)
def test_what_only_the_model_can_tell_names_the_field_too(error: OutriderError, param: str, code: str) -> None:
    with serving(Script(refusal=error)) as running, pytest.raises(openai.BadRequestError) as raised:
        client(running).completions.create(model="outrider", prompt="x")
    assert (raised.value.param, raised.value.code) == (param, code)
    # LiteLLM, for one, looks for these words of OpenAI's.
    assert ("this model's maximum context length is" in str(raised.value)) == (code == "context_length_exceeded")


def test_a_stream_that_fails_later_ends_with_the_error() -> None:
    with serving(Script(end=CloudLost("away"))) as running:
        stream = client(running).chat.completions.create(**HELLO, stream=True)
        said = []
        with pytest.raises(openai.APIError, match="away"):
            said.extend(chunk.choices[0].delta.content for chunk in stream)
        assert said == ["", "a", " b", " c"]
        assert running.scheduler.active == 0


def test_an_unexpected_error_tells_no_more_than_its_kind() -> None:
    with serving(Script(refusal=ValueError("secret"))) as running:  # type: ignore[arg-type]
        reply = httpx2.post(f"{running.url}/v1/completions", json={"model": "outrider", "prompt": "x"})
        figures = httpx2.get(f"{running.url}/metrics").text
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert 'outrider_edge_requests_total{path="/v1/completions",status="500"} 1.0' in figures


def test_a_stream_whose_result_is_another_text_ends_with_an_error() -> None:
    with serving(Script(end=result_of("another", 3))) as running:
        stream = client(running).completions.create(model="outrider", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="not the result's"):
            list(stream)


def test_the_cloud_s_name_may_be_known_later() -> None:
    names = iter(["not there yet", "a model"])
    with serving(cloud=lambda: next(names)) as running:
        assert [httpx2.get(f"{running.url}/v1/outrider").json()["cloud"] for _ in range(2)] == [
            "not there yet",
            "a model",
        ]


# Clients that leave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generation(stream: bool) -> None:
    script = Script(batches=spoken(*["a"] * 1000), end=result_of("a" * 1000, 1000), pause=0.1)
    with serving(script) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
            body = json.dumps({**HELLO, "stream": stream}).encode()
            line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            line.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: running.scheduler.active == 1)
            if stream:
                assert b"200 OK" in line.recv(1000)
        wait_until(lambda: running.scheduler.active == 0)
        assert running.scheduler.tasks[0].cancelled_after < 1000  # type: ignore[operator]
        wait_until(lambda: "outrider_edge_disconnects_total 1.0" in httpx2.get(f"{running.url}/metrics").text)


@contextmanager
def uploading(running: Running, sent: bytes = b"{", size: int = 1000) -> Iterator[socket.socket]:
    """A request whose body does not come to its end."""
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
        line.settimeout(HANG_S)
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        line.sendall(b"Content-Length: %d\r\n\r\n" % size + sent)
        yield line


def arriving(running: Running) -> int:
    return running.gateway.uploads._by_client.total()


def test_a_client_that_leaves_while_it_sends_is_counted_as_gone() -> None:
    with serving() as running:
        with uploading(running):
            wait_until(lambda: arriving(running) == 1)
        wait_until(lambda: "outrider_edge_disconnects_total 1.0" in httpx2.get(f"{running.url}/metrics").text)
        figures = httpx2.get(f"{running.url}/metrics").text
        assert 'outrider_edge_requests_total{path="/v1/completions",status="499"} 1.0' in figures
        assert 'status="500"' not in figures
        assert arriving(running) == 0


def test_no_more_bodies_are_read_than_there_is_room_for() -> None:
    with serving() as running:
        running.scheduler.room = 2
        with uploading(running), uploading(running):
            wait_until(lambda: arriving(running) == 2)
            with uploading(running, b"") as third:
                assert b"429" in third.recv(1000).partition(b"\r\n")[0], "before its body"
        wait_until(lambda: arriving(running) == 0)
        client(running).chat.completions.create(**HELLO)


def test_one_client_s_uploads_leave_room_for_another_s() -> None:
    uploads = UploadLimiter()
    with uploads.upload("a", 1):
        with pytest.raises(QueueFull), uploads.upload("a", 1):
            pass
        with uploads.upload("b", 1), pytest.raises(QueueFull), uploads.upload("c", 1):
            pass
    with uploads.upload("a", 1):
        pass


def test_a_body_that_takes_too_long_is_not_waited_for() -> None:
    with serving(access=Access(body_s=0.2)) as running:
        with uploading(running) as line:
            assert b"408" in line.recv(1000).partition(b"\r\n")[0]
        assert arriving(running) == 0


def test_closing_the_client_s_stream_ends_the_generation() -> None:
    script = Script(batches=spoken(*["a"] * 1000), end=result_of("a" * 1000, 1000), pause=0.1)
    with serving(script) as running:
        stream = client(running).chat.completions.create(**HELLO, stream=True)
        next(stream)
        stream.close()
        wait_until(lambda: running.scheduler.active == 0)
        assert running.scheduler.tasks[0].cancelled_after < 1000  # type: ignore[operator]


# The door ---------------------------------------------------------------------------------------------------


def test_without_the_key_nothing_but_health_and_page_is_open(keys: Tokens) -> None:
    with serving(access=Access(keys)) as running:
        for path in ("/v1/models", "/v1/outrider", "/metrics"):
            assert httpx2.get(running.url + path).status_code == 401
        for path in ("/health", "/", "/openapi.json", "/demo/clips"):
            assert httpx2.get(running.url + path).status_code == 200
        with pytest.raises(openai.AuthenticationError) as refused:
            client(running, "another-key").chat.completions.create(**HELLO)
        assert refused.value.code == "invalid_api_key"
        assert "another-key" not in refused.value.message
        assert running.scheduler.asked == []
        client(running, KEY).chat.completions.create(**HELLO)
        assert running.scheduler.asked[0][0] == "me"


def test_without_keys_a_client_is_its_address(plain: Running) -> None:
    client(plain).chat.completions.create(**HELLO)
    assert plain.scheduler.asked[-1][0] == "127.0.0.1"


def test_a_client_cannot_name_another_address(plain: Running) -> None:
    httpx2.post(f"{plain.url}/v1/chat/completions", json=HELLO, headers={"x-forwarded-for": "10.9.8.7"})
    assert plain.scheduler.asked[-1][0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/demo/clips", "/openapi.json", "/page/page.js"])
def test_another_site_s_name_for_this_machine_is_refused(path: str) -> None:
    hosts = allowed_hosts("127.0.0.1", keys=False)
    with serving(access=Access(hosts=hosts)) as running:
        assert httpx2.get(running.url + path).status_code == 200
        assert httpx2.get(running.url + path, headers={"host": "evil.example"}).status_code == 403
        assert httpx2.get(running.url + path, headers={"host": "localhost:8080"}).status_code == 200
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())
            assert b"403" in line.recv(1000).partition(b"\r\n")[0], "named twice"
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
            line.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert b"200" in line.recv(1000).partition(b"\r\n")[0], (
                "HTTP/1.0 needs no name, and no browser leaves it out"
            )
        assert "location" not in httpx2.get(f"{running.url}/page", headers={"host": "evil.example"}).headers


def test_which_addresses_need_keys() -> None:
    check_listen("127.0.0.1", keys=False, insecure=False)
    check_listen("0.0.0.0", keys=True, insecure=False)
    check_listen("0.0.0.0", keys=False, insecure=True)
    with pytest.raises(errors.SettingsError, match="--api-keys"):
        check_listen("0.0.0.0", keys=False, insecure=False)
    with pytest.raises(errors.SettingsError, match="--api-keys"):
        check_listen("", keys=False, insecure=False)
    assert allowed_hosts("0.0.0.0", keys=False) is None
    assert allowed_hosts("::1", keys=False) == {"localhost", "127.0.0.1", "[::1]"}


def test_other_sites_pages_may_ask_only_where_they_were_let_in(plain: Running) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert httpx2.options(f"{plain.url}/v1/chat/completions", headers=asks).status_code == 405
    with serving(origins=("https://page.example",)) as running:
        reply = httpx2.options(f"{running.url}/v1/chat/completions", headers=asks)
        assert reply.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-private-network" not in reply.headers
        asks["access-control-request-private-network"] = "true"
        reply = httpx2.options(f"{running.url}/v1/chat/completions", headers=asks)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-private-network"] == "true"
        other = httpx2.options(f"{running.url}/v1/chat/completions", headers={**asks, "origin": "https://evil.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("headers", [{}, {**JSON, "content-encoding": "gzip"}])
def test_a_body_of_another_type_is_not_read(plain: Running, headers: dict[str, str]) -> None:
    reply = httpx2.post(f"{plain.url}/v1/completions", content=b"{}", headers=headers)
    assert reply.status_code == 415
    assert reply.headers["connection"] == "close", "the rest of the body would be taken for a request"


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_connection_on_which_a_request_does_not_come_to_an_end_is_closed(
    before: bytes, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 1)  # s; after an answer
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", HANG_S if before else 0.3)  # the first head has its time
    with serving() as running, socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
        line.settimeout(HANG_S)
        if before:
            wait_until(lambda: any(each._head_timer for each in running.listener.connections))
            monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
        heard = b""
        with suppress(ConnectionError):  # it may be closed before the head is sent
            line.sendall(before + begun)
            while part := line.recv(1000):
                heard += part
        assert heard.count(b"200 OK") == bool(before)


def test_a_request_may_take_longer_than_its_head() -> None:
    with serving() as running, socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
        body = json.dumps(HELLO).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        line.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
        wait_until(lambda: arriving(running) == 1)
        (connection,) = running.listener.connections
        assert connection._head_timer is None, "the body has no part in the head's time"
        line.sendall(body)
        line.settimeout(HANG_S)
        assert b"200" in line.recv(1000).partition(b"\r\n")[0]


def test_head_requests_for_the_page_succeed(plain: Running) -> None:
    assert httpx2.head(plain.url).status_code == 200


def test_the_page_s_files_have_the_page_s_headers(plain: Running) -> None:
    page, script = (httpx2.get(plain.url + path).headers for path in ("/", "/page/page.js"))
    for name in PAGE_HEADERS:
        assert script[name] == page[name]


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_body_is_refused_before_it_is_there(chunked: bool) -> None:
    with serving(access=Access(max_body=1000)) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as line:
            line.settimeout(HANG_S)
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            size = (
                b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % 1001 if chunked else b"Content-Length: 10000000\r\n\r\n"
            )
            line.sendall(size + (b" " * 1001 if chunked else b""))  # and no more
            assert b"413" in line.recv(1000).partition(b"\r\n")[0]
        with pytest.raises(openai.APIStatusError) as refused:
            client(running).completions.create(model="outrider", prompt="x" * 10_000_000)
        assert refused.value.status_code == 413


# Waiting ----------------------------------------------------------------------------------------------------


ASK = {"model": "outrider", "prompt": "x", "stream": True}


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "PING_S", 0.02)


@pytest.mark.usefixtures("quick_pings")
def test_a_stream_that_waits_for_a_slot_has_its_headers_at_once_and_comments_meanwhile() -> None:
    hold = threading.Event()
    with serving(Script(hold=hold)) as running:
        with httpx2.stream("POST", f"{running.url}/v1/completions", json=ASK, timeout=30) as reply:
            assert reply.status_code == 200
            parts = reply.iter_text()
            heard = ""
            while heard.count(": waiting\n\n") < 3:
                heard += next(parts)
            assert running.scheduler.tasks == []
            hold.set()
            rest = "".join(parts)
        assert "data:" not in heard
        assert rest.endswith("data: [DONE]\n\n")


@pytest.mark.usefixtures("quick_pings")
def test_openai_s_client_reads_past_the_comments() -> None:
    hold = threading.Event()
    with serving(Script(hold=hold, pause=0.05)) as running:
        stream = client(running).completions.create(**ASK)  # type: ignore[call-overload]
        hold.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == "a b c"


@pytest.mark.usefixtures("quick_pings")
def test_comments_fill_a_silence_in_mid_stream_too() -> None:
    script = Script(pause=0.2)
    with serving(script) as running:
        text = httpx2.post(f"{running.url}/v1/completions", json=ASK).text
    before, _, after = text.partition("data:")
    assert ": waiting" in after.partition("data:")[0], before


@pytest.mark.usefixtures("quick_pings")
@pytest.mark.parametrize(
    "error", [CloudLost("away"), QueueFull("full", 1), PromptError("no"), GenerationTimeout("too long")]
)
def test_what_fails_after_the_headers_is_the_stream_s_last_event(error: OutriderError) -> None:
    hold = threading.Event()
    with serving(Script(hold=hold, refusal=error)) as running:
        with httpx2.stream("POST", f"{running.url}/v1/completions", json=ASK, timeout=30) as reply:
            assert reply.status_code == 200
            hold.set()
            text = "".join(reply.iter_text())
        events = [part for part in text.split("\n\n") if part and not part.startswith(":")]
        assert len(events) == 1
        said = response_schema.ErrorReply.model_validate_json(events[0].removeprefix("data: "))
        assert str(error) in said.error.message
        assert httpx2.get(f"{running.url}/health").status_code == 200


def test_what_can_be_refused_before_the_queue_has_its_status() -> None:
    with serving(Script(hold=threading.Event())) as running:
        reply = httpx2.post(f"{running.url}/v1/completions", json={**ASK, "top_p": 5})
        assert reply.status_code == 400


def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    with serving(Script(hold=threading.Event())) as running:
        with httpx2.stream("POST", f"{running.url}/v1/completions", json=ASK, timeout=30) as reply:
            assert reply.status_code == 200
        wait_until(lambda: "outrider_edge_disconnects_total 1.0" in httpx2.get(f"{running.url}/metrics").text)


def test_a_generation_that_took_too_long_is_504() -> None:
    with serving(Script(batches=[], end=GenerationTimeout("after 600 s"))) as running:
        reply = httpx2.post(f"{running.url}/v1/completions", json={**ASK, "stream": False})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "time_limit")


# Streams ----------------------------------------------------------------------------------------------------


def test_a_batch_of_events_is_one_chunk() -> None:
    with serving(Script(batches=[[event(0, "a"), event(1, " b"), event(2, " c")]])) as running:
        chunks = list(client(running).chat.completions.create(**HELLO, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a b c", None]


def test_the_stream_is_ended_by_done(plain: Running) -> None:
    reply = httpx2.post(f"{plain.url}/v1/chat/completions", json={**HELLO, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")


def test_provisional_tokens_come_only_when_asked_for() -> None:
    batches = [[event(0, "x", "provisional")], [event(0, "a", "revised")], *spoken("a", " b", " c")[1:]]
    with serving(Script(batches=batches)) as running:
        for asked, kinds in ((False, ["revised"]), (True, ["provisional", "revised"])):
            options = {"tokens": True, "provisional": asked}
            stream = client(running).chat.completions.create(**HELLO, stream=True, extra_body={"outrider": options})
            chunks = list(stream)
            told = [t for chunk in chunks for t in (getattr(chunk, "outrider", None) or {}).get("tokens", [])]
            assert [token["kind"] for token in told][: len(kinds)] == kinds
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a b c"


def test_listeners_are_tcp_so_that_nagle_is_switched_off() -> None:
    with bound("127.0.0.1", 0) as on:  # asyncio switches Nagle's algorithm off only where it sees that this is TCP
        assert on.proto == socket.IPPROTO_TCP
