"""One request and its response over a connection that never blocks: as much of HTTP/1.1 as object stores speak.

Bytes go from the caller's memory to the socket and back, without a copy between.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import select
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from selectors import EVENT_READ, EVENT_WRITE
from typing import TypeVar

import attrs

T = TypeVar("T")
#: Yields what it waits for, EVENT_READ or EVENT_WRITE, and is resumed when the socket is ready for it.
Steps = Generator[int, None, T]

_MAX_HEAD_NBYTES = 64 << 10
#: Of a body that does not go into the caller's memory: a listing, or an error.
_MAX_BODY_NBYTES = 16 << 20
_PIECE_NBYTES = 1 << 20
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")


class HttpError(Exception):
    """What came is not HTTP, or ended early."""


@attrs.frozen
class Request:
    """What is asked of the store."""

    method: str
    path: str  #: quoted
    query: str = ""  #: quoted, and sorted as signatures need it
    headers: Mapping[str, str] = attrs.field(factory=dict)  #: names in lower case
    body: bytes | memoryview = b""
    into: memoryview | None = None  #: takes the body of a response of status 200 or 206


@attrs.frozen
class Response:
    """What the store said."""

    status: int
    headers: Mapping[str, str]  #: names in lower case
    body: bytes = b""  #: empty if it went into `Request.into`
    nbytes: int = 0  #: of the body, as told by the store
    fits: bool = True  #: False: the body is longer than `Request.into`, and nothing was written there


@attrs.define
class Endpoint:
    """Where the store listens."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    _turn: int = 0  #: which of the host's addresses is tried next

    @property
    def authority(self) -> str:
        """Host and port as in a URL, without the port that goes without saying."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def address(self) -> tuple[int, tuple]:
        """Family and address of one of the host's addresses. Raises OSError."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[self._turn % len(found)]
        return family, address

    def turn(self) -> None:
        """The address that was tried last does not answer: try another one."""
        self._turn += 1


class Connection:
    """A connection that is made with its first request. One request at a time."""

    def __init__(self, endpoint: Endpoint):
        self.reused = False  #: has it had a response before?
        self.open = True  #: may it carry another request?
        self._endpoint = endpoint
        self._socket: socket.socket | None = None
        self._received = bytearray()  # and not yet looked at

    def fileno(self) -> int:
        """The descriptor to wait for, once `exchange` has begun."""
        return self._socket.fileno() if self._socket is not None else -1

    def silent(self) -> bool:
        """Is it as idle as it should be? One that the store has closed, or says something on, is of no use."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self.open = False
        if self._socket is not None:
            self._socket.close()

    def exchange(self, head: bytes, request: Request) -> Steps[Response]:
        """Send a request, whose head is ``head``, and receive the response. Raises OSError and HttpError."""
        if self._socket is None:
            yield from self._connect()
        yield from self._send(head)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it closed
            yield from self._send(request.body)
        status, headers = yield from self._receive_head()
        while status < 200:
            status, headers = yield from self._receive_head()
        response = yield from self._receive_response(request, status, headers)
        if self._received:
            raise HttpError("more came than was announced")
        self.reused = True
        return response

    def _connect(self) -> Steps[None]:
        family, address = self._endpoint.address()
        self._socket = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = sock.connect_ex(address)
        if error == errno.EINPROGRESS:
            yield EVENT_WRITE
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._endpoint.turn()
            raise OSError(error, os.strerror(error))
        if self._endpoint.tls is not None:
            self._socket = tls = self._endpoint.tls.wrap_socket(
                sock, server_hostname=self._endpoint.host, do_handshake_on_connect=False
            )
            yield from _when_ready(tls.do_handshake, EVENT_READ)

    def _send(self, data: bytes | memoryview) -> Steps[None]:
        view, sent = memoryview(data), 0
        while sent < len(view):
            piece = view[sent : sent + _PIECE_NBYTES]
            sent += yield from _when_ready(functools.partial(self._socket.send, piece), EVENT_WRITE)

    def _receive(self) -> Steps[None]:
        """At least a byte more."""
        data = yield from _when_ready(functools.partial(self._socket.recv, 64 << 10), EVENT_READ)
        if not data:
            raise HttpError("the store closed the connection")
        self._received += data

    def _receive_head(self) -> Steps[tuple[int, dict[str, str]]]:
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > _MAX_HEAD_NBYTES:
                raise HttpError("the head of the response has no end")
            yield from self._receive()
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        del self._received[: end + 4]
        status = _STATUS.fullmatch(first)
        if status is None:
            raise HttpError("the response is not HTTP/1.1")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.open = status[1] == "1" and headers.get("connection", "").lower() != "close"
        return int(status[2]), headers

    def _receive_response(self, request: Request, status: int, headers: dict[str, str]) -> Steps[Response]:
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        told = headers.get("content-length", "")
        nbytes = int(told) if told.isascii() and told.isdigit() else None
        if request.method == "HEAD" or status in (204, 304):
            return Response(status, headers, nbytes=nbytes or 0)
        if request.into is not None and status in (200, 206):
            if nbytes is None or chunked:
                raise HttpError("the store does not say how long an object is")
            if nbytes > len(request.into):
                self.open = False  # the rest is not worth reading
                self._received.clear()
                return Response(status, headers, nbytes=nbytes, fits=False)
            yield from self._receive_into(request.into[:nbytes])
            return Response(status, headers, nbytes=nbytes)
        body = yield from self._receive_chunks() if chunked else self._receive_body(nbytes)
        return Response(status, headers, body, len(body))

    def _receive_into(self, view: memoryview) -> Steps[None]:
        count = min(len(self._received), len(view))
        view[:count] = self._received[:count]
        del self._received[:count]
        while count < len(view):
            more = yield from _when_ready(functools.partial(self._socket.recv_into, view[count:]), EVENT_READ)
            if not more:
                raise HttpError("an object ended before its announced length")
            count += more

    def _receive_body(self, nbytes: int | None) -> Steps[bytes]:
        if nbytes is None:
            raise HttpError("the store does not say how long its response is")
        if nbytes > _MAX_BODY_NBYTES:
            raise HttpError("the response is too long")
        while len(self._received) < nbytes:
            yield from self._receive()
        return self._taken(nbytes)

    def _receive_chunks(self) -> Steps[bytes]:
        body = bytearray()
        while True:
            while (end := self._received.find(b"\r\n")) < 0:
                if len(self._received) > _MAX_HEAD_NBYTES:
                    raise HttpError("a chunk of the response has no length")
                yield from self._receive()
            told = self._taken(end + 2)[:end].partition(b";")[0].strip()
            nbytes = int(told, 16) if re.fullmatch(rb"[0-9A-Fa-f]{1,8}", told) else -1
            if not 0 <= nbytes <= _MAX_BODY_NBYTES - len(body):
                raise HttpError("a chunk of the response has no length, or is too long")
            while len(self._received) < nbytes + 2:
                yield from self._receive()
            body += self._taken(nbytes + 2)[:nbytes]
            if not nbytes:
                return bytes(body)

    def _taken(self, nbytes: int) -> bytes:
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken


def _when_ready(call: Callable[[], T], event: int) -> Steps[T]:
    """Call, and again whenever the socket is ready, until it does not have to wait."""
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield EVENT_READ
        except ssl.SSLWantWriteError:
            yield EVENT_WRITE
        except BlockingIOError:
            yield event
