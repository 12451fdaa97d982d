"""A network that fails on demand: a proxy between a tier and its real server, for tests of tiers over a network."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import attrs

#: The address on which a server listens: host and port, or the path of a Unix socket.
Address = tuple[str, int] | Path

_LOOPBACK = "127.0.0.1"
_PIECE_NBYTES = 1 << 16
_IN_FLIGHT = 64  # pieces of one connection in one direction that wait for their time
_PIECES_PER_SECOND = 50  # at least, where the rate is limited: a slow link is not a link that stutters


class Way(enum.Enum):
    """A direction, for all connections."""

    REQUESTS = "requests"  #: from the client to the server
    ANSWERS = "answers"  #: from the server to the client


@attrs.frozen
class _Link:
    """The faults of the network."""

    delay: float
    rate: float
    stalled: bool = False
    garbled: bool = False
    limits: dict[Way, int] = attrs.Factory(dict)  # bytes after which a connection ends


class Proxy:
    """Forwards each connection to a server, and does to it what networks do, at up to about 1 GB/s.

    A context manager, which listens on a free port of the loopback interface, or on a Unix socket::

        with Proxy(("127.0.0.1", 6379)) as proxy:
            client = connect(port=proxy.port)
            proxy.stall()
            ...
            proxy.heal()

    Kinds of trouble add up until `heal` ends them. All methods may be called on any thread; when one returns, the
    trouble has begun, or ended. Bytes that are in a socket's buffer by then arrive nevertheless.
    """

    def __init__(self, server: Address, listen: Path | None = None, *, delay: float = 0, rate: float = math.inf):
        """``listen`` is the path of the socket to make, if that is a Unix socket; ``delay`` is in seconds each way,
        ``rate`` in bytes per second each way, all connections together."""
        self.server = server  #: may be changed; applies to new connections
        self.address: Address = listen or (_LOOPBACK, 0)  #: on which it listens
        self.connections = 0  #: accepted so far
        self.forwarded = dict.fromkeys(Way, 0)  #: bytes so far
        self._healthy = self._link = _Link(delay, rate)
        self._clear_at = dict.fromkeys(Way, 0.0)  # when the link has passed on what it was given
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-proxy")
        self._changed = asyncio.Event()  # set, and replaced, when the link changes
        self._running: dict[asyncio.Task[None], _Connection] = {}
        self._listener: socket.socket | None = None
        self._reserved: socket.socket | None = None

    def __enter__(self) -> Self:
        if not isinstance(self.address, Path):
            self._reserved = _bound(self.address)
            self.address = self._reserved.getsockname()
        self._thread.start()
        try:
            self._call(self._listen())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._reserved is not None:
            self._reserved.close()
        if isinstance(self.address, Path):
            self.address.unlink(missing_ok=True)

    @property
    def port(self) -> int:
        """The port on which it listens, unless that is a Unix socket."""
        assert not isinstance(self.address, Path), "a Unix socket has no port"
        return self.address[1]

    # -- trouble -----------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Each byte arrives ``seconds`` later, each way."""
        self._call(self._change(delay=seconds))

    def limit(self, rate: float) -> None:
        """No more than ``rate`` bytes per second pass each way, all connections together."""
        self._call(self._change(rate=rate))

    def stall(self) -> None:
        """Accept connections, and forward nothing. What was held back is forwarded when it is over."""
        self._call(self._change(stalled=True))

    def garble(self) -> None:
        """Replace the bytes of answers by as many random ones."""
        self._call(self._change(garbled=True))

    def truncate(self, nbytes: int, way: Way = Way.ANSWERS) -> None:
        """Close each connection, old or new, when ``nbytes`` more have passed one way."""
        self._call(self._truncate(nbytes, way))

    def drop(self) -> None:
        """Close all connections, and refuse new ones."""
        self._call(self._close())

    def heal(self) -> None:
        """End all trouble: the link is again as it was made. Open connections stay open."""
        self._call(self._heal())

    # -- in the loop's thread ----------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _change(self, **changes: Any) -> None:
        self._link = attrs.evolve(self._link, **changes)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _truncate(self, nbytes: int, way: Way) -> None:
        for connection in self._running.values():
            connection.passed[way] = 0
        await self._change(limits={**self._link.limits, way: nbytes})

    async def _heal(self) -> None:
        self._clear_at = dict.fromkeys(Way, 0.0)
        await self._change(**attrs.asdict(self._healthy))
        await self._listen()

    async def _listen(self) -> None:
        if self._listener is None:
            if isinstance(self.address, Path):
                self.address.unlink(missing_ok=True)
            self._listener = _bound(self.address)
            self._listener.listen()
            # Not `sock_accept`: when it is cancelled a client that it has accepted may be lost, and stay open.
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has hung up
            client, _ = listener.accept()
            self.connections += 1
            connection = _Connection(self, client)
            task = self._loop.create_task(connection.run())
            self._running[task] = connection
            task.add_done_callback(lambda task: self._running.pop(task).close())

    async def _close(self) -> None:
        """Neither listen nor forward."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def pass_link(self, way: Way, nbytes: int, arrived: float) -> None:
        """Wait until the link has passed on a piece that arrived at ``arrived``."""
        begin = max(self._loop.time(), self._clear_at[way])
        self._clear_at[way] = begin + nbytes / self._link.rate
        due = max(arrived + self._link.delay, self._clear_at[way])
        link = self._link
        while self._link is link and self._loop.time() < due:
            await self._pause(due - self._loop.time())
        while self._link.stalled:
            await self._pause(None)

    async def _pause(self, seconds: float | None) -> None:
        """Wait, at most until the link changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def piece_nbytes(self) -> int:
        """How much to forward at once."""
        return int(max(1, min(_PIECE_NBYTES, self._link.rate / _PIECES_PER_SECOND)))

    def altered(self, piece: bytes, way: Way, passed: int) -> tuple[bytes, bool]:
        """The fate of a piece after ``passed`` bytes of its connection; and whether the connection ends then."""
        left = self._link.limits.get(way, math.inf) - passed
        if left <= len(piece):
            piece = piece[: int(left)]
        if self._link.garbled and way is Way.ANSWERS:
            piece = self._random.randbytes(len(piece))
        self.forwarded[way] += len(piece)
        return piece, left <= len(piece)


