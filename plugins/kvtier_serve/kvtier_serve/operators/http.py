"""The HTTP interface for operators, on a thread of its own. The owner answers it between two calls of engines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier_core.errors import ConfigError, ContractError
from kvtier_core.outside import printable
from kvtier_remote.protocol import plain
from kvtier_serve.operators.console import OPERATIONS, Console, Operation
from kvtier_serve.operators.forms import Prompt, RefusedError
from kvtier_serve.operators.listening import Listening, apps_of, decoded, html_page
from kvtier_serve.operators.metrics import FORMAT, Snapshot
from kvtier_serve.operators.openapi import FOR_GET, FORM, UNPROVEN, Page, refusals, schema
from kvtier_serve.server import Server

#: Seconds in which the owner must answer: it has no call that takes as long.
_PROGRESS = 2.0
_SCRIPT = Path(__file__).with_name("status.js")


class HTTP(Listening):
    """Answers operators of a server. One thread calls every method."""

    def __init__(self, server: Server):
        self._server = server
        self._console = Console(server)
        self._pages = (
            Page("/", self._page, "text/html"),
            Page("/metrics", self._metrics, "text/plain", (UNPROVEN, 503)),
            Page("/openapi.json", self._schema, FORM, (UNPROVEN,)),
            Page("/links", self._links_to_page, FORM, (UNPROVEN, FOR_GET)),
        )
        asked = [(Route(each.path, self._endpoint(each), methods=[each.method]), refusals(each)) for each in OPERATIONS]
        asked += [(Route(page.path, page.work), list(page.refusals)) for page in self._pages]
        super().__init__(apps_of(asked, Route("/health", self._alive)))

    # -- on its thread -------------------------------------------------------------------------------

    def _endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            asked = await decoded(request, operation.body) if operation.body else None
            if isinstance(asked, Response):
                return asked
            try:
                arguments = await self._arguments(operation, asked)
            except (RefusedError, ConfigError) as error:
                return JSONResponse({"error": str(error)}, 409)
            except TimeoutError as error:
                return JSONResponse({"error": str(error)}, 503)
            named = {field: printable(name) for field, name in request.path_params.items()}
            work = functools.partial(self._console.carry_out, operation, _who(request), asked, *arguments, **named)
            return await self._asked(work, lambda found: _as_json(operation.finish(self._console, found)))

        return answer

    async def _arguments(self, operation: Operation, asked: Any) -> list[Any]:
        """The arguments of the owner's work, made on another thread. Raises as `_owner` does."""
        arguments = list(await asyncio.to_thread(operation.prepare, self._console))
        if isinstance(asked, Prompt):
            arguments.append(await asyncio.to_thread(await self._owner(lambda: self._console.name(asked))))
        return arguments if asked is None or type(asked) is Prompt else [*arguments, asked]

    async def _asked(self, work: Callable[[], Any], told: Callable[[Any], Response]) -> Response:
        """Have the owner do it, and another thread make an answer from the result."""
        try:
            return await asyncio.to_thread(told, await self._owner(work))
        except TimeoutError as error:
            return JSONResponse({"error": str(error)}, 503)
        except (RefusedError, ConfigError, ContractError) as error:
            return JSONResponse({"error": str(error)}, 409)

    async def _owner(self, work: Callable[[], Any]) -> Any:
        """Have the owner do it. Raises as the work does, and TimeoutError if the owner did not begin; it never will."""
        future: Future[Any] = self._server.ask(work)
        answer = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([answer], timeout=_PROGRESS)
        if not done and future.cancel():  # what the owner has begun, it finishes
            raise TimeoutError(f"the server has made no progress for {_PROGRESS} s")
        return await answer

    async def _alive(self, request: Request) -> Response:
        """All that a stranger is told: does the owner make progress?"""
        status = (await self._asked(lambda: None, _as_json)).status_code
        return JSONResponse({"alive": status == 200}, status)

    async def _metrics(self, request: Request) -> Response:
        """All counts, for Prometheus."""
        return await self._asked(self._console.metrics.look, _as_text)

    async def _schema(self, request: Request) -> Response:
        """This description."""
        return JSONResponse(schema(self._pages))

    async def _page(self, request: Request) -> Response:
        """A page for people, which has no data but asks for it."""
        return html_page("kvtier serve", _SCRIPT)

    async def _links_to_page(self, request: Request) -> Response:
        """Addresses of the page, with the token behind the #."""
        return JSONResponse(self.links)


def _as_json(found: Any) -> Response:
    return Response(msgspec.json.encode(found, enc_hook=plain), media_type=FORM)


def _as_text(found: Snapshot) -> Response:
    return Response(found.text(), headers={"Content-Type": FORMAT})


def _who(request: Request) -> str:
    """The other end of the connection, for the log."""
    return request.client.host if request.client else "unknown"
