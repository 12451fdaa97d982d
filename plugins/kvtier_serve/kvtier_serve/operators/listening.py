"""Where operators are answered: at Unix sockets and at addresses, by apps that are told apart by who asks."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from kvtier_core.config.model import UNIX
from kvtier_core.errors import BackendError, ContractError
from kvtier_core.forks import ProcessBound
from kvtier_core.storekit import owner_socket
from kvtier_core.work.io_pool import run_aside
from kvtier_serve.operators.access import Apps, Gate, link
from kvtier_serve.operators.asking import host_and_port
from kvtier_serve.operators.clients import Listener
from kvtier_serve.operators.openapi import FOR_GET, REFUSALS, UNPROVEN

#: The most bytes of a body: a prompt of a million tokens.
LONGEST = 8 << 20
_PAGE = Path(__file__).with_name("page.html")
#: A page runs its own script, and asks its server alone.
_POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
#: Seconds in which the thread ends.
_CLOSING = 2.0
#: Connections that wait in the kernel's queue.
_BACKLOG = 128


class Listening(ProcessBound):
    """Answers operators wherever it listens, until it is closed. One thread calls every method."""

    def __init__(self, apps: Apps, *, trial: bool = False):
        """In a ``trial`` no socket is made, and no token."""
        self._trial = trial
        self.links: list[str] = []  #: addresses of the page, with the token behind the #
        self._apps = apps
        self._sockets: list[socket.socket] = []
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._thread = run_aside(self._run, "http")

    def open(self, address: str, certificate: str | None = None, key: str | None = None) -> str:
        """Answer at unix:PATH, or at HOST:PORT as `open_port` does; returns who asks where. Raises BackendError."""
        try:
            if address.startswith(UNIX):
                self.open_socket(Path(address.removeprefix(UNIX)))
                return f"operators of this user ask {address}"
            host, port = host_and_port(address)
            return f"operators with the token ask {host}:{self.open_port(host, port, certificate, key)}"
        except (OSError, ValueError, ContractError) as error:
            raise BackendError(f"cannot listen on {address}: {error}") from error

    def open_socket(self, path: Path) -> None:
        """Answer this user, and root, at a Unix socket. Raises OSError if the socket is not available."""
        listening = self._kept(owner_socket.listen(path, _BACKLOG, trial=self._trial))
        self._serve(Listener(listening, self._apps.operators, admits=owner_socket.admits))

    def open_port(self, host: str, port: int, certificate: str | None = None, key: str | None = None) -> int:
        """Answer those who have a token at an address, over TLS if there is a certificate. Returns the port.

        ``port`` 0 chooses a free one; ``key`` may be left out if it is in the file of the certificate. Raises
        ContractError for an address beyond loopback without a token, and for a certificate that cannot be used; OSError
        and BackendError if the address, or the token, is not available.
        """
        gate = Gate(host, self._apps, make=not self._trial)
        tls = _tls(certificate, key) if certificate else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = self._kept(socket.create_server((host, port), family=family, backlog=_BACKLOG))
        port = listening.getsockname()[1]
        if not self._trial:
            self.links.append(link(host, port, tls is not None))
        self._serve(Listener(listening, gate, tls))
        return port

    def close(self) -> None:
        """Stop answering."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSING)
        for each in self._sockets:
            each.close()

    def _kept(self, listening: socket.socket) -> socket.socket:
        self._sockets.append(listening)
        return listening

    def _serve(self, listener: Listener) -> None:
        if not self._trial:
            asyncio.run_coroutine_threadsafe(listener.serve(), self._loop)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._closing.wait())


def listening_for_nobody() -> Listening:
    """It finds out where one could listen, and answers nobody."""
    return Listening(Apps(*[_app([])] * 3), trial=True)


def apps_of(routes: Iterable[tuple[Route, Collection[int]]], alive: Route) -> Apps:
    """The apps of these routes, each with the statuses of its refusals. ``alive`` is all that a stranger may ask."""
    asked = list(routes)
    return Apps(
        operators=_app([route for route, _ in asked]),
        readers=_app([_not_for_readers(route) if FOR_GET in why else route for route, why in asked]),
        strangers=_app([alive, *(route for route, why in asked if UNPROVEN not in why)], _refusal(UNPROVEN)),
    )


def html_page(title: str, script: Path) -> Response:
    """A page for people, which has no data but asks for it: ``script`` says what, and shows the answers."""
    html = _PAGE.read_text("utf-8").replace("TITLE", title).replace("/* show */", script.read_text("utf-8"))
    return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})


async def decoded(request: Request, form: type) -> Any:
    """The body of a request in this form, or the answer that refuses it. Nothing is read beyond `LONGEST`."""
    try:
        return msgspec.json.decode(await _body(request), type=form)
    except OverflowError as error:
        return JSONResponse({"error": str(error)}, 413, {"Connection": "close"})
    except (msgspec.DecodeError, UnicodeDecodeError, ClientDisconnect) as error:
        return JSONResponse({"error": str(error)}, 400)


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ContractError(f"cannot use the certificate {certificate} and its key: {error}") from error
    return context


def _not_for_readers(route: Route) -> Route:
    """The same route, refused: without it, one of the same path would reveal the methods."""

    async def refuse(request: Request) -> Response:
        return _refusal(FOR_GET)

    return Route(route.path, refuse, methods=list(route.methods or ()))


def _app(routes: Sequence[BaseRoute], otherwise: ASGIApp | None = None) -> Router:
    return Router(routes, redirect_slashes=False, default=otherwise)


def _refusal(status: int) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == UNPROVEN else None
    return JSONResponse({"error": REFUSALS[status]}, status, headers)


async def _body(request: Request) -> bytes:
    """The body of a request; nothing is read beyond `LONGEST`. Raises OverflowError."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST:
            raise OverflowError(f"a body of more than {LONGEST} bytes")
    return bytes(body)
