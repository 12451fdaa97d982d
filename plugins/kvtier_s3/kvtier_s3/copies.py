"""Copies of what is sent, in memory that is used again: the pages of fresh memory cost more than the copy."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator


class Copies:
    """A request that is given up may be sent from its buffer for a moment longer, so it never gets the arena's memory.

    All methods may be called on any thread.
    """

    def __init__(self, kept: int):
        """So many buffers are kept between two requests."""
        self._free: deque[bytearray] = deque(maxlen=kept)

    @contextlib.contextmanager
    def of(self, body: bytes | memoryview) -> Iterator[bytearray]:
        """A copy for one request. It is used again if the request was answered well, and dropped if anything failed."""
        copy = self._taken(len(body))
        copy[:] = body
        yield copy
        self._free.append(copy)

    def _taken(self, nbytes: int) -> bytearray:
        with contextlib.suppress(IndexError):
            buffer = self._free.pop()
            if len(buffer) == nbytes:
                return buffer
        return bytearray(nbytes)
