"""Routes of the page, its files and its data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from outrider.engines.load import BUNDLED
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.handlers import Gateway

PAGE: Final = Path(__file__).parent / "page"
CLIPS: Final = BUNDLED / "clips"
PAGE_HEADERS: Final = {  # the page loads nothing from other hosts, and no other page may embed it
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, gateway: Gateway, document: Callable[[], JsonObject]) -> None:
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

    async def openapi(request: HttpRequest) -> Response:
        gateway.access.check_host(request)
        return JSONResponse(document())

    answers = {"/": page, "/demo/clips": clips, "/demo/clips/{name}": clip, "/openapi.json": openapi}
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
