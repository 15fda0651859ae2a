"""`outrider edge`: its options, and from them to a gateway that serves."""

from __future__ import annotations

import json as jsonlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from outrider.cli.escape import one_line
from outrider.cli.options import (
    Decoding,
    Models,
    Network,
    Speculation,
    Whole,
    check,
    collect_from_now_on,
    load_drafter,
)
from outrider.errors import SettingsError
from outrider.hints import install

if TYPE_CHECKING:
    from socket import socket

    from outrider.engines.base import Engine
    from outrider.gateway.access import Access
    from outrider.gateway.pool import Choice, Pool
    from outrider.verifiers.base import Verifier

    Reach = Callable[[str], Verifier]

SERVING = Group("Serving", sort_key=6)
NEEDED = ("fastapi", "httptools", "uvicorn")
MEETING_S = 30.0  # that the first answer of the cloud is waited for, before clients are served without it
log = logging.getLogger("outrider.gateway")


@Parameter(name="*", group=SERVING)
@dataclass(frozen=True)
class Serving:
    """Who is served, and how much.

    Parameters
    ----------
    slots
        Generations that run at once.
    queue
        Requests that may wait for a slot; more are told to come again (429).
    max_body
        The largest request, recordings in base64 included, as in 16MiB.
    api_keys
        A file with one NAME KEY per line: whoever asks must show a key.
    insecure
        Listen on a public address without API keys.
    allow_origin
        A site whose pages may ask, as in https://example.org (may be given several times).
    log_format
        text or json lines, on stderr; neither holds any user's text.
    json
        One JSON line on stdout once it listens.
    verbose
        Log what is loaded and resolved.
    """

    slots: Whole = 8
    queue: Whole = 64
    max_body: str = "16MiB"
    api_keys: str | None = None
    insecure: Annotated[bool, Parameter(negative="")] = False
    allow_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    log_format: Literal["text", "json"] = "text"
    json: Annotated[bool, Parameter(negative="")] = False
    verbose: Annotated[bool, Parameter(negative="", alias="-v")] = False


@dataclass(frozen=True)
class Asked:
    """All that the command line said."""

    models: Models
    speculation: Speculation
    network: Network
    decoding: Decoding
    serving: Serving


def run_edge(listen: str, asked: Asked) -> int:
    """Load the edge's model, start or reach the cloud, and serve until told to stop."""
    _check_installed()
    with _ended_by_signals():
        _check(asked)
        on, access = _door(listen, asked.serving)
        with on:
            _log_to_stderr(asked.serving)
            with _cloud(asked.models, asked.network) as reach:
                _serve(on, access, reach, asked)
    return 0


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SettingsError(f"outrider edge needs {', '.join(missing)}: {install('gateway')}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end it in order also while models are loaded; `serve` takes them over later."""

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)
    with suppress(KeyboardInterrupt):
        yield


def _door(listen: str, serving: Serving) -> tuple[socket, Access]:
    """The address, taken but not listening, and who may come in."""
    from outrider.cloud.limits import parse_bytes
    from outrider.cloud.security import Tokens, parse_address
    from outrider.gateway.access import Access, check_listen, known_hosts
    from outrider.gateway.server import bound

    host, port = parse_address(listen)
    keys = Tokens.load(Path(serving.api_keys)) if serving.api_keys is not None else None
    check_listen(host, keys=keys is not None, insecure=serving.insecure)
    hosts = known_hosts(host, keys=keys is not None)
    if (max_body := parse_bytes(serving.max_body)) < 1:
        raise SettingsError(f"--max-body {serving.max_body}: 1 byte or more")
    access = Access(keys, max_body, hosts)
    return bound(host, port), access


def _check(asked: Asked) -> None:
    """Raise InputError for what is wrong with the options, before a model is loaded."""
    from outrider.config import GenerationSettings
    from outrider.engines.load import locate
    from outrider.verifiers.connect import parse_target

    models, network, serving = asked.models, asked.network, asked.serving
    _check_serving(serving)
    GenerationSettings.build(asked.decoding.settings())
    if models.edge == "none":
        raise SettingsError("--edge none: the gateway writes prompts and texts with the edge's model; give one")
    target = parse_target(models.cloud)
    if target.kind == "local":
        locate(target.model)
        _check_own_cloud(network)
        check(Models(models.edge, "grpc://127.0.0.1:1"), asked.speculation, network)  # it will be a process of its own
    else:
        check(models, asked.speculation, network)
    locate(models.edge)


def _check_serving(serving: Serving) -> None:
    for name, least in (("slots", 1), ("queue", 0)):
        if getattr(serving, name) < least:
            raise SettingsError(f"--{name} {getattr(serving, name)}: {least} or more")
    for origin in serving.allow_origin:
        if "://" not in origin or origin.endswith("/"):
            raise SettingsError(f"--allow-origin {origin!r}: write SCHEME://HOST, as in https://example.org")


