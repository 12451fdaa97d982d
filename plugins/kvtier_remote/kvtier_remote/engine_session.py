"""A session of an engine, as its scheduler side sees it: calls are made, and answered in order."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvtier_core.types import ChunkKey
from kvtier_remote.connection import Connection
from kvtier_remote.protocol import CALLS, DONE, Header, ProtocolError, encode, reason, result

#: Seconds for which an answer is polled before the thread sleeps: most arrive by then, and waking up takes 60 µs.
_SPIN = 300e-6
#: The most bytes of calls that wait to be sent; then the server is asked nothing more. A call has up to 256 KiB.
_MOST_UNSENT = 1 << 20
#: The most chunks that are remembered as stored.
_MOST_STORED = 1 << 14


class _Asked(NamedTuple):
    """A request that the server has not answered."""

    name: str
    then: Callable[[Any], None] | None  #: what is done with the result
    since: float


class EngineSession:
    """A connection to the server, on which the engine has a session or is about to have one."""

    def __init__(self, connection: Connection, clock: Callable[[], float]):
        self.connection = connection
        self._clock = clock
        self._asked: dict[int, _Asked] = {}
        self._last = 0
        self.boot = self.epoch = 0  #: of the last answer
        self.refusals: list[tuple[str, str]] = []  #: calls that were refused, and why
        self._stored: dict[ChunkKey, None] = {}  # some chunks that the server has, to the knowledge of this engine

    @property
    def owes(self) -> bool:
        """Is there a request that the server has not answered?"""
        return bool(self._asked)

    @property
    def takes_questions(self) -> bool:
        """Does the server take what it is sent, apart from a bounded amount? Other calls are few, and made anyway."""
        return self.connection.unsent <= _MOST_UNSENT

    @property
    def silence(self) -> float:
        """Seconds for which the server has owed its oldest answer."""
        return self._clock() - next(iter(self._asked.values())).since if self._asked else 0.0

    def stored(self, keys: Iterable[ChunkKey]) -> None:
        """The server has these chunks."""
        self._stored |= dict.fromkeys(keys)
        for key in list(itertools.islice(self._stored, max(0, len(self._stored) - _MOST_STORED))):
            del self._stored[key]

    def evicted(self, keys: Iterable[ChunkKey]) -> None:
        """The server may no longer have these chunks."""
        for key in keys:
            self._stored.pop(key, None)

    def not_stored(self, path: Sequence[ChunkKey]) -> tuple[ChunkKey, ...]:
        """The chunks of a path that the server is not known to have."""
        return tuple(key for key in path if key not in self._stored)

    def tell(self, name: str, *arguments: Any, then: Callable[[Any], None] | None = None) -> int:
        """Make a call, and go on; ``then(result)`` is called in `poll`. Raises ProtocolError."""
        body = encode(arguments)
        self._last += 1
        self._asked[self._last] = _Asked(name, then, self._clock())
        self.connection.send(Header(len(body), self._last, CALLS[name].number, 0, 0), body)
        return self._last

    def answered(self, number: int, seconds: float) -> bool:
        """Wait for an answer, and process it with all before it. False if it has not come. Raises ProtocolError."""
        begun = time.monotonic()
        while True:
            self.poll()
            waited = time.monotonic() - begun
            if number not in self._asked or waited >= seconds:
                return number not in self._asked
            if waited >= _SPIN:
                self.connection.wait(seconds - waited)
            else:
                os.sched_yield()  # to the server, where it has no other core

    def catch_up(self, seconds: float) -> None:
        """Wait until the server has answered all calls. Raises ProtocolError."""
        self.answered(self._last, seconds)

    def poll(self) -> bool:
        """Send what waits, and process the answers that are here. False if there are none. Raises ProtocolError."""
        self.connection.flush()
        any_here = False
        for header, body in self.connection.receive():
            any_here = True
            asked = self._asked.pop(header.number, None)
            if asked is None or (self.boot and header.boot != self.boot):
                raise ProtocolError("it answers what was not asked")
            self.boot, self.epoch = header.boot, header.epoch
            if header.call != DONE:
                self.refusals.append((asked.name, reason(body)))
            elif asked.then:
                asked.then(result(asked.name, body))
        return any_here
