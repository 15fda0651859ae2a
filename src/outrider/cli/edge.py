"""`outrider edge`: its options, their checks, and the gateway process."""

from __future__ import annotations

import json as jsonlib
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from outrider.cli import interrupts
from outrider.cli.build import (
    build_options,
    check,
    check_edge,
    check_target_tokenizer,
    enable_gc,
    load_drafter,
    load_lookup,
    load_target_tokenizer,
)
from outrider.cli.edge_cloud import CloudConnection, CloudState, fetch_tokenizer, open_cloud, wait_for_cloud
from outrider.cli.escape import one_line
from outrider.cli.options import Models, Pair, Whole
from outrider.config import DecodingMode
from outrider.errors import PromptError, SettingsError, quote
from outrider.hints import check_extra

if TYPE_CHECKING:
    from fastapi import FastAPI

    from outrider.engines.base import Engine
    from outrider.engines.prompt_lookup import PromptLookup
    from outrider.gateway.access import Access
    from outrider.gateway.connections import Listener
    from outrider.gateway.decoder_pool import DecoderPool
    from outrider.gateway.request_scheduler import RequestScheduler
    from outrider.gateway.tools import ToolSupport

SERVING = Group("Serving", sort_key=6)
log = logging.getLogger("outrider.gateway")


@Parameter(name="*", group=SERVING)
@dataclass(frozen=True)
class Serving:
    """Access and limits.

    Parameters
    ----------
    slots
        Generations that run at once.
    queue
        Requests that may wait for a slot. Further ones are refused (429).
    time_limit
        Seconds of a generation, from getting its slot to its end.
    max_body
        The largest request, recordings in base64 included, as in 16MiB.
    api_keys
        A file with one NAME KEY per line. Every request must carry a key.
    insecure
        Listen on a public address without API keys.
    allow_origin
        A site with pages that may send requests, as in https://example.org (may be given several times).
    log_format
        text or json lines, on stderr. The log never contains a user's text.
    json
        Print one JSON line on stdout once the gateway listens.
    verbose
        Log models and resolved settings.
    """

    slots: Whole = 8
    queue: Whole = 64
    time_limit: float = 600.0
    max_body: str = "16MiB"
    api_keys: str | None = None
    insecure: Annotated[bool, Parameter(negative="")] = False
    allow_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    log_format: Literal["text", "json"] = "text"
    json: Annotated[bool, Parameter(negative="")] = False
    verbose: Annotated[bool, Parameter(negative="", alias="-v")] = False


@dataclass(frozen=True)
class _Options:
    """The options of the command line."""

    pair: Pair
    serving: Serving
    target_tokenizer: str | None = None


def run_edge(listen: str, pair: Pair, serving: Serving, *, target_tokenizer: str | None = None) -> int:
    """Load the edge's model, start or reach the cloud, and serve until SIGTERM or SIGINT."""
    check_extra("outrider edge", "gateway")
    signals = _StartSignals()
    options = _Options(pair, serving, target_tokenizer)
    _check(options)
    listener, access = _bind_listener(listen, serving)
    with listener:
        _log_to_stderr(serving)
        with open_cloud(pair.models, pair.network) as cloud:
            return _serve(listener, access, cloud, options, signals)


class _StartSignals:
    """SIGTERM and SIGINT during the start. The first one ends it with 128 + its number, later ones are ignored."""

    def __init__(self) -> None:
        self.first = 0  # the number of the first signal, else 0
        self._deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def check(self) -> None:
        """Exit if a signal came. A library that was loading a model may have swallowed the exception."""
        if self.first:
            sys.exit(128 + self.first)

    def defer(self) -> None:
        """Only record signals from now on, as an exception within asyncio would leave a half-made event loop."""
        self._deferred = True
        self.check()

    def _received(self, number: int, frame: object) -> None:
        if self.first:
            return
        self.first = number
        if not self._deferred:
            interrupts.ignore_signals()
            self.check()