def _check_own_cloud(network: Network) -> None:
    secured = [name for name in ("token_file", "tls", "ca", "cert", "key") if getattr(network, name)]
    if secured:
        raise SettingsError(f"--{secured[0].replace('_', '-')}: the gateway's own cloud has no TLS and no tokens")


@contextmanager
def _cloud(models: Models, network: Network) -> Iterator[Callable[[], Reach | None]]:
    """How to reach the cloud; a local one is started, and is waited for when it is asked for.

    What this yields, when called, gives a function from an emulated network to a verifier behind it, or None.
    """
    from outrider.cli.child import share_cores, starting_cloud
    from outrider.verifiers.connect import connect, parse_target

    target, options = parse_target(models.cloud), network.connection()
    options.pop("net", None)

    def reaching(place: str) -> Reach:
        def reach(net: str) -> Verifier:
            verifier = connect(place, **options, net=net)
            assert verifier is not None  # a cloud is named
            return verifier

        return reach

    if target.kind == "none":
        yield lambda: None
    elif target.kind != "local":
        yield lambda: reaching(models.cloud)
    else:
        share_cores()
        with starting_cloud(target.model, "--dtype", models.dtype, "--device", models.device) as address:
            yield lambda: reaching(f"grpc://{address()}")


def _serve(on: socket, access: Access, reach: Callable[[], Reach | None], asked: Asked) -> None:
    import asyncio  # here, as parsing needs none of it

    from outrider.gateway.pool import Pool

    engine = load_drafter(asked.models)
    assert engine is not None  # --edge none was refused
    cloud = reach()
    with _met(engine, cloud) as name, closing(Pool(engine, cloud)) as pool:
        collect_from_now_on()
        asyncio.run(_run(on, access, pool, name, asked))


async def _run(on: socket, access: Access, pool: Pool, cloud: Callable[[], str], asked: Asked) -> None:
    from outrider.gateway.app import Shown, create_app, overview
    from outrider.gateway.asking import Defaults
    from outrider.gateway.desk import Desk
    from outrider.gateway.exchange import Gateway
    from outrider.gateway.metrics import Metrics
    from outrider.gateway.server import serve

    engine, serving = pool.engine, asked.serving
    desk = Desk(pool, slots=serving.slots, queue=serving.queue)
    choice = _choice(asked.speculation, asked.network, has_cloud=cloud() != "none")
    pool.keep(choice)
    audio = getattr(engine, "audio", None)
    defaults = Defaults(choice, asked.decoding.settings(), 0.0 if audio is None else audio.max_seconds, engine.name)
    metrics = Metrics(lambda: desk.active, lambda: desk.waiting, serving.slots)
    shown = overview(defaults, cloud(), serving.slots, cut=pool.cuttable)
    app = create_app(Gateway(desk, access, defaults, metrics), Shown(shown, serving.allow_origin, cloud))
    await serve(app, on, desk, lambda url: _say(url, f"edge {engine.name} · cloud {cloud()}", serving))


def _choice(speculation: Speculation, network: Network, *, has_cloud: bool) -> Choice:
    from outrider.gateway.pool import Choice

    together = {name: getattr(network, name) for name in ("driver", "on_cloud_loss", "privacy")}
    way: Any = "speculative" if has_cloud else "edge-only"
    return Choice(way, **asdict(speculation), **together, net=network.net or "none")


@contextmanager
def _met(engine: Engine, cloud: Reach | None) -> Iterator[Callable[[], str]]:
    """Meet the cloud, as far as it can be asked now; one that suits no edge ends the gateway here.

    One that cannot be reached yet does not: requests then say so until it can. What this yields gives its name.
    """
    from outrider.gateway.meeting import Meeting

    if cloud is None:
        yield lambda: "none"
        return
    with closing(Meeting(engine, cloud("none"))) as meeting:
        if not meeting.wait(MEETING_S):
            log.warning("the cloud cannot be reached yet")
        yield lambda: meeting.name


def _log_to_stderr(serving: Serving) -> None:
    """The gateway's log, and the server's; never with a user's text."""
    from outrider.cloud.logs import EventFormatter, PlainFormatter, SafeFields

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter() if serving.log_format == "json" else PlainFormatter())
    handler.addFilter(SafeFields())
    level = logging.INFO if serving.verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("outrider").setLevel(logging.ERROR)  # the rest's warnings are for people with a terminal
    log.setLevel(level)
    from transformers.utils import logging as transformers_logging

    if not serving.verbose:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def _say(url: str, summary: str, serving: Serving) -> None:
    if serving.log_format == "text":
        print(one_line(f"serving {url}/ · {summary}"), file=sys.stderr, flush=True)  # noqa: T201
    if serving.json:
        print(jsonlib.dumps({"listening": url}), flush=True)  # noqa: T201
