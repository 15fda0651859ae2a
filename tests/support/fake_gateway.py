"""A gateway that plays a script: for what a real one does not do on demand, such as an error in mid-stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import outrider

PAGE = Path(outrider.__file__).parent / "gateway" / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SURE = {"entropy": 0.1, "margin": 0.9, "maxprob": 0.02, "logprob": 0.05}
STATS = {
    "rounds": 1,
    "blocks": 2,
    "escalated": 1,
    "verified": 4,
    "accepted": 3,
    "cloud_lost": False,
    "ttft_s": 0.05,
    "total_s": 0.5,
}
END = {
    "guarantee": "best-effort",
    "finish_reason": "eos",
    "stats": STATS,
    "warnings": [],
    "risk": None,
    "ledger": {"up": {"verify": 900, "transport": 60}, "down": {"verdict": 120}},
}


def token(kind: str, index: int, text: str, source: str, **more: Any) -> dict[str, Any]:
    """One token as a stream reports it. Its id follows from its text, so that the same text is the same token."""
    return {
        "kind": kind,
        "index": index,
        "id": sum(text.encode()),
        "text": text,
        "source": source,
        "signals": SURE,
    } | more


def tokens(*events: dict[str, Any]) -> bytes:
    return chunk({"tokens": list(events)})


def chunk(own: dict[str, Any], **more: Any) -> bytes:
    """One server-sent event. Its characters are sent as they are, so that a cut can fall into one."""
    body = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": None}]}
    return b"data: " + json.dumps({**body, "outrider": own, **more}, ensure_ascii=False).encode() + b"\n\n"


def ended(**more: Any) -> bytes:
    return chunk({**END, **more}) + b"data: [DONE]\n\n"


@dataclass
class Script:
    """What is played. pieces: written one by one, `pause` seconds apart. status: other than 200, with `error`."""

    pieces: list[bytes] = field(default_factory=list)
    pause: float = 0.0
    status: int = 200
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    key: str = ""
    audio: bool = False
    edge: str = "an edge"
    cloud: str = "a cloud"
    networks: bool = True
    cut: bool = True
    trouble: str = ""  # why the cloud is away
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # a client went away in mid-stream

    def about(self) -> dict[str, Any]:
        return {
            "edge": self.edge,
            "cloud": self.cloud,
            "audio": self.audio,
            "text": True,
            "networks": self.networks,
            "cut": self.cut,
            "slots": 8,
            "settings": {"max_new_tokens": 99},
            "signals": ["entropy", "margin", "maxprob", "logprob"],
            "drafter": "none" if self.edge == "none" else "model",
            "version": "0",
            "defaults": self._defaults(),
        }

    def _defaults(self) -> dict[str, Any]:
        """Without an edge or a cloud, the options that do not apply are left out."""
        if self.cloud == "none":
            return {"way": "edge-only", "k": 5}
        if self.edge == "none":
            return {"way": "cloud-only", "net": "none"}
        return {"way": "speculative", "gate": "always", "k": 5, "net": "none"}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        script, path = self.server.script, self.path
        if path.startswith(("/v1", "/demo")) and script.key not in ("", self._key()):
            self._json(401, {"error": {"message": "This key is not known.", "type": "invalid_request_error"}})
        elif path == "/v1/outrider":
            self._json(200, script.about())
        elif path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "a pair", "object": "model"}]})
        elif path == "/health":
            self._json(200, {"status": "degraded" if script.trouble else "ok", "reason": script.trouble or None})
        elif path == "/demo/clips":
            self._json(200, [])
        else:
            file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
            self._send(200, KINDS[file.suffix], file.read_bytes())

    def do_POST(self) -> None:
        script = self.server.script
        script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if script.status != 200:
            self._json(script.status, {"error": script.error}, script.headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for piece in script.pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(script.pause)  # scripted: the time between two pieces
        except OSError:
            script.left.set()

    def _key(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", json.dumps(body).encode(), headers or {})

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = Script()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


@contextmanager
def standing_in() -> Iterator[StandIn]:
    """A stand-in that serves until the block ends."""
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
