"""The ASGI application: routes, OpenAPI document, and error handlers."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider import __version__
from outrider.decoding.gate import SIGNAL_NAMES
from outrider.errors import OutriderError
from outrider.gateway import response_schema
from outrider.gateway.access import JSON
from outrider.gateway.completion_schema import CompletionRequest
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import SERVER, ErrorResponse, JsonObject, RequestError, http_error, to_error_response
from outrider.gateway.handlers import Gateway, handle_document, handle_generation
from outrider.gateway.page_routes import add_page
from outrider.gateway.request_kind import RequestKind, completion_kind
from outrider.gateway.request_schema import MODEL, ChatRequest, StrictModel
from outrider.gateway.responses_request import RESPONSES
from outrider.gateway.responses_schema import ResponsesRequest
from outrider.gateway.tokenization import DetokenizeRequest, TokenizeRequest
from outrider.gateway.transcriptions import TRANSCRIPTION, TranscriptionRequest

log = logging.getLogger("outrider.gateway")

MODEL_ENTRY: Final = {"id": MODEL, "object": "model", "created": 0, "owned_by": "outrider"}
STATUS_DESCRIPTIONS: Final = {
    400: "The request is invalid. `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The Host header names another host, or a page of another site sent the form.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    429: "The queue is full. Retry-After gives the seconds until a retry.",
    500: "A bug of the gateway.",
    503: "The cloud is unreachable or refused the request (`type` is cloud_error), or the gateway is shutting down.",
    504: "The generation took longer than this gateway allows.",
}
Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Content = Callable[[str, Mapping[str, str]], JsonObject]  # from the client and the path's parameters
COMPLETION_STATUSES: Final = (400, 403, 404, 408, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True)
class GatewayInfo:
    """The gateway's description at `/v1/outrider`.

    overview: the fields of `response_schema.Overview`. cloud: returns the cloud's name, which may be known later than
    the rest. trouble: returns the reason while the cloud cannot be used, else None.
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
        "defaults": defaults.options.applicable(),
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
    routes.add_generations()
    routes.add_tokenization()
    routes.add_documents(info)
    routes.add_metrics()
    routes.add_health(info)
    _add_head_routes(app)
    add_page(app, gateway, lambda: _document(app))
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

    def add_generations(self) -> None:
        """Add the requests that generate."""
        events = "The answer. With stream: true, OpenAI's events as server-sent events."
        chunks = "The answer. With stream: true, OpenAI's chunks as server-sent events, ended by [DONE]."
        kinds: tuple[tuple[str, RequestKind, type[StrictModel], type[response_schema.Reply], str, str], ...] = (
            (
                "chat/completions",
                completion_kind(ChatRequest),
                ChatRequest,
                response_schema.ChatCompletion,
                "Answer a conversation, or a recording.",
                chunks,
            ),
            (
                "completions",
                completion_kind(CompletionRequest),
                CompletionRequest,
                response_schema.Completion,
                "Continue a text.",
                chunks,
            ),
            (
                "responses",
                RESPONSES,
                ResponsesRequest,
                response_schema.Response,
                "Answer a conversation, or a recording.",
                events,
            ),
            (
                "audio/transcriptions",
                TRANSCRIPTION,
                TranscriptionRequest,
                response_schema.Transcription,
                "Caption a recording.",
                events,
            ),
        )
        for path, kind, schema, reply, summary, description in kinds:
            content: JsonObject = {"text/event-stream": {}}
            if kind is TRANSCRIPTION:
                content |= {"text/plain": {"schema": {"type": "string"}}}
            success = {"model": reply, "description": description, "content": content}
            answer = self._counted(partial(handle_generation, kind=kind, gateway=self._gateway))
            self._add_body(f"/v1/{path}", answer, schema, summary, success, kind.media_type)

    def add_tokenization(self) -> None:
        """Add /tokenize and /detokenize."""
        gateway = self._gateway
        tokenize, detokenize = gateway.tokenization.tokenize, gateway.tokenization.detokenize
        works = (
            ("/tokenize", tokenize, TokenizeRequest, response_schema.Tokens, "A prompt's tokens."),
            ("/detokenize", detokenize, DetokenizeRequest, response_schema.Prompt, "Tokens' text."),
        )
        for path, work, schema, reply, summary in works:
            answer = self._counted(partial(handle_document, answer=work, gateway=gateway))
            self._add_body(path, answer, schema, summary, {"model": reply}, JSON)

    def _counted(self, answer: Endpoint) -> Endpoint:
        """Return an endpoint whose responses are counted."""

        async def counted(request: HttpRequest) -> Response:
            response = await answer(request)
            self._gateway.metrics.count_response(request.url.path, response.status_code)
            return response

        return counted

    def _add_body(
        self,
        path: str,
        answer: Endpoint,
        schema: type[StrictModel],
        summary: str,
        success: JsonObject,
        media_type: str,
    ) -> None:
        content = {media_type: {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
        body = {"requestBody": {"required": True, "content": content}}
        self._add(path, answer, schema.__name__, summary, success, COMPLETION_STATUSES, "POST", body)

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
    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, TranscriptionRequest, TokenizeRequest, DetokenizeRequest)
    schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}")[
        1
    ]
    document["components"]["schemas"].update(schemas["$defs"])
    return document
