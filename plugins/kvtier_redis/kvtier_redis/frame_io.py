"""Frames over one connection: their manifests, and their parts into and out of views."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import attrs

from kvtier_redis.link import Garbage, Link, ServerError, command, command_around
from kvtier_redis.names import Manifest

#: Number of requests that are sent before the first is answered. More would only fill the server's buffers.
_WINDOW = 4


@attrs.define
class Transfer:
    """A frame on its way to a server or from it."""

    name: bytes
    manifest: Manifest
    view: memoryview  #: as long as the frame
    moved: int = 0  #: parts that have arrived
    left: int = 0  #: of a write: parts that may be on a server
    failed: bool = False  #: a part is missing, or the server answered with an error
    error: ServerError | None = None  #: the first of these

    def begin(self) -> None:
        """Begin with the first part, perhaps again at another server."""
        self.moved, self.failed, self.error = 0, False, None

    @property
    def whole(self) -> bool:
        return self.moved == self.manifest.count

    def record(self, arrived: bool, error: ServerError | None = None) -> None:
        self.moved += arrived
        self.failed = self.failed or not arrived
        self.error = self.error or error


class _Part(NamedTuple):
    of: Transfer
    name: bytes
    view: memoryview


def receive(link: Link, transfers: Sequence[Transfer]) -> None:
    """Receive the parts of frames into their views. Raises BackendError and OSError."""

    def take(part: _Part) -> None:
        answer = link.reply_into(part.view)
        part.of.record(answer is True, answer if isinstance(answer, ServerError) else None)

    _in_turns(_parts(transfers), lambda part: link.send(command(b"GET", part.name)), take)


def send(link: Link, transfers: Sequence[Transfer], expiry: Sequence[bytes]) -> None:
    """Store the parts of frames; ``expiry`` has the words of SET that expire them. Raises BackendError and OSError."""

    def request(part: _Part) -> None:
        part.of.left += 1  # until the server refuses: it may store a part and never answer
        head, tail = command_around((b"SET", part.name), len(part.view), expiry)
        link.send(head, part.view, tail)

    def take(part: _Part) -> None:
        answer = link.reply()
        if answer != b"OK" and not isinstance(answer, ServerError):
            raise Garbage("unexpected reply from the server instead of OK")
        part.of.left -= isinstance(answer, ServerError)
        part.of.record(answer == b"OK", answer if isinstance(answer, ServerError) else None)

    _in_turns(_parts(transfers), request, take)


def _parts(transfers: Sequence[Transfer]) -> Iterator[_Part]:
    """The parts of each frame, until one fails: the rest of it is not moved."""
    for transfer in transfers:
        for name, begin, end in transfer.manifest.parts(transfer.name):
            if transfer.failed:
                break
            yield _Part(transfer, name, transfer.view[begin:end])


def _in_turns(parts: Iterator[_Part], request: Callable[[_Part], None], take: Callable[[_Part], None]) -> None:
    """Request each part, and take the answers in their order, a few requests behind."""
    sent: deque[_Part] = deque()
    for part in parts:
        request(part)
        sent.append(part)
        if len(sent) == _WINDOW:
            take(sent.popleft())
    while sent:
        take(sent.popleft())
