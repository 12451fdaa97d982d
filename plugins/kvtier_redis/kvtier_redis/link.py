"""A connection to a server that speaks RESP. Payloads are sent from, and received into, the caller's memory."""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.connection import AbstractConnection

from kvtier_core.errors import BackendError
from kvtier_core.outside import printable

#: Bytes received at once for the line before a payload: those of the payload among them are copied, so these are few.
_AHEAD = 64
_LONGEST_LINE = 1 << 10
_CHUNK = 1 << 16
#: The most bytes of an answer that is parsed, and not received into a view.
_LONGEST_REPLY = 256 << 20
#: Kinds of lists. The parser makes room for all items as soon as they are announced; ten million are too many.
_LISTS = (b"*", b"~", b">", b"|")
_TOO_MANY = re.compile(rb".[0-9]{8,}\r\n")
_LONGEST_COUNT = 24
_NOT_YET = object()


class Deadline:
    """When a call must have ended: ``seconds`` from now."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, more than 0. Raises BackendError when it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise BackendError("the call timed out")
        return left

    def share(self, among: int) -> Deadline:
        """A deadline that leaves equal time for each of the others still to be served."""
        return Deadline(self.left() / among)


class ServerError(BackendError):
    """The error that the server returned instead of a result."""

    def __init__(self, told: str, *, where: str = "", code: str = ""):
        told = printable(told)
        super().__init__(f"{where}: {told}" if where else told)
        self.code = code or told.partition(" ")[0]  #: the first word of the answer: OOM, NOAUTH, MOVED

    @property
    def elsewhere(self) -> bool:
        """Does another server have to be asked?"""
        return self.code in ("MOVED", "READONLY")

    @property
    def of_the_server(self) -> bool:
        """Does it mean that this server has lost its part, or may have? Errors such as OOM do not."""
        return self.elsewhere or self.code in ("ASK", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN")


class Garbage(BackendError):
    """The peer does not speak RESP, or its reply does not fit the request."""


class Link:
    """Raises BackendError and OSError; then it must be closed. For one thread at a time.

    Commands may be sent before the answers to earlier ones were received: `send` them, then take a `reply` for each, or
    `reply_into` for each. While a command waits for one of these, none may wait for the other.
    """

    def __init__(self, connection: AbstractConnection, deadline: Deadline):
        """On a connection that is open, and has nothing more to receive."""
        self.deadline = deadline  #: by which each operation ends
        self.waiting = 0  #: number of answers not yet received
        self._connection = connection
        self._sock = sock = _socket_of(connection)
        self._reader = hiredis.Reader(protocolError=Garbage, replyError=ServerError, notEnoughData=_NOT_YET)
        self._ahead = b""
        self._gathers = not isinstance(sock, ssl.SSLSocket)

    def close(self) -> None:
        """May be called twice."""
        self._connection.disconnect()

    @property
    def is_stale(self) -> bool:
        """Was it closed by the peer, or did the peer send something unasked?"""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def call(self, *words: bytes | str | int) -> Any:
        """Send one command, and return its answer. Raises ServerError if that is an error."""
        return unless_refused(self.ask([command(*words)]))[0]

    def ask(self, commands: Sequence[bytes]) -> list[Any]:
        """The answers to several commands, some of them ServerErrors, in one round trip."""
        self.send(b"".join(commands), answers=len(commands))
        return [self.reply() for _ in commands]

    def send(self, *buffers: bytes | memoryview, answers: int = 1) -> None:
        """Send the buffers one after another: commands that have ``answers`` answers in all."""
        self.waiting += answers
        views = [memoryview(buffer) for buffer in buffers]
        while views:
            self._sock.settimeout(self.deadline.left())
            sent = self._sock.sendmsg(views) if self._gathers else self._sock.send(views[0])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def reply(self) -> Any:
        """The next answer: bytes, a number, None, a list of these, or a ServerError."""
        received, tail = 0, b""
        while (answer := self._reader.gets()) is _NOT_YET:
            data, self._ahead = self._ahead or self._receive(_CHUNK), b""
            received, tail = received + len(data), tail[-_LONGEST_COUNT:] + data
            if received > _LONGEST_REPLY or _announces_too_much(tail):
                raise Garbage("the answer of the server has no end")
            self._reader.feed(data)
        self.waiting -= 1
        return answer

    def reply_into(self, view: memoryview) -> bool | ServerError:
        """Receive a value into the view. False if there is none, or one of another length; the view is then unchanged.

        Returns the ServerError if that is the answer.
        """
        line = self._line()
        self.waiting -= 1
        if line.startswith(b"-"):
            return ServerError(line[1:].decode("ascii", "replace"))
        nbytes = _length(line)
        if nbytes == len(view):
            self._fill(view)
        elif nbytes >= 0:
            self._skip(nbytes)
        if nbytes >= 0:
            self._end()
        return nbytes == len(view)

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > _LONGEST_LINE:
                raise Garbage("the server does not speak the protocol of Redis")
            self._ahead += self._receive(_AHEAD)
        line, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return line

    def _end(self) -> None:
        while len(self._ahead) < 2:
            self._ahead += self._receive(_AHEAD)
        if not self._ahead.startswith(b"\r\n"):
            raise Garbage("the server sent more than it had announced")
        self._ahead = self._ahead[2:]

    def _fill(self, view: memoryview) -> None:
        filled = min(len(self._ahead), len(view))
        view[:filled], self._ahead = self._ahead[:filled], self._ahead[filled:]
        while filled < len(view):
            self._sock.settimeout(self.deadline.left())
            filled += self._must_go_on(self._sock.recv_into(view[filled:]))

    def _skip(self, nbytes: int) -> None:
        while len(self._ahead) < nbytes:
            nbytes -= len(self._ahead)
            self._ahead = self._receive(_CHUNK)
        self._ahead = self._ahead[nbytes:]

    def _receive(self, nbytes: int) -> bytes:
        self._sock.settimeout(self.deadline.left())
        received = self._sock.recv(nbytes)
        self._must_go_on(len(received))
        return received

    def _must_go_on(self, received: int) -> int:
        if not received:
            raise ConnectionResetError("the server closed the connection")
        return received


def _socket_of(connection: AbstractConnection) -> socket.socket:
    """The one place that knows redis-py's name for a connection's socket: others have none."""
    sock: socket.socket | None = getattr(connection, "_sock", None)
    if sock is None:
        raise BackendError("this version of redis-py does not expose the sockets of its connections")
    return sock


def _announces_too_much(data: bytes) -> bool:
    for kind in _LISTS:
        at = data.find(kind)  # much faster than a regular expression that begins with it
        while at >= 0:
            if _TOO_MANY.match(data, at):
                return True
            at = data.find(kind, at + 1)
    return False


def _length(line: bytes) -> int:
    """The length that the line before a value announces; -1 if there is no value."""
    if line[:1] != b"$" or not (line[1:].isdigit() or line == b"$-1"):
        raise Garbage("unexpected reply from the server")
    return int(line[1:])


def unless_refused(answers: list[Any]) -> list[Any]:
    """The answers. Raises the first ServerError among them."""
    for answer in answers:
        if isinstance(answer, ServerError):
            raise answer
    return answers


def command(*words: bytes | str | int) -> bytes:
    """A command as it is sent."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # typed as if it took one word
    return packed


def command_around(before: Sequence[bytes], nbytes: int, after: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The bytes before and after a payload of ``nbytes`` that stands between these words of a command."""
    count = len(before) + 1 + len(after)
    return b"*%d\r\n%b$%d\r\n" % (count, _packed(before), nbytes), b"\r\n" + _packed(after)


def _packed(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
