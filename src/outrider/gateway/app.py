"""The ASGI application: routes, OpenAPI document, and error handlers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from outrider import __version__
from outrider.decoding.gate import SIGNAL_NAMES
from outrider.engines.load import BUNDLED
from outrider.errors import OutriderError
from outrider.gateway import response_schema
from outrider.gateway.errors import SERVER, ErrorResponse, JsonObject, RequestError, http_error, to_error_response
from outrider.gateway.handlers import Gateway, handle_completion
from outrider.gateway.request_parsing import Defaults
from outrider.gateway.request_schema import MODEL, ChatRequest, CompletionRequest, Request

log = logging.getLogger("outrider.gateway")

PAGE: Final = Path(__file__).parent / "page"
CLIPS: Final = BUNDLED / "clips"
MODEL_ENTRY: Final = {"id": MODEL, "object": "model", "created": 0, "owned_by": "outrider"}
PAGE_HEADERS: Final = {  # the page loads nothing from other hosts, and no other page may embed it
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STATUS_DESCRIPTIONS: Final = {
    400: "The request is invalid. `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The Host header names another host.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full. Retry-After gives the seconds until a retry.",
    500: "A bug of the gateway.",
    503: "The cloud is unreachable or refused the request (`type` is cloud_error), or the gateway is going down.",
    504: "The generation took longer than this gateway allows.",
}
Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Content = Callable[[str, Mapping[str, str]], JsonObject]  # from the client and the path's parameters
COMPLETION_STATUSES: Final = (400, 403, 404, 408, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True)
class GatewayInfo:
    """The gateway's description at `/v1/outrider`.

    overview: the fields of `response_schema.Overview`. cloud: returns the cloud's name, which may be known later than
    the rest. trouble: returns the reason while the cloud is unreachable, else None.
    """

    overview: JsonObject
    origins: tuple[str, ...] = ()
    cloud: Callable[[], str] | None = None
    trouble: Callable[[], str | None] = lambda: None

    def to_json(self) -> JsonObject:
        """Return the overview with the cloud's present name."""
        return self.overview if self.cloud is None else {**self.overview, "cloud": self.cloud()}


def build_overview(
    defaults: Defaults, cloud: str, slots: int, *, cut: bool = False, drafter: str = "model"
) -> JsonObject:
    """Return the fields of `response_schema.Overview`. cloud: the model's name, or "none"."""
    return {
        "edge": defaults.edge,
        "cloud": cloud,
        "drafter": drafter,
        "defaults": asdict(defaults.options),
        "settings": dict(defaults.settings),
        "audio": bool(defaults.audio_seconds),
        "text": defaults.text,
        "networks": cloud != "none",
        "cut": cut,
        "slots": slots,
        "signals": list(SIGNAL_NAMES),
        "version": __version__,
    }


