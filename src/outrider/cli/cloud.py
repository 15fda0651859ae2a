"""`outrider cloud`: its options, their checks, and the server process."""

from __future__ import annotations

import gc
import json as jsonlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from outrider.cli import interrupts
from outrider.cli.build import enable_gc
from outrider.cli.escape import one_line
from outrider.cli.options import Whole
from outrider.errors import SettingsError
from outrider.hints import check_extra
from outrider.transport.hosts import bracket_host

if TYPE_CHECKING:
    from outrider.cloud.server import Server, ServerConfig
    from outrider.engines.base import ServableEngine
    from outrider.transport.tls import ServerTls

SECURITY = Group("Security", sort_key=1)
CAPACITY = Group("Capacity", sort_key=2)
OPERATION = Group("Operation", sort_key=3)


@Parameter(name="*", group=SECURITY)
@dataclass(frozen=True)
class Security:
    """Authentication and encryption.

    Parameters
    ----------
    tokens
        A file with one NAME TOKEN per line. Every client must present a token.
    tls_cert
        The server's certificate chain (PEM).
    tls_key
        The key of that certificate (PEM).
    client_ca
        Authorities (PEM) of the certificates that clients must present: mutual TLS.
    insecure
        Listen on a public address without TLS and tokens.
    """

    tokens: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    insecure: Annotated[bool, Parameter(negative="")] = False


@Parameter(name="*", group=CAPACITY)
@dataclass(frozen=True)
class Capacity:
    """Limits of sessions, memory and rates.

    Parameters
    ----------
    kv_budget
        Bytes for the sessions' KV caches, as in 512MiB.
    max_context
        Tokens of one session, prompt and output.
    max_sessions
        Sessions, with or without a KV cache at the moment.
    max_sessions_per_identity
        Sessions of one token or certificate.
    max_prompt
        Tokens of a prompt. By default the context is the limit.
    max_media
        Bytes of one recording as sent.
    max_media_total
        Bytes of all recordings that are kept for sessions.
    max_rate
        Requests per second of one identity. The default is no limit.
    idle
        Seconds after which an unused session ends.
    """

    kv_budget: str = "1GiB"
    max_context: Whole = 4096
    max_sessions: Whole = 1024
    max_sessions_per_identity: Whole = 256
    max_prompt: Whole | None = None
    max_media: str = "8MiB"
    max_media_total: str = "512MiB"
    max_rate: float | None = None
    idle: float = 600.0


@Parameter(name="*", group=OPERATION)
@dataclass(frozen=True)
class Operation:
    """Device, metrics, shutdown and logs.

    Parameters
    ----------
    dtype
        auto is float32 on a CPU and the checkpoint's own type on a GPU. With auto, a .gguf file stays quantised, in
        llama.cpp on the CPU.
    device
        A torch device such as cpu or cuda:0; auto is cuda if it is available.
    quantization
        Quantise the weights of the linear layers to int8 or int4. Outputs are then those of the quantised model.
    kv_cache_dtype
        fp8 stores keys and values as float8 (e4m3). Outputs are then those of the model with this KV cache, up to near
        ties. auto is the model's own type.
    metrics
        HOST:PORT for Prometheus metrics.
    grace
        Seconds that active sessions get to finish after SIGTERM.
    until_stdin_ends
        Also stop when standard input ends, so that the server does not outlive a program that started it.
    log_format
        text or json lines, on stderr. The log never contains a user's text.
    json
        Print one JSON line on stdout once the server listens.
    verbose
        Log every session.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    quantization: Literal["int8", "int4"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    metrics: str | None = None
    grace: float = 30.0
    until_stdin_ends: Annotated[bool, Parameter(negative="")] = False
    log_format: Literal["text", "json"] = "text"
    json: Annotated[bool, Parameter(negative="")] = False
    verbose: Annotated[bool, Parameter(negative="", alias="-v")] = False


def run_cloud(model: str, listen: str, security: Security, capacity: Capacity, operation: Operation) -> int:
    """Load the model and serve it until SIGTERM."""
    signal.signal(signal.SIGTERM, _terminated)  # until the server listens and installs its own handler
    interrupts.exit_at_once()
    check_extra("outrider cloud", "cloud")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported, which would add log lines of its own
    import asyncio  # here, to keep help texts fast

    from outrider.cli.progress import startup_steps
    from outrider.cloud.server import check_bindable
    from outrider.engines.load import load_engine, resolve_path
    from outrider.engines.load_options import LoadOptions, load_keywords
    from outrider.serving import logs

    config = build_config(listen, security, capacity, operation)
    check_bindable(config.host, config.port)  # before the model is loaded
    name = "demo:cloud" if model == "demo" else model
    resolve_path(name)
    options = load_keywords(operation)
    LoadOptions(**options).check_file(name)
    if operation.until_stdin_ends:
        threading.Thread(target=_end_with_stdin, name="outrider-stdin", daemon=True).start()
    logs.configure("INFO" if operation.verbose else "WARNING", json=operation.log_format == "json", stream=sys.stderr)
    from outrider.cloud.server import run

    with startup_steps(quiet=operation.log_format == "json") as step:
        step(f"loading the model {name}")
        engine = load_engine(name, **options)
        gc.collect()  # free temporary objects of loading, as a server runs for long
        enable_gc()
        step("reserving the KV cache")
        code = asyncio.run(run(engine, config, _announcer(engine, config, operation, step)))
        interrupts.ignore_signals()
        return code


def _announcer(
    engine: ServableEngine, config: ServerConfig, operation: Operation, step: Callable[[str | None], None]
) -> Callable[[Server], None]:
    """Return a function that announces the server's address."""
    from outrider.verifiers.local import describe

    def on_listening(server: Server) -> None:
        step(None)
        where = f"{bracket_host(config.host)}:{server.port}"
        if operation.json:
            print(jsonlib.dumps({"listening": where, "model": engine.name}), flush=True)  # noqa: T201
        if operation.log_format == "text":
            served = describe(engine).label
            print(one_line(f"outrider: serving {served} at grpc://{where}"), file=sys.stderr, flush=True)  # noqa: T201

    return on_listening


