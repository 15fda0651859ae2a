"""Other people's servers, played on loopback by a tiny float32 model: what vLLM's and SGLang's share.

They check every field of every request, more strictly than the real ones: a field that is not listed, or not left at
what it must be, is a 400. Their prefix cache is counted, not built: rows come from reading the whole sequence, and what
a real server would have had in its cache is left out, or overwritten with garbage, as a real one does.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from outrider import SpeculativeDecoder, connect, local
from outrider.config import GenerationSettings
from outrider.engines.base import Prompt
from tests.support.fakes import ScriptedEngine
from tests.support.ports import ReservedPort
from tests.support.tiny_models import byte_tokenizer, tiny_engine

Json = dict[str, Any]
Check = Callable[[Any], bool]
BLOCK = 16  # tokens; what a prefix cache holds
ENGINES = threading.RLock()  # engines are shared between servers, and no two threads may use one


@dataclass(frozen=True)
class Answer:
    """What a server sends. body: JSON, or bytes as they are."""

    status: int
    body: Any
    headers: tuple[tuple[str, str], ...] = ()


class Bad(Exception):
    """A request that the server refuses."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Fault:
    """Something that goes wrong with the next `times` requests for `path` (any, if empty), after `skip` good ones.

    status: instead of 200. drop: the request is not even read, else it is answered, and what it read is cached. delay:
    seconds. cut: the answer ends in its middle, and so does the connection. raw: sent instead. alter: what becomes of
    the answer.
    """

    path: str = ""
    status: int = 200
    message: str = "injected"
    headers: tuple[tuple[str, str], ...] = ()
    drop: bool = False
    delay: float = 0.0
    cut: bool = False
    raw: bytes | None = None
    alter: Callable[[Any], Any] | None = None
    skip: int = 0
    times: int = 1


# The pair -------------------------------------------------------------------------------------------------------

EOS = (41, 99)
TOKENS = 12  # in an output


def target_engine(family: str = "qwen2", *, eos: tuple[int, ...] = EOS, **options: Any) -> Any:
    return tiny_engine(family, vocab=266, tokenizer=byte_tokenizer(), eos=eos, **options)


@cache
def draft_engine(family: str = "qwen2", *, drift: float = 0.05, eos: tuple[int, ...] = EOS) -> Any:
    """A drafter that is often right; for texts, one that has what was read before by heart."""
    engine = target_engine(family, eos=eos, drift=drift)
    if family != "qwen2":
        return engine
    return Remembering(engine)


class Remembering(ScriptedEngine):
    """An engine that reads nothing twice."""

    def __init__(self, engine: Any) -> None:
        size, words, ends = engine.vocab_size, engine.tokenizer, engine.eos_ids
        super().__init__(lambda ids: rows_of(engine, list(ids))[-1], size, eos_ids=ends, tokenizer=words)
        self.vocabulary, self._fingerprint = engine.vocabulary, engine.fingerprint

    @property
    def fingerprint(self) -> str:
        return str(self._fingerprint)


def reference_result(prompt: Any, engine: Any = None, *, drafter: Any = None, **options: Any) -> Any:
    """The result with the same model in this process. options: the decoder's, then those of `generate`."""
    options = {"max_new_tokens": TOKENS, **options}
    options |= {"logit_bias": GenerationSettings.build({"logit_bias": options.get("logit_bias", {})}).logit_bias}
    frozen = tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in options.items()))
    prompt = tuple(prompt) if isinstance(prompt, list) else prompt
    return (_cached_reference if isinstance(prompt, tuple) else _cached_reference.__wrapped__)(
        prompt, engine or target_engine(), drafter or draft_engine(), frozen
    )


@cache
def _cached_reference(prompt: Any, engine: Any, drafter: Any, frozen: tuple[tuple[str, Any], ...]) -> Any:
    options = dict(frozen)
    own = {name: options.pop(name) for name in ("k", "accept", "gate") if name in options}
    decoder = SpeculativeDecoder(drafter, local(engine), **own)
    with ENGINES:
        return decoder.generate(list(prompt) if isinstance(prompt, tuple) else prompt, **options)


