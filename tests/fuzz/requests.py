"""Hostile requests against a gateway that plays scripts: heads, framing, JSON, fields.

    python -m tests.fuzz.requests --seconds 600 [--seed 7]

Invariants: every answer is HTTP and none is a 500; the gateway still answers `/health`; nothing is left over; its
memory stays within `GROWTH`. The first broken one ends the run, with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from outrider.gateway.access import Access
from tests.support.processes import wait_until
from tests.support.scripted_gateway import Running, Script, serving

GROWTH = 192 * 2**20  # bytes
PATHS = ["/v1/chat/completions", "/v1/completions", "/health", "/v1/models", "/", "/page/page.js", "/v1/outrider/cut/x"]
WORDS: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, "", "x", "\ud83d\ude00", "\x00", "\u202e",
    "outrider", "user", "input_audio", "text", [], {}, [[]], "rtt=1s", "always", "A" * 3000, [0] * 3000,
    {"type": "text"},
    "data:audio/wav;base64,AAAA", "entropy:0.3", "calibrated:/etc/passwd", "none", "cut",
]  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop",
    "seed", "n", "logit_bias", "user", "outrider", "tools", "stream_options", "response_format", "reasoning_effort",
    "parallel_tool_calls", "store", "metadata", "x", "top_k",
]  # fmt: skip
OPTIONS = ["way", "gate", "k", "accept", "net", "tokens", "provisional", "task", "lang", "top_k", "min_p", "scope", "x"]
HEADERS = [
    b"Content-Type: application/json", b"Content-Type: text/plain", b"Content-Encoding: gzip", b"Connection: close",
    b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c", b"Expect: 100-continue", b"Host: localhost",
    b"Host: evil.example", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Length: 5",
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Authorization: Bearer x", b"Range: bytes=0-5",
    b"Origin: null", b"X: \xff\xfe", b": x", b"X", b"X : y", b" folded", b"Accept-Encoding: *", b"X: " + b"a" * 9000,
]  # fmt: skip


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value, likely of a shape that means something."""
    kind = draw.random()
    if depth > 3 or kind < 0.5:
        return draw.choice(WORDS)
    if kind < 0.65:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind < 0.8:
        return [{"role": value(draw, 4), "content": value(draw, depth + 1)} for _ in range(draw.randrange(3))]
    if kind < 0.9:
        sound = {"data": draw.choice(WORDS), "format": draw.choice(["wav", "ogg", "x", 1])}
        return [{"type": draw.choice(["text", "input_audio", "x"]), "text": "x", "input_audio": sound}]
    return {draw.choice(OPTIONS + FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(5))}


def body(draw: random.Random) -> bytes:
    """A request's body: well meant with a few fields changed, or bytes."""
    kind = draw.random()
    if kind < 0.05:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
    if kind < 0.1:
        return draw.choice(
            [b"[" * 5000, b'{"a":' * 5000, b"{}" * 9, b"nul", b'{"model":"outrider","model":1}', b"\xff{}"]
        )
    fields: dict[str, Any] = {
        "model": "outrider",
        "messages": [{"role": "user", "content": "hello"}],
        "prompt": "hello",
    }
    del fields[draw.choice(["messages", "prompt"])]
    for _ in range(draw.randrange(4)):
        fields[draw.choice(FIELDS)] = value(draw)
    if draw.random() < 0.3:
        fields["outrider"] = {draw.choice(OPTIONS): value(draw, 3) for _ in range(3)}
    return json.dumps(fields).encode("utf-8", "surrogatepass")


def request(draw: random.Random) -> bytes:
    """A whole request, well formed or not."""
    method = draw.choice(
        [b"POST"] * 8 + [b"GET", b"HEAD", b"OPTIONS", b"PUT", b"G E T", b"PRI", b"CONNECT", b"\x16\x03"]
    )
    path = (
        draw.choice(PATHS).encode() if draw.random() < 0.9 else draw.choice([b"*", b"x", b"//", b"/%ff%00", b"/\xff"])
    )
    version = draw.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""])
    content, headers = body(draw), [b"Host: localhost", b"Content-Type: application/json"]
    if draw.random() < 0.3:
        headers = draw.choices(HEADERS, k=draw.randrange(6))
    if draw.random() < 0.2:
        headers.append(b"Transfer-Encoding: chunked")
        content = chunked(draw, content)
    else:
        headers.append(b"Content-Length: %d" % (len(content) + draw.choice([0] * 20 + [1, 7, -1])))
    sent = b" ".join([method, path, version]) + b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + content
    if draw.random() < 0.15:  # damaged
        at = draw.randrange(len(sent))
        sent = sent[:at] + bytes([draw.randrange(256)]) * draw.choice([1, 1, 40_000]) + sent[at + 1 :]
    return sent[: draw.randrange(len(sent))] if draw.random() < 0.1 else sent


def chunked(draw: random.Random, content: bytes) -> bytes:
    made = b""
    while content:
        size = draw.randrange(1, 200)
        part, content = content[:size], content[size:]
        made += b"%x" % len(part) + draw.choice([b"", b";x=y"]) + b"\r\n" + part + b"\r\n"
    return made + draw.choice([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\n", b"-1\r\n\r\n", b"zz\r\n"])


def ask(port: int, draw: random.Random) -> bytes:
    """What comes back for one connection's requests; it may be closed at any moment by either side."""
    sent = b"".join(request(draw) for _ in range(draw.choice([1, 1, 1, 2, 30])))
    heard = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.3) as line:
        line.sendall(sent)
        if draw.random() < 0.5:
            line.shutdown(socket.SHUT_WR)
        while draw.random() < 0.98 and (part := line.recv(2**16)):
            heard += part
    return heard


def check(heard: bytes) -> None:
    """Raise AssertionError for an answer that must not be."""
    assert not heard or heard.startswith(b"HTTP/1.1 "), heard[:200]
    for status in (b"500", b"501", b"502", b"504"):
        assert b"HTTP/1.1 %s" % status not in heard, heard[:1000]
    assert b"unexpected" not in heard.lower(), heard[:1000]
    assert b"Traceback" not in heard, heard[:1000]


def fuzz(seconds: float, seed: int, tell: Callable[[str], None] = lambda _: None) -> int:
    """How many connections were made."""
    process, count, until = psutil.Process(), 0, time.monotonic() + seconds
    with serving(Script(), Access(max_body=2**20, body_s=0.5)) as running:
        port, before = int(running.url.rpartition(":")[2]), process.memory_info().rss
        while time.monotonic() < until:
            number = seed + count
            try:
                check(ask(port, random.Random(number)))
            except AssertionError as error:
                raise AssertionError(f"--seed {number}: {error}") from error
            count += 1
            if count % 100 == 0:
                still_well(running, process.memory_info().rss - before, number)
                tell(f"{count} connections")
        still_well(running, process.memory_info().rss - before, seed + count)
    return count


def still_well(running: Running, growth: int, number: int) -> None:
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=30) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in line.recv(2**16).partition(b"\r\n")[0], f"after --seed {number}"
    assert growth < GROWTH, f"after --seed {number}: {growth} bytes"
    gateway = running.gateway
    wait_until(lambda: not (gateway.active_requests or gateway.uploads._bytes or running.scheduler.active))


def main() -> None:
    parser = argparse.ArgumentParser(description="hostile requests against the gateway")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # noqa: T201
    print(f"{fuzz(options.seconds, seed)} connections, and the gateway is well")  # noqa: T201


if __name__ == "__main__":
    main()
