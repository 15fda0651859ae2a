"""Limits that hold before any key is checked: heads, pipelining, the number of connections, unread answers."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from starlette.requests import Request

from outrider.gateway import connections, handlers
from outrider.gateway.access import Access
from outrider.gateway.connections import (
    ACCEPTS_PER_TICK,
    HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    URL_BYTES,
    Listener,
    OpenConnections,
)
from outrider.gateway.errors import QueueFull
from outrider.gateway.upload_limiter import UploadLimiter
from outrider.serving.tokens import Tokens
from tests.support.processes import HANG_S, wait_until
from tests.support.scripted_gateway import Running, Script, serving

KEY = "a-key-that-is-long-enough"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
KEYED = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "keys").write_text(f"me {KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    with serving(access=Access(Tokens.load(tmp_path / "keys"))) as running:
        yield running


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=HANG_S) as line:
        yield line


def everything(line: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while part := line.recv(2**16):
            heard += part
    return heard


def answered(line: socket.socket) -> bytes:
    """One answer of /health, whole."""
    heard = b""
    while not heard.endswith(b"}"):
        part = line.recv(2**16)
        assert part, heard
        heard += part
    return heard


def send(line: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
        line.sendall(data)


HEADS = {
    "one header without an end": (GET + b"X: " + b"a" * 2**20, 431),
    "a header's name without an end": (GET + b"x" * 2**20, 431),
    "headers without an end": (GET + b"X: a\r\n" * 2**17, 431),
    "a URL without an end": (b"GET /" + b"a" * 2**20, 414),
    "a long URL": (b"GET /" + b"a" * URL_BYTES + b" HTTP/1.1\r\n\r\n", 414),
    "a method without an end": (b"G" * 2**20, 400),
    "many headers": (GET + b"X: a\r\n" * MAX_HEADERS + b"\r\n", 431),
    "empty lines": (b"\r\n" * 2**19, 431),
    "trailers without an end": (POST + KEYED + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 2**20, 431),
    "many trailers": (POST + KEYED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 2**15, 431),
    "a chunk's extension without an end": (
        POST + KEYED + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 2**20,
        431,
    ),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "second"])
def test_a_head_is_bounded(keyed: Running, name: str, before: bytes) -> None:
    sent, status = HEADS[name]
    with connected(keyed.url) as line:
        send(line, before)
        if before:
            assert b"200 OK" in answered(line)
        send(line, sent)
        heard = everything(line)
    assert heard.startswith(b"HTTP/1.1 %d " % status), heard[:200]
    assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert httpx2.get(f"{keyed.url}/health").status_code == 200


def test_a_head_within_the_limits_is_taken(keyed: Running) -> None:
    big = {f"x-{n}": "a" * 300 for n in range(MAX_HEADERS - 10)}
    assert httpx2.get(f"{keyed.url}/health?{'a' * (URL_BYTES - 100)}").status_code == 200
    assert httpx2.get(f"{keyed.url}/health", headers=big).status_code == 200


def test_requests_on_one_connection_are_answered_in_turn_up_to_a_number(keyed: Running) -> None:
    with connected(keyed.url) as line:
        send(line, (GET + b"\r\n") * MAX_PIPELINED)
        heard = b""
        while heard.count(b"200 OK") < MAX_PIPELINED:
            heard += line.recv(2**16)
        send(line, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)
        everything(line)
    assert httpx2.get(f"{keyed.url}/health").status_code == 200


def test_nothing_is_written_into_an_answer_that_has_begun() -> None:
    with serving(Script(hold=threading.Event())) as running, connected(running.url) as line:
        body = json.dumps({"model": "outrider", "prompt": "x", "stream": True}).encode()
        send(line, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b"200 OK" in line.recv(2**16)
        send(line, b"this is not HTTP\r\n\r\n")
        assert b"HTTP/1.1" not in everything(line)


def test_a_refused_body_is_dropped_for_a_while_and_its_client_sees_why(
    keyed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_TIMEOUT_S", 0.3)
    with connected(keyed.url) as line:
        send(line, POST + b"Content-Length: 10000000\r\n\r\n" + b" " * 1000)
        assert b" 401 " in line.recv(2**16).partition(b"\r\n")[0]

        def closed() -> bool:
            try:
                line.sendall(b" ")
            except ConnectionError:
                return True
            return False

        wait_until(closed)  # however slowly the rest comes


def test_a_refused_body_that_comes_to_its_end_leaves_the_connection_open(keyed: Running) -> None:
    body = b" " * 300_000
    with httpx2.Client() as client:
        for _ in range(3):
            reply = client.post(
                f"{keyed.url}/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            assert reply.status_code == 401
        assert client.get(f"{keyed.url}/health").status_code == 200


def test_http_1_0_gets_no_chunk_sizes_and_the_end_of_the_connection_ends_its_stream() -> None:
    with serving() as running, connected(running.url) as line:
        body = json.dumps({"model": "outrider", "prompt": "x", "stream": True}).encode()
        head = POST.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
        send(line, head + body)
        head, _, rest = everything(line).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")


def test_http_1_0_gets_whole_answers_too() -> None:
    with serving() as running, connected(running.url) as line:
        send(line, b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
        head, _, rest = everything(line).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert json.loads(rest)["data"]


# The number of connections --------------------------------------------------------------------------------------


def test_an_idle_connection_gives_way_to_a_new_one(keyed: Running) -> None:
    keyed.listener.max_connections = 4
    with ExitStack() as stack:
        lines = [stack.enter_context(connected(keyed.url)) for _ in range(4)]
        for line in lines:
            send(line, GET + b"\r\n")
            assert b"200 OK" in answered(line)
        for _ in range(6):
            assert httpx2.get(f"{keyed.url}/health").status_code == 200
        assert everything(lines[0]) == b"", "closed"


def test_where_all_are_busy_a_new_one_is_refused_and_the_old_ones_go_on() -> None:
    with serving(Script(pause=0.5)) as running, ExitStack() as stack:
        running.listener.max_connections = 2
        body = json.dumps({"model": "outrider", "prompt": "x", "stream": True}).encode()
        lines = [stack.enter_context(connected(running.url)) for _ in range(2)]
        for line in lines:
            send(line, POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        heard = [line.recv(2**16) for line in lines]
        with connected(running.url) as third:
            assert everything(third).startswith(b"HTTP/1.1 503 ")
        assert all(b"[DONE]" in first + everything(line) for first, line in zip(heard, lines, strict=True))
        assert httpx2.get(f"{running.url}/health").status_code == 200


class Client:
    """A connection of a client, for `OpenConnections`."""

    def __init__(self, host: str) -> None:
        self.client = (host, 1)


def opened(*hosts: str) -> tuple[OpenConnections, list[Any]]:
    """Connections from these hosts, idle from the first to the last."""
    found, made = OpenConnections(), [Client(host) for host in hosts]
    for each in made:
        found.add(each)
        found.mark_idle(each)  # type: ignore[arg-type]
    return found, made


def test_the_address_with_the_most_idle_connections_loses_the_one_idle_for_longest() -> None:
    found, (a1, b1, a2, b2, b3) = opened("a", "b", "a", "b", "b")
    assert found.pop_idle() is b1
    assert [found.pop_idle() for _ in range(5)] == [a1, b2, a2, b3, None]


def test_a_connection_with_a_request_or_without_a_client_is_not_idle() -> None:
    found, (first, second, third) = opened("a", "a", "a")
    found.mark_busy(first)
    found.discard(second)
    found.mark_idle(second)
    assert found.pop_idle() is third
    assert found.pop_idle() is None
    found.mark_idle(first)
    assert found.pop_idle() is first


def test_a_connection_that_is_idle_again_is_idle_from_then_on() -> None:
    found, (first, second) = opened("a", "a")
    found.mark_idle(first)
    assert [found.pop_idle(), found.pop_idle()] == [second, first]


@contextmanager
def listening(most: int) -> Iterator[Listener]:
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as on:
        on.bind(("127.0.0.1", 0))
        on.listen()
        on.setblocking(False)
        on.max_connections = most
        yield on


def test_a_flood_of_connections_to_refuse_leaves_the_loop_its_turns() -> None:
    with listening(0) as on, ExitStack() as stack:
        count = 2 * ACCEPTS_PER_TICK
        lines = [stack.enter_context(socket.create_connection(on.getsockname(), timeout=HANG_S)) for _ in range(count)]
        for turn in (1, 2):
            with pytest.raises(BlockingIOError):
                on.accept()
            refused = turn * ACCEPTS_PER_TICK
            assert all(line.recv(12) == b"HTTP/1.1 503" for line in lines[refused - ACCEPTS_PER_TICK : refused])
        assert count == refused


def test_a_closed_connection_makes_room_though_it_is_still_referenced() -> None:
    with listening(1) as on, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(on.getsockname(), timeout=HANG_S))
        first, _ = on.accept()
        first.close()
        second, _ = on.accept()
        second.close()


SERVER = """
import sys, threading
from tests.support.scripted_gateway import serving
with serving() as running:
    print(running.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def in_a_process(before: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A gateway in a process of its own. before: Python that runs first there."""
    code = before + textwrap.dedent(SERVER)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url, child.stderr and child.stderr.read()
        try:
            yield url, child
        finally:
            child.kill()


def test_few_file_descriptors_and_many_kept_connections_do_no_harm() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    with in_a_process(limit) as (url, child), ExitStack() as stack:
        for n in range(90):
            line = stack.enter_context(connected(url))
            send(line, GET + b"\r\n")
            assert b"200 OK" in answered(line), n
        burst = [stack.enter_context(connected(url)) for _ in range(90)]  # all at once, and silent
        for _ in range(5):
            assert httpx2.get(f"{url}/health", timeout=HANG_S).status_code == 200
        assert len(burst) == 90
        child.kill()
        assert child.stderr is not None
        assert len(child.stderr.read()) < 1000


def test_a_connection_without_a_complete_head_costs_at_most_100_kib() -> None:
    count, head = 300, GET + b"X: a\r\n" * 90 + b"Y: "
    with in_a_process() as (url, child), ExitStack() as stack:
        assert httpx2.get(f"{url}/health").status_code == 200
        process = psutil.Process(child.pid)
        before = process.memory_info().rss
        for _ in range(count):
            line = stack.enter_context(connected(url))
            send(line, head + b"a" * (HEAD_BYTES - len(head) - 1))
        assert httpx2.get(f"{url}/health", timeout=HANG_S).status_code == 200
        assert (process.memory_info().rss - before) / count < 100 * 1024


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_TIMEOUT_S", 0.3)
    with serving() as running, connected(running.url) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        with pytest.raises(ConnectionError):  # noqa: PT012 - any of them may find it closed
            while True:
                line.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_every_interface_means_both_families() -> None:
    from outrider.gateway.server import bound

    with bound("", 0) as on:
        assert isinstance(on, Listener)
        on.listen()
        port = on.getsockname()[1]
        for host in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((host, port), timeout=HANG_S).close()


# Bodies and waiting prompts --------------------------------------------------------------------------------------


def test_the_bytes_of_one_client_s_unread_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "PROMPT_BYTES", 0)
    body = b'{"model": "outrider", "prompt": "' + b"x" * 600
    with serving(access=Access(max_body=1000)) as running, ExitStack() as stack:
        budget = running.gateway.budget
        assert budget == 4000
        for n in range(6):
            line = stack.enter_context(connected(running.url))
            send(line, POST + b"Content-Length: 900\r\n\r\n" + body)
            wait_until(lambda n=n: sum(running.gateway.uploads._bytes.values()) == len(body) * (n + 1))
        late = stack.enter_context(connected(running.url))
        send(late, POST + b"Content-Length: 900\r\n\r\n" + body)
        assert b" 429 " in late.recv(2**16).partition(b"\r\n")[0]
        assert sum(running.gateway.uploads._bytes.values()) <= budget
        stack.close()
        wait_until(lambda: not running.gateway.uploads._bytes)


def test_all_clients_together_have_twice_as_much() -> None:
    uploads = UploadLimiter()
    with uploads.reserving("a", 10) as a, uploads.reserving("b", 10) as b, uploads.reserving("c", 10) as c:
        a(10)
        with pytest.raises(QueueFull):
            a(1)
        b(9)
        with pytest.raises(QueueFull):
            c(2)
        c(1)
    assert not uploads._bytes


def test_a_client_is_the_same_through_both_families() -> None:
    scope = {"type": "http", "client": ("::ffff:10.0.0.1", 1), "headers": []}
    assert Access().authenticate(Request(scope)) == "10.0.0.1"
