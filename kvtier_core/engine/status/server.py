"""A Unix socket on which one thread answers questions: a line of JSON each, from what the owner has published.

A client that hangs or sends garbage delays no one, nor do a thousand of them: no call waits, lines and connections are
bounded. Only processes of the same user, or of root, are answered. Nothing can be changed through it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.storekit import owner_socket
from kvtier_core.transfer.io_pool import run, run_aside

Answer = Mapping[str, Any]

#: Bytes of a question: a prompt of a million tokens.
_LONGEST = 8 << 20
#: Connections at a time; others wait in the kernel's queue.
_MOST_CLIENTS = 16
#: Seconds for which a connection may say or take nothing.
_PATIENCE = 10.0
#: Seconds that the thread sleeps at most, so that it sees who was silent for too long.
_TICK = 1.0
#: Seconds for which `close` waits for the thread.
_CLOSE_TIMEOUT = 1.0
#: pid, user and group of the process at the other end.
_CREDENTIALS = struct.Struct("3i")


@attrs.define
class _Client:
    connection: socket.socket
    since: float  #: when it last said or took something
    question: bytearray = attrs.field(factory=bytearray)
    asked: bool = False  #: is the question whole? There is one to a connection
    answer: memoryview | None = None  #: what is left of it; None: not known yet


class Server:
    """Answers at ``path`` from now on. The owner's thread calls every method.

    ``answer`` is called on the server's thread with what was asked. It returns at once: the answer, or None if the
    owner has to be asked, who then calls `take` and `reply`.
    """

    def __init__(self, path: Path, answer: Callable[[Answer], Answer | None]):
        """Raises OSError if there is a file, or another engine that answers, or no right to make one."""
        self.path = path
        self._answer = answer
        self._asked: deque[tuple[_Client, Answer]] = deque(maxlen=_MOST_CLIENTS)  # older ones have been given up
        self._replied: deque[tuple[_Client, Answer]] = deque()
        self._closed = False
        self._listener = owner_socket.listen(path, _MOST_CLIENTS)
        self._inode = path.lstat().st_ino
        self._wake, self._woken = socket.socketpair()
        for each in (self._listener, self._woken, self._wake):
            each.setblocking(False)
        self._thread = run_aside(self._serve, "status")

    def take(self) -> tuple[object, Answer] | None:
        """A question for the owner, and from whom; None if there is none."""
        return self._asked.popleft() if self._asked else None

    def reply(self, client: object, answer: Answer) -> None:
        """What the owner says to one of these."""
        self._replied.append((client, answer))
        self._wake_up()

    def close(self) -> None:
        """Remove the socket and end the thread. May be called twice."""
        self._closed = True
        self._wake_up()
        self._thread.join(_CLOSE_TIMEOUT)
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake
            self._wake.send(b"\0")

    # -- on the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.ExitStack() as closing, selectors.DefaultSelector() as selector:
            for each in (self._listener, self._woken, self._wake):
                closing.enter_context(each)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                for key, events in selector.select(_TICK):
                    self._ready(selector, key.fileobj, key.data, events)
                while self._replied:
                    client, answer = self._replied.popleft()
                    self._begin_answer(selector, client, answer)
                self._close_idle(selector)
            for client in _clients(selector):
                client.connection.close()

    def _ready(self, selector: selectors.BaseSelector, file: Any, client: _Client | None, events: int) -> None:
        if file is self._listener:
            self._accept(selector)
        elif client is None:
            with contextlib.suppress(OSError):
                self._woken.recv(4096)
        elif not run(lambda: self._go_on(selector, client, events)).value:
            _drop(selector, client)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if not _is_ours(connection):
                connection.close()
                return
            selector.register(connection, selectors.EVENT_READ, _Client(connection, time.monotonic()))
            if len(_clients(selector)) >= _MOST_CLIENTS:
                selector.unregister(self._listener)

    def _go_on(self, selector: selectors.BaseSelector, client: _Client, events: int) -> bool:
        """Read or write as much as goes without waiting. False if the connection is to be closed."""
        client.since = time.monotonic()
        if events & selectors.EVENT_WRITE:
            client.answer = client.answer[client.connection.send(client.answer) :]
            return bool(client.answer)
        received = client.connection.recv(1 << 16)
        client.question += received
        if not received or len(client.question) > _LONGEST:
            return False
        if not client.question.endswith(b"\n"):
            return True
        if client.asked:
            return False
        client.asked = True
        asked = json.loads(client.question)
        answer = self._answer(asked)
        if answer is None:
            self._asked.append((client, asked))
        else:
            self._begin_answer(selector, client, answer)
        return True

    def _begin_answer(self, selector: selectors.BaseSelector, client: _Client, answer: Answer) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it has gone meanwhile
            client.answer = memoryview(json.dumps(answer).encode() + b"\n")
            selector.modify(client.connection, selectors.EVENT_WRITE, client)

    def _close_idle(self, selector: selectors.BaseSelector) -> None:
        before = time.monotonic() - _PATIENCE
        for client in _clients(selector):
            if client.since < before:
                _drop(selector, client)
        if len(_clients(selector)) < _MOST_CLIENTS:
            with contextlib.suppress(KeyError):  # it is listening
                selector.register(self._listener, selectors.EVENT_READ)


def _clients(selector: selectors.BaseSelector) -> list[_Client]:
    return [key.data for key in list(selector.get_map().values()) if key.data is not None]


def _drop(selector: selectors.BaseSelector, client: _Client) -> None:
    selector.unregister(client.connection)
    client.connection.close()


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())