def create_app(gateway: Gateway, info: GatewayInfo) -> FastAPI:
    """Build the gateway's ASGI application."""
    app = FastAPI(title="outrider edge", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # a redirect would repeat the host that the request names, checked or not
    routes = _Routes(app, gateway)
    routes.add_completions()
    routes.add_documents(info)
    routes.add_metrics()
    routes.add_health(info)
    _add_head_routes(app)
    _add_page(app, gateway)
    _add_errors(app, gateway)
    if info.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(info.origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # public sites may call a gateway on a private network
        )
    return app


# Paths ------------------------------------------------------------------------------------------------------


class _Routes:
    """The routes of the OpenAPI document. All but /health require an API key, if the gateway has keys."""

    def __init__(self, app: FastAPI, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway
        self._has_keys = bool(gateway.access.keys)
        self._dependencies = [Depends(HTTPBearer(auto_error=False, description="an API key"))] if self._has_keys else []

    def add_completions(self) -> None:
        """Add both kinds of completion."""
        gateway = self._gateway

        def endpoint(kind: type[Request]) -> Endpoint:
            async def complete(request: HttpRequest) -> Response:
                response = await handle_completion(request, kind, gateway)
                gateway.metrics.count_response(request.url.path, response.status_code)
                return response

            return complete

        kinds: tuple[tuple[str, type[Request], type[response_schema.Reply], str], ...] = (
            ("chat/completions", ChatRequest, response_schema.ChatCompletion, "Answer a conversation, or a recording."),
            ("completions", CompletionRequest, response_schema.Completion, "Continue a text."),
        )
        for path, kind, reply, summary in kinds:
            schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
            success = {
                "model": reply,
                "description": "The answer. With stream: true, OpenAI's chunks as server-sent events, ended by [DONE].",
                "content": {"text/event-stream": {}},
            }
            body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
            self._add(f"/v1/{path}", endpoint(kind), kind.__name__, summary, success, COMPLETION_STATUSES, "POST", body)

    def add_documents(self, info: GatewayInfo) -> None:
        """Add the JSON documents about the models and the gateway, and the cut of a request's connection."""
        gateway = self._gateway

        def add(
            path: str, reply: type[response_schema.Reply], summary: str, content: Content, method: str = "GET"
        ) -> None:
            async def answer(request: HttpRequest) -> Response:
                return JSONResponse(content(gateway.access.authenticate(request), request.path_params))

            parameters = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"{(\w+)", path)
            ]
            statuses, extra = ((403, 404), {"parameters": parameters}) if parameters else ((403,), None)
            self._add(path, answer, reply.__name__, summary, {"model": reply}, statuses, method, extra)

        def model(_: str, parameters: Mapping[str, str]) -> JsonObject:
            if parameters["model"] != MODEL:
                raise RequestError(f"no such model: use {MODEL!r}", param="model", code="model_not_found", status=404)
            return MODEL_ENTRY

        def cut(client: str, parameters: Mapping[str, str]) -> JsonObject:
            gateway.cut(client, parameters["id"])
            return {"cut": True}

        listed = {"object": "list", "data": [MODEL_ENTRY]}
        add("/v1/models", response_schema.Models, "The models.", lambda *_: listed)
        add("/v1/models/{model:path}", response_schema.Model, "One model.", model)
        add("/v1/outrider", response_schema.Overview, "The models and the defaults.", lambda *_: info.to_json())
        summary = "Disconnect a running request from its cloud."
        add("/v1/outrider/cut/{id}", response_schema.Cut, summary, cut, "POST")

    def add_metrics(self) -> None:
        """Add /metrics."""

        async def metrics(request: HttpRequest) -> Response:
            self._gateway.access.authenticate(request)
            return Response(self._gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        success = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics."}
        self._add("/metrics", metrics, "Metrics", "Metrics for Prometheus.", success, (403,), response_class=Response)

    def add_health(self, info: GatewayInfo) -> None:
        """Add /health, which needs no API key."""

        async def health(request: HttpRequest) -> Response:
            self._gateway.access.check_host(request)
            scheduler, reason = self._gateway.scheduler, info.trouble()
            status = {"status": "ok" if reason is None else "degraded", "reason": reason}
            load = {"active": scheduler.active, "waiting": scheduler.waiting}
            return JSONResponse({**status, **load, "cloud": str(info.to_json()["cloud"])})

        success = {"model": response_schema.Health}
        self._add("/health", health, "Health", "The gateway's state.", success, (403,), open_to_all=True)

    def _add(
        self,
        path: str,
        answer: Endpoint,
        name: str,
        summary: str,
        success: JsonObject,
        statuses: tuple[int, ...],
        method: str = "GET",
        extra: JsonObject | None = None,
        *,
        response_class: type[Response] = JSONResponse,
        open_to_all: bool = False,
    ) -> None:
        errors = sorted((*statuses, 401) if self._has_keys and not open_to_all else statuses)
        responses: dict[int | str, JsonObject] = {200: success}
        for status in errors:
            responses[status] = {"model": response_schema.ErrorReply, "description": STATUS_DESCRIPTIONS[status]}
        self._app.add_api_route(
            path,
            answer,
            methods=[method],
            summary=summary,
            operation_id=name,
            dependencies=[] if open_to_all else self._dependencies,
            responses=responses,
            openapi_extra=extra,
            response_class=response_class,
        )


def _add_head_routes(app: FastAPI) -> None:
    """Answer HEAD on each route that answers GET. The OpenAPI document lists GET alone."""
    for route in [each for each in app.routes if isinstance(each, APIRoute) and each.methods == {"GET"}]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _add_page(app: FastAPI, gateway: Gateway) -> None:
    """Add the page, its files, the bundled clips and the OpenAPI document, which need no API key."""

    async def page(request: HttpRequest) -> Response:
        gateway.access.check_host(request)
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    async def clips(request: HttpRequest) -> Response:
        gateway.access.check_host(request)
        return JSONResponse(await asyncio.to_thread(bundled_clips))

    async def clip(request: HttpRequest) -> Response:
        gateway.access.check_host(request)
        name = request.path_params["name"]
        if name not in {each["name"] for each in await asyncio.to_thread(bundled_clips)}:
            raise RequestError(f"no such clip: {name}", code="not_found", status=404)
        return FileResponse(CLIPS / name, media_type="audio/ogg")

    async def document(request: HttpRequest) -> Response:
        gateway.access.check_host(request)
        return JSONResponse(_document(app))

    answers = {"/": page, "/demo/clips": clips, "/demo/clips/{name}": clip, "/openapi.json": document}
    for path, answer in answers.items():
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/page", _PageFiles(gateway), name="page")


class _PageFiles(StaticFiles):
    """The page's own files, with its host check and headers."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(directory=PAGE)
        self._access = gateway.access

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Check the host, and return a file."""
        self._access.check_host(HttpRequest(scope))
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


@lru_cache(1)
def bundled_clips() -> list[JsonObject]:
    """Return the bundled recordings, as the fields of `response_schema.Clip`."""
    import soundfile

    listed = json.loads((CLIPS / "clips.json").read_text(encoding="utf-8"))
    return [
        {
            "name": clip["file"],
            "lang": clip["lang"],
            "seconds": round(soundfile.info(CLIPS / clip["file"]).duration, 2),
            "url": f"/demo/clips/{clip['file']}",
            "said": clip["text"],
        }
        for clip in listed
    ]


# Errors -----------------------------------------------------------------------------------------------------


def _add_errors(app: FastAPI, gateway: Gateway) -> None:
    def count(request: HttpRequest, status: int) -> None:
        if request.url.path.startswith("/v1/"):
            route = request.scope.get("route")  # its declared path: each path that clients send would be a new series
            gateway.metrics.count_response(str(getattr(route, "path", "other")), status)

    def on_outrider_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, OutriderError)  # as registered
        response = to_error_response(error)
        if response.status >= 500:
            log.warning("a request has failed", extra={"kind": type(error).__name__, "status": str(response.status)})
        count(request, response.status)
        return _to_response(response)

    def on_http_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # as registered
        return _to_response(http_error(error.status_code, str(error.detail)), error.headers)

    def on_unexpected_error(request: HttpRequest, error: Exception) -> Response:
        count(request, 500)
        return _to_response(ErrorResponse(500, f"unexpected {type(error).__name__}", type=SERVER, code="internal"))

    app.add_exception_handler(OutriderError, on_outrider_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_unexpected_error)  # starlette raises it again, for the server's log


def _to_response(response: ErrorResponse, headers: Mapping[str, str] | None = None) -> Response:
    more = {**response.headers, **(headers or {})}
    return Response(response.encode(), response.status, more, media_type="application/json")


# The document -----------------------------------------------------------------------------------------------


def _document(app: FastAPI) -> JsonObject:
    """Return FastAPI's OpenAPI document with the request schemas. Bodies are read as bytes, so FastAPI has none."""
    document = app.openapi()
    schemas = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template="#/components/schemas/{model}"
    )[1]
    document["components"]["schemas"].update(schemas["$defs"])
    return document
