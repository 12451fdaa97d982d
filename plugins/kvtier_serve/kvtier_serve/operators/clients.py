"""The connections of HTTP clients: a bounded number at a time and per second, each for a bounded time.

A client has proved nothing yet when its connection is accepted, so all that a stranger can use is bounded here.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable

from h11 import LocalProtocolError
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvtier_core.storekit import owner_socket

logger = logging.getLogger("kvtier")

#: The most connections of a listener, and open files of this process for each. A further connection ends the one on
#: which nothing has been answered for longest.
_MOST, _FILES = 64, 16
#: Connections that a listener accepts in a second; more wait in the kernel's queue, where they cost the owner nothing.
_PACE = 100
#: Seconds between two answers on a connection, in which its client must ask, and take the answer.
PATIENCE = 30.0
#: The most bytes of the first line and the headers of a request.
_LONGEST_HEAD = 1 << 14
#: Seconds without accepting after a failure: there may be no descriptor left.
_REST = 0.5


class Listener:
    """Serves an app to those who connect to a socket. Everything but the constructor runs in one event loop."""

    def __init__(
        self,
        listening: socket.socket,
        app: ASGIApp,
        tls: ssl.SSLContext | None = None,
        admits: Callable[[socket.socket], bool] = lambda client: True,
    ):
        """``admits`` judges a connection by its socket, before anything is read."""
        listening.setblocking(False)
        self._listening, self._tls, self._admits = listening, tls, admits
        self._app = app
        self._config = Config(
            self._answer,
            interface="asgi3",
            http="h11",  # the other implementation does not bound headers
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # a stranger could write its other lines
            access_log=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_LONGEST_HEAD,
        )
        self._config.load()
        self._most = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _FILES)
        self._connections: dict[_Client, asyncio.Task[None]] = {}  # the one answered last is at the end

    async def serve(self) -> None:
        """Serve until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(_REST)
                continue
            if not self._admits(sock):
                sock.close()
                continue
            if len(self._connections) >= self._most:
                self._connections.pop(next(iter(self._connections))).cancel()
            client = _Client(self._config, self._answered)
            self._connections[client] = loop.create_task(self._connection(sock, client))
            await asyncio.sleep(1 / _PACE)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except LocalProtocolError:  # the client has broken HTTP meanwhile, and was told so
            raise
        except Exception:
            logger.exception("kvtier: an operator request failed")
            raise

    async def _connection(self, sock: socket.socket, client: _Client) -> None:
        """A connection, until it ends, its time is over, or another takes its place."""
        try:
            async with asyncio.timeout(PATIENCE) as client.patience:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: client, sock, ssl=self._tls)
                await client.ended.wait()
        except (OSError, TimeoutError):
            pass
        finally:
            self._connections.pop(client, None)
            client.abort()
            sock.close()

    def _answered(self, client: _Client) -> None:
        if client in self._connections:
            self._connections[client] = self._connections.pop(client)
            client.patience.reschedule(asyncio.get_running_loop().time() + PATIENCE)


class _Client(H11Protocol):
    """The other end of a connection."""

    patience: asyncio.Timeout

    def __init__(self, config: Config, answered: Callable[[_Client], None]):
        super().__init__(config, ServerState(), {})
        self._answered = answered
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:  # the log names the user, as it does the host of others
            pid, user, _ = owner_socket.credentials(sock)
            self.client = f"user {user}, process {pid}", 0

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered(self)

    def abort(self) -> None:
        """Hang up, whatever has not been sent. In Python 3.11.2, a TLS connection that has ended cannot be aborted."""
        if self.transport is not None and not self.ended.is_set():
            self.transport.abort()
