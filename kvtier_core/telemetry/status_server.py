"""A Unix socket on which one thread answers questions: a line of JSON each, from data that the owner has published.

Only its user can connect. What only the owner can answer, or do, waits for it. One client is served at a time, for a
bounded time.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier_core.forks import ProcessBound
from kvtier_core.storekit import owner_socket
from kvtier_core.work.io_pool import run, run_aside

Answer = Mapping[str, Any]

#: Maximum number of bytes of a question: a prompt of a million tokens.
_LONGEST = 8 << 20
#: Questions that wait for the owner; older ones are given up. As many connections wait in the kernel's queue.
_MOST_WAITING = 16
#: Seconds in which a client must have asked, and then those in which it must have taken the answer.
_PATIENCE = 2.0
#: Seconds that the thread rests after a client that failed: there may be no descriptor for the next one.
_REST = 0.01
#: Seconds for which `close` waits for the thread.
_CLOSE_TIMEOUT = 1.0


class Server(ProcessBound):
    """Answers at ``path`` from now on. The owner's thread calls every method.

    ``answer`` is called on the server's thread with the question. It immediately returns the answer, or None if only
    the owner can answer, which then calls `take` and `reply`.
    """

    def __init__(self, path: Path, answer: Callable[[Answer], Answer | None], *, trial: bool = False):
        """Raises OSError if there is a file, or another engine that answers, or no permission to make a socket.

        ``trial``: see `owner_socket.listen`.
        """
        self.path = path
        self._answer = answer
        self._asked: deque[tuple[socket.socket, Answer]] = deque()
        self._closing = threading.Event()
        self._listener = owner_socket.listen(path, _MOST_WAITING, trial=trial)
        self._client = self._listener  # the one that is served now
        self._thread = run_aside(self._serve, "status")

    def take(self) -> tuple[socket.socket, Answer] | None:
        """A question for the owner, and its client, which still waits; None if there is no question."""
        with contextlib.suppress(IndexError):
            while _has_hung_up((found := self._asked.popleft())[0]):
                found[0].close()
            return found
        return None

    def reply(self, client: socket.socket, answer: Answer) -> None:
        """Send an answer of the owner, which does not wait until it is taken."""
        run_aside(lambda: _send(client, answer), "status-answer")

    def close(self) -> None:
        """Remove the socket and end the thread. May be called twice."""
        self._closing.set()
        for each in (self._listener, self._client):
            with contextlib.suppress(OSError):  # it has hung up
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_TIMEOUT)
        self._listener.close()
        self._give_up(0)

    def _give_up(self, most: int) -> None:
        while len(self._asked) > most and (oldest := self.take()):
            oldest[0].close()

    # -- on the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            if run(self._serve_one).error is not None:
                self._closing.wait(_REST)

    def _serve_one(self) -> None:
        self._client, _ = self._listener.accept()
        with contextlib.ExitStack() as closing:
            client = closing.enter_context(self._client)
            if not owner_socket.admits(client):
                return
            asked = json.loads(_question(client))
            answer = self._answer(asked)
            if answer is not None:
                _send(client, answer)
                return
            closing.pop_all()
            self._asked.append((client, asked))
            self._give_up(_MOST_WAITING)


def _question(client: socket.socket) -> bytes:
    """A line. Raises OSError or ValueError if it takes too long, or is too long."""
    deadline = time.monotonic() + _PATIENCE
    asked = bytearray()
    while not asked.endswith(b"\n"):
        client.settimeout(deadline - time.monotonic())  # raises ValueError after the deadline
        received = client.recv(1 << 16)
        asked += received
        if not received or len(asked) > _LONGEST:
            raise ValueError
    return bytes(asked)


def _has_hung_up(client: socket.socket) -> bool:
    """Has it closed the connection? One that only sends nothing more still waits for its answer."""
    return run(lambda: client.send(b"", socket.MSG_NOSIGNAL)).error is not None


def _send(client: socket.socket, answer: Answer) -> None:
    with client:
        client.settimeout(_PATIENCE)
        client.sendall(json.dumps(answer).encode() + b"\n")