def _terminated(number: int, frame: object) -> None:
    """End at once. No child or file needs cleanup yet, and a library's import could swallow an exception."""
    os._exit(128 + number)


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def build_config(listen: str, security: Security, capacity: Capacity, operation: Operation) -> ServerConfig:
    """Check every option before a model is loaded.

    Raises:
        SettingsError: an option is invalid.
    """
    from outrider.cloud.limits import BYTES_PER_ID, MIN_MESSAGE_BYTES, Limits
    from outrider.cloud.server import ServerConfig
    from outrider.serving.addresses import check_listen, check_metrics_address, parse_address
    from outrider.serving.sizes import MIB, parse_bytes
    from outrider.serving.tokens import Tokens

    host, port = parse_address(listen)
    tls = _server_tls(security)
    tokens = Tokens.load(Path(security.tokens)) if security.tokens is not None else None
    known = tokens is not None or (tls is not None and tls.is_mutual)
    check_listen(host, tls=tls is not None, tokens=known, insecure=security.insecure)
    media = parse_bytes(capacity.max_media)
    limits = Limits(
        max_sessions=capacity.max_sessions,
        max_sessions_per_identity=capacity.max_sessions_per_identity,
        max_prompt_tokens=capacity.max_prompt,
        max_media_bytes=media,
        max_media_total=parse_bytes(capacity.max_media_total),
        max_message_bytes=max(MIB // 2, MIN_MESSAGE_BYTES + BYTES_PER_ID * capacity.max_context),
        max_rate=capacity.max_rate,
        idle_seconds=capacity.idle,
    )
    if not 0 <= operation.grace < float("inf"):
        raise SettingsError(f"--grace {operation.grace}: a number of seconds")
    if capacity.max_context < 2:
        raise SettingsError(f"--max-context {capacity.max_context}: 2 tokens or more")
    metrics_address = parse_address(operation.metrics) if operation.metrics is not None else None
    if metrics_address is not None:
        check_metrics_address(metrics_address[0], insecure=security.insecure)
    budget = parse_bytes(capacity.kv_budget)
    return ServerConfig(host, port, limits, tokens, tls, budget, capacity.max_context, metrics_address, operation.grace)


def _server_tls(security: Security) -> ServerTls | None:
    from outrider.transport.tls import ServerTls

    given = (security.tls_cert, security.tls_key)
    if given == (None, None):
        if security.client_ca is not None:
            raise SettingsError("--client-ca needs --tls-cert and --tls-key")
        return None
    if None in given:
        raise SettingsError("--tls-cert and --tls-key need each other: give both or none")
    authority = Path(security.client_ca) if security.client_ca is not None else None
    return ServerTls(Path(str(security.tls_cert)), Path(str(security.tls_key)), authority)