def _bind_listener(listen: str, serving: Serving) -> tuple[Listener, Access]:
    """Bind the address without listening yet, and return it with the access rules."""
    from outrider.gateway.access import Access, allowed_hosts, check_listen
    from outrider.gateway.server import bound
    from outrider.serving.addresses import parse_address
    from outrider.serving.sizes import parse_bytes
    from outrider.serving.tokens import Tokens

    host, port = parse_address(listen)
    keys = Tokens.load(Path(serving.api_keys)) if serving.api_keys is not None else None
    check_listen(host, keys=keys is not None, insecure=serving.insecure)
    hosts = allowed_hosts(host, keys=keys is not None)
    if (max_body := parse_bytes(serving.max_body)) < 1:
        raise SettingsError(f"--max-body {serving.max_body}: 1 byte or more")
    access = Access(keys, max_body, hosts, origins=frozenset(serving.allow_origin))
    return bound(host, port), access


def _check(options: _Options) -> None:
    """Raise InputError for invalid options, before a model is loaded."""
    from outrider.config import GenerationSettings
    from outrider.engines.load import resolve_path
    from outrider.verifiers.connect import parse_cloud_address

    pair, models, network = options.pair, options.pair.models, options.pair.network
    _check_serving(options.serving)
    GenerationSettings.build(pair.decoding.settings())
    if models.edge == "lookup":
        raise SettingsError(
            "--edge lookup: the gateway needs the edge's tokenizer and chat template: give --edge lookup:TOKENIZER"
        )
    target = parse_cloud_address(models.cloud)
    if models.edge == "none" and target.kind in ("vllm", "sglang"):
        raise SettingsError(
            f"--edge none: {target.kind} sends no tokenizer: give --edge MODEL, or --edge lookup:TOKENIZER"
        )
    if target.kind == "local":
        resolve_path(target.model)
        network.check_own_cloud("the gateway's")
        own_process = "grpc://127.0.0.1:1"  # stands for the address of the process that will serve the cloud
        pair = replace(pair, models=Models(models.edge, own_process))
    check(pair)
    check_edge(models)
    if options.target_tokenizer is not None:
        check_target_tokenizer(pair.models, options.target_tokenizer)


def _check_serving(serving: Serving) -> None:
    for name, least in (("slots", 1), ("queue", 0)):
        if getattr(serving, name) < least:
            raise SettingsError(f"--{name} {getattr(serving, name)}: {least} or more")
    if not serving.time_limit > 0:
        raise SettingsError(f"--time-limit {serving.time_limit:g}: a number of seconds above 0")
    for origin in serving.allow_origin:
        if "://" not in origin or origin.endswith("/"):
            raise SettingsError(f"--allow-origin {quote(origin)}: write SCHEME://HOST, as in https://example.org")


def _serve(
    listener: Listener, access: Access, cloud: CloudConnection, options: _Options, signals: _StartSignals
) -> int:
    import asyncio  # here, to keep help texts fast

    from outrider.cli.progress import startup_steps
    from outrider.gateway.decoder_pool import DecoderPool

    quiet = options.serving.log_format == "json"
    with startup_steps(quiet=quiet) as step:
        models = options.pair.models
        drafts = models.edge != "none"
        if drafts:
            step(f"loading the edge's {'model' if models.edge_model else 'tokenizer'} {models.edge}")
        model, lookup = load_drafter(models), load_lookup(models)
        tokenizer = load_target_tokenizer(options.target_tokenizer)
        if cloud.target.kind != "none":
            step(f"waiting for the cloud {models.cloud}")
        reach = cloud.reach()
        engine = model or lookup or fetch_tokenizer(reach)
        with (
            wait_for_cloud(engine, tokenizer, reach, cloud) as cloud_state,
            closing(
                DecoderPool(engine, reach, lookup=lookup, target_tokenizer=cloud_state.tokenizer, drafts=drafts)
            ) as pool,
        ):
            step("starting to serve")
            enable_gc()
            signals.defer()
            code = asyncio.run(_run(listener, access, pool, cloud_state, options, step, signals))
            interrupts.ignore_signals()
            return code


