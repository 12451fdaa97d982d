"""Keys of invalidated frames: they are never found again, and are to be deleted."""

from __future__ import annotations

from kvtier_core.types import ChunkKey

#: Seconds before a failed delete is retried: at first, and at most after doubling each time.
_FIRST_RETRY, _LAST_RETRY = 5.0, 60.0


class InvalidatedKeys(set[ChunkKey]):
    """A set that also knows when to retry deletes. ``now`` is in seconds, of any clock."""

    def __init__(self) -> None:
        super().__init__()
        self._pause = _FIRST_RETRY
        self._next = 0.0

    def failed(self, now: float) -> None:
        """Deleting some of them failed."""
        self._next = max(self._next, now + _FIRST_RETRY)

    def due(self, now: float) -> list[ChunkKey]:
        """The keys whose delete is to be retried now, in a fixed order."""
        if now < self._next:
            return []
        if not self:
            self._pause = _FIRST_RETRY
            return []
        self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST_RETRY)
        return sorted(self)
