"""The ASGI application: routes, OpenAPI document, and error handlers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

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
from outrider.gateway.errors import SERVER, ErrorResponse, RequestError, http_error, to_error_response
from outrider.gateway.handlers import Gateway, handle_completion
from outrider.gateway.request_parsing import Defaults
from outrider.gateway.request_schema import MODEL, ChatRequest, CompletionRequest, Request, StrictModel

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
COMPLETION_STATUSES: Final = (400, 403, 404, 408, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True)
class GatewayInfo:
    """The gateway's description at `/v1/outrider`.

    overview: the fields of `response_schema.Overview`. cloud: returns the cloud's name, which may be known later than
    the rest. trouble: returns the reason while the cloud is unreachable, else None.
    """

    overview: dict[str, Any]
    origins: tuple[str, ...] = ()
    cloud: Callable[[], str] | None = None
    trouble: Callable[[], str | None] = lambda: None

    def to_json(self) -> dict[str, Any]:
        """Return the overview with the cloud's present name."""
        return self.overview if self.cloud is None else {**self.overview, "cloud": self.cloud()}


def build_overview(defaults: Defaults, cloud: str, slots: int, *, cut: bool = False) -> dict[str, Any]:
    """Return the fields of `response_schema.Overview`. cloud: the model's name, or "none"."""
    return {
        "edge": defaults.edge,
        "cloud": cloud,
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
    auth_dependencies = [Depends(HTTPBearer(auto_error=False, description="an API key"))] if gateway.access.keys else []
    _add_completions(app, gateway, auth_dependencies)
    _add_info_routes(app, gateway, info, auth_dependencies)
    _add_cut(app, gateway, auth_dependencies)
    _add_metrics(app, gateway, auth_dependencies)
    _add_health(app, gateway, info)
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


def _add_completions(app: FastAPI, gateway: Gateway, auth_dependencies: Sequence[Any]) -> None:
    kinds: tuple[tuple[str, type[Request], type[response_schema.Reply], str], ...] = (
        ("/v1/chat/completions", ChatRequest, response_schema.ChatCompletion, "Answer a conversation, or a recording."),
        ("/v1/completions", CompletionRequest, response_schema.Completion, "Continue a text."),
    )
    for path, kind, reply, summary in kinds:
        app.add_api_route(
            path,
            _completion_endpoint(gateway, kind),
            methods=["POST"],
            summary=summary,
            operation_id=kind.__name__,
            dependencies=auth_dependencies,
            responses={200: {"model": reply, **_streams()}, **_errors(auth_dependencies, *COMPLETION_STATUSES)},
            openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(kind)}}}},
            response_class=JSONResponse,
        )


def _completion_endpoint(gateway: Gateway, kind: type[Request]) -> Callable[[HttpRequest], Any]:
    async def complete(request: HttpRequest) -> Response:
        response = await handle_completion(request, kind, gateway)
        gateway.metrics.count_response(request.url.path, response.status_code)
        return response

    return complete


def _add_info_routes(app: FastAPI, gateway: Gateway, info: GatewayInfo, auth_dependencies: Sequence[Any]) -> None:
    """Add the JSON documents about the models and the gateway."""

    def add_get(
        path: str, reply: type[response_schema.Reply], summary: str, content: Callable[[HttpRequest], Any]
    ) -> None:
        async def answer(request: HttpRequest) -> Response:
            gateway.access.authenticate(request)
            return JSONResponse(content(request))

        errors = _errors(auth_dependencies, 403, *([404] if "{" in path else []))
        extra = {"parameters": [_path_parameter("model")]} if "{" in path else None
        app.add_api_route(
            path,
            answer,
            summary=summary,
            operation_id=reply.__name__,
            dependencies=auth_dependencies,
            responses={200: {"model": reply}, **errors},
            openapi_extra=extra,
        )

    add_get("/v1/models", response_schema.Models, "The models.", lambda _: {"object": "list", "data": [MODEL_ENTRY]})
    add_get(
        "/v1/models/{model:path}",
        response_schema.Model,
        "One model.",
        lambda request: _model(request.path_params["model"]),
    )
    add_get("/v1/outrider", response_schema.Overview, "The models and the defaults.", lambda _: info.to_json())


