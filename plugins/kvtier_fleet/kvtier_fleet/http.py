"""`kvtier fleet serve`: the calls of a server, answered by all servers of a fleet, and a page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier_core.errors import BackendError
from kvtier_core.outside import printable
from kvtier_fleet.fleet import Fleet
from kvtier_fleet.seen import Seen
from kvtier_serve.operators.console import OPERATIONS, Operation
from kvtier_serve.operators.forms import ModelQuota, QuotaOf
from kvtier_serve.operators.listening import Listening, apps_of, decoded, html_page
from kvtier_serve.operators.openapi import FOR_GET, FORM, UNPROVEN, refusals

logger = logging.getLogger("kvtier")

_SCRIPT = Path(__file__).with_name("fleet.js")


class FleetHTTP(Listening):
    """Answers operators of a fleet as `Listening` says. ``on``, which may be repeated in a query, chooses servers."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        asked = [each for each in OPERATIONS if each.path != "/health"]
        routes = [(Route(each.path, self._endpoint(each), methods=[each.method]), refusals(each)) for each in asked]
        routes += [(Route("/", _page), []), (Route("/links", self._links), [UNPROVEN, FOR_GET])]
        super().__init__(apps_of(routes, Route("/health", _alive)))

    def _endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            asked = await decoded(request, operation.body) if operation.body else None
            if isinstance(asked, Response):
                return asked
            named = {field: quote(printable(name), safe="") for field, name in request.path_params.items()}
            path, on = operation.path.format(**named), request.query_params.getlist("on")
            if operation.changes:
                who, where = request.client.host if request.client else "unknown", printable(", ".join(on)) or "all"
                logger.info("kvtier: operator %s: %s %s on %s", who, operation.method, path, where)
            try:
                return await asyncio.to_thread(self._answer, operation, path, asked, on)
            except BackendError as error:
                return JSONResponse({"error": str(error)}, 409)

        return answer

    def _answer(self, operation: Operation, path: str, asked: Any, on: list[str]) -> Response:
        """Have all servers do it. Raises BackendError if ``on`` names no server."""
        body: dict[str, Any] = {} if asked is None else msgspec.to_builtins(asked)
        if isinstance(asked, QuotaOf | ModelQuota):
            found = self._fleet.share(path, body, on)
        else:
            form = Seen if operation.path == "/status" else operation.result
            found = self._fleet.ask(operation.method, path, body or None, form, on)
        return Response(msgspec.json.encode(found.plain()), media_type=FORM)

    async def _links(self, request: Request) -> Response:
        return JSONResponse(self.links)


async def _alive(request: Request) -> Response:
    return JSONResponse({"alive": True})


async def _page(request: Request) -> Response:
    return html_page("kvtier fleet", _SCRIPT)
