"""SpaceAccount under the tier's capacity, and the frames of other namespaces that lie in it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable

from kvtier_disk.folder import Folder
from kvtier_disk.frames import Place


class SpaceAccount:
    """What may be written before frames of others must go, and which of them go first.

    The tier keeps its own frames within the capacity and knows nothing of the others. One queue holds what
    is free, as bytes without a place, and then the others' frames, oldest first. Its ends are atomic, so the
    I/O threads need no lock; where two race for what is free, a frame of another goes sooner than it must.
    """

    def __init__(self, free: int, others: Iterable[tuple[Place, int]], remove: Callable[[Place], None]):
        """``free`` is below zero when the others' frames already take too much."""
        self._queue: deque[tuple[Place | None, int]] = deque(others)
        self._remove = remove
        self.take(-free)

    def take(self, nbytes: int) -> None:
        """To take less than nothing is to give."""
        while nbytes > 0:
            try:
                place, found = self._queue.popleft()
            except IndexError:
                return
            if place is not None:
                self._remove(place)
            nbytes -= found
        self.give(-nbytes)

    def leave(self, place: Place, nbytes: int) -> None:
        """What was the tier's own is another's now, and goes last."""
        self._queue.append((place, nbytes))

    def give(self, nbytes: int) -> None:
        if nbytes:
            self._queue.appendleft((None, nbytes))


def free_of(folder: Folder) -> int:
    """Bytes that the filesystem would still let this user write."""
    stats = os.fstatvfs(folder.fd)
    return stats.f_bavail * stats.f_frsize
