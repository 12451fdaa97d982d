"""The free bytes of a slab."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Extents:
    """Hands out contiguous bytes, from the shortest free extent that is long enough.

    Frames of one length, which an engine without a serializer writes, leave no gap that the next one does not fill.
    Frames of varying lengths do: then there may be no extent for a frame although enough bytes are free.
    """

    def __init__(self, free: Iterable[tuple[int, int]]):
        """``free`` has where each free extent begins and ends, in order; no two touch."""
        self.free = 0  #: bytes that are not taken
        self._nbytes_at: dict[int, int] = {}  # of the free extents: where each begins, and its length
        self._start_of: dict[int, int] = {}  # where each ends, and where it begins
        self._starts: dict[int, dict[int, None]] = {}  # by length, in the order in which they became free
        self._lengths: list[int] = []  # that occur, in order
        for begin, end in free:
            self._add(begin, end - begin)

    def take(self, nbytes: int) -> int | None:
        """Take ``nbytes`` contiguous free bytes. Returns where they begin; None if there are none."""
        i = bisect.bisect_left(self._lengths, nbytes)
        if i == len(self._lengths):
            return None
        length = self._lengths[i]
        at = next(iter(self._starts[length]))
        self._remove(at)
        self._add(at + nbytes, length - nbytes)
        return at

    def give(self, at: int, nbytes: int) -> None:
        """Free these bytes, and merge them with the free ones beside them."""
        end = at + nbytes
        if (before := self._start_of.get(at)) is not None:
            self._remove(before)
            at = before
        if end in self._nbytes_at:
            end += self._remove(end)
        self._add(at, end - at)

    def _add(self, at: int, nbytes: int) -> None:
        if not nbytes:
            return
        self.free += nbytes
        self._nbytes_at[at] = nbytes
        self._start_of[at + nbytes] = at
        if nbytes not in self._starts:
            bisect.insort(self._lengths, nbytes)
        self._starts.setdefault(nbytes, {})[at] = None

    def _remove(self, at: int) -> int:
        """Returns its length."""
        nbytes = self._nbytes_at.pop(at)
        self.free -= nbytes
        del self._start_of[at + nbytes]
        starts = self._starts[nbytes]
        del starts[at]
        if not starts:
            del self._starts[nbytes]
            self._lengths.remove(nbytes)
        return nbytes
