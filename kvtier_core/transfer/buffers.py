"""Memory that is used again and again: for frames on their way to a store and back, and for what serializers need."""

from __future__ import annotations

import ctypes
import mmap
import sys


class Buffers:
    """Buffers of one length, aligned for O_DIRECT. Any thread may call any method.

    New memory costs more than to encrypt it: each of its pages is faulted in, and was zeroed before. There are never
    more buffers than were in use at once.
    """

    def __init__(self, nbytes: int):
        self._nbytes = nbytes
        self._free: list[mmap.mmap] = []  # `append` and `pop` are atomic

    def take(self) -> memoryview:
        """A buffer that nobody else has, with any content. Unless it is given back it is freed with its last view."""
        while self._free:
            try:
                found = [self._free.pop()]
            except IndexError:  # another thread was faster
                break
            if sys.getrefcount(found[0]) == 2:  # the list and the argument; else somebody kept a view
                return memoryview(found[0])
        return memoryview(mmap.mmap(-1, self._nbytes))

    def give_back(self, views: list[memoryview]) -> None:
        """Buffers, or parts of them, that nobody reads or writes any more. The list is emptied."""
        buffers = [view.obj for view in views]
        views.clear()
        self._free += buffers  # type: ignore[arg-type]


def address_of(buffer: bytearray | memoryview) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