def _add_cut(app: FastAPI, gateway: Gateway, auth_dependencies: Sequence[Any]) -> None:
    async def cut(request: HttpRequest) -> Response:
        gateway.cut(gateway.access.authenticate(request), request.path_params["id"])
        return JSONResponse({"cut": True})

    app.add_api_route(
        "/v1/outrider/cut/{id}",
        cut,
        methods=["POST"],
        summary="Disconnect a running request from its cloud.",
        operation_id="Cut",
        dependencies=auth_dependencies,
        responses={200: {"model": response_schema.Cut}, **_errors(auth_dependencies, 403, 404)},
        openapi_extra={"parameters": [_path_parameter("id")]},
    )


def _add_metrics(app: FastAPI, gateway: Gateway, auth_dependencies: Sequence[Any]) -> None:
    async def metrics(request: HttpRequest) -> Response:
        gateway.access.authenticate(request)
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics."}
    }
    app.add_api_route(
        "/metrics",
        metrics,
        summary="Metrics for Prometheus.",
        operation_id="Metrics",
        dependencies=auth_dependencies,
        responses={**text, **_errors(auth_dependencies, 403)},
        response_class=Response,
    )


def _add_health(app: FastAPI, gateway: Gateway, info: GatewayInfo) -> None:
    """Add /health, which needs no API key."""

    async def health(request: HttpRequest) -> Response:
        gateway.access.check_host(request)
        scheduler, reason = gateway.scheduler, info.trouble()
        status = {"status": "ok" if reason is None else "degraded", "reason": reason}
        load = {"active": scheduler.active, "waiting": scheduler.waiting}
        return JSONResponse({**status, **load, "cloud": str(info.to_json()["cloud"])})

    responses: dict[int | str, dict[str, Any]] = {200: {"model": response_schema.Health}, **_errors([], 403)}
    app.add_api_route("/health", health, summary="The gateway's state.", operation_id="Health", responses=responses)


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

    for path, answer in (
        ("/", page),
        ("/demo/clips", clips),
        ("/demo/clips/{name}", clip),
        ("/openapi.json", document),
    ):
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


def _model(name: str) -> dict[str, Any]:
    if name != MODEL:
        raise RequestError(f"no such model: use {MODEL!r}", param="model", code="model_not_found", status=404)
    return MODEL_ENTRY


@lru_cache(1)
def bundled_clips() -> list[dict[str, Any]]:
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
            gateway.metrics.count_response(_endpoint(request), status)

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


def _endpoint(request: HttpRequest) -> str:
    """Return the route's declared path, because each path that clients send would be a new time series."""
    route = request.scope.get("route")
    return str(getattr(route, "path", "other"))


def _to_response(response: ErrorResponse, headers: Any = None) -> Response:
    more = {**response.headers, **(headers or {})}
    return Response(response.encode(), response.status, more, media_type="application/json")


# The document -----------------------------------------------------------------------------------------------


def _errors(auth_dependencies: Sequence[Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    listed = sorted({*statuses, *((401,) if auth_dependencies else ())})
    return {
        status: {"model": response_schema.ErrorReply, "description": STATUS_DESCRIPTIONS[status]} for status in listed
    }


def _streams() -> dict[str, Any]:
    return {
        "description": "The answer. With stream: true, OpenAI's chunks as server-sent events, ended by [DONE].",
        "content": {"text/event-stream": {}},
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _ref(kind: type[StrictModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with the request schemas. Bodies are read as bytes, so FastAPI has none."""
    document = app.openapi()
    schemas = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template="#/components/schemas/{model}"
    )[1]
    document["components"]["schemas"].update(schemas["$defs"])
    return document