async def _run(
    listener: Listener,
    access: Access,
    pool: DecoderPool,
    cloud_state: CloudState,
    options: _Options,
    step: Callable[[str | None], None],
    signals: _StartSignals,
) -> int:
    from outrider.gateway.server import StopSignal, serve

    stop = StopSignal(lambda: signals.first)
    scheduler, app = _application(access, pool, cloud_state, options)
    translated = ", its drafts translated through text" if pool.target_tokenizer else ""
    summary = f"edge {pool.name}{translated} · cloud {cloud_state.name()}"

    def listening(url: str) -> None:
        step(None)
        _announce(url, summary, options.serving)

    return await serve(app, listener, scheduler, stop, listening)


def _application(
    access: Access, pool: DecoderPool, cloud_state: CloudState, options: _Options
) -> tuple[RequestScheduler, FastAPI]:
    from outrider.gateway.app import GatewayInfo, build_overview, create_app
    from outrider.gateway.decoder_pool import RequestOptions
    from outrider.gateway.defaults import Defaults
    from outrider.gateway.handlers import Gateway
    from outrider.gateway.metrics import Metrics
    from outrider.gateway.request_scheduler import RequestScheduler
    from outrider.gateway.tokenization import Tokenization

    engine, serving = pool.engine, options.serving
    scheduler = RequestScheduler(pool, slots=serving.slots, queue=serving.queue, seconds=serving.time_limit)
    mode: DecodingMode = "edge-only" if cloud_state.name() == "none" else "speculative"
    mode = "cloud-only" if pool.drafter == "none" else mode
    chosen = asdict(build_options(options.pair.speculation, options.pair.network))
    decoding_options = RequestOptions(mode, net=options.pair.network.net or "none", **chosen)
    pool.pin(decoding_options)
    audio = None if pool.target_tokenizer else getattr(engine, "audio", None)
    seconds, text = 0.0 if audio is None else audio.max_seconds, not getattr(pool.reader, "captions_only", False)
    settings = options.pair.decoding.settings()
    tokenization, tools = Tokenization(pool.reader, cloud_state.max_length), _tool_support(pool.reader)
    decode = tokenization.decode if pool.reader.tokenizer is not None else None
    defaults = Defaults(decoding_options, settings, seconds, text, pool.name, tools, decode)
    metrics = Metrics(lambda: scheduler.active, lambda: scheduler.waiting, serving.slots)
    overview = build_overview(defaults, cloud_state.name(), serving.slots, cut=pool.cuttable, drafter=pool.drafter)
    info = GatewayInfo(overview, serving.allow_origin, cloud_state.name, cloud_state.trouble)
    return scheduler, create_app(Gateway(scheduler, access, defaults, metrics, tokenization), info)


def _tool_support(engine: Engine | PromptLookup) -> ToolSupport | str:
    """Return the model's support of tools, or the reason why it has none."""
    from outrider.gateway.tools import find_tool_support

    if engine.tokenizer is None:
        return f"tools: {engine.name} came without a tokenizer"
    try:
        return find_tool_support(engine.name, engine.tokenizer)
    except PromptError as error:
        return str(error)


def _log_to_stderr(serving: Serving) -> None:
    """Log the gateway and the HTTP server to stderr, without any user's text."""
    from outrider.serving.logs import JsonEventFormatter, RedactingFilter, TextFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonEventFormatter() if serving.log_format == "json" else TextFormatter())
    handler.addFilter(RedactingFilter())
    level = logging.INFO if serving.verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("outrider").setLevel(logging.ERROR)  # warnings of the decoder are part of the results
    log.setLevel(level)
    from transformers.utils import logging as transformers_logging

    if not serving.verbose:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def _announce(url: str, summary: str, serving: Serving) -> None:
    if serving.log_format == "text":
        print(one_line(f"serving {url}/ · {summary}"), file=sys.stderr, flush=True)  # noqa: T201
    if serving.json:
        print(jsonlib.dumps({"listening": url}), flush=True)  # noqa: T201
