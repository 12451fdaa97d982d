"""Accounts for the bytes that a tier may still write, and removes frames of other namespaces to make room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvtier_core.errors import BackendError, StoreFull
from kvtier_disk.frames import Place


class SpaceAccount:
    """The capacity, less the tier's own frames and less the frames of other namespaces in the same folder.

    The tier evicts its own frames and does not know the others. When new frames need their space, this account removes
    them, oldest first. Several I/O threads use an account at once, and no file is removed under its lock.
    """

    def __init__(self, free: int, others: Iterable[tuple[Place, int]], remove: Callable[[Place], None]):
        """Remove others' frames until ``free`` is not negative, or none is left.

        Parameters
        ----------
        free
            Bytes of the capacity that no frame takes; negative when the frames take more than the capacity.
        others
            The places of the frames of other namespaces, and their bytes; the oldest first.
        remove
            Removes one of them. Raises OSError or BackendError.

        Raises StoreFull as `take` does.
        """
        self._free = free
        self._others = dict(others)
        self._remove = remove
        self._lock = threading.Lock()
        self.take(0)

    @property
    def free(self) -> int:
        """Bytes that may be written before a frame of another namespace is removed.

        Negative when the tier's own frames take more than the capacity.
        """
        return self._free

    def take(self, nbytes: int) -> None:
        """Take ``nbytes`` bytes, and remove frames of other namespaces while their space is needed.

        Raises StoreFull if such a frame cannot be removed; then nothing was taken.
        """
        self.give(-nbytes)
        stuck: dict[Place, int] = {}
        failure: Exception | None = None
        while (oldest := self._pop_oldest_in_the_way()) is not None:
            place, size = oldest
            try:
                self._remove(place)
            except (OSError, BackendError) as error:
                stuck[place], failure = size, failure or error
            else:
                self.give(size)
        if stuck:
            with self._lock:
                self._others.update(stuck)
                missing = -self._free
                if missing > 0:
                    self._free += nbytes
            if missing > 0:
                raise StoreFull(f"cannot remove a frame of another namespace: {failure}", missing=missing)

    def give(self, nbytes: int) -> None:
        """Return bytes that were taken and are not, or no longer, in use."""
        with self._lock:
            self._free += nbytes

    def hand_over(self, place: Place, nbytes: int) -> None:
        """The tier's own frame is now at ``place``: count it among the others, as the last of them to be removed."""
        with self._lock:
            self._free += self._others.pop(place, 0)  # what it replaced is gone
            self._others[place] = nbytes

    def remove(self, place: Place) -> None:
        """Remove this frame of another namespace now. Raises OSError and BackendError."""
        with self._lock:
            nbytes = self._others.pop(place, None)
        if nbytes is None:
            return  # another thread removes it
        try:
            self._remove(place)
        except BaseException:
            self.hand_over(place, nbytes)
            raise
        self.give(nbytes)

    def _pop_oldest_in_the_way(self) -> tuple[Place, int] | None:
        with self._lock:
            if self._free >= 0 or not self._others:
                return None
            place = next(iter(self._others))
            return place, self._others.pop(place)