class _Connection:
    """A client's connection to the proxy, and the proxy's to the server."""

    def __init__(self, proxy: Proxy, client: socket.socket):
        self.passed = dict.fromkeys(Way, 0)  # bytes since the last `truncate`
        self._proxy = proxy
        self._client = client
        self._client.setblocking(False)
        self._server = _new_socket(proxy.server)

    async def run(self) -> None:
        """Forward both ways until both have ended, or one has failed."""
        try:
            await asyncio.get_running_loop().sock_connect(self._server, _for_socket(self._proxy.server))
            async with asyncio.TaskGroup() as tasks:
                for way, source, sink in (
                    (Way.REQUESTS, self._client, self._server),
                    (Way.ANSWERS, self._server, self._client),
                ):
                    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT)
                    tasks.create_task(self._receive(source, pieces))
                    tasks.create_task(self._deliver(way, pieces, sink))
        except* OSError:
            pass

    def close(self) -> None:
        """Close both sockets."""
        self._client.close()
        self._server.close()

    async def _receive(self, source: socket.socket, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        piece = b"first"
        while piece:
            piece = await loop.sock_recv(source, self._proxy.piece_nbytes())
            await pieces.put((loop.time(), piece))

    async def _deliver(self, way: Way, pieces: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrived, piece = await pieces.get()
            await self._proxy.pass_link(way, len(piece), arrived)
            if not piece:
                sink.shutdown(socket.SHUT_WR)
                return
            piece, ends = self._proxy.altered(piece, way, self.passed[way])
            self.passed[way] += len(piece)
            await loop.sock_sendall(sink, piece)
            if ends:
                raise ConnectionAbortedError("truncated")


def _new_socket(address: Address) -> socket.socket:
    made = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
    made.setblocking(False)
    if not isinstance(address, Path):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _bound(address: Address) -> socket.socket:
    """A bound socket that does not listen yet.

    Several may be bound to one port. One that never listens keeps it, so that no other process gets the port of a proxy
    that refuses connections for a while.
    """
    made = _new_socket(address)
    try:
        if not isinstance(address, Path):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(_for_socket(address))
    except OSError:
        made.close()
        raise
    return made


def _for_socket(address: Address) -> str | tuple[str, int]:
    return str(address) if isinstance(address, Path) else address
