"""Reusable memory: for frames on their way to and from a store, and for serializers."""

from __future__ import annotations

import ctypes
import mmap
import sys


class Buffers:
    """Buffers of one length, aligned for O_DIRECT. Any thread may call any method.

    New memory costs more than encrypting it, because the kernel zeroes and faults in each of its pages. There are never
    more buffers than were in use at the same time.
    """

    def __init__(self, nbytes: int):
        self._nbytes = nbytes
        self._free: list[mmap.mmap] = []  # `append` and `pop` are atomic

    def take(self) -> memoryview:
        """An unused buffer with any content. Unless it is given back, it is freed with its last view."""
        while self._free:
            try:
                found = [self._free.pop()]
            except IndexError:  # another thread was faster
                break
            if sys.getrefcount(found[0]) == 2:  # the list and the argument; otherwise a view was kept
                return memoryview(found[0])
        return memoryview(mmap.mmap(-1, self._nbytes))

    def give_back(self, views: list[memoryview]) -> None:
        """Take back buffers, or parts of them, that are no longer read or written. The list is emptied."""
        buffers = [view.obj for view in views]
        views.clear()
        self._free += buffers  # type: ignore[arg-type]


def address_of(buffer: bytearray | memoryview) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