def connect_servers(*servers: Server, patience: float = 3.0, deadline: float = 5.0, **options: Any) -> Any:
    """Connect to one server, or to several replicas of one."""
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return connect(f"{servers[0].scheme}://{hosts}", patience=patience, deadline=deadline, **options)


def generate(verifier: Any, prompt: Any, *, drafter: Any = None, **options: Any) -> Any:
    """Generate with a verifier. options: the decoder's, then those of `generate`."""
    own = {n: options.pop(n) for n in ("k", "accept", "gate", "driver", "on_cloud_loss", "privacy") if n in options}
    decoder = SpeculativeDecoder(draft_engine() if drafter is None else drafter, verifier, **own)
    return decoder.generate(prompt, **{"max_new_tokens": TOKENS, **options})


def rows_of(engine: Any, tokens: list[int], audio: np.ndarray | None = None) -> torch.Tensor:
    """Logits after each token, float32 [len(tokens), V]: read as one sequence, once."""
    known = _KNOWN.setdefault(engine, {})
    prefixes = [tuple(tokens[:n]) for n in range(1, len(tokens) + 1)]
    if audio is None and all(prefix in known for prefix in prefixes):
        return torch.stack([known[prefix] for prefix in prefixes])
    with ENGINES:
        slot = engine.open(Prompt(tuple(tokens), audio))
        rows = engine.forward(slot, tokens).clone()
        engine.close(slot)
    if audio is None and len(tokens) < 100:
        known.update(zip(prefixes, rows, strict=True))
    return rows


_KNOWN: dict[Any, dict[tuple[int, ...], torch.Tensor]] = {}


# What fields may hold -------------------------------------------------------------------------------------------


def whole(low: int, high: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def exactly(*wanted: Any) -> Check:
    return lambda value: any(type(value) is type(one) and value == one for one in wanted)


def text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(whole(0, 2**63 - 1), value))


def check_fields(body: Any, fields: dict[str, Check], where: str, needed: tuple[str, ...] = ()) -> None:
    """Raise Bad for a field that is unknown, lacking, or holds what it must not."""
    if not isinstance(body, dict):
        raise Bad(f"{where}: Input should be a valid dictionary")
    if unknown := sorted(set(body) - set(fields)):
        raise Bad(f"{where}: unknown fields {', '.join(unknown)}")
    if lacking := sorted(set(needed) - set(body)):
        raise Bad(f"{where}: lacks {', '.join(lacking)}")
    for name, value in body.items():
        if not fields[name](value):
            raise Bad(f"{where}.{name}: {str(value)[:80]} is not accepted")


# The model ------------------------------------------------------------------------------------------------------


class Model:
    """A tiny engine behind a server. tokenizer: the server's own, where it differs from the engine's."""

    def __init__(self, engine: Any, *, tokenizer: Any = None, eos: tuple[int, ...] | None = None) -> None:
        self.engine, self.tokenizer = engine, tokenizer or engine.tokenizer
        self.eos = engine.eos_ids if eos is None else eos

    @property
    def rows(self) -> int:
        """Ids that can be read: entries of a row."""
        return int(self.engine.row_count)

    def read(self, tokens: list[int], audio: np.ndarray | None = None) -> torch.Tensor:
        """Logits after each token, float32 [len(tokens), V]."""
        if max(tokens) >= self.rows:
            raise Bad(f"Token id {max(tokens)} is out of vocabulary")
        return rows_of(self.engine, tokens, audio)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


def best(row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """(token, value) of the best `count` entries (−1: all), the best first."""
    found = torch.topk(row, len(row) if count < 0 else min(count, len(row)))
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def rank(row: torch.Tensor, token: int) -> int:
    return int((row > row[token]).sum()) + 1


class PrefixCache:
    """Which blocks have been read, and how many tokens were read anew."""

    def __init__(self) -> None:
        self._blocks: set[tuple[Any, ...]] = set()

    def take(self, key: Any, tokens: list[int], *, reuse: bool = True) -> int:
        """How many of the tokens were there; the last one never is, for it has to be read. Then all are."""
        blocks = [(key, *tokens[: n + BLOCK]) for n in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)]
        found = 0
        for block in blocks[: (len(tokens) - 1) // BLOCK] if reuse else ():
            if block not in self._blocks:
                break
            found += BLOCK
        self._blocks.update(blocks)
        return found


# HTTP -----------------------------------------------------------------------------------------------------------


class Server:
    """A server in a thread. `paths`: method and path to what answers; subclasses fill it.

    requests: (path, body) of all that were heard; read: tokens that were read anew; sessions: the X-Session-ID of
    those that read any.
    """

    scheme = ""

    def __init__(self, model: Model, *, key: str | None = None) -> None:
        self.model, self.key = model, key
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, Json]] = []
        self.sessions: list[str] = []
        self.errors: list[str] = []
        self.read = 0
        self.paths: dict[tuple[str, str], Callable[[Json], Any]] = {}
        self._http: _Http | None = None

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._reserved.release()

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, with nothing cached, always at the same port."""
        self.forget()
        self._http = _Http(self)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening, and break every connection."""
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            http.hang_up()

    def forget(self) -> None:
        """Lose everything that a process keeps."""

    def asked(self, path: str) -> list[Json]:
        """The bodies of the requests for a path."""
        return [body for asked, body in self.requests if asked == path]

    def error(self, status: int, message: str) -> Json:
        """An error as this server words it."""
        raise NotImplementedError

    def answer(self, method: str, path: str, headers: Any, data: bytes) -> Answer:
        try:
            if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
                return Answer(401, {"error": "Unauthorized"})
            if (method, path) not in self.paths:
                return Answer(404, {"detail": "Not Found"})
            return Answer(200, self.paths[method, path](self._body(method, headers, data)))
        except Bad as bad:
            self.errors.append(str(bad))
            return Answer(bad.status, self.error(bad.status, str(bad)))

    def _body(self, method: str, headers: Any, data: bytes) -> Json:
        if method == "GET":
            return {}
        if headers.get("content-type") != "application/json":
            raise Bad("Unsupported media type", 415)
        return json.loads(data)

    def fault(self, path: str) -> Fault:
        """What goes wrong with this request; a fault of no kind where nothing does."""
        for fault in self.faults:
            if fault.path not in ("", path) or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
                break
            fault.times -= 1
            return fault
        return Fault()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: Server) -> None:
        self.owner, self._open = owner, set[socket.socket]()
        super().__init__(("127.0.0.1", owner.port), _Handler)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are what tests are about; anything else is a bug of the fake, and a 500 by now."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: _Http

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self, method: str) -> None:
        owner = self.server.owner
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        owner.requests.append((self.path, json.loads(data) if data else {}))
        fault = owner.fault(self.path)
        if self.headers.get("x-session-id"):
            owner.sessions.append(self.headers["x-session-id"])
        if not fault.drop:
            answer = owner.answer(method, self.path, self.headers, data)
        if fault.delay:
            time.sleep(fault.delay)  # scripted: a slow server
        if fault.status != 200:
            answer = Answer(fault.status, owner.error(fault.status, fault.message), fault.headers)
        body = answer.body if fault.alter is None else fault.alter(answer.body)
        self._send(answer, fault.raw if fault.raw is not None else json.dumps(body).encode(), fault)

    def _send(self, answer: Answer, data: bytes, fault: Fault) -> None:
        self.send_response(answer.status)
        for name, value in (*answer.headers, *(fault.headers if answer.status == 200 else ())):
            self.send_header(name, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault.cut else data)
        self.wfile.flush()
        self.close_connection |= fault.cut
